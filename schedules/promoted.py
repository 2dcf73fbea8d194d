"""A promoted schedule: one row of `schedules/SKU/MODEL.RECIPE.json`, with what was measured and proven of it.

`schedule_id` is the digest of the knobs. It stands in the row, in its timing and in its evidence, so a schedule that was
changed by hand no longer matches, and `problems` says where. Values only: files are `store`'s business.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..shapes.fields import Fields
from ..shapes.model import KernelShape, shape_from_dict, shape_to_dict
from .errors import ScheduleError
from .schedule import Schedule, schedule_id, schedule_of, schedule_to_dict

RANDOM_WEIGHTS, PATH_WEIGHTS = "random:", "path:"


@dataclass(frozen=True)
class Toolchain:
    """What made the artefact: Triton's version, what ptxas says of its own, and the flags that reach the output bits."""

    triton: str
    ptxas: str
    flags: Mapping[str, Any]


@dataclass(frozen=True)
class Recorded:
    """Where it ran; no part of the look-up."""

    driver: str
    cuda: str


@dataclass(frozen=True)
class Artefact:
    """What the inspection read in the cubin that was timed."""

    instructions: tuple[str, ...]
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int
    tmem_columns: int
    blocks_per_sm: int
    cubin_sha256: str


@dataclass(frozen=True)
class Paired:
    """A paired comparison, new time over old time: below 1 is faster. interval: 95%, [low, high]."""

    ratio: float
    interval: tuple[float, float]
    pairs: int


@dataclass(frozen=True)
class Distribution:
    """Times of one schedule. interval_us: 95% of the median; quantiles_us: evenly spaced, least to greatest, to draw."""

    median_us: float
    interval_us: tuple[float, float]
    samples: int
    quantiles_us: tuple[float, ...]


@dataclass(frozen=True)
class Previous:
    """The schedule that was in place before, timed in the same rounds. paired: new over previous."""

    schedule: Schedule
    schedule_id: str
    times: Distribution
    paired: Paired


@dataclass(frozen=True)
class PromotedTiming:
    """previous: None only where the incumbent itself stays. clocks: such as sm_mhz, memory_mhz, temperature_c."""

    schedule_id: str
    times: Distribution
    previous: Previous | None
    driver: str
    clocks: Mapping[str, float]


@dataclass(frozen=True)
class Checks:
    """How many checks of one kind ran, and how many passed."""

    run: int
    passed: int


@dataclass(frozen=True)
class Evidence:
    """What was proven with this schedule in place. weights: `random:SEED` or `path:NAME` (with a fingerprint);
    tokens_sha256: of all tokens compared; full_model: by mode, the whole step's time, new over previous."""

    schedule_id: str
    checks: Mapping[str, Checks]
    prompts: int
    tokens_compared: int
    tokens_sha256: str | None
    weights: str
    weights_fingerprint: str | None
    full_model: Mapping[str, Paired]

    @property
    def random_weights(self) -> bool:
        """Enough for speed and bits; says nothing of a real model, and is marked wherever it is shown."""
        return self.weights.startswith(RANDOM_WEIGHTS)


@dataclass(frozen=True)
class PromotedSchedule:
    """One row. target (a SKU) and recipe are those of its file."""

    target: str
    recipe: str
    kernel: str
    shape: KernelShape
    schedule: Schedule
    schedule_id: str
    kernel_digest: str
    toolchain: Toolchain
    recorded: Recorded
    artefact: Artefact
    numerics_class: str
    timing: PromotedTiming
    evidence: Evidence
    date: str

    def problems(self) -> list[str]:
        """Why this row can't be relied on: edited since it was measured, or a check missing or failed."""
        found = []
        right = schedule_id(self.schedule)
        for where, stored in (("schedule_id", self.schedule_id), ("timing.schedule_id", self.timing.schedule_id),
                              ("evidence.schedule_id", self.evidence.schedule_id)):
            if stored != right:
                found.append(f"{where} is {stored}, but the schedule's knobs give {right}: edited since it was measured")
        before = self.timing.previous
        if before and before.schedule_id != schedule_id(before.schedule):
            found.append(f"timing.previous.schedule_id is {before.schedule_id}, but its knobs give "
                         f"{schedule_id(before.schedule)}: edited since it was measured")
        if not sum(c.run for c in self.evidence.checks.values()):
            found.append("evidence.checks: no check was run")
        found += [f"evidence.checks: {kind}: {c.run - c.passed} of {c.run} failed"
                  for kind, c in sorted(self.evidence.checks.items()) if c.passed != c.run]
        return found


def row_to_dict(row: PromotedSchedule) -> dict[str, Any]:
    """The row as its file has it: without target and recipe, which the file says once."""
    table = dataclasses.asdict(row)
    del table["target"], table["recipe"]
    table["shape"], table["schedule"] = shape_to_dict(row.shape), schedule_to_dict(row.schedule)
    return table


def row_from_dict(table: Any, where: str, target: str, recipe: str) -> PromotedSchedule:
    """Raises ScheduleError for a field that is missing, unknown or of the wrong kind. Says nothing of `problems`."""
    fields = _fields(table, where)
    row = PromotedSchedule(
        target, recipe, fields.get("kernel", str), _shape(fields), schedule_of(fields.get("schedule", dict), where),
        fields.get("schedule_id", str), fields.get("kernel_digest", str), _toolchain(fields), _recorded(fields),
        _artefact(fields), fields.get("numerics_class", str), _timing(fields), _evidence(fields), fields.get("date", str))
    fields.done()
    return row


