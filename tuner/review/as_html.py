"""A difference as one HTML file that works from disk. Summary, findings and drawings are plain HTML; the page's script shows the
rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from ...schedules.promoted import Distribution
from ..drawing import Compared, Drawing, forest
from ..page import render_page
from . import words
from .check import CODES
from .compare import STATUSES, Change, Code, Diff, Entry, RowDiff, Value, knobs_in
from .summary import Summary, lines, summarise
from .times import FASTER, SLOWER, TIE, verdict_of

KINDS = {FASTER: "good", SLOWER: "bad", TIE: "now"}  # of a mark, by verdict
MOST_DRAWN = 16
PLACE = ("target", "model", "recipe", "identity", "kernel_digest")
SHOWN = ("verdict", "instructions", "registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes", "shared_bytes",
         "tmem_columns", "blocks_per_sm")
Side = list[str]  # a name, the old value, the new one


@dataclass(frozen=True)
class Times:
    """One distribution, in microseconds."""

    median: float
    interval: tuple[float, float]
    samples: int
    quantiles: tuple[float, ...]
    words: str


@dataclass(frozen=True)
class CodeLines:
    """Lines of code that changed."""

    counts: list[str]
    old: tuple[str, ...]
    new: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row for the page's script, which adds no words of its own. became: the verdict of a report's variant, and whether it
    changed.
    """

    id: str
    status: str
    kernel: str
    shape: str
    target: str
    became: str
    refused: str
    findings: list[tuple[str, str]]
    knobs: list[str]
    schedule: str
    artefact: list[str]
    notes: list[str]
    code: CodeLines | None
    whole: str
    facts: list[Side]
    toolchain: list[Side]
    schedules: list[Side]
    sides: list[Side]
    time: str
    time_words: str
    ratio: float | None
    interval: tuple[float, float] | None
    basis: str
    times: tuple[Times | None, Times | None]
    bits: str
    bits_words: str
    classes: tuple[str | None, str | None]
    evidence: str
    evidence_words: list[tuple[str, str]]
    random: bool

    def to_dict(self) -> dict[str, object]:
        """As in the page's data."""
        return {**vars(self), "code": self.code and vars(self.code), "times": [t and vars(t) for t in self.times]}


def render_html(diff: Diff) -> str:
    """The HTML page."""
    rows = [_row(row, diff.everywhere) for row in diff.rows]
    statuses = [(status, n, urlencode({"status": status})) for status in STATUSES if (n := diff.count(status))]
    findings = [(f, CODES[f.code], urlencode({"open": f.row})) for f in diff.findings]
    data = {"rows": [row.to_dict() for row in rows], "promoted": any(row.evidence or row.time for row in diff.rows),
            "notes": any(row.notes for row in rows), "targets": len({row.target for row in rows})}
    summary = summarise(diff)
    return render_page("diff.html", data, ["table.css", "drawing.css", "diff.css"], ["table.js", "diff.js"], diff=diff,
                       statuses=statuses, drawings=_drawings(diff, summary), lines=lines(diff, summary)[1 if diff.rows else 0:],
                       findings=findings, filters=_filters(rows))


def _drawings(diff: Diff, summary: Summary) -> list[tuple[str, Drawing]]:
    """(title, forest plot) of the kernels' times, largest difference first, and of the whole step's."""
    kernels = [Compared(row.entry.kernel, row.time.ratio, row.time.interval, KINDS[row.time.verdict])
               for row in diff.rows if row.new and row.time and row.time.ratio and row.time.interval]
    kernels.sort(key=lambda one: -abs(one.ratio - 1))
    left = f", {len(kernels) - MOST_DRAWN} smaller ones left out" if len(kernels) > MOST_DRAWN else ""
    whole = [(step.place[0].removeprefix("nvidia-") + " kernels", step.ratio, step.interval) for step in summary.steps]
    whole += [(f"full model {one.mode}", one.paired.ratio, one.paired.interval) for one in summary.full_model]
    steps = [Compared(name, ratio, interval, KINDS[verdict_of(interval)]) for name, ratio, interval in whole]
    named = ((f"Time of each kernel{left}", kernels[:MOST_DRAWN]), ("Time of a step", steps[:MOST_DRAWN]))
    return [(title, forest(title, rows, "% new against old, with 95% interval")) for title, rows in named if rows]


