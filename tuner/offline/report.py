"""The offline report: its value, the one reader and writer of report.json, and the summary in a terminal."""

import dataclasses
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...kernels.loading import Source
from ...schedules.errors import ScheduleError
from ...schedules.promoted import Artefact, Toolchain
from ...schedules.schedule import KINDS, Schedule, schedule_of, schedule_to_dict
from ...shapes.fields import Count, Digest, Fields, Name, Table, nearest, read_table, shown
from ...shapes.model import KernelShape, shape_from_dict, shape_to_dict
from ..errors import ReportError
from .record import Code, Reason, Stage

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA: Literal["tune-kernels/offline-report/1"] = "tune-kernels/offline-report/1"
FAMILY = "tune-kernels/offline-report/"
AGAIN = "run tune-kernels --offline again: finished work is kept"
# Facts of the artefact: null in a variant that was rejected before the stage `sass`.
FACT_FIELDS = tuple(field.name for field in dataclasses.fields(Artefact))


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A variant without its shape, schedule and facts. lines: of TTGIR, PTX and the assembler's log. compile_ms: None if a rule
    rejected it without compiling. artefact: the key in the bundle, None if there is no artefact."""

    id: Name
    kernel: Name
    kernel_digest: Digest
    target: Name
    verdict: Literal["accepted", "rejected"]
    stage: Stage
    reasons: tuple[Reason, ...]
    warnings: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    compile_ms: float | None
    artefact: Digest | None


@dataclass(frozen=True, kw_only=True)
class Variant(Judged):
    """One kernel, shape and schedule for one target, with its verdict. facts: None before the stage `sass`."""

    shape: KernelShape
    schedule: Schedule
    facts: Artefact | None

    @property
    def accepted(self) -> bool:
        return self.verdict == "accepted"

    def to_dict(self) -> Table:
        """As in report.json: facts are fields of the same table, null if unknown."""
        table = {**vars(self), "shape": shape_to_dict(self.shape), "schedule": schedule_to_dict(self.schedule),
                 "reasons": [vars(reason) for reason in self.reasons]}
        del table["facts"]
        return table | (vars(self.facts) if self.facts else dict.fromkeys(FACT_FIELDS))


@dataclass(frozen=True)
class Toolchains:
    """The toolchain of the artefacts. ptxas: by target. flags: the recipe's; max_num_imprecise_acc by target."""

    triton: str
    ptxas: Mapping[str, str]
    nvdisasm: str
    flags: Mapping[str, object]

    @classmethod
    def of(cls, made: Mapping[str, Toolchain], nvdisasm: str) -> "Toolchains":
        """From the toolchain of each target."""
        first = next(iter(made.values()))
        by_target = {name: {arch: tools.flags[name] for arch, tools in made.items()} for name in first.flags}
        flags = {name: values if name == "max_num_imprecise_acc" else first.flags[name] for name, values in by_target.items()}
        return cls(first.triton, {arch: tools.ptxas for arch, tools in made.items()}, nvdisasm, flags)

    def on(self, arch: str) -> Toolchain:
        """The toolchain of one target."""
        flags = {name: value.get(arch) if isinstance(value, Mapping) else value for name, value in self.flags.items()}
        return Toolchain(self.triton, self.ptxas.get(arch, ""), flags)


@dataclass(frozen=True)
class Counts:
    """Numbers of variants. contract: rejected by a contract; cached: judged without compiling in this run; cubins: distinct
    ones."""

    variants: Count
    contract: Count
    accepted: Count
    rejected: Count
    cached: Count
    cubins: Count
    accepted_cubins: Count


