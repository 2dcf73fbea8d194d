"""A recorded run: all samples, clocks, throttle flags and checks, in one JSON value. It is saved during the run: a stopped run
continues from it, and a replay ranks it without a GPU."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ....kernels import registry
from ....schedules.promoted import AnySchedule, AnyShape, Artefact, Toolchain, are_weights
from ....schedules.recipe import Recipe
from ....schedules.schedule import OwnSchedule, Schedule
from ....shapes.errors import UserError
from ....shapes.fields import Digest, Fields, Table, read_fields, require_name
from ....shapes.model import AttentionShape, CertifiedHeadShape, HeadShape, KernelShape, LinearShape, MergeShape, dims_of
from ....shapes.own import OwnShape
from ....shapes.target import load_sku
from ...errors import GpuError, RecordingError
from ...offline.record import write_json
from .gate import Checked, Failure, GateResult, StoredChecked, checked_of, gate_of, other_recipe, stored_checked
from .machine import Machine, sku_of
from .timing import CONFIRM, Batch, StoredBatch, batch_of, stored_batch
from .usage import Calls

SCHEMA = "tune-kernels/recording/2"
FIRST_SCHEMA = "tune-kernels/recording/1"  # one confirming process, no resolution
PROCESSES = 2  # that confirm: one artefact's time differs by up to 5% between processes (seen on an H200)
NO_CLASS = "no class"
ALL_DIED = 4  # if so many first candidates of a kernel die, and none survives, the cause isn't the candidates
ANY_CLASS = "any class"
Origin = Literal["promoted", "recipe default", "first accepted"]  # of the schedule in place


@dataclass(frozen=True)
class Entrant:
    """A candidate. name: its id in the offline report. artefact: its facts from the inspection."""

    name: str
    schedule: Schedule
    artefact: Artefact


def contest_name(kernel: str, shape: KernelShape) -> str:
    """`down`, `my_norm.norm[H=4096,rows=5]`."""
    return f"{kernel}[{','.join(f'{n}={v}' for n, v in sorted(shape.dims.items()))}]" if isinstance(shape, OwnShape) else kernel


def schedule_type(kernel: str, shape: KernelShape) -> type[Schedule]:
    """The kind of a kernel's schedules."""
    found: type[Schedule] = OwnSchedule if isinstance(shape, OwnShape) else registry.operation(kernel).schedule_type
    return found


@dataclass
class Contest:
    """One kernel's candidates, their checks and samples. incumbent: the candidate in place. founded: the class of this recipe's
    rows on this SKU, None before the first promotion. shared: the incumbent's row has a decoder's evidence, perhaps of another
    model with this shape. finished: nothing is left to measure."""

    kernel: str
    shape: KernelShape
    kernel_digest: str
    entrants: dict[str, Entrant]
    incumbent: str
    origin: Origin
    founded: str | None = None
    shared: bool = False
    checked: dict[str, Checked] = field(default_factory=dict)
    dead: dict[str, Failure] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    finished: bool = False

    @property
    def name(self) -> str:
        """The kernel's; of one's own with its sizes, as it has a contest for each shape."""
        return contest_name(self.kernel, self.shape)

    @property
    def any_class(self) -> bool:
        """Whether a winner may have any class: a kernel of one's own is bound to its bits by its first promotion alone."""
        return isinstance(self.shape, OwnShape) and self.founded is None

    def failure(self, name: str) -> Failure | None:
        """A candidate's failure, or None."""
        return self.dead.get(name) or (self.checked[name].failure if name in self.checked else None)

    def fit(self) -> list[str]:
        """Candidates that passed their checks and didn't die."""
        return [n for n in self.entrants if n in self.checked and not self.failure(n)]

    def base(self) -> str | None:
        """The candidate that all are compared with: the incumbent, or if it failed, the first fit one."""
        fit = self.fit()
        return self.incumbent if self.incumbent in fit else next(iter(fit), None)

    def home(self) -> str | None:
        """The class that a winner must have: the founded one, or before the first promotion the base's."""
        if self.any_class:
            return ANY_CLASS
        base = self.base()
        return self.founded or (self.checked[base].numerics_class if base else None)

    def groups(self, recipe: Recipe) -> dict[str, str]:
        """Group by fit candidate: its class, with a mark if it belongs to another recipe."""
        if self.any_class:
            return dict.fromkeys(self.fit(), ANY_CLASS)
        return {n: (self.checked[n].numerics_class or NO_CLASS) +
                ("*" if other_recipe(recipe, self.entrants[n].schedule) else "") for n in self.fit()}

    def confirmations(self) -> dict[str, list[Batch]]:
        """Batches of phase CONFIRM by process, if they have enough rounds."""
        base = self.base()
        found: dict[str, list[Batch]] = {}
        for batch in self.batches:
            if batch.phase == CONFIRM and batch.enough and base in batch.samples_us:
                found.setdefault(batch.process, []).append(batch)
        return found

    @property
    def throttled(self) -> bool:
        """Whether throttling prevents a decision."""
        return not self.finished and any(not batch.enough for batch in self.batches)


