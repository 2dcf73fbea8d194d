"""A promoted schedule: one row of `schedules/SKU/MODEL.RECIPE.json`, with its measurements and its proofs.

`row_digest` is the digest of every other value of the row, its SKU, model and recipe among them: a row that was edited by hand is
refused by look-up and by `tune-kernels diff --check`. `schedule_id`, the digest of the knobs, stands in the row, in its timing
and in its evidence: it says which schedule each of them is of. Values only: files are `store`'s business.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from ..shapes.fields import Count, Digest, Fields, Finite, From, Name, Positive, PositiveInt, Rule
from ..shapes.model import KernelShape, shape_from_dict
from .errors import ScheduleError
from .schedule import Schedule, schedule_id, schedule_of

RANDOM_WEIGHTS, PATH_WEIGHTS = "random:", "path:"
CHECKS = ("reference", "rows", "determinism", "agreement", "full_model", "quality")  # kinds that --on-gpu and verify run
MIGRATE = "python -m tune_kernels.schedules.migrate"

AnyShape = Annotated[KernelShape, From(shape_from_dict)]
AnySchedule = Annotated[Schedule, From(schedule_of)]
Interval = Annotated[tuple[Positive, Positive], Rule("[low, high]", lambda ends: ends[0] <= ends[1])]
Ascending = Annotated[tuple[Positive, ...], Rule("numbers in ascending order", lambda numbers: list(numbers) == sorted(numbers))]


@dataclass(frozen=True)
class Toolchain:
    """The makers of the artefact: Triton's version, the release that ptxas says, and the flags that reach the output bits."""

    triton: str
    ptxas: str
    flags: Mapping[str, object]


@dataclass(frozen=True)
class Recorded:
    """The machine; no part of the look-up."""

    driver: str
    cuda: str


@dataclass(frozen=True)
class Artefact:
    """Facts that the inspection read in the cubin that was timed."""

    instructions: tuple[str, ...]
    registers: Count
    spill_store_bytes: Count
    spill_load_bytes: Count
    stack_bytes: Count
    shared_bytes: Count
    tmem_columns: Count
    blocks_per_sm: Count
    cubin_sha256: Digest


@dataclass(frozen=True)
class Paired:
    """A paired comparison, new time over old time: below 1 is faster. interval: 95%, [low, high]."""

    ratio: Positive
    interval: Interval
    pairs: PositiveInt


@dataclass(frozen=True)
class Distribution:
    """Times of one schedule. interval_us: 95% of the median; quantiles_us: evenly spaced, least to greatest, to draw."""

    median_us: Positive
    interval_us: Interval
    samples: PositiveInt
    quantiles_us: Ascending


@dataclass(frozen=True)
class Previous:
    """The schedule that was in place before, timed in the same rounds. paired: new over previous."""

    schedule: AnySchedule
    schedule_id: Digest
    times: Distribution
    paired: Paired


@dataclass(frozen=True)
class PromotedTiming:
    """previous: None only where the incumbent itself stays. clocks: such as sm_mhz, memory_mhz, temperature_c."""

    schedule_id: Digest
    times: Distribution
    previous: Previous | None
    driver: str
    clocks: Mapping[str, Finite]


@dataclass(frozen=True)
class Checks:
    """How many checks of one kind ran, and how many passed."""

    run: Count
    passed: Count


@dataclass(frozen=True)
class Evidence:
    """The proofs of this schedule in its place. weights: `random:SEED` or `path:NAME` (with a fingerprint); tokens_sha256: of
    all tokens compared; full_model: by mode, the whole step's time, new over previous."""

    schedule_id: Digest
    checks: Mapping[str, Annotated[Checks, Rule("at most as many passed as ran", lambda c: c.passed <= c.run)]]
    prompts: Count
    tokens_compared: Count
    tokens_sha256: Digest | None
    weights: Annotated[str, Rule("random:SEED or path:NAME", lambda text: text.startswith((RANDOM_WEIGHTS, PATH_WEIGHTS)))]
    weights_fingerprint: str | None
    full_model: Mapping[str, Paired]

    @property
    def random_weights(self) -> bool:
        """Enough for speed and bits; says nothing of a real model, and is marked wherever it is shown."""
        return self.weights.startswith(RANDOM_WEIGHTS)


State = Literal["edited", "missing", "failed"]
EDITED: State = "edited"
MISSING: State = "missing"
FAILED: State = "failed"


