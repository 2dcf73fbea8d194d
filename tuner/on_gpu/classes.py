"""Numerics classes: the schedules of a kernel with equal output bits, and the knobs that change the bits.

The class of a schedule is the SHA-256 of its output on fixed inputs (`worker.checks.numerics_class`). A pair of schedules that
differ in one knob alone shows this knob's effect; without such a pair, nothing is claimed.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...schedules import store
from ...schedules.promoted import PromotedSchedule, Toolchain
from ...schedules.recipe import load_recipe
from ...schedules.schedule import Schedule, knobs_of
from ...shapes.fields import nearest
from ...shapes.model import KernelShape, load_model_shape
from ..errors import RecordingError
from ..offline.report import read_report
from . import survivors
from .samples import recording
from .samples.machine import Machine, sku_of
from .samples.recording import Contest, Recording, require_some_life
from .samples.usage import Calls
from .survivors import Conditions
from .worker.measurer import Measurer
from .worker.tasks import Problem

YES, NO, NOT_VARIED = "yes", "no", "not varied alone"
SAME, DIFFERS, NOT_COMPUTED = "same class", "another class", "not computed"
NO_WEIGHTS = "random:0"  # placeholder: no model is loaded
Knob = object  # a value of a knob


@dataclass(frozen=True)
class Effect:
    """Whether a knob changes the bits: `yes`, `no`, or `not varied alone`. pair: two schedules that show it."""

    says: str
    pair: tuple[Schedule, Schedule] | None = None


@dataclass(frozen=True)
class ClassSize:
    """One class: its number of candidates, and the values of each knob among them."""

    numerics_class: str
    candidates: int
    knobs: Mapping[str, tuple[Knob, ...]]


def changes_bits(classes: Mapping[Schedule, str]) -> dict[str, Effect]:
    """The effect of each knob. classes: class by schedule of one kernel."""
    knobs = {schedule: knobs_of(schedule) for schedule in classes}
    return {knob: _effect(knob, knobs, classes) for knob in next(iter(knobs.values()), {})}


def _effect(knob: str, knobs: Mapping[Schedule, Mapping[str, Knob]], classes: Mapping[Schedule, str]) -> Effect:
    alike: dict[tuple[Knob, ...], list[Schedule]] = {}
    for schedule, values in knobs.items():
        alike.setdefault(tuple(v for k, v in values.items() if k != knob), []).append(schedule)
    groups = [group for group in alike.values() if len(group) > 1]
    if not groups:
        return Effect(NOT_VARIED)
    pairs = itertools.chain.from_iterable(itertools.combinations(group, 2) for group in groups)
    other = next(((a, b) for a, b in pairs if classes[a] != classes[b]), None)
    return Effect(YES, other) if other else Effect(NO, (groups[0][0], groups[0][1]))


def sizes(classes: Mapping[Schedule, str]) -> tuple[ClassSize, ...]:
    """The classes, largest first."""
    found: dict[str, list[Mapping[str, Knob]]] = {}
    for schedule, digest in classes.items():
        found.setdefault(digest, []).append(knobs_of(schedule))
    return tuple(
        ClassSize(digest, len(mine), {k: tuple(sorted({s[k] for s in mine}, key=str)) for k in mine[0]})
        for digest, mine in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))


@dataclass(frozen=True)
class Request:
    """A bundle to classify. model, recipe: the bundle's if None. schedules: the first folder in the search for promoted
    schedules. out: for a bundle that must be recompiled."""

    bundle: Path
    model: str | None
    recipe: str | None
    kernels: tuple[str, ...]
    schedules: Path | None
    out: Path


@dataclass(frozen=True)
class Classified:
    """The classes of a bundle or of a recorded run. recording: has each candidate's class or failure. skipped: reason by kernel
    that was left out. seconds: of the run."""

    recording: Recording
    skipped: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None


def classify(request: Request, machine: Machine, measurer: Measurer, watch: Callable[[str], None]) -> Classified:
    """The class of every accepted variant of a bundle on this GPU. A variant that dies is only a failure of its own.

    Raises:
        UserError: an unusable bundle, recipe or GPU. GpuError: the first variants all died.
    """
    began = time.monotonic()
    report = read_report(request.bundle)
    shape = load_model_shape(request.model) if request.model else None
    model = shape.name if shape else report.model
    recipe, target = load_recipe(request.recipe or report.recipe), sku_of(machine)
    wanted = Conditions(request.model or model, shape, target, recipe, store.search_path(request.schedules))
    found = survivors.find_survivors(request.bundle, wanted, request.kernels, request.out)
    if found.differs:
        watch(f"{found.differs}: compiled here")
    contests, skipped = survivors.contests(found, request.kernels, wanted)
    now = Recording(model, target.name, recipe.name, found.toolchain, machine, 0, NO_WEIGHTS, None, contests)
    for index, (kernel, contest) in enumerate(contests.items()):
        problem = Problem(kernel, contest.shape, target.name, recipe.name, str(found.folder.absolute()))
        for name in sorted(contest.entrants, key=lambda n: n != contest.incumbent):
            contest.checked[name] = measurer.check(problem, name, contest.entrants[name].schedule)
            require_some_life(contest)
        watch(f"{index + 1} of {len(contests)}: {kernel}: {len(set(classes_of(contest).values()))} classes, "
              f"{len(contest.fit())} of {len(contest.entrants)} variants")
    now.calls = measurer.usage().calls
    return Classified(now, skipped, round(time.monotonic() - began, 1))


def of_recording(path: Path, kernels: Sequence[str]) -> Classified:
    """The classes recorded by a run of --on-gpu. kernels: all if empty. Raises RecordingError."""
    now = recording.load(path)
    for name in kernels:
        if name not in now.contests:
            raise RecordingError(f"kernel {name!r}{nearest(name, now.contests)} is not in {path}",
                                 expected=f"one of {', '.join(now.contests)}")
    return Classified(replace(now, contests={k: c for k, c in now.contests.items() if not kernels or k in kernels}))


def classes_of(contest: Contest) -> dict[Schedule, str]:
    """The class of each candidate that has one."""
    return {contest.entrants[n].schedule: contest.checked[n].numerics_class or "" for n in contest.fit()}


@dataclass(frozen=True)
class Compared:
    """A promoted row compared with the class found here. found: None if its schedule's class wasn't computed."""

    row: PromotedSchedule
    found: str | None
    verdict: str


@dataclass(frozen=True)
class KernelClasses:
    """One kernel's classes. schedule: in place. classes: by schedule. effects: by knob. without_class: reason by variant."""

    kernel: str
    shape: KernelShape
    origin: str
    schedule: Schedule
    classes: Mapping[Schedule, str]
    effects: Mapping[str, Effect]
    promoted: tuple[Compared, ...]
    without_class: Mapping[str, str]

    @property
    def numerics_class(self) -> str | None:
        """The class of the schedule in place."""
        return self.classes.get(self.schedule)