def require_some_life(contest: Contest) -> None:
    """Raises GpuError if the first ALL_DIED candidates all died: then the cause isn't the candidates."""
    failures = [c.failure for c in contest.checked.values()]
    died = [f for f in failures if f and f.stage in ("crash", "hang")]
    if len(died) == len(failures) == ALL_DIED:
        raise GpuError(f"{contest.kernel}: the first {ALL_DIED} candidates all died, the last with: {died[-1].detail}",
                       expected="a GPU, driver and torch that work", action="see tune-kernels doctor; nothing was decided")


@dataclass
class Recording:
    """One run. target: the SKU. weights: of the full model; weights_fingerprint: of their files. gate: None if the full model
    wasn't tried. processes: number in which a winner must be confirmed."""

    model: str
    target: str
    recipe: str
    toolchain: Toolchain
    machine: Machine
    seed: int
    weights: str
    weights_fingerprint: str | None = None
    contests: dict[str, Contest] = field(default_factory=dict)
    gate: GateResult | None = None
    calls: Calls = field(default_factory=Calls)
    seconds_to_first_sample: float | None = None
    gpu_seconds: float = 0.0
    processes: int = PROCESSES

    def conditions(self) -> dict[str, str]:
        """The values, apart from the machine, that a second run must share to continue the first."""
        return {"model": self.model, "target": self.target, "recipe": self.recipe, "Triton": self.toolchain.triton,
                "ptxas": self.toolchain.ptxas, "flags": str(dict(self.toolchain.flags)), "weights": self.weights,
                "weights' fingerprint": str(self.weights_fingerprint)}


def save(recording: Recording, path: Path) -> None:
    """Write the recording durably: it is on the disk when this returns. Raises OutputError."""
    write_json(path, to_dict(recording), durable=True)


def load(path: Path) -> Recording:
    """A recording from its file or folder. Raises RecordingError."""
    path = path / "recording.json" if path.is_dir() else path
    if not path.exists():
        raise RecordingError(f"no recording at {path}", expected="recording.json, as tune-kernels --on-gpu writes it")
    return recording_of(read_fields(path, RecordingError))


def to_dict(recording: Recording) -> Table:
    """As in its file."""
    plain = {n: getattr(recording, n) for n in ("model", "target", "recipe", "seed", "weights", "weights_fingerprint",
                                                "seconds_to_first_sample", "gpu_seconds")}
    return {**plain, "schema": SCHEMA if recording.processes > 1 else FIRST_SCHEMA,
            "toolchain": dataclasses.asdict(recording.toolchain), "machine": dataclasses.asdict(recording.machine),
            "calls": dataclasses.asdict(recording.calls), "gate": dataclasses.asdict(recording.gate) if recording.gate else None,
            "contests": {k: dataclasses.asdict(_stored_contest(c)) for k, c in recording.contests.items()}}


def recording_of(fields: Fields) -> Recording:
    """A recording from its file's fields. Raises RecordingError if they are incomplete or contradict each other."""
    schema = fields.get("schema", str)
    if schema not in (SCHEMA, FIRST_SCHEMA):
        raise fields.fail("schema", f"is {schema!r}"[:120], expected=SCHEMA)
    gate = fields.get("gate", dict, None)  # FIRST_SCHEMA has an empty object instead of null
    try:
        found = Recording(
            require_name(fields.get("model", str), f"{fields.where}: model", RecordingError),
            load_sku(fields.get("target", str)[:100]).name,
            require_name(fields.get("recipe", str), f"{fields.where}: recipe", RecordingError),
            fields.inner("toolchain").read(Toolchain),
            fields.inner("machine").read(Machine), fields.get("seed", int), fields.get("weights", str),
            fields.get("weights_fingerprint", str, None),
            {k: _contest_of(c.read(StoredContest), c) for k, c in fields.each("contests").items()},
            gate_of(fields.inner("gate")) if gate else None, fields.inner("calls").read(Calls),
            fields.get("seconds_to_first_sample", float, None), fields.get("gpu_seconds", float),
            PROCESSES if schema == SCHEMA else 1)
        fields.done()
        _require_consistent(found, fields.where)
    except UserError as e:
        raise RecordingError(e.found if e.found.startswith(fields.where) else f"{fields.where}: {e.found}",
                             expected=e.expected) from None
    return found


