"""Marks of a drawing, in pixels, which templates/drawing.html writes as SVG; axes, intervals and forest plots for all pages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH, LABELS, RIGHT = 340, 104, 10  # widths in pixels: a drawing, the labels on its left, its right margin
ROW, AXIS = 17, 30  # heights in pixels: a row, an axis with its labels and title


@dataclass(frozen=True)
class Line:
    x1: float
    y1: float
    x2: float
    y2: float
    kind: str


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    kind: str


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    r: float
    kind: str


@dataclass(frozen=True)
class Label:
    x: float
    y: float
    anchor: str  # start, middle or end
    text: str


@dataclass
class Drawing:
    """title: for screen readers."""

    title: str
    height: float
    width: int = WIDTH
    lines: list[Line] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    dots: list[Dot] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` to `high` to pixels from `start` to `end`; values outside are clipped."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, count: int = 4) -> list[float]:
        """At most `count` + 1 round values."""
        rough = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [round(n * step, 10) for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def scale_of(values: Sequence[float], start: float = LABELS, end: float = WIDTH - RIGHT, most: float | None = None) -> Scale:
    """A scale over these values with some room. most: maximum of its upper end."""
    low, high = min(values), max(values)
    high = max(low, min(high, most)) if most is not None else high
    room = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    return Scale(low - room, high + room, start, end)


def axis(drawing: Drawing, scale: Scale, top: float, bottom: float, unit: str) -> None:
    """Grid lines with their values below, and the unit under them."""
    for tick in scale.ticks():
        x = scale.at(tick)
        drawing.lines.append(Line(x, top, x, bottom, "grid"))
        drawing.labels.append(Label(x, bottom + 11, "middle", f"{tick:g}"))
    drawing.labels.append(Label(WIDTH - RIGHT, bottom + 24, "end", unit))


def interval(drawing: Drawing, scale: Scale, ends: tuple[float, float], middle: float, y: float, kind: str) -> None:
    """A line from end to end with a dot at the middle; an arrow if the middle is off the scale."""
    if middle > scale.high:
        drawing.labels.append(Label(scale.end, y + 3.5, "end", f"{middle:.4g} →"))
        return
    drawing.lines.append(Line(scale.at(ends[0]), y, scale.at(ends[1]), y, f"interval {kind}"))
    drawing.dots.append(Dot(scale.at(middle), y, 3, kind))


@dataclass(frozen=True)
class Compared:
    """One row of a forest plot: a ratio new over old with its interval."""

    label: str
    ratio: float
    interval: tuple[float, float]
    kind: str


def forest(title: str, rows: Sequence[Compared], unit: str, most: float | None = None) -> Drawing:
    """Differences in percent with their intervals, and a line at 0. most: maximum of the axis, in percent."""
    drawing = Drawing(title, ROW * len(rows) + AXIS + 4)
    scale = scale_of([0.0, *(100 * (end - 1) for row in rows for end in row.interval)], most=most)
    bottom = ROW * len(rows) + 2
    axis(drawing, scale, 0, bottom, unit)
    drawing.lines.append(Line(scale.at(0), 0, scale.at(0), bottom, "zero"))
    for i, row in enumerate(rows):
        y = ROW * i + ROW / 2
        low, high = (100 * (end - 1) for end in row.interval)
        interval(drawing, scale, (low, high), 100 * (row.ratio - 1), y, row.kind)
        drawing.labels.append(Label(LABELS - 8, y + 3.5, "end", row.label))
    return drawing
