"""The effects of a change of schedules: pairs the entries of two collections and compares each pair.

An entry is a promoted schedule or a variant of an offline report. Entries pair by kernel and shape (variants by schedule too),
and by SKU or target, model and recipe. If each side has a single SKU, model or recipe, these pair even if they differ: two
recipes can be compared. `source` reads entries; as_text, as_markdown, as_html and as_json show a difference.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

from ...schedules.promoted import Artefact, PromotedSchedule, Toolchain
from ...schedules.schedule import Schedule, knobs_of, schedule_to_dict
from ...schedules.store import PromotedFile
from ...shapes.model import KernelShape, shape_to_dict
from ..offline.report import Report, Variant
from .evidence import Bits, EvidenceState, Kernels, bits_of, evidence_of, installed_kernels
from .times import TimeChange, time_change

STATUSES = ("changed", "added", "removed", "unchanged")
PROMOTED, REPORT = "promoted", "report"
AXES = ("target", "model", "recipe")
ACCEPTED, REJECTED = "accepted", "rejected"

Value = str | int | float | bool | tuple[str, ...] | None  # a field's value; None: unknown on this side


@dataclass(frozen=True)
class Facts:
    """The known facts of an artefact, in order of importance. verdict, stage, reasons (codes): of a report's variant. The rest is
    None if it was rejected early."""

    verdict: str | None = None
    stage: str | None = None
    reasons: tuple[str, ...] | None = None
    instructions: tuple[str, ...] | None = None
    spill_store_bytes: int | None = None
    spill_load_bytes: int | None = None
    stack_bytes: int | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    tmem_columns: int | None = None
    blocks_per_sm: int | None = None
    cubin_sha256: str | None = None

    @property
    def rejected(self) -> bool:
        return self.verdict == REJECTED


FACTS = tuple(one.name for one in fields(Facts))


@dataclass(frozen=True)
class Entry:
    """One side of a row. identity: schedule_id, or the variant's id. toolchain: value by name. misplaced: the reason why look-up
    never reads the row. lines: of TTGIR, PTX and the assembler's log. artefact: its key in the report's bundle."""

    target: str
    model: str
    recipe: str
    kernel: str
    shape: KernelShape
    schedule: Schedule
    identity: str
    facts: Facts
    kernel_digest: str
    toolchain: Mapping[str, Value]
    misplaced: str = ""
    lines: tuple[str, ...] = ()
    artefact: str | None = None
    promoted: PromotedSchedule | None = None


@dataclass(frozen=True)
class Collection:
    """OLD or NEW. name: as the user wrote it. kind: PROMOTED or REPORT; "" if it is empty and may be either. bundle: the folder
    of the entries' artefacts. kernels: sources that promoted rows of this side are checked against."""

    name: str
    kind: str
    entries: tuple[Entry, ...]
    bundle: Path | None = None
    kernels: Kernels = field(default_factory=installed_kernels)


@dataclass(frozen=True)
class Change:
    """One field that differs."""

    name: str
    old: Value
    new: Value


@dataclass(frozen=True)
class Code:
    """Changes in the code. counts: of deciding SASS instructions, if both artefacts are available. old_lines, new_lines: deciding
    lines of TTGIR, PTX, assembler's log and SASS that the other side lacks. notes: reasons why a side's SASS can't be read."""

    counts: tuple[Change, ...] = ()
    old_lines: tuple[str, ...] = ()
    new_lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A reason why a row fails `--check`. code: one of `check.CODES`. row: the row's id. what: the row in words."""

    code: str
    row: str
    what: str
    detail: str


@dataclass(frozen=True)
class RowDiff:
    """One kernel and shape (and schedule, in reports) in OLD and NEW."""

    id: str
    status: str
    old: Entry | None
    new: Entry | None
    knobs: tuple[Change, ...] = ()
    facts: tuple[Change, ...] = ()
    toolchain: tuple[Change, ...] = ()
    kernel_changed: bool = False
    time: TimeChange | None = None
    bits: Bits | None = None
    evidence: EvidenceState | None = None
    code: Code | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def places(self) -> tuple[Change, ...]:
        """Differences in SKU or target, model and recipe."""
        if self.old is None or self.new is None:
            return ()
        pairs = ((axis, getattr(self.old, axis), getattr(self.new, axis)) for axis in AXES)
        return tuple(Change(axis, old, new) for axis, old, new in pairs if old != new)

    @property
    def entry(self) -> Entry:
        """The new side, or the old one of a removed row."""
        entry = self.new or self.old
        assert entry is not None
        return entry


@dataclass(frozen=True)
class Diff:
    """Two collections compared. rows: those with findings first, then by status, kernel and shape. kernels: sources that promoted
    rows were checked against."""

    old: str
    new: str
    kind: str
    rows: tuple[RowDiff, ...]
    findings: tuple[Finding, ...] = field(default=())
    kernels: Kernels | None = None

    def count(self, status: str) -> int:
        return sum(row.status == status for row in self.rows)

    @cached_property
    def everywhere(self) -> tuple[Change, ...]:
        """Differences of place or toolchain in every row with both sides: shown once, not per row."""
        pairs = [{c: None for c in (*row.places, *row.toolchain)} for row in self.rows if row.old and row.new]
        return tuple(c for c in pairs[0] if all(c in other for other in pairs)) if pairs else ()


def promoted_entries(files: Iterable[PromotedFile]) -> tuple[Entry, ...]:
    return tuple(_promoted_entry(row, file.model) for file in files for row in file.rows)


