"""Results of the gate, as values. Its checks, cheapest first:

    reference, rows, determinism, numerics class   by `worker.checks`, for every candidate, before it is timed
    class rule                                     speed never promotes a schedule of another class
    decoder agreement                              tokens of AR, SD and SSD equal the incumbents' and each other's
    full model                                     old and new alternate; the interval must exclude a slowdown
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ....schedules.promoted import Checks, Paired
from ....schedules.recipe import Recipe
from ....schedules.schedule import Schedule
from ....shapes.fields import Count, Digest, Fields
from ...errors import RecordingError

TIMED = re.compile(r"(together: )?(\w+): the interval of the full model's time, new over old, .*: (\d+\.?\d*) to (\d+\.?\d*)")
TOO_FEW = "throttling left too few pairs of the full model's times"
PROVES, NOT_EXCLUDED = "proves a slowdown", "doesn't exclude a slowdown"


@dataclass(frozen=True)
class Failure:
    """The check that a candidate failed. stage: launch, reference, rows, determinism, crash or hang."""

    stage: str
    detail: str


@dataclass(frozen=True)
class Checked:
    """Results of one candidate's checks. error: relative RMS against fp64. numerics_class: None unless all passed."""

    checks: Mapping[str, Checks] = field(default_factory=dict)
    error: float | None = None
    numerics_class: str | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Agreement:
    """The full model's result with new schedules in place of the old. full_model: time new over old, by mode. failure: the reason
    why they may not be promoted, or None."""

    checks: Mapping[str, Checks] = field(default_factory=dict)
    prompts: int = 0
    tokens_compared: int = 0
    tokens_sha256: Digest | None = None
    full_model: Mapping[str, Paired] = field(default_factory=dict)
    failure: str | None = None


@dataclass
class GateResult:
    """The candidates that may be promoted. accepted: by kernel, the fastest candidate, or the incumbent if that is rejected.
    agreement: of all accepted together. rejected, would_differ: reason by kernel. measured: by kernel, times of the full model
    with this change alone, if that was measured."""

    accepted: dict[str, str] = field(default_factory=dict)
    agreement: Agreement = field(default_factory=Agreement)
    rejected: dict[str, str] = field(default_factory=dict)
    would_differ: dict[str, str] = field(default_factory=dict)
    measured: dict[str, dict[str, Paired]] = field(default_factory=dict)

    def throttled(self, kernel: str) -> bool:
        """Whether throttling kept a change from being judged."""
        return TOO_FEW in self.rejected.get(kernel, "")

    def slowdown(self, kernel: str) -> tuple[str, tuple[float, float]] | None:
        """(mode, interval of the full model's time, new over old) if a change was rejected for its time, else None."""
        found = TIMED.fullmatch(self.rejected.get(kernel, ""))
        return (found[2], (float(found[3]), float(found[4]))) if found else None


def describe_slowdown(mode: str, interval: tuple[float, float]) -> str:
    """The reason to reject a change with this interval of time, new over old, which isn't below 1."""
    found = PROVES if interval[0] > 1 else NOT_EXCLUDED
    return f"{mode}: the interval of the full model's time, new over old, {found}: {interval[0]} to {interval[1]}"


def other_recipe(recipe: Recipe, schedule: Schedule) -> str | None:
    """The reason why a schedule belongs to another recipe, or None: its row tile or chunk, which fix orders of sums, differ.
    split_k isn't part of the recipe: the class depends on it."""
    fixed = {"row_tile": recipe.row_tile, "chunk": recipe.kv_chunk}
    for knob, value in fixed.items():
        found = getattr(schedule, knob, value)
        if found != value:
            return f"{knob} {found}; recipe {recipe.name} fixes {value}"
    return None


@dataclass(frozen=True)
class StoredChecked:
    """A candidate's checks as in the file. checks: (run, passed) by kind. failure: (stage, detail)."""

    checks: Mapping[str, tuple[Count, Count]]
    error: float | None
    numerics_class: Digest | None
    failure: tuple[str, str] | None


def stored_checked(checked: Checked) -> StoredChecked:
    """For the file, without an error that isn't finite."""
    error = checked.error if checked.error is not None and np.isfinite(checked.error) else None
    return StoredChecked({kind: (c.run, c.passed) for kind, c in checked.checks.items()}, error, checked.numerics_class,
                         None if checked.failure is None else (checked.failure.stage, checked.failure.detail))


def checked_of(stored: StoredChecked, where: str) -> Checked:
    """From the file. Raises RecordingError if more passed than ran."""
    checks = {kind: Checks(*counts) for kind, counts in stored.checks.items()}
    _require_passed(checks, where)
    return Checked(checks, stored.error, stored.numerics_class, Failure(*stored.failure) if stored.failure else None)


def gate_of(fields: Fields) -> GateResult:
    """From the file. Old recordings said `doesn't exclude a slowdown` of proven ones too: corrected here. Raises the fields'
    error."""
    found = fields.read(GateResult)
    _require_passed(found.agreement.checks, fields.where)
    for kernel, why in found.rejected.items():
        if (slowdown := found.slowdown(kernel)) and slowdown[1][0] > 1:
            found.rejected[kernel] = why.replace(NOT_EXCLUDED, PROVES)
    return found


def _require_passed(checks: Mapping[str, Checks], where: str) -> None:
    for kind, c in checks.items():
        if not 0 <= c.passed <= c.run < 2**53:
            raise RecordingError(f"{where}: {kind[:40]}: {c.passed} passed of {c.run}", expected="at most as many as ran")
