"""A difference in a terminal: the summary, the rows that differ, the changed lines of code, the findings."""

import io
from collections.abc import Iterable, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...schedules.store import PromotedFile
from ...shapes.errors import printable
from . import words
from .check import checked
from .compare import PROMOTED, Change, Collection, Diff, RowDiff, compare, promoted_entries
from .evidence import OTHER_CLASS, PRESENT
from .summary import lines, summarise
from .times import FASTER, SLOWER

MOST_ROWS = 40  # the other formats have all rows
MOST_CODE = 3  # rows whose changed lines of code are shown
MOST_LINES = 4  # of code per side
GAP = 3  # between columns, with the table's borders
PIPE_WIDTH = 140  # without a terminal: equal bytes everywhere
STYLES = {"changed": "yellow", "added": "green", "removed": "red", FASTER: "green", SLOWER: "red"}


def _text(*parts: str | tuple[str, str]) -> Text:
    """Text with styles, without markup, with escaped control characters."""
    return Text.assemble(*((printable(p), "") if isinstance(p, str) else (printable(p[0]), p[1]) for p in parts))


def show_promotion(old: Sequence[PromotedFile], new: Sequence[PromotedFile], console: Console) -> Diff:
    """Show and return the checked difference that a promotion makes. old, new: the affected files before and after."""
    before, after = (Collection(name, PROMOTED, promoted_entries(files)) for name, files in (("before", old), ("after", new)))
    diff = checked(compare(before, after))
    print_diff(diff, console)
    return diff


def render_text(diff: Diff) -> str:
    """As `print_diff`, without colours, at a fixed width."""
    file = io.StringIO()
    print_diff(diff, Console(file=file, width=PIPE_WIDTH, color_system=None, force_terminal=False, legacy_windows=False))
    return "\n".join(line.rstrip() for line in file.getvalue().split("\n"))


def print_diff(diff: Diff, console: Console) -> None:
    console.print(_text((f"{diff.old} → {diff.new}", "bold")))
    summary = Table.grid(padding=(0, 2))
    for label, text in lines(diff, summarise(diff)):
        summary.add_row(_text((label, "dim")), _text(text))
    console.print(summary)
    shown = [row for row in diff.rows if row.status != "unchanged" or row.findings]
    if shown:
        cells = [_cells(row, diff.everywhere) for row in shown[:MOST_ROWS]]
        console.print(_table(cells, console.width) or _blocks(cells))
    _print_more(len(shown), "rows", console)
    _print_codes([row for row in shown if row.code], console)
    for finding in diff.findings[:MOST_ROWS]:
        console.print(_text(("refused: ", "red"), (finding.code, "bold red"), f"  {finding.what}: {finding.detail}"))
    _print_more(len(diff.findings), "findings", console)
    if not diff.findings:
        console.print(_text(("--check refuses nothing", "green")))


def _print_more(count: int, what: str, console: Console) -> None:
    if count > MOST_ROWS:
        console.print(_text(f"and {count - MOST_ROWS:,} more {what}: --format html --out FILE shows all"))


def _table(cells: Sequence[dict[str, Text]], width: int) -> Table | None:
    """A table without empty columns; None if a word doesn't fit, which rich would crop silently."""
    names = [name for name in cells[0] if any(c[name] for c in cells)]
    columns = [[_text(name), *(c[name] for c in cells)] for name in names]
    least = [max(_longest(cell, " " if name != "time" else "\n") for cell in column) for name, column in zip(names, columns)]
    most = [max(_longest(cell, "\n") for cell in column) for column in columns]
    spare = width - sum(least) - GAP * len(names)
    if spare < 0:
        return None
    extra = _shares([high - low for low, high in zip(least, most)], spare)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name, low, more in zip(names, least, extra):
        table.add_column("" if name == "status" else name, width=low + more, overflow="fold", vertical="top")
    for mine in cells:
        table.add_row(*(mine[name] for name in names))
        table.add_section()
    return table


def _shares(wanted: Sequence[int], spare: int) -> list[int]:
    """Shares of `spare`: small wishes are granted in full, larger ones share the rest equally."""
    shares = [0] * len(wanted)
    by_want = sorted(range(len(wanted)), key=lambda i: wanted[i])
    for left, i in zip(range(len(wanted), 0, -1), by_want):
        shares[i] = min(wanted[i], spare // left)
        spare -= shares[i]
    return shares


def _longest(cell: Text, separator: str) -> int:
    """Width in cells of the longest word or line."""
    return max(cell_len(part) for line in cell.plain.split("\n") for part in line.split(separator))


def _blocks(cells: Sequence[dict[str, Text]]) -> Table:
    """One block per row, for terminals that are too narrow for the table."""
    grid = Table.grid(padding=(0, 2))
    for mine in cells:
        grid.add_row(_text(""))
        grid.add_row(mine["status"], mine["kernel"])
        for name, cell in list(mine.items())[2:]:
            if cell:
                grid.add_row(_text((name, "dim")), cell)
    return grid


def _cells(row: RowDiff, everywhere: Sequence[Change]) -> dict[str, Text]:
    return {"status": _text((row.status, STYLES.get(row.status, ""))), "kernel": _kernel(row),
            "schedule": _lines(words.knobs(row)), "artefact": _lines(words.artefact(row)), "time": _time(row),
            "bits": _bits(row), "evidence": _evidence(row), "other changes": _lines(words.notes(row, everywhere))}


def _lines(parts: Iterable[str]) -> Text:
    return _text("\n".join(parts))


def _kernel(row: RowDiff) -> Text:
    entry = row.entry
    return _text((entry.kernel, "bold"), f" {entry.target}\n{words.shape(entry.shape)}")


def _time(row: RowDiff) -> Text:
    time = row.time
    if time is None or time.new is None:
        return _text("")
    parts = [f"{words.times(time.old)} →", words.times(time.new)] if time.old else [words.times(time.new)]
    verdict = (words.time_verdict(time), STYLES.get(time.verdict, ""))
    return _text("\n".join(parts), "\n", verdict, f"\n({time.basis})" if time.basis else "")


def _bits(row: RowDiff) -> Text:
    wrong = row.bits is not None and row.bits.verdict == OTHER_CLASS and not row.bits.new_recipe
    return _text((words.bits(row), "red" if wrong else ""))


def _evidence(row: RowDiff) -> Text:
    state = row.evidence
    if state is None:
        return _text("")
    return _text((state.state, "" if state.state == PRESENT else "red"), f": {words.checks(state)}\n",
                 (words.weights(state), "yellow" if state.random else ""))


def _print_codes(rows: Sequence[RowDiff], console: Console) -> None:
    for row in rows[:MOST_CODE]:
        _print_code(row, console)
    if len(rows) > MOST_CODE:
        console.print(_text(f"and the code of {len(rows) - MOST_CODE:,} more rows: --format html --out FILE shows it"))


def _print_code(row: RowDiff, console: Console) -> None:
    code = row.code
    if code is None:
        return
    console.print(_text(("code of ", "dim"), words.row_name(row)))
    for one in code.counts:
        console.print(_text(f"  {words.change(one)} instructions"))
    for sign, style, listed in (("-", "red", code.old_lines), ("+", "green", code.new_lines)):
        for line in listed[:MOST_LINES]:
            console.print(_text((f"  {sign} {line}", style)), no_wrap=True, overflow="ellipsis")
        if len(listed) > MOST_LINES:
            console.print(_text((f"  {sign} and {len(listed) - MOST_LINES} more lines", style)))
    for note in code.notes:
        console.print(_text(f"  {note}"))