def _promoted_entry(row: PromotedSchedule, model: str) -> Entry:
    toolchain = {**_toolchain(row.toolchain), "driver": row.recorded.driver, "CUDA": row.recorded.cuda}
    return Entry(row.target, model, row.recipe, row.kernel, row.shape, row.schedule, row.schedule_id, _facts_of(row.artefact),
                 row.kernel_digest, toolchain, promoted=row)


def report_entries(report: Report) -> tuple[Entry, ...]:
    return tuple(_report_entry(variant, report) for variant in report.variants)


def _report_entry(variant: Variant, report: Report) -> Entry:
    known = _facts_of(variant.facts) if variant.facts else Facts()
    facts = replace(known, verdict=variant.verdict, stage=variant.stage,
                    reasons=tuple(dict.fromkeys(r.code for r in variant.reasons)))
    lines = dict.fromkeys([*(line for r in variant.reasons for line in r.lines), *variant.lines])
    return Entry(variant.target, report.model, report.recipe, variant.kernel, variant.shape, variant.schedule, variant.id, facts,
                 variant.kernel_digest, _toolchain(report.toolchain.on(variant.target)), lines=tuple(lines),
                 artefact=variant.artefact)


def _facts_of(artefact: Artefact) -> Facts:
    return Facts(**{**vars(artefact), "instructions": tuple(sorted(artefact.instructions))})


def _toolchain(tools: Toolchain) -> dict[str, Value]:
    """Value by display name. A flag with several values becomes JSON."""
    flags = {name: value if isinstance(value, str | int | float | None) else json.dumps(value, sort_keys=True)
             for name, value in sorted(tools.flags.items())}
    return {"Triton": tools.triton, "ptxas": tools.ptxas, **flags}


def compare(old: Collection, new: Collection) -> Diff:
    """One row per entry of either side. `check` and `code` add findings and code."""
    kind = new.kind or old.kind
    joined = [axis for axis in AXES if _only(old, axis) and _only(new, axis)]
    before, after = ({_key(e, kind, joined): e for e in side.entries} for side in (old, new))
    rows = [_row(key, before.get(key), after.get(key), new.kernels) for key in sorted(before.keys() | after.keys())]
    return Diff(old.name, new.name, kind, tuple(sorted(rows, key=_rank)),
                kernels=new.kernels if kind == PROMOTED else None)


def _rank(row: RowDiff) -> tuple[int, int]:
    """Sorts by status, and changed variants by their most important changed fact."""
    decides = row.entry.promoted is None
    return STATUSES.index(row.status), min((FACTS.index(c.name) for c in row.facts), default=len(FACTS)) if decides else 0


def _only(side: Collection, axis: str) -> bool:
    return len({getattr(e, axis) for e in side.entries}) == 1


def _key(entry: Entry, kind: str, joined: Sequence[str]) -> tuple[str, ...]:
    places = ["" if axis in joined else getattr(entry, axis) for axis in AXES]
    schedule = json.dumps(schedule_to_dict(entry.schedule), sort_keys=True) if kind == REPORT else ""
    return (*places, entry.kernel, json.dumps(shape_to_dict(entry.shape), sort_keys=True), schedule)


def _row(key: tuple[str, ...], old: Entry | None, new: Entry | None, kernels: Kernels) -> RowDiff:
    row_id = hashlib.sha256("\n".join(key).encode()).hexdigest()[:12]
    was, now = old.promoted if old else None, new.promoted if new else None
    row = RowDiff(row_id, "unchanged", old, new, time=time_change(was, now), bits=bits_of(was, now),
                  evidence=evidence_of(now, kernels))
    if old is None or new is None:
        return replace(row, status="added" if old is None else "removed")
    if old == new:
        return row
    row = replace(row, knobs=changes(knobs_in(old.schedule), knobs_in(new.schedule)), facts=_changed_facts(old.facts, new.facts),
                  toolchain=changes(old.toolchain, new.toolchain), kernel_changed=old.kernel_digest != new.kernel_digest)
    return row if _same(row, was, now) else replace(row, status="changed")


def knobs_in(schedule: Schedule) -> Mapping[str, Value]:
    """The knobs by name."""
    return {name: value if isinstance(value, str | int | float | None) else str(value)
            for name, value in knobs_of(schedule).items()}


def _same(row: RowDiff, was: PromotedSchedule | None, now: PromotedSchedule | None) -> bool:
    """Whether promoted rows differ at most in the recipe's or model's name, variants at most in the toolchain."""
    if was and now:
        return replace(now, recipe=was.recipe, model=was.model, row_digest=was.row_digest) == was
    return not (row.facts or row.knobs or row.kernel_changed)


def _changed_facts(old: Facts, new: Facts) -> tuple[Change, ...]:
    """The changed facts. A variant that both sides reject may have been compiled further on one side, for the audit: then a fact
    that one side lacks isn't a change."""
    found = changes(vars(old), vars(new))
    if old.rejected and new.rejected:
        return tuple(c for c in found if c.name != "stage" and c.old is not None and c.new is not None)
    return found


def changes(old: Mapping[str, Value], new: Mapping[str, Value]) -> tuple[Change, ...]:
    """The fields that differ, in the new side's order."""
    names = dict.fromkeys([*new, *old])
    return tuple(Change(n, old.get(n), new.get(n)) for n in names if old.get(n) != new.get(n))
