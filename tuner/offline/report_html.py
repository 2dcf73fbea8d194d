"""report.html: the offline report as one file that works from disk.

The summary is plain HTML, rendered here. The variants are embedded once, as JSON, and the page's own script shows them,
a hundred at a time: 25,000 rows of HTML would be slow to open.
The same report gives the same bytes, whether it comes from a sweep or was read back from its file.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from ..page import render_page
from .report import FACT_FIELDS, Report, describe_schedule, rejection_counts

KNOB_COLUMNS = ("BLOCK_N", "BLOCK_K", "num_stages", "num_warps", "split_k")  # the other knobs share one column
PLAIN_FIELDS = ("id", "kernel", "target", "verdict", "stage", "kernel_digest", "artefact", "compile_ms", *FACT_FIELDS)
SHADES = 4


@dataclass(frozen=True)
class Cell:
    """A count in a summary table. query: the filter that a click sets, in the form of the page's URL hash."""

    count: int
    total: int
    query: str

    @property
    def shade(self) -> int:
        """0 where none is accepted, then 1 to SHADES by the share that is."""
        return 1 + min(SHADES - 1, SHADES * self.count // self.total) if self.count else 0

    @property
    def percent(self) -> int:
        return round(100 * self.count / self.total) if self.total else 0


@dataclass(frozen=True)
class Row:
    """A row of a summary table: its name, a cell a target, and all of them together."""

    name: str
    cells: tuple[Cell, ...]
    total: Cell


def render_report(report: Report) -> str:
    """The page, as the text of one HTML file."""
    variants, targets = report["variants"], report["targets"]
    rejected = _rejected(variants, targets)
    filters = [("kernel", "all kernels", list(dict.fromkeys(v["kernel"] for v in variants))), ("target", "all targets", targets),
               ("verdict", "all verdicts", ["accepted", "rejected"]), ("reason", "all reasons", [row.name for row in rejected])]
    return render_page(
        "report.html", _payload(variants), ["table.css", "report.css"], ["table.js", "report.js"], report=report, filters=filters,
        accepted=_accepted(variants, targets), rejected=rejected, toolchain=_toolchain(report["toolchain"], targets))


def _accepted(variants: Sequence[Mapping[str, Any]], targets: Sequence[str]) -> list[Row]:
    """Accepted of all, by kernel and target; the last row is the sum."""
    def cell(kernel: str, target: str) -> Cell:
        mine = [v["verdict"] for v in variants if kernel in ("", v["kernel"]) and target in ("", v["target"])]
        return Cell(mine.count("accepted"), len(mine), _query(kernel=kernel, target=target))

    names = [*dict.fromkeys(v["kernel"] for v in variants), ""]
    return [Row(name, tuple(cell(name, t) for t in targets), cell(name, "")) for name in names]


def _rejected(variants: Sequence[dict[str, Any]], targets: Sequence[str]) -> list[Row]:
    """Rejected, by reason and target, the most frequent reason first."""
    counts = {t: rejection_counts([v for v in variants if v["target"] == t]) for t in targets}
    whole = rejection_counts(list(variants))
    return [Row(code, tuple(Cell(counts[t][code], whole.total(), _query(reason=code, target=t)) for t in targets),
                Cell(n, whole.total(), _query(reason=code)))
            for code, n in sorted(whole.items(), key=lambda item: (-item[1], item[0]))]


def _query(**filters: str) -> str:
    return urlencode({name: value for name, value in filters.items() if value})


def _toolchain(toolchain: Mapping[str, Any], targets: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(name, a value a target), or (name, one value) where it is the same for all by its nature."""
    def row(name: str, value: Any) -> tuple[str, list[str]]:
        if isinstance(value, Mapping):
            return name, [_shown(value.get(t)) for t in targets]
        return name, [_shown(value)]

    first = ("triton", "ptxas", "nvdisasm")
    rows = [row({"triton": "Triton"}.get(name, name), toolchain[name]) for name in first if name in toolchain]
    rows += [row(name, value) for name, value in sorted(toolchain.items()) if name not in (*first, "flags")]
    return rows + [row(name, value) for name, value in sorted(toolchain.get("flags", {}).items())]


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value)


def _payload(variants: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the script reads: a list a variant, in the order of `fields`. Values that many variants share (schedules,
    shapes, lines) are numbers that point into `shared`: half the size, and one copy of each in memory."""
    shared: list[Any] = []
    known: dict[str, int] = {}

    def share(value: Any) -> int:
        key = json.dumps(value)
        if key not in known:
            known[key] = len(shared)
            shared.append(value)
        return known[key]

    def pairs(table: Mapping[str, Any]) -> list[Any]:
        order = [k for k in KNOB_COLUMNS if k in table] + sorted(k for k in table if k not in KNOB_COLUMNS)
        return [[k, table[k]] for k in order]

    shapes = {(v["kernel"], share(pairs(v["shape"]))) for v in variants}
    several = {kernel for kernel, n in Counter(kernel for kernel, _ in shapes).items() if n > 1}
    fields = [*PLAIN_FIELDS, "instructions", "shape", "schedule", "rest", "reasons", "warnings", "lines"]
    rows = []
    for v in variants:
        schedule = pairs(v["schedule"])
        reasons = [[r["code"], share(r["detail"]), [share(line) for line in r.get("lines") or ()]]
                   for r in v["reasons"]]
        rest = describe_schedule({k: value for k, value in schedule if k not in KNOB_COLUMNS})
        if v["kernel"] in several:
            sizes = [f"{name} {value}" for name, value in pairs(v["shape"]) if value is not False]
            rest = ", ".join([rest, *sizes] if rest else sizes)
        rows.append([*(v.get(name) for name in PLAIN_FIELDS), v.get("instructions"), share(pairs(v["shape"])),
                     share(schedule), share(rest), reasons, [share(w) for w in v["warnings"]],
                     [share(line) for line in v.get("lines") or ()]])
    return {"knobs": KNOB_COLUMNS, "fields": fields, "shared": shared, "rows": rows}