@dataclass(frozen=True)
class Problem:
    """Why a row can't be relied on. state: edited since it was measured, evidence missing, or a check failed."""

    state: State
    text: str


@dataclass(frozen=True)
class PromotedSchedule:
    """One row. target (a SKU), model and recipe are those of its file. row_digest: None in a row that was never sealed, such as
    one of schema 1."""

    target: Name
    model: Name
    recipe: Name
    kernel: Name
    shape: AnyShape
    schedule: AnySchedule
    schedule_id: Digest
    kernel_digest: Digest
    toolchain: Toolchain
    recorded: Recorded
    artefact: Artefact
    numerics_class: Digest
    timing: PromotedTiming
    evidence: Evidence
    date: str
    row_digest: Digest | None = None

    def digest(self) -> str:
        """Of every value but `row_digest`: 16 hexadecimal digits. A whole number counts alike as int and as float."""
        table = {**dataclasses.asdict(self), "row_digest": None}
        return hashlib.sha256(json.dumps(_canonical(table), sort_keys=True).encode()).hexdigest()[:16]

    def sealed(self) -> "PromotedSchedule":
        """The row with its own digest: after it was measured, or proved anew."""
        return dataclasses.replace(self, row_digest=self.digest())

    def problems(self) -> list[Problem]:
        """Why this row can't be relied on."""
        return [*(Problem(EDITED, text) for text in self._edits()), *_unproven(self.evidence)]

    def _edits(self) -> Iterator[str]:
        if self.row_digest is None:
            yield f"row_digest is missing: rows of schema 1 have none; {MIGRATE} FOLDER adds it to rows that you trust"
        elif self.row_digest != (right := self.digest()):
            yield f"row_digest is {self.row_digest}, but the row's values give {right}: edited since it was measured"
        ids = [("schedule_id", self.schedule_id, self.schedule), ("timing.schedule_id", self.timing.schedule_id, self.schedule),
               ("evidence.schedule_id", self.evidence.schedule_id, self.schedule)]
        if before := self.timing.previous:
            ids.append(("timing.previous.schedule_id", before.schedule_id, before.schedule))
            yield from _impossible_times("timing.previous.times", before.times)
            yield from _impossible_pair("timing.previous.paired", before.paired)
        for where, stored, schedule in ids:
            if stored != (right := schedule_id(schedule)):
                yield f"{where} is {stored}, but the schedule's knobs give {right}: edited since it was measured"
        yield from _impossible_times("timing.times", self.timing.times)
        for mode, pair in sorted(self.evidence.full_model.items()):
            yield from _impossible_pair(f"evidence.full_model.{mode}", pair)
        for kind in sorted(set(self.evidence.checks) - set(CHECKS)):
            yield f"evidence.checks: {kind!r} is no kind of check: expected some of {', '.join(CHECKS)}"


def _impossible_times(where: str, times: Distribution) -> Iterator[str]:
    low, high = times.interval_us
    if not low <= times.median_us <= high:
        yield f"{where}: the median {times.median_us:g} us lies outside its interval [{low:g}, {high:g}]"
    if times.quantiles_us and not times.quantiles_us[0] <= times.median_us <= times.quantiles_us[-1]:
        yield f"{where}: the median {times.median_us:g} us lies outside its quantiles"


def _impossible_pair(where: str, pair: Paired) -> Iterator[str]:
    low, high = pair.interval
    if not low <= pair.ratio <= high:
        yield f"{where}: the ratio {pair.ratio:g} lies outside its interval [{low:g}, {high:g}]"


def _unproven(evidence: Evidence) -> Iterator[Problem]:
    if not sum(c.run for c in evidence.checks.values()):
        yield Problem(MISSING, "evidence.checks: no check was run")
    for kind, c in sorted(evidence.checks.items()):
        if c.passed != c.run:
            yield Problem(FAILED, f"evidence.checks: {kind}: {c.run - c.passed} of {c.run} failed")


def _canonical(value: object) -> object:
    """A JSON value in which whole numbers are ints: a file may say 2.0 where a measurement said 2."""
    if isinstance(value, Mapping):
        return {key: _canonical(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def row_to_dict(row: PromotedSchedule) -> dict[str, object]:
    """The row as its file has it: without target, model and recipe, which the file says once."""
    return {name: value for name, value in dataclasses.asdict(row).items() if name not in ("target", "model", "recipe")}


def toolchain_from_dict(table: Mapping[str, object], where: str) -> Toolchain:
    """Raises ScheduleError."""
    return Fields(table, where, ScheduleError).read(Toolchain)
