"""A difference as Markdown, for a pull request: the summary and the rows that differ; details are folded."""

import html
import re
from collections.abc import Iterable, Sequence

from ...shapes.errors import printable
from . import words
from .compare import Change, Diff, RowDiff
from .summary import lines, summarise

MOST_ROWS = 20  # before the fold
MOST_FOLDED = 100  # in the fold: a GitHub comment has at most 65,536 characters
MOST_CODE = 10  # rows whose code is shown
MOST_LINES = 6  # of code per side
SPECIAL = re.compile(r"([\\`*\[\]~|@#]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")  # an underscore inside a word isn't special


def render_markdown(diff: Diff) -> str:
    differing = [row for row in diff.rows if row.status != "unchanged" or row.findings]
    parts = [f"### Schedules: {_text(diff.old)} → {_text(diff.new)}", *_verdict(diff), _bullets(diff)]
    if differing:
        parts.append(_table(differing[:MOST_ROWS], diff.everywhere))
        parts += _more(len(differing) - MOST_ROWS, "rows that differ")
    if diff.rows:
        parts.append(_fold(f"Evidence and artefacts of {words.counted(len(diff.rows), 'row')}", _details(diff.rows)))
    code = [row for row in diff.rows if row.code]
    if code:
        blocks = [_code(row) for row in code[:MOST_CODE]] + _more(len(code) - MOST_CODE, "rows")
        parts.append(_fold(f"Lines of code that changed, in {words.counted(len(code), 'row')}", "\n\n".join(blocks)))
    return "\n\n".join(parts) + "\n"


def _verdict(diff: Diff) -> list[str]:
    if not diff.findings:
        return ["**`--check` refuses nothing.**"]
    items = [f"- `{f.code}` {_text(f.what)}: {_text(f.detail)}" for f in diff.findings[:MOST_ROWS]]
    return [f"**Refused by `--check`: {words.counted(len(diff.findings), 'finding')}.**",
            "\n".join(items), *_more(len(diff.findings) - MOST_ROWS, "findings")]


def _bullets(diff: Diff) -> str:
    return "\n".join(f"- **{_text(label)}** {_text(text)}" for label, text in lines(diff, summarise(diff)))


def _table(rows: Sequence[RowDiff], everywhere: Sequence[Change]) -> str:
    heads = ["", "kernel", "schedule", "artefact"]
    promoted = any(row.evidence or row.time for row in rows)
    heads += ["time", "bits", "evidence"] if promoted else []
    heads += ["other changes"] if any(words.notes(row, everywhere) for row in rows) else []
    cells = {"time": lambda row: [words.time_verdict(row.time)], "bits": lambda row: [words.bits(row)],
             "evidence": lambda row: [words.evidence(row.evidence)], "other changes": lambda row: words.notes(row, everywhere)}
    body = [[_text(row.status), _kernel(row), _cell(words.knobs(row)), _cell(words.artefact(row)),
             *(_cell(cells[name](row)) for name in heads[4:])] for row in rows]
    return _grid(heads, body)


def _details(rows: Sequence[RowDiff]) -> str:
    promoted = any(row.evidence or row.time for row in rows)
    heads = ["", "kernel", "whole schedule", "artefact", *(["time old", "time new", "checks", "weights"] if promoted else [])]
    body = []
    for row in rows[:MOST_FOLDED]:
        time, state = row.time, row.evidence
        cells = [row.status, "", words.schedule(row), ", ".join(words.whole_artefact(row))]
        if promoted:
            cells += [words.times(time.old if time else None), words.times(time.new if time else None),
                      words.checks(state) if state else words.NONE, words.weights(state) if state else words.NONE]
        body.append([_text(cells[0]), _kernel(row), *map(_text, cells[2:])])
    return "\n\n".join([_grid(heads, body), *_more(len(rows) - MOST_FOLDED, "rows")])


def _code(row: RowDiff) -> str:
    code = row.code
    assert code
    listed = [f"{words.change(c)} instructions" for c in code.counts]
    for sign, found in (("-", code.old_lines), ("+", code.new_lines)):
        listed += [f"{sign} {line}" for line in found[:MOST_LINES]]
        listed += [f"{sign} and {len(found) - MOST_LINES} more lines"] if len(found) > MOST_LINES else []
    text = "\n".join([*listed, *code.notes])
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{_text(words.row_name(row))}\n\n{fence}diff\n{text}\n{fence}"


def _fold(title: str, body: str) -> str:
    return f"<details>\n<summary>{title}</summary>\n\n{body}\n\n</details>"


def _grid(heads: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *body))


def _kernel(row: RowDiff) -> str:
    entry = row.entry
    return f"**{_text(entry.kernel)}** {_text(entry.target)}<br>{_text(words.shape(entry.shape))}"


def _cell(parts: Iterable[str]) -> str:
    return "<br>".join(_text(part) for part in parts)


def _text(text: str) -> str:
    """Escaped text on one line: no Markdown, HTML, mention or escape code."""
    return SPECIAL.sub(r"\\\1", html.escape(printable(" ".join(text.split())), quote=False)).replace(r"\@", "&#64;")


def _more(count: int, what: str) -> list[str]:
    return [f"And {count:,} more {what}: `tune-kernels diff … --format html` has all."] if count > 0 else []

