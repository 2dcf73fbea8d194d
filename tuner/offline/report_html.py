"""report.html: the offline report as one file that works from disk.

The summary is plain HTML. The variants are embedded as JSON, and the page's script shows a hundred at a time: 25,000 rows of HTML
would be slow to open. Equal reports give equal bytes.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...schedules.schedule import OwnSchedule, knobs_of
from ...shapes.model import dims_of
from ..page import render_page
from .drawings import Cell, deciding_knobs, occupancy, query_of
from .report import FACT_FIELDS, Report, Toolchains, Variant, describe_schedule, rejection_counts

KNOB_COLUMNS = ("BLOCK_N", "BLOCK_K", "num_stages", "num_warps", "split_k")  # of the step's kernels; the others share one column
MOST_COLUMNS = 6  # with a user's kernels
PLAIN_FIELDS = ("id", "kernel", "target", "verdict", "stage", "kernel_digest", "artefact", "compile_ms", *FACT_FIELDS)


@dataclass(frozen=True)
class Row:
    """A row of a summary table. cells: one per target. total: their sum."""

    name: str
    cells: tuple[Cell, ...]
    total: Cell


def render_report(report: Report) -> str:
    """The HTML page."""
    variants, targets = report.variants, report.targets
    rejected = _rejected(variants, targets)
    filters = [("kernel", "all kernels", list(dict.fromkeys(v.kernel for v in variants))), ("target", "all targets", targets),
               ("verdict", "all verdicts", ["accepted", "rejected"]), ("reason", "all reasons", [row.name for row in rejected])]
    return render_page(
        "report.html", _payload(variants), ["table.css", "report.css"], ["table.js", "report.js"], report=report, filters=filters,
        knobs=deciding_knobs(variants), scatter=occupancy(variants),
        accepted=_accepted(variants, targets), rejected=rejected, toolchain=_toolchain(report.toolchain, targets))


def _accepted(variants: Sequence[Variant], targets: Sequence[str]) -> list[Row]:
    """Accepted variants by kernel and target; the last row is the sum."""
    def cell(kernel: str, target: str) -> Cell:
        mine = [v.accepted for v in variants if kernel in ("", v.kernel) and target in ("", v.target)]
        return Cell(sum(mine), len(mine), query_of(kernel=kernel, target=target))

    names = [*dict.fromkeys(v.kernel for v in variants), ""]
    return [Row(name, tuple(cell(name, t) for t in targets), cell(name, "")) for name in names]


def _rejected(variants: Sequence[Variant], targets: Sequence[str]) -> list[Row]:
    """Rejected variants by reason and target, most frequent reason first."""
    counts = {t: rejection_counts([v for v in variants if v.target == t]) for t in targets}
    whole = rejection_counts(variants)
    return [Row(code, tuple(Cell(counts[t][code], whole.total(), query_of(reason=code, target=t)) for t in targets),
                Cell(n, whole.total(), query_of(reason=code)))
            for code, n in sorted(whole.items(), key=lambda item: (-item[1], item[0]))]


def _toolchain(made: Toolchains, targets: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(name, one value per target), or (name, [value]) for a value that doesn't depend on the target."""
    def row(name: str, value: object) -> tuple[str, list[str]]:
        if isinstance(value, Mapping):
            return name, [_shown(value.get(t)) for t in targets]
        return name, [_shown(value)]

    return [row("Triton", made.triton), row("ptxas", made.ptxas), row("nvdisasm", made.nvdisasm),
            *(row(name, value) for name, value in sorted(made.flags.items()))]


def _shown(value: object) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value)


class _Shared:
    """Values that many variants share (schedules, shapes, lines): stored once and referred to by number."""

    def __init__(self) -> None:
        self.values: list[object] = []
        self.known: dict[str, int] = {}

    def number(self, value: object) -> int:
        key = json.dumps(value)
        if key not in self.known:
            self.known[key] = len(self.values)
            self.values.append(value)
        return self.known[key]

    def numbers(self, values: Iterable[object]) -> list[int]:
        return [self.number(value) for value in values]


def knob_columns(variants: Sequence[Variant]) -> tuple[str, ...]:
    """The knobs with a column: those of the step's kernels, if there are any, and of a user's kernels those that vary most."""
    own: dict[str, set[object]] = {}
    for variant in variants:
        for name, value in variant.schedule.knobs.items() if isinstance(variant.schedule, OwnSchedule) else ():
            own.setdefault(name, set()).add((type(value), value))
    first = KNOB_COLUMNS if any(not isinstance(v.schedule, OwnSchedule) for v in variants) or not variants else ()
    others = sorted((name for name in own if name not in first), key=lambda name: -len(own[name]))
    return (*first, *others[: max(0, MOST_COLUMNS - len(first))])


def _pairs(table: Mapping[str, object], columns: Sequence[str] = KNOB_COLUMNS) -> list[tuple[str, object]]:
    order = [k for k in columns if k in table] + sorted(k for k in table if k not in columns)
    return [(k, table[k]) for k in order]


def _payload(variants: Sequence[Variant]) -> dict[str, object]:
    """The script's data: one list per variant, in the order of `fields`, at half the size of a list of objects."""
    shared, columns = _Shared(), knob_columns(variants)
    shapes = {(v.kernel, v.shape) for v in variants}
    several = {kernel for kernel, n in Counter(kernel for kernel, _ in shapes).items() if n > 1}
    rows = [[*map(v.to_dict().get, PLAIN_FIELDS), shared.number(_pairs(dims_of(v.shape))),
             shared.number(_pairs(knobs_of(v.schedule), columns)), shared.number(_other_knobs(v, v.kernel in several, columns)),
             [[r.code, shared.number(r.detail), shared.numbers(r.lines)] for r in v.reasons], shared.numbers(v.warnings),
             shared.numbers(v.lines)] for v in variants]
    fields = [*PLAIN_FIELDS, "shape", "schedule", "rest", "reasons", "warnings", "lines"]
    return {"knobs": columns, "fields": fields, "shared": shared.values, "rows": rows}


def _other_knobs(variant: Variant, with_shape: bool, columns: Sequence[str]) -> str:
    """The knobs without a column of their own, and the shape if the kernel has several."""
    knobs = describe_schedule({k: v for k, v in _pairs(knobs_of(variant.schedule), columns) if k not in columns})
    sizes = [f"{name} {value}" for name, value in _pairs(dims_of(variant.shape)) if value is not False] if with_shape else []
    return ", ".join([*([knobs] if knobs else []), *sizes])