@dataclass(frozen=True)
class ClassesReport:
    """The result of `verify --classes`."""

    model: str
    target: str
    recipe: str
    machine: Machine
    toolchain: Toolchain
    calls: Calls
    seconds: float | None
    skipped: Mapping[str, str]
    kernels: tuple[KernelClasses, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing was skipped, each schedule in place has a class, and each promoted row has its class here, if
        computed."""
        return bool(self.kernels) and not self.skipped and all(
            k.numerics_class and all(row.verdict != DIFFERS for row in k.promoted) for k in self.kernels)


def make_report(found: Classified, folders: Sequence[Path]) -> ClassesReport:
    """The report, with a comparison to promoted rows. Raises ScheduleError if a file of promoted schedules is damaged."""
    now = found.recording
    return ClassesReport(now.model, now.target, now.recipe, now.machine, now.toolchain, now.calls, found.seconds, found.skipped,
                         tuple(_kernel(now, contest, folders) for contest in now.contests.values()))


def _kernel(now: Recording, contest: Contest, folders: Sequence[Path]) -> KernelClasses:
    classes = classes_of(contest)
    return KernelClasses(
        contest.name, contest.shape, contest.origin, contest.entrants[contest.incumbent].schedule, classes,
        changes_bits(classes), tuple(_compared(row, classes) for row in _promoted(now, contest, folders)),
        {n: f"{f.stage}: {f.detail}" for n in contest.checked if (f := contest.failure(n))})


def _promoted(now: Recording, contest: Contest, folders: Sequence[Path]) -> list[PromotedSchedule]:
    """The promoted rows of this kernel, shape, recipe and SKU, of any toolchain: they must all have one class."""
    mine = (now.target, now.recipe, contest.kernel, contest.shape)
    return store.rows_like(folders, lambda r: (r.target, r.recipe, r.kernel, r.shape) == mine and not r.problems())


def _compared(row: PromotedSchedule, classes: Mapping[Schedule, str]) -> Compared:
    found = classes.get(row.schedule)
    verdict = NOT_COMPUTED if found is None else SAME if found == row.numerics_class else DIFFERS
    return Compared(row, found, verdict)