def toolchain_from_dict(table: Any, where: str) -> Toolchain:
    """Raises ScheduleError."""
    fields = _fields(table, where)
    found = Toolchain(fields.get("triton", str), fields.get("ptxas", str), fields.get("flags", dict))
    fields.done()
    return found


def _fields(table: Any, where: str) -> Fields:
    if not isinstance(table, dict):
        raise ScheduleError(f"{where}: is a {type(table).__name__}", expected="an object")
    return Fields(table, where, ScheduleError)


def _inner(fields: Fields, name: str) -> Fields:
    return Fields(fields.get(name, dict), f"{fields.where}: {name}", ScheduleError)


def _count(fields: Fields, name: str) -> int:
    value: int = fields.get(name, int)
    if not 0 <= value < 2**53:
        raise fields.fail(name, f"is {value}", expected="a whole number, 0 or more")
    return value


def _numbers(fields: Fields, name: str, length: int | None = None) -> tuple[float, ...]:
    """Positive numbers in ascending order."""
    listed = fields.get(name, list)
    right = all(type(v) in (int, float) and 0 < v < 2**53 for v in listed)
    if not right or list(listed) != sorted(listed) or (length is not None and len(listed) != length):
        raise fields.fail(name, f"is {listed!r}"[:120],
                          expected=f"{'positive' if length is None else length} numbers in ascending order")
    return tuple(float(v) for v in listed)


def _pair(fields: Fields, name: str) -> tuple[float, float]:
    low, high = _numbers(fields, name, 2)
    return low, high


def _shape(fields: Fields) -> KernelShape:
    return shape_from_dict(fields.get("shape", dict), fields.where, ScheduleError)


def _toolchain(fields: Fields) -> Toolchain:
    return toolchain_from_dict(fields.get("toolchain", dict), f"{fields.where}: toolchain")


def _recorded(fields: Fields) -> Recorded:
    inner = _inner(fields, "recorded")
    found = Recorded(inner.get("driver", str), inner.get("cuda", str))
    inner.done()
    return found


def _artefact(fields: Fields) -> Artefact:
    inner = _inner(fields, "artefact")
    named = inner.get("instructions", list)
    if not all(isinstance(n, str) for n in named):
        raise inner.fail("instructions", f"is {named!r}", expected="a list of names")
    counts = {name: _count(inner, name) for name in (
        "registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes", "shared_bytes", "tmem_columns", "blocks_per_sm")}
    found = Artefact(tuple(named), cubin_sha256=inner.get("cubin_sha256", str), **counts)
    inner.done()
    return found


def _paired(inner: Fields) -> Paired:
    found = Paired(inner.positive("ratio", float), _pair(inner, "interval"), inner.positive("pairs", int))
    inner.done()
    return found


def _distribution(inner: Fields) -> Distribution:
    found = Distribution(inner.positive("median_us", float), _pair(inner, "interval_us"), inner.positive("samples", int),
                         _numbers(inner, "quantiles_us"))
    inner.done()
    return found


def _timing(fields: Fields) -> PromotedTiming:
    inner = _inner(fields, "timing")
    clocks = inner.get("clocks", dict)
    if not all(type(v) in (int, float) and math.isfinite(v) for v in clocks.values()):
        raise inner.fail("clocks", f"is {clocks!r}", expected="a number each")
    before = _inner(inner, "previous") if inner.get("previous", dict, None) is not None else None
    previous = None
    if before is not None:
        previous = Previous(schedule_of(before.get("schedule", dict), before.where), before.get("schedule_id", str),
                            _distribution(_inner(before, "times")), _paired(_inner(before, "paired")))
        before.done()
    found = PromotedTiming(inner.get("schedule_id", str), _distribution(_inner(inner, "times")), previous,
                           inner.get("driver", str), {k: float(v) for k, v in clocks.items()})
    inner.done()
    return found


def _evidence(fields: Fields) -> Evidence:
    inner = _inner(fields, "evidence")
    weights = inner.get("weights", str)
    if not weights.startswith((RANDOM_WEIGHTS, PATH_WEIGHTS)):
        raise inner.fail("weights", f"is {weights!r}", expected="random:SEED or path:NAME")
    kinds = _inner(inner, "checks")
    checks = {kind: _checks(_inner(kinds, kind)) for kind in kinds.table}
    modes = _inner(inner, "full_model")
    found = Evidence(inner.get("schedule_id", str), checks, _count(inner, "prompts"), _count(inner, "tokens_compared"),
                     inner.get("tokens_sha256", str, None), weights, inner.get("weights_fingerprint", str, None),
                     {mode: _paired(_inner(modes, mode)) for mode in modes.table})
    inner.done()
    return found


def _checks(inner: Fields) -> Checks:
    found = Checks(_count(inner, "run"), _count(inner, "passed"))
    inner.done()
    if found.passed > found.run:
        raise inner.fail("passed", f"is {found.passed}", expected=f"at most {found.run}, those that ran")
    return found