def _filters(rows: list[Row]) -> list[tuple[str, str, list[str]]]:
    """(id, label of no choice, choices) of each filter with several choices, and of `status`, which the counts at the top set."""
    labels = {"status": "all rows", "kernel": "all kernels", "target": "all targets", "became": "all verdicts",
              "time": "all times", "bits": "all bits", "evidence": "all evidence", "refused": "refused or not"}
    choices = {name: sorted({str(getattr(row, name)) for row in rows} - {""}) for name in labels}
    return [(name, label, choices[name]) for name, label in labels.items()
            if len(choices[name]) > 1 or name == "status" or (name == "refused" and choices[name])]


def _row(row: RowDiff, everywhere: Sequence[Change]) -> Row:
    entry, time, state, bits = row.entry, row.time, row.evidence, row.bits
    old, new = row.old, row.new
    return Row(
        id=row.id, status=row.status, kernel=entry.kernel, shape=words.shape(entry.shape), target=entry.target,
        became=_became(old, new), refused="refused" if row.findings else "", findings=[(f.code, f.detail) for f in row.findings],
        knobs=[words.change(c) for c in row.knobs], schedule=words.schedule(row), artefact=words.artefact(row),
        notes=words.notes(row, everywhere), code=_code(row.code), whole=", ".join(words.whole_artefact(row)),
        facts=_facts(old, new), toolchain=_sides(old.toolchain if old else None, new.toolchain if new else None),
        schedules=_sides(knobs_in(old.schedule) if old else None, knobs_in(new.schedule) if new else None),
        sides=[[name, *(str(getattr(e, name)) if e else words.NONE for e in (old, new))] for name in PLACE],
        time=time.verdict if time and row.status != "removed" else "", time_words=words.time_verdict(time),
        ratio=time.ratio if time else None, interval=time.interval if time else None, basis=time.basis if time else "",
        times=(_times(time.old), _times(time.new)) if time else (None, None),
        bits=bits.verdict if bits and new else "", bits_words=words.bits(row),
        classes=(bits.old_class, bits.new_class) if bits else (None, None),
        evidence=state.state if state else "", evidence_words=_evidence(row), random=bool(state and state.random))


def _sides(old: Mapping[str, Value] | None, new: Mapping[str, Value] | None) -> list[Side]:
    """A line per name of the new side, or of the old one without a new one."""
    found = []
    for name in new if new is not None else old or ():
        was, now = (side.get(name) if side else None for side in (old, new))
        shown = words.value(was)
        alike = type(was) is type(now) and was == now  # the common case: one text serves both
        found.append([name, shown, shown if alike else words.value(now)])
    return found


def _facts(old: Entry | None, new: Entry | None) -> list[Side]:
    """The facts that a side knows."""
    tables = [vars(entry.facts) if entry else {} for entry in (old, new)]
    known = [name for name in SHOWN if any(table.get(name) is not None for table in tables)]
    was, now = ({words.FACT_NAMES.get(name, name): table.get(name) for name in known} for table in tables)
    return _sides(was, now)


def _became(old: Entry | None, new: Entry | None) -> str:
    was, now = (entry.facts.verdict if entry else None for entry in (old, new))
    return f"{'now' if was and was != now else 'still' if was else ''} {now}".strip() if now else ""


def _times(found: Distribution | None) -> Times | None:
    if found is None:
        return None
    return Times(found.median_us, found.interval_us, found.samples, found.quantiles_us, words.times(found))


def _code(code: Code | None) -> CodeLines | None:
    return CodeLines([words.change(c) for c in code.counts], code.old_lines, code.new_lines, code.notes) if code else None


def _evidence(row: RowDiff) -> list[tuple[str, str]]:
    """(label, text) for the opened row. Weights come first: random ones must not be overlooked."""
    state, new = row.evidence, row.new.promoted if row.new else None
    if state is None or new is None:
        return []
    found = [("weights", words.weights(state)), ("checks passed", words.checks(state)), ("prompts", words.value(state.prompts)),
             ("tokens compared", words.value(state.tokens_compared)), ("date", state.date)]
    found += [(f"whole {mode} step, in the full model", words.change_of(p.ratio, p.interval))
              for mode, p in sorted(new.evidence.full_model.items())]
    found += [("clocks", ", ".join(f"{k} {v:g}" for k, v in sorted(new.timing.clocks.items())) or "none"),
              ("driver", new.timing.driver)]
    return [*found, *state.why]
