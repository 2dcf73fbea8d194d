"""A promoted schedule: one row of `schedules/SKU/MODEL.RECIPE.json`, with its measurements and evidence.

`row_digest` is the digest of all other values of the row, with its SKU, model and recipe: look-up and `tune-kernels diff --check`
refuse a row that was edited by hand. `schedule_id` is the digest of the knobs. The row, its timing and its evidence each have
one: it identifies the schedule that they belong to. `store` reads and writes the files.
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
NO_WEIGHTS = "none"  # of a kernel of one's own: no decoder was asked
CHECKS = ("reference", "rows", "determinism", "agreement", "full_model", "quality")  # kinds that --on-gpu and verify run
MIGRATE = "python -m tune_kernels.schedules.migrate"

AnyShape = Annotated[KernelShape, From(shape_from_dict)]
AnySchedule = Annotated[Schedule, From(schedule_of)]
Interval = Annotated[tuple[Positive, Positive], Rule("[low, high]", lambda ends: ends[0] <= ends[1])]
Ascending = Annotated[tuple[Positive, ...], Rule("numbers in ascending order", lambda numbers: list(numbers) == sorted(numbers))]


def are_weights(text: str) -> bool:
    """Whether this says on which weights a decoder was asked, or that none was."""
    return text == NO_WEIGHTS or text.startswith((RANDOM_WEIGHTS, PATH_WEIGHTS))


@dataclass(frozen=True)
class Toolchain:
    """The toolchain of an artefact: Triton's version, ptxas's release, and the flags that change the output bits."""

    triton: str
    ptxas: str
    flags: Mapping[str, object]


@dataclass(frozen=True)
class Recorded:
    """The machine, which isn't part of the look-up."""

    driver: str
    cuda: str


@dataclass(frozen=True)
class Artefact:
    """Facts of the timed cubin, from the inspection. Registers, spills and stack are per thread, shared_bytes and tmem_columns
    per block."""

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
    """A paired comparison, new time over old time: below 1 is faster. interval: 95%."""

    ratio: Positive
    interval: Interval
    pairs: PositiveInt


@dataclass(frozen=True)
class Distribution:
    """Times of one schedule. interval_us: 95% interval of the median. quantiles_us: evenly spaced, ascending, for drawings."""

    median_us: Positive
    interval_us: Interval
    samples: PositiveInt
    quantiles_us: Ascending


@dataclass(frozen=True)
class Previous:
    """The schedule that was in place before, timed in the same rounds. paired: time of new over previous."""

    schedule: AnySchedule
    schedule_id: Digest
    times: Distribution
    paired: Paired


@dataclass(frozen=True)
class PromotedTiming:
    """The times of a promoted schedule. previous: None if the incumbent itself was promoted. clocks: such as sm_mhz, memory_mhz,
    temperature_c."""

    schedule_id: Digest
    times: Distribution
    previous: Previous | None
    driver: str
    clocks: Mapping[str, Finite]


@dataclass(frozen=True)
class Checks:
    """Numbers of checks of one kind that ran and that passed."""

    run: Count
    passed: Count


@dataclass(frozen=True)
class Evidence:
    """The evidence of a schedule. tokens_sha256: of all compared tokens. weights: `random:SEED`, `path:NAME` with a fingerprint,
    or `none`. full_model: the whole step's time, new over previous, by mode."""

    schedule_id: Digest
    checks: Mapping[str, Annotated[Checks, Rule("at most as many passed as ran", lambda c: c.passed <= c.run)]]
    prompts: Count
    tokens_compared: Count
    tokens_sha256: Digest | None
    weights: Annotated[str, Rule("random:SEED, path:NAME or none", lambda text: are_weights(text))]
    weights_fingerprint: str | None
    full_model: Mapping[str, Paired]

    @property
    def random_weights(self) -> bool:
        """Whether weights are random: enough for speed and bits, no proof for a real model. Marked wherever it is shown."""
        return self.weights.startswith(RANDOM_WEIGHTS)


State = Literal["edited", "missing", "failed"]
EDITED: State = "edited"
MISSING: State = "missing"
FAILED: State = "failed"


@dataclass(frozen=True)
class Problem:
    """A reason not to trust a row. state: edited since it was measured, evidence missing, or a check failed."""

    state: State
    text: str


@dataclass(frozen=True)
class PromotedSchedule:
    """One row. target (a SKU), model, recipe: of its file. numerics_class: SHA-256 of the output bits on fixed inputs. date:
    YYYY-MM-DD. row_digest: None in a row that was never sealed, as in schema 1."""

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
        """Digest of every value except `row_digest`: 16 hexadecimal digits. 2 and 2.0 give the same digest."""
        table = {**dataclasses.asdict(self), "row_digest": None}
        return hashlib.sha256(json.dumps(_canonical(table), sort_keys=True).encode()).hexdigest()[:16]

    def sealed(self) -> "PromotedSchedule":
        """The row with its digest, after a measurement or new evidence."""
        return dataclasses.replace(self, row_digest=self.digest())

    def problems(self) -> list[Problem]:
        """The reasons not to trust this row; empty if there are none."""
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
            yield f"evidence.checks: unknown kind {kind!r}: expected some of {', '.join(CHECKS)}"


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
    """A JSON value with whole numbers as ints: a file may have 2.0 for a measured 2."""
    if isinstance(value, Mapping):
        return {key: _canonical(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def row_to_dict(row: PromotedSchedule) -> dict[str, object]:
    """The row as in its file: without target, model and recipe, which the file has once."""
    return {name: value for name, value in dataclasses.asdict(row).items() if name not in ("target", "model", "recipe")}


def toolchain_from_dict(table: Mapping[str, object], where: str) -> Toolchain:
    """From a file's table. Raises ScheduleError."""
    return Fields(table, where, ScheduleError).read(Toolchain)