@dataclass(frozen=True)
class Audit:
    """Early rejects that were compiled to the end: one in `one_in`. disagreed: ids of those whose prediction was wrong."""

    one_in: Count
    sampled: Count
    disagreed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A report without its variants. model: the shape's name, a label. model_digest: of the shape's sizes, None in a report of an
    older version and where no kernel is a model's. seconds: of the sweep. sources: of a user's kernels, by name."""

    schema: Literal["tune-kernels/offline-report/1"] = SCHEMA
    model: str
    model_digest: str | None = None
    targets: tuple[Name, ...]
    space: str
    recipe: Name
    max_spill_bytes: Count
    seconds: float
    toolchain: Toolchains
    counts: Counts
    audit: Audit
    sources: Mapping[str, Source] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Report(Summary):
    """One sweep."""

    variants: tuple[Variant, ...]

    def to_dict(self) -> Table:
        """As in report.json."""
        table = {name: value for name, value in vars(self).items() if name != "sources"}
        sources = {"sources": {name: vars(source) for name, source in self.sources.items()}} if self.sources else {}
        return {**table, **sources, "toolchain": vars(self.toolchain), "counts": vars(self.counts), "audit": vars(self.audit),
                "variants": [variant.to_dict() for variant in self.variants]}


def read_report(path: Path) -> Report:
    """A report from its file or folder.

    Raises:
        ReportError: no report there; not JSON; another schema; fields missing or of the wrong type.
    """
    path = path / "report.json" if path.is_dir() else path
    if not path.exists():
        raise ReportError(f"no report at {path}", expected="report.json, as tune-kernels --offline writes it",
                          action="run tune-kernels --offline, or name its folder with --out")
    return report_from(read_table(path, ReportError), str(path))


def report_from(table: Table, where: str) -> Report:
    """A report from the JSON value of its file. where: the file's name in errors.

    Raises:
        ReportError: another schema; fields missing or of the wrong type.
    """
    fields = Fields(table, where, ReportError)
    schema = table.get("schema")
    if schema != SCHEMA:
        newer = isinstance(schema, str) and schema.startswith(FAMILY)
        raise ReportError(f"{where}: schema {shown(schema)}", expected=repr(SCHEMA),
                          action="update tune-kernels: this report is another version's" if newer else
                                 "name the folder or report.json of tune-kernels --offline")
    found = [_variant(inner) for inner in fields.items("variants")]
    rest = {name: value for name, value in fields.table.items() if name != "variants"}
    report = Report(variants=tuple(found), **vars(Fields(rest, fields.where, ReportError).read(Summary)))
    for variant in report.variants:
        if variant.target not in report.targets:
            raise fields.fail("variants", f"{variant.id} is for {variant.target}", expected=f"one of {', '.join(report.targets)}")
        if variant.accepted and (variant.facts is None or variant.artefact is None):
            raise fields.fail("variants", f"{variant.id} is accepted without artefact or facts", expected="both", action=AGAIN)
    return report


def _variant(fields: Fields) -> Variant:
    shape = shape_from_dict(fields.get("shape", dict), fields.where, ReportError)
    try:
        schedule = schedule_of(fields.get("schedule", dict), fields.where)
    except ScheduleError as e:
        raise ReportError(e.found, expected=e.expected, action=AGAIN) from None
    known = {name: fields.table[name] for name in FACT_FIELDS if fields.table.get(name) is not None}
    facts = Fields(known, fields.where, ReportError).read(Artefact) if known else None
    rest = {name: value for name, value in fields.table.items() if name not in ("shape", "schedule", *FACT_FIELDS)}
    judged = Fields(rest, fields.where, ReportError).read(Judged)
    return Variant(shape=shape, schedule=schedule, facts=facts, **vars(judged))


def find_variant(report: Report, variant_id: str) -> Variant:
    """The variant whose id begins with `variant_id`. Raises ReportError if there is none, or more than one."""
    found = [v for v in report.variants if v.id.startswith(variant_id)]
    if variant_id and len(found) == 1:
        return found[0]
    if len(found) > 1:
        raise ReportError(f"{len(found)} variants begin with {variant_id!r}", expected="more characters of the id",
                          action=f"for example {', '.join(v.id for v in found[:3])}")
    raise ReportError(f"no variant {variant_id!r} in this report{nearest(variant_id, [v.id for v in report.variants])}",
                      expected="an id of report.json or report.html", action="name the report's folder with --out")


def describe_schedule(schedule: Mapping[str, object]) -> str:
    """`BLOCK_N 64, BLOCK_K 128, ...` without knobs at their defaults."""
    order = ("chunk", "TILE", "BLOCK_N", "BLOCK_K", "BLOCK_D", "splits", "num_stages", "num_warps", "split_k")
    plain = _plain_knobs()
    names = sorted(schedule, key=lambda k: order.index(k) if k in order else len(order))
    return ", ".join(f"{k} {schedule[k]}" for k in names if k not in plain or plain[k] != schedule[k])


@cache
def _plain_knobs() -> dict[str, object]:
    return {f.name: f.default for kind in KINDS for f in dataclasses.fields(kind)}


def rejection_counts(variants: Iterable[Variant]) -> Counter[Code]:
    """Rejected variants by the code of their first reason."""
    return Counter(v.reasons[0].code for v in variants if v.reasons)


def print_summary(report: Report, console: "Console", out: Path) -> None:
    """A table per target with a row per kernel, then the commands to run next. Text from the report is never markup."""
    from rich.table import Table as RichTable
    from rich.text import Text

    for target in report.targets:
        mine = [v for v in report.variants if v.target == target]
        codes = sorted(rejection_counts(mine))
        table = RichTable(title=Text(f"{report.model} on {target}, Triton {report.toolchain.triton}"), title_justify="left")
        for name in ("kernel", "variants", "accepted", *codes):  # a narrow terminal wraps a heading at its spaces
            first = name == "kernel"
            table.add_column(name.replace("_", " "), justify="left" if first else "right", no_wrap=first)
        for kernel in dict.fromkeys(v.kernel for v in mine):
            rows = [v for v in mine if v.kernel == kernel]
            counts = rejection_counts(rows)
            table.add_row(kernel, str(len(rows)), str(sum(v.accepted for v in rows)), *(str(counts[c] or "") for c in codes))
        console.print(table)
    for line in _closing_lines(report, out):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _closing_lines(report: Report, out: Path) -> list[str]:
    counts, audit = report.counts, report.audit
    known = counts.cached - sum(v.compile_ms is None for v in report.variants)  # without those that a rule rejected
    example = next((v for v in report.variants if v.reasons), None)
    return [
        f"{counts.variants} variants: {counts.accepted} accepted ({counts.accepted_cubins} distinct artefacts), "
        f"{counts.rejected} rejected, {counts.contract} against a kernel's contract; {known} known from an earlier run, in "
        f"{report.seconds:.1f} s",
        f"audit: {audit.sampled} early rejects compiled to the end, {len(audit.disagreed)} of them without the predicted fault",
        "next:",
        f"  open {out / 'report.html'}",
        *([f"  tune-kernels show {example.id} --out {shlex.quote(str(out))}    why one was rejected"] if example else []),
        f"  take {out} to a GPU machine with Triton {report.toolchain.triton}: accepted kernels launch there without compiling",
    ]
