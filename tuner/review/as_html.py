"""A difference as one HTML file that works from disk: the summary and what `--check` refuses as plain HTML, the rows as data
that the page's script shows, with the distributions drawn."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from ..drawing import Compared, Drawing, forest
from ..page import render_page
from . import words as words
from .check import CODES
from .compare import NUMBERS, STATUSES, Diff, RowDiff
from .summary import Summary, lines, summarise
from .times import FASTER, SLOWER, TIE, verdict_of

KINDS = {FASTER: "good", SLOWER: "bad", TIE: "now"}  # of a mark, by verdict
MOST_DRAWN = 16
PLACE = ("target", "model", "recipe", "identity", "kernel_digest")


def render_html(diff: Diff) -> str:
    """The page, as the text of one HTML file."""
    everywhere = diff.everywhere
    rows = [_row(row, everywhere) for row in diff.rows]
    statuses = [(status, n, urlencode({"status": status})) for status in STATUSES if (n := diff.count(status))]
    findings = [(f, CODES[f.code], urlencode({"open": f.row})) for f in diff.findings]
    data = {"rows": rows, "promoted": any(row.evidence or row.time for row in diff.rows),
            "beside": any(row["notes"] for row in rows), "targets": len({row["target"] for row in rows})}
    summary = summarise(diff)
    return render_page("diff.html", data, ["table.css", "drawing.css", "diff.css"], ["table.js", "diff.js"], diff=diff,
                       statuses=statuses, drawings=_drawings(diff, summary), lines=lines(diff, summary)[1 if diff.rows else 0:],
                       findings=findings, filters=_filters(rows))


def _drawings(diff: Diff, summary: Summary) -> list[tuple[str, Drawing]]:
    """(title, forest plot): the kernels' times, largest difference first, and the whole step's."""
    kernels = [Compared(row.entry.kernel, row.time.ratio, row.time.interval, KINDS[row.time.verdict])
               for row in diff.rows if row.new and row.time and row.time.ratio and row.time.interval]
    kernels.sort(key=lambda one: -abs(one.ratio - 1))
    left = f", {len(kernels) - MOST_DRAWN} smaller ones left out" if len(kernels) > MOST_DRAWN else ""
    whole = [(step.place[0].removeprefix("nvidia-") + " kernels", step.ratio, step.interval) for step in summary.steps]
    whole += [(f"full model {one.mode}", one.paired.ratio, one.paired.interval) for one in summary.full_model]
    steps = [Compared(name, ratio, interval, KINDS[verdict_of(interval)]) for name, ratio, interval in whole]
    named = ((f"Time of each kernel{left}", kernels[:MOST_DRAWN]), ("Time of a step", steps[:MOST_DRAWN]))
    return [(title, forest(title, rows, "% new against old, with 95% interval")) for title, rows in named if rows]


def _filters(rows: list[dict[str, Any]]) -> list[tuple[str, str, list[str]]]:
    """(id, label of no choice, choices) of each select; where there is nothing to choose there is none, but for `status`, which
    the counts at the top set."""
    labels = {"status": "all rows", "kernel": "all kernels", "target": "all targets", "became": "all verdicts",
              "time": "all times", "bits": "all bits", "evidence": "all evidence", "refused": "refused or not"}
    choices = {name: sorted({str(row[name]) for row in rows if row[name]}) for name in labels}
    return [(name, label, choices[name]) for name, label in labels.items()
            if len(choices[name]) > 1 or name == "status" or (name == "refused" and choices[name])]


def _row(row: RowDiff, everywhere: Any) -> dict[str, Any]:
    """What the script reads of one row; words are made here, as in every other format."""
    entry, time, state = row.entry, row.time, row.evidence
    return {
        "id": row.id, "status": row.status, "kernel": entry.kernel, "shape": words.shape(entry.shape), "target": entry.target,
        "became": _became(row), "refused": "refused" if row.findings else "",
        "findings": [[f.code, f.detail] for f in row.findings],
        "knobs": [words.change(c) for c in row.knobs], "schedule": words.schedule(row), "artefact": words.artefact(row),
        "notes": words.notes(row, everywhere), "code": _code(row),
        "whole": ", ".join(words.whole_artefact(row)),
        "facts": _sides(row, "facts", [n for n in ("verdict", "instructions", *NUMBERS) if _known(row, n)]),
        "toolchain": _sides(row, "toolchain", list(entry.toolchain)), "schedules": _sides(row, "schedule", list(entry.schedule)),
        "sides": [[n, *(str(getattr(e, n)) if e else words.NONE for e in (row.old, row.new))] for n in PLACE],
        "time": time.verdict if time and row.status != "removed" else "", "time_words": words.time_verdict(time),
        "ratio": time.ratio if time else None, "interval": time.interval if time else None,
        "basis": time.basis if time else "", "times": [_times(time.old), _times(time.new)] if time else [None, None],
        "bits": row.bits.verdict if row.bits and row.new else "", "bits_words": words.bits(row),
        "classes": [row.bits.old_class, row.bits.new_class] if row.bits else [None, None],
        "evidence": state.state if state else "", "evidence_words": _evidence(row), "random": bool(state and state.random),
    }


def _sides(row: RowDiff, table: str, names: Sequence[str]) -> list[list[str]]:
    """A line a name: it, the old value, the new one."""
    old, new = (getattr(e, table) if e else {} for e in (row.old, row.new))
    said = []
    for name in names:
        was, now = old.get(name), new.get(name)
        shown = words.value(was)
        alike = type(was) is type(now) and was == now  # most are: their text is made once
        said.append([words.FACT_NAMES.get(name, name) if table == "facts" else name, shown, shown if alike else words.value(now)])
    return said


def _known(row: RowDiff, fact: str) -> bool:
    return any(e and e.facts.get(fact) is not None for e in (row.old, row.new))


def _became(row: RowDiff) -> str:
    """The verdict of a report's variant, and whether it is new."""
    old, new = (e.facts.get("verdict") if e else None for e in (row.old, row.new))
    return f"{'now' if old and old != new else 'still' if old else ''} {new}".strip() if new else ""


def _times(found: Any) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"median": found.median_us, "interval": found.interval_us, "samples": found.samples,
            "quantiles": found.quantiles_us, "words": words.times(found)}


def _code(row: RowDiff) -> dict[str, Any] | None:
    code = row.code
    if code is None:
        return None
    return {"counts": [words.change(c) for c in code.counts], "old": code.old_lines, "new": code.new_lines, "notes": code.notes}


def _evidence(row: RowDiff) -> list[list[str]]:
    """Pairs for the opened row: the weights first, since random ones must not be overlooked."""
    state, new = row.evidence, row.new.promoted if row.new else None
    if state is None or new is None:
        return []
    found = [["weights", words.weights(state)], ["checks passed", words.checks(state)], ["prompts", words.value(state.prompts)],
             ["tokens compared", words.value(state.tokens_compared)], ["date", state.date]]
    found += [[f"whole {mode} step, in the full model", words.change_of(p.ratio, p.interval)]
              for mode, p in sorted(new.evidence.full_model.items())]
    found += [["clocks", words.value({k: f"{v:g}" for k, v in new.timing.clocks.items()})], ["driver", new.timing.driver]]
    return [*found, *([name, why] for name, why in state.why)]
