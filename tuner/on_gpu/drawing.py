"""Drawings of a kernel's report."""

from collections.abc import Sequence

from .. import drawing as shared
from ..drawing import AXIS, LABELS, RIGHT, ROW, WIDTH, Box, Compared, Dot, Drawing, Label, Line, Scale, axis, interval, scale_of
from .report import KernelReport, KnobEffect, PlaceReport, Trace

BAR = 8  # height of a box, in pixels
PANEL, GAP = 84, 12  # height of a plot over rounds, space between two, in pixels
SIDE = 66  # width of a vertical axis, in pixels
MOST_ROWS = 16
KNOBS, FAR = 4, 1.6  # number of drawn knobs; end of an axis, as a multiple of its least value


def times(kernel: KernelReport) -> Drawing | None:
    """Distribution of each candidate's times: whiskers from minimum to maximum, a box over the middle half, the median with its
    95% interval. None if nothing was timed."""
    shown = [(i, p) for i, p in numbered(kernel) if p.times]
    if not shown:
        return None
    drawing = Drawing(f"{kernel.kernel}: times of {len(shown)} candidates in us", ROW * len(shown) + AXIS + 4)
    values = [q for _, p in shown if p.times for q in p.times.quantiles_us]
    now = [p.times.quantiles_us[-1] for p in kernel.places if p.times and p.name == kernel.incumbent]
    scale = scale_of(values, most=max([FAR * min(values), *now]))
    axis(drawing, scale, 0, ROW * len(shown) + 2, "us (dot: median with 95% interval; box: middle half)")
    for row, (index, place) in enumerate(shown):
        assert place.times
        quantiles, y = place.times.quantiles_us, ROW * row + ROW / 2
        last = len(quantiles) - 1
        low, high = scale.at(quantiles[last // 4]), scale.at(quantiles[last - last // 4])
        if quantiles[0] <= scale.high:
            drawing.lines.append(Line(scale.at(quantiles[0]), y, scale.at(quantiles[-1]), y, "whisker"))
            drawing.boxes.append(Box(low, y - BAR / 2, round(max(high - low, 1), 1), BAR, "middle"))
        interval(drawing, scale, place.times.interval_us, place.times.median_us, y, _kind(place))
        drawing.labels.append(_row_label(index, place, y))
    return drawing


def forest(kernel: KernelReport) -> Drawing | None:
    """Each candidate's time relative to the incumbent's, in percent, with its interval. None without comparisons."""
    rows = [Compared(f"{p.status} {i}", p.versus.ratio, p.versus.interval, _kind(p)) for i, p in numbered(kernel) if p.versus]
    title = f"{kernel.kernel}: differences from the schedule in place, in percent"
    return shared.forest(title, rows, "% against the schedule in place, with 95% interval", 100 * (FAR - 1)) if rows else None


def numbered(kernel: KernelReport) -> list[tuple[int, PlaceReport]]:
    """(place in the table, candidate) of those that are drawn: the confirmed ones, then the next."""
    listed = list(enumerate(kernel.places, 1))
    drawn = {i for i, p in sorted(listed, key=lambda item: not item[1].confirmed)[:MOST_ROWS] if p.times}
    return [(i, p) for i, p in listed if i in drawn]


def _kind(place: PlaceReport) -> str:
    return {"winner": "good", "refused": "bad", "incumbent": "now"}.get(place.status, "other")


def _row_label(index: int, place: PlaceReport, y: float) -> Label:
    return Label(LABELS - 8, y + 3.5, "end", f"{place.status} {index}")


def knobs(kernel: KernelReport) -> Drawing | None:
    """Each knob's values: a line from the best candidate's ratio to the median. None if no knob varies."""
    effects = kernel.knobs[:KNOBS]
    if not effects:
        return None
    rows = [(effect, value) for effect in effects for value in effect.values]
    drawing = Drawing(f"{kernel.kernel}: time by knob value", ROW * len(rows) + GAP * (len(effects) - 1) + AXIS + 4)
    scale = scale_of([100 * (v - 1) for _, value in rows for v in value[2:]], most=100 * (FAR - 1))
    bottom = drawing.height - AXIS - 2
    axis(drawing, scale, 0, bottom, "% against the one in place (dot: best; line: to median)")
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
    """The confirmations' samples by round, with the SM clock. A throttled round has a mark at the top, and its samples are
    clipped to the range of the others. None without confirmations."""
    if not kernel.traces:
        return None
    count = sum(len(t.incumbent_us) for t in kernel.traces)
    with_clocks = any(c is not None for t in kernel.traces for c in t.sm_mhz)
    drawing = Drawing(f"{kernel.kernel}: samples over {count} rounds", PANEL * (2 if with_clocks else 1) + GAP + AXIS)
    across = Scale(0, max(count, 1), SIDE, WIDTH - RIGHT)
    samples = [v for t in kernel.traces for one in (t.incumbent_us, t.fastest_us) for v, slowed in zip(one, t.throttled)
               if not slowed]
    up = scale_of(samples, PANEL, 10)
    bottom = PANEL * (2 if with_clocks else 1) + (GAP if with_clocks else 0)
    axis(drawing, across, 0, bottom, "rounds of the confirmations, process by process")
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
