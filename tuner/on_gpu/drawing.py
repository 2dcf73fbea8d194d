"""Drawings of a report's numbers, each with its axis: marks in pixels, which the page's template writes as SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .report import KernelReport, KnobEffect, PlaceReport, Trace

WIDTH, LABELS, RIGHT = 340, 104, 10  # of a drawing, of the labels on its left, of its right margin, in pixels
ROW, AXIS, BAR = 17, 30, 8  # height of a row, of an axis with its labels and title, of a box
PANEL, GAP = 84, 12  # height of a plot over rounds, and the space between two
SIDE = 66  # of a vertical axis
MOST_ROWS = 16
KNOBS, FAR = 4, 1.6  # knobs that are drawn; an axis ends at this many times the least: the slowest would fill it


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
    """title: read out where the drawing isn't seen."""

    title: str
    height: float
    width: int = WIDTH
    lines: list[Line] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    dots: list[Dot] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` on pixels from `start` to `end`; beyond its ends a value is drawn at the end."""

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
    """A scale over these values with some room. most: where it ends at the latest."""
    low, high = min(values), max(values)
    high = max(low, min(high, most)) if most is not None else high
    room = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    return Scale(low - room, high + room, start, end)


def _axis(drawing: Drawing, scale: Scale, top: float, bottom: float, unit: str) -> None:
    """Grid lines with their values below, and the unit under them."""
    for tick in scale.ticks():
        x = scale.at(tick)
        drawing.lines.append(Line(x, top, x, bottom, "grid"))
        drawing.labels.append(Label(x, bottom + 11, "middle", f"{tick:g}"))
    drawing.labels.append(Label(WIDTH - RIGHT, bottom + 24, "end", unit))


def times(kernel: KernelReport) -> Drawing | None:
    """Distribution of each candidate's times: whiskers from least to greatest, a box over the middle half, the 95% interval of
    the median on it."""
    shown = [(i, p) for i, p in numbered(kernel) if p.times]
    if not shown:
        return None
    drawing = Drawing(f"{kernel.kernel}: times of {len(shown)} candidates in us", ROW * len(shown) + AXIS + 4)
    values = [q for _, p in shown if p.times for q in p.times.quantiles_us]
    now = [p.times.quantiles_us[-1] for p in kernel.places if p.times and p.name == kernel.incumbent]
    scale = scale_of(values, most=max(FAR * min(values), *now))
    _axis(drawing, scale, 0, ROW * len(shown) + 2, "us (dot: median with 95% interval; box: middle half)")
    for row, (index, place) in enumerate(shown):
        assert place.times
        quantiles, y = place.times.quantiles_us, ROW * row + ROW / 2
        last = len(quantiles) - 1
        low, high = scale.at(quantiles[last // 4]), scale.at(quantiles[last - last // 4])
        if quantiles[0] <= scale.high:
            drawing.lines.append(Line(scale.at(quantiles[0]), y, scale.at(quantiles[-1]), y, "whisker"))
            drawing.boxes.append(Box(low, y - BAR / 2, round(max(high - low, 1), 1), BAR, "middle"))
        _interval(drawing, scale, place.times.interval_us, place.times.median_us, y, _kind(place))
        drawing.labels.append(_row_label(index, place, y))
    return drawing


def forest(kernel: KernelReport) -> Drawing | None:
    """Each candidate's time over the incumbent's, with its interval; the line at 0 is the incumbent."""
    shown = [(i, p) for i, p in numbered(kernel) if p.versus]
    if not shown:
        return None
    drawing = Drawing(f"{kernel.kernel}: differences from the schedule in place, in percent", ROW * len(shown) + AXIS + 4)
    ends = [100 * (v - 1) for _, p in shown if p.versus for v in p.versus.interval]
    scale = scale_of([*ends, 0.0], most=100 * (FAR - 1))
    _axis(drawing, scale, 0, ROW * len(shown) + 2, "% against the schedule in place, with 95% interval")
    drawing.lines.append(Line(scale.at(0), 0, scale.at(0), ROW * len(shown) + 2, "zero"))
    for row, (index, place) in enumerate(shown):
        assert place.versus
        y = ROW * row + ROW / 2
        low, high = (100 * (v - 1) for v in place.versus.interval)
        _interval(drawing, scale, (low, high), 100 * (place.versus.ratio - 1), y, _kind(place))
        drawing.labels.append(_row_label(index, place, y))
    return drawing


def numbered(kernel: KernelReport) -> list[tuple[int, PlaceReport]]:
    """The candidates that are drawn, with their place in the table: those that were confirmed, then the next ones."""
    listed = list(enumerate(kernel.places, 1))
    drawn = {i for i, p in sorted(listed, key=lambda item: not item[1].confirmed)[:MOST_ROWS] if p.times}
    return [(i, p) for i, p in listed if i in drawn]


def _kind(place: PlaceReport) -> str:
    return {"winner": "good", "refused": "bad", "incumbent": "now"}.get(place.status, "other")


def _row_label(index: int, place: PlaceReport, y: float) -> Label:
    return Label(LABELS - 8, y + 3.5, "end", f"{place.status} {index}")


def _interval(drawing: Drawing, scale: Scale, interval: tuple[float, float], middle: float, y: float, kind: str) -> None:
    if middle > scale.high:
        drawing.labels.append(Label(scale.end, y + 3.5, "end", f"{middle:.4g} →"))
        return
    drawing.lines.append(Line(scale.at(interval[0]), y, scale.at(interval[1]), y, f"interval {kind}"))
    drawing.dots.append(Dot(scale.at(middle), y, 3, kind))


def knobs(kernel: KernelReport) -> Drawing | None:
    """Each knob's values: a line from the best candidate's ratio to the median one's."""
    effects = kernel.knobs[:KNOBS]
    if not effects:
        return None
    rows = [(effect, value) for effect in effects for value in effect.values]
    drawing = Drawing(f"{kernel.kernel}: time by knob value", ROW * len(rows) + GAP * (len(effects) - 1) + AXIS + 4)
    scale = scale_of([100 * (v - 1) for _, value in rows for v in value[2:]], most=100 * (FAR - 1))
    bottom = drawing.height - AXIS - 2
    _axis(drawing, scale, 0, bottom, "% against the one in place (dot: best; line: to median)")
    y = ROW / 2
    before: KnobEffect | None = None
    for effect, (value, _, best, median) in rows:
        y += GAP if before and effect is not before else 0
        before = effect
        drawing.lines.append(Line(scale.at(100 * (best - 1)), y, scale.at(100 * (median - 1)), y, "interval other"))
        drawing.dots.append(Dot(scale.at(100 * (best - 1)), y, 3, "other"))
        drawing.labels.append(Label(LABELS - 8, y + 3.5, "end", f"{effect.knob} {value}"))
        y += ROW
    return drawing


def rounds(kernel: KernelReport) -> Drawing | None:
    """The samples of the confirmations, round by round, with the SM's clock; a mark on top where a round was throttled."""
    if not kernel.traces:
        return None
    count = sum(len(t.incumbent_us) for t in kernel.traces)
    with_clocks = any(c is not None for t in kernel.traces for c in t.sm_mhz)
    drawing = Drawing(f"{kernel.kernel}: samples over {count} rounds", PANEL * (2 if with_clocks else 1) + GAP + AXIS)
    across = Scale(0, max(count, 1), SIDE, WIDTH - RIGHT)
    samples = [v for t in kernel.traces for v in (*t.incumbent_us, *t.fastest_us)]
    up = scale_of(samples, PANEL, 10)
    bottom = PANEL * (2 if with_clocks else 1) + (GAP if with_clocks else 0)
    _axis(drawing, across, 0, bottom, "rounds of the confirmations, process by process")
    _side(drawing, up, "us")
    if with_clocks:
        mhz = [float(c) for t in kernel.traces for c in t.sm_mhz if c is not None]
        clock = scale_of(mhz, bottom, PANEL + GAP)
        _side(drawing, clock, "MHz")
    first = 0
    for trace in kernel.traces:
        if first:
            drawing.lines.append(Line(across.at(first), 0, across.at(first), bottom, "zero"))
        _trace(drawing, trace, [across.at(first + i + 0.5) for i in range(len(trace.incumbent_us))], up)
        if with_clocks:
            drawing.dots += [Dot(across.at(first + i + 0.5), clock.at(c), 1.2, "now") for i, c in enumerate(trace.sm_mhz) if c]
        first += len(trace.incumbent_us)
    return drawing


def _trace(drawing: Drawing, trace: Trace, xs: Sequence[float], up: Scale) -> None:
    drawing.dots += [Dot(x, up.at(v), 1.4, "now") for x, v in zip(xs, trace.incumbent_us)]
    drawing.dots += [Dot(x, up.at(v), 1.4, "fast") for x, v in zip(xs, trace.fastest_us)]
    drawing.lines += [Line(x, 0, x, 6, "throttled") for x, dropped in zip(xs, trace.throttled) if dropped]


def _side(drawing: Drawing, scale: Scale, unit: str) -> None:
    """A vertical axis on the left."""
    for tick in scale.ticks(3):
        y = scale.at(tick)
        drawing.lines.append(Line(SIDE, y, WIDTH - RIGHT, y, "grid"))
        drawing.labels.append(Label(SIDE - 4, y + 3.5, "end", f"{tick:g}"))
    drawing.labels.append(Label(4, (scale.start + scale.end) / 2 + 3.5, "start", unit))