def _require_consistent(recording: Recording, where: str) -> None:
    """Raises RecordingError if a name refers to nothing, or the GPU isn't of the target."""
    if not are_weights(recording.weights):
        raise RecordingError(f"{where}: weights: is {recording.weights!r}"[:200], expected="random:SEED, path:NAME or none")
    if (sku := sku_of(recording.machine).name) != recording.target:
        raise RecordingError(f"{where}: target: is {recording.target}, but {recording.machine.gpu!r} is {sku}",
                             expected="samples of the target's GPU")
    for kernel, contest in recording.contests.items():
        used = {contest.incumbent, *contest.checked, *contest.dead, *(n for b in contest.batches for n in b.samples_us)}
        classless = [n for n, c in contest.checked.items() if c.failure is None and c.numerics_class is None]
        if kernel != contest.name or classless or not used <= contest.entrants.keys():
            raise RecordingError(f"{where}: {kernel[:40]}: names another kernel, an unknown candidate, or one without a class",
                                 expected="a whole recording")
    for kernel, chosen in recording.gate.accepted.items() if recording.gate else ():
        if kernel not in recording.contests or chosen not in recording.contests[kernel].entrants:
            raise RecordingError(f"{where}: gate: accepted: {kernel}: {chosen}"[:200], expected="a candidate of this recording")


@dataclass(frozen=True)
class StoredEntrant:
    """A candidate as in the file."""

    schedule: AnySchedule
    facts: Artefact


@dataclass(frozen=True)
class StoredContest:
    """A contest as in the file. order: the names of the entrants. dead: (stage, detail) by candidate."""

    kernel: str
    shape: AnyShape
    kernel_digest: Digest
    entrants: Mapping[str, StoredEntrant]
    order: tuple[str, ...]
    incumbent: str
    origin: Origin
    founded: Digest | None
    checked: Mapping[str, StoredChecked]
    dead: Mapping[str, tuple[str, str]]
    batches: tuple[StoredBatch, ...]
    finished: bool
    shared: bool = False


def _stored_contest(contest: Contest) -> StoredContest:
    entrants = {n: StoredEntrant(e.schedule, e.artefact) for n, e in contest.entrants.items()}
    return StoredContest(
        contest.kernel, contest.shape, contest.kernel_digest, entrants, tuple(contest.entrants), contest.incumbent,
        contest.origin, contest.founded, {n: stored_checked(c) for n, c in contest.checked.items()},
        {n: (f.stage, f.detail) for n, f in contest.dead.items()}, tuple(map(stored_batch, contest.batches)), contest.finished,
        contest.shared)


def _contest_of(stored: StoredContest, fields: Fields) -> Contest:
    """Raises UserError. fields: for errors."""
    where, kernel, shape = fields.where, stored.kernel, stored.shape
    if isinstance(shape, OwnShape):
        require_name(kernel, f"{where}: kernel", RecordingError)
    elif kernel not in registry.TUNABLE:
        raise fields.fail("kernel", f"is {kernel!r}"[:120], expected=f"one of {', '.join(registry.TUNABLE)}")
    elif not isinstance(shape, LinearShape | HeadShape | CertifiedHeadShape | AttentionShape | MergeShape) or not all(
            not isinstance(n, int) or 0 <= n < 2**31 for n in dims_of(shape).values()):
        raise fields.fail("shape", "isn't a tuned kernel's", expected="the shape of a linear, head, attention or merge")
    if len(stored.order) != len(stored.entrants) or set(stored.order) != set(stored.entrants):
        raise fields.fail("order", "doesn't name each entrant once", expected="the names of the entrants")
    entrants = {}
    for name in stored.order:
        schedule = stored.entrants[name].schedule
        if type(schedule) is not schedule_type(kernel, shape):
            raise fields.fail("schedule", f"isn't a schedule of {kernel}", expected="this kernel's knobs")
        entrants[name] = Entrant(name, schedule, stored.entrants[name].facts)
    return Contest(
        kernel, shape, stored.kernel_digest, entrants, stored.incumbent, stored.origin, stored.founded, stored.shared,
        {n: checked_of(c, where) for n, c in stored.checked.items()}, {n: Failure(*f) for n, f in stored.dead.items()},
        [batch_of(b, f"{where}: batch {i}") for i, b in enumerate(stored.batches)], stored.finished)
