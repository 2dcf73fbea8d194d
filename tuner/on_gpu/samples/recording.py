"""A recorded run: every sample, clock and throttle flag, every check, in one JSON value. It is kept as a run goes on, so that
a run that is stopped goes on from it, and it can be ranked again without a GPU."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....schedules.promoted import Toolchain, toolchain_from_dict
from ....schedules.recipe import Recipe
from ....schedules.schedule import Schedule, schedule_of, schedule_to_dict
from ....shapes.errors import UserError
from ....shapes.model import KernelShape, shape_from_dict, shape_to_dict
from ...errors import GpuError, RecordingError
from ...offline.record import write_json
from ..worker.gpu_state import Machine
from .gate import Checked, Failure, checked_from_dict, checked_to_dict, other_recipe
from .timing import Batch, batch_from_dict, batch_to_dict

SCHEMA = "tune-kernels/recording/1"
NO_CLASS = "no class"
ALL_DIED = 4  # deaths of the first candidates of a kernel, without one that lives: it is not the candidates


@dataclass(frozen=True)
class Entrant:
    """A candidate. name: its id in the offline report; facts: what the inspection read in its artefact."""

    name: str
    schedule: Schedule
    facts: Mapping[str, Any]


@dataclass
class Contest:
    """What is known of one kernel's candidates. incumbent: the name of what is in place; origin: promoted, or the recipe's
    default; founded: the class that rows of this recipe already have on this SKU, None before the first promotion; shared: what
    is in place was promoted with a decoder's evidence."""

    kernel: str
    shape: KernelShape
    kernel_digest: str
    entrants: dict[str, Entrant]
    incumbent: str
    origin: str
    founded: str | None = None
    shared: bool = False
    checked: dict[str, Checked] = field(default_factory=dict)
    dead: dict[str, Failure] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    finished: bool = False

    def failure(self, name: str) -> Failure | None:
        """Why a candidate is out, or None."""
        return self.dead.get(name) or (self.checked[name].failure if name in self.checked else None)

    def fit(self) -> list[str]:
        """Candidates that passed their checks and live."""
        return [n for n in self.entrants if n in self.checked and not self.failure(n)]

    def base(self) -> str | None:
        """What all are compared with: the incumbent, or, where that is wrong, the first that is right."""
        fit = self.fit()
        return self.incumbent if self.incumbent in fit else next(iter(fit), None)

    def home(self) -> str | None:
        """The class that a winner must have: the recipe's, or before the first promotion the incumbent's."""
        base = self.base()
        return self.founded or (self.checked[base].numerics_class if base else None)

    def groups(self, recipe: Recipe) -> dict[str, str]:
        """Class by fit candidate; that of another recipe is a group of its own."""
        return {n: (self.checked[n].numerics_class or NO_CLASS) +
                ("*" if other_recipe(recipe, self.entrants[n].schedule) else "") for n in self.fit()}


def require_some_life(contest: Contest) -> None:
    """Candidates are to blame for their deaths, but not where all of the first ones die. Raises GpuError."""
    failures = [c.failure for c in contest.checked.values()]
    died = [f for f in failures if f and f.stage in ("crash", "hang")]
    if len(died) == len(failures) == ALL_DIED:
        raise GpuError(f"{contest.kernel}: the first {ALL_DIED} candidates all died, the last one so: {died[-1].detail}",
                       expected="a GPU, driver and torch that work", action="see tune-kernels doctor; nothing was decided")


@dataclass
class Recording:
    """One run. target: the SKU; weights: of the full model, with their fingerprint where they are in files; gate: what the full
    model said (`full_model.Said`)."""

    model: str
    target: str
    recipe: str
    toolchain: Toolchain
    machine: Machine
    seed: int
    weights: str
    weights_fingerprint: str | None = None
    contests: dict[str, Contest] = field(default_factory=dict)
    gate: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    seconds_to_first_sample: float | None = None
    gpu_seconds: float = 0.0

    def conditions(self) -> dict[str, Any]:
        """What must be the same for a second run to go on from the first."""
        return {"model": self.model, "target": self.target, "recipe": self.recipe, "Triton": self.toolchain.triton,
                "ptxas": self.toolchain.ptxas, "flags": dict(self.toolchain.flags), "driver": self.machine.driver,
                "weights": self.weights, "weights' fingerprint": self.weights_fingerprint}


def save(recording: Recording, path: Path) -> None:
    """Raises OutputError."""
    write_json(path, to_dict(recording))


def load(path: Path) -> Recording:
    """A recording from its file, or the folder it lies in. Raises RecordingError."""
    path = path / "recording.json" if path.is_dir() else path
    try:
        return from_dict(json.loads(path.read_bytes()))
    except FileNotFoundError:
        raise RecordingError(f"no recording at {path}", expected="recording.json, as tune-kernels --on-gpu writes it") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, UserError) as e:
        said = e.found if isinstance(e, UserError) else f"{type(e).__name__}: {e}"
        raise RecordingError(f"{path}: {said}"[:400], expected=f"a whole recording of schema {SCHEMA}") from None


def to_dict(recording: Recording) -> dict[str, Any]:
    table = dataclasses.asdict(dataclasses.replace(recording, contests={}))
    return {**table, "schema": SCHEMA, "contests": {k: _contest_to_dict(c) for k, c in recording.contests.items()}}


def from_dict(table: Any) -> Recording:
    """Raises KeyError, TypeError, ValueError or UserError where the table isn't one."""
    if table.get("schema") != SCHEMA:
        raise RecordingError(f"schema {table.get('schema')!r}", expected=SCHEMA)
    plain = {f.name: table[f.name] for f in dataclasses.fields(Recording)}
    return Recording(**{**plain, "toolchain": toolchain_from_dict(table["toolchain"], "toolchain"),
                        "machine": Machine(**table["machine"]),
                        "contests": {k: _contest_from_dict(c) for k, c in table["contests"].items()}})


def _contest_to_dict(contest: Contest) -> dict[str, Any]:
    return {
        "kernel": contest.kernel, "shape": shape_to_dict(contest.shape), "kernel_digest": contest.kernel_digest,
        "entrants": {n: {"schedule": schedule_to_dict(e.schedule), "facts": dict(e.facts)} for n, e in contest.entrants.items()},
        "order": list(contest.entrants), "incumbent": contest.incumbent, "origin": contest.origin, "founded": contest.founded,
        "shared": contest.shared,
        "checked": {n: checked_to_dict(c) for n, c in contest.checked.items()},
        "dead": {n: [f.stage, f.detail] for n, f in contest.dead.items()},
        "batches": [batch_to_dict(b) for b in contest.batches], "finished": contest.finished,
    }


def _contest_from_dict(table: Mapping[str, Any]) -> Contest:
    where = table["kernel"]
    entrants = {n: Entrant(n, schedule_of(table["entrants"][n]["schedule"], where), table["entrants"][n]["facts"])
                for n in table["order"]}
    return Contest(where, shape_from_dict(table["shape"], where), table["kernel_digest"], entrants, table["incumbent"],
                   table["origin"], table["founded"], table.get("shared", False),
                   {n: checked_from_dict(c) for n, c in table["checked"].items()},
                   {n: Failure(*f) for n, f in table["dead"].items()}, [batch_from_dict(b) for b in table["batches"]],
                   table["finished"])
