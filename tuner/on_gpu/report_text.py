"""The report of an --on-gpu run in a terminal: one row per kernel, then each kernel's candidates."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...schedules.schedule import Schedule, knobs_of
from ..offline.report import describe_schedule
from .report import PlaceReport, Report, closing_lines, describe_change, describe_times, headline
from .samples.decisions import GAIN, REFUSED, THROTTLED, Decision

SHOWN = 3  # places per kernel
WIDE = 120  # terminal columns that the table of decisions needs
STYLES = {GAIN: "green", REFUSED: "red", THROTTLED: "red"}


def print_report(report: Report, console: Console) -> None:
    """Prints the decisions, then a few candidates of each kernel, one per line. Text is never interpreted as markup."""
    if console.width >= WIDE:
        console.print(_decisions(report))
    else:
        for decision in report.decisions:
            for text in _row(decision):
                console.print(text, soft_wrap=True)
    _print_line(console, headline(report))
    for line in closing_lines(report):
        _print_line(console, line)
    for kernel in report.kernels:
        matters = f"; {kernel.knobs[0].knob} matters most" if kernel.knobs else ""
        _print_line(console, f"\n{kernel.kernel}: {len(kernel.places)} candidates, {kernel.throttling}{matters}")
        for place in shown(kernel.places):
            _print_line(console, _candidate(place))


def _print_line(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def describe(schedule: Schedule | None) -> str:
    """The knobs, or an empty string."""
    return describe_schedule(knobs_of(schedule)) if schedule else ""


def _changes(now: Schedule | None, proposed: Schedule | None) -> str:
    """The knobs that differ, as `BLOCK_N 128 to 64`; an empty string without a proposal."""
    if now is None or proposed is None:
        return ""
    before, after = knobs_of(now), knobs_of(proposed)
    return ", ".join(f"{k} {before.get(k)} to {v}" for k, v in after.items() if before.get(k) != v)


def _decisions(report: Report) -> Table:
    table = Table(title=Text(report.title), title_justify="left",
                  box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("kernel", "now", "proposed", "alone", "full model", "decision and why"):
        table.add_column(name, no_wrap=name == "kernel", overflow="fold")
    for d in report.decisions:
        table.add_row(Text(d.kernel), Text(_with(describe(d.now), describe_times(d.times_now))),
                      Text(_with(_changes(d.now, d.proposed), describe_times(d.times))), Text(describe_change(d.alone)),
                      Text(d.describe_full_model()), Text(_with(d.outcome, d.why), style=STYLES.get(d.outcome, "")))
    return table


def _row(d: Decision) -> list[Text]:
    """A decision in at most three lines, for a terminal that is too narrow for the table."""
    lines = [Text(f"{d.kernel}: ").append(_with(d.outcome, d.why), style=STYLES.get(d.outcome, ""))]
    parts = [describe_change(d.alone) + " alone" if d.alone else "", d.describe_full_model()]
    lines += [Text(f"  now {_with(describe(d.now), describe_times(d.times_now))}")] if d.now else []
    proposed = "; ".join(part for part in (_with(_changes(d.now, d.proposed), describe_times(d.times)), *parts) if part)
    return [*lines, Text(f"  proposed {proposed}")] if d.proposed else lines


def _with(first: str, second: str) -> str:
    return f"{first}: {second}" if first and second else first or second


def _candidate(place: PlaceReport) -> str:
    """`  slower, +1.2% [+1.1, +1.3], 4.7 us [4.6, 4.8]: BLOCK_N 64, ...`."""
    share = f"{100 * place.share_of_ceiling:.0f}% of the bandwidth" if place.share_of_ceiling else ""
    parts = [_with(place.status, place.why), describe_change(place.versus), describe_times(place.times), share]
    return f"  {', '.join(part for part in parts if part)}: {describe(place.schedule)}"


def shown(places: Sequence[PlaceReport]) -> list[PlaceReport]:
    """The first SHOWN places, the incumbent, and the best of each other status."""
    chosen = list(places[:SHOWN])
    statuses = {p.status for p in chosen}
    for place in places[SHOWN:]:
        if place.status not in statuses or place.status == "incumbent":
            chosen.append(place)
            statuses.add(place.status)
    return chosen
