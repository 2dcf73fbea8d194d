"""`tune-kernels --on-gpu`: survivors of an offline bundle → checked → raced → confirmed → asked in the full model → promoted.

What is found is kept in OUT/recording.json as it is found: a run whose budget ends, or that is stopped, goes on from there.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ...schedules import store
from ...schedules.recipe import Recipe, load_recipe
from ...schedules.schedule import Schedule
from ...schedules.store import PromotedFile
from ...shapes.model import load_model_shape
from ..errors import GpuError, RecordingError
from ..offline.record import cannot_write
from . import survivors
from .full_model import Said, judge, said_from_dict
from .rows import promoted_file
from .samples import recording
from .samples.gate import DecoderProbe
from .samples.race import CONFIRM_ROUNDS, FINALISTS, Timed, fastest_first, finalists, race
from .samples.ranking import Ranking, rank
from .samples.recording import Contest, Recording, require_some_life
from .samples.timing import Batch, batch_from_dict, batch_to_dict
from .worker import gpu_state
from .worker.gpu_state import Machine
from .worker.measure import Problem
from .worker.measurer import GpuMeasurer, Measurer

LARGE = 200  # candidates of one kernel: more are searched, fewer are raced in full
GATE_SHARE = 0.4  # of the budget, kept for the full model
BUDGET_SECONDS = 600.0


@dataclass(frozen=True)
class Request:
    """What to tune. storage: a file or database URL for the study of a large space, shared by machines; schedules: the folder
    that is asked first and promoted to."""

    model: str = "qwen2.5-7b"
    bundle: Path = Path("build/offline")
    kernels: tuple[str, ...] = ()
    weights: str = "random:0"
    recipe: str = "fp8-v1"
    budget: float = BUDGET_SECONDS
    storage: str | None = None
    schedules: Path | None = None
    out: Path = Path("build/on-gpu")
    promote: bool = False
    seed: int = 0


@dataclass
class Outcome:
    """What came of a run or a replay. promoted: rows that may be promoted; written: the file they went to; skipped: why a
    kernel was not tuned; notes: what a user should know."""

    recording: Recording
    rankings: dict[str, Ranking]
    said: Said
    promoted: PromotedFile
    recipe: Recipe
    written: Path | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Budget:
    """Seconds on the GPU, from its first use on."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.clock, self.began = seconds, clock, clock()

    @property
    def left(self) -> float:
        return self.seconds - (self.clock() - self.began)


Watch = Callable[[str], None]


def tune(request: Request, machine: Machine, measurer: Measurer, make_probe: Callable[[Path], DecoderProbe] | None,
         watch: Watch, fingerprint: str | None = None) -> Outcome:
    """One run on this machine's GPU.

    make_probe: from the folder of the artefacts; None where the model is a drafter, whose kernels no token depends on.
    fingerprint: of the weights.

    Raises:
        UserError: a bundle, recipe, GPU or folder that is wrong or can't be used; a recording made under other conditions.
    """
    target, recipe, shape = gpu_state.sku_of(machine), load_recipe(request.recipe), load_model_shape(request.model)
    if target.arch not in recipe.defaults:
        raise GpuError(f"recipe {recipe.name} has no defaults for {target.arch}", expected=f"one of {', '.join(recipe.defaults)}")
    folders = store.search_path(request.schedules)
    found = survivors.find_survivors(request.bundle, shape.name, request.kernels, target, recipe, request.out,
                                     request.schedules)
    if found.differs:
        watch(f"{found.differs}: compiled here")
    made, skipped = survivors.contests(found, request.kernels, target, recipe, folders)
    now = Recording(shape.name, target.name, recipe.name, found.toolchain, machine, request.seed, request.weights,
                    fingerprint, made)
    path = request.out / "recording.json"
    _go_on(now, path)
    run = _Run(request, now, recipe, measurer, found.folder, path, watch)
    run.contests()
    rankings = {k: rank(c, recipe) for k, c in now.contests.items()}
    finished = {k: c for k, c in now.contests.items() if c.finished}
    if finished:
        watch("full model: tokens and time with the winners in place" if make_probe else "a drafter: no token depends on it")
        now.gate = judge(finished, {k: rankings[k] for k in finished}, recipe, make_probe(found.folder) if make_probe else None,
                         lambda: run.budget.left <= 0).as_dict()
    run.save()
    outcome = conclude(now, recipe, rankings)
    outcome.skipped = skipped
    return outcome


def replay(path: Path, recipe_name: str | None = None) -> Outcome:
    """A recorded run, ranked again: no GPU, nothing measured. Raises RecordingError."""
    old = recording.load(path)
    recipe = load_recipe(recipe_name or old.recipe)
    return conclude(old, recipe, {k: rank(c, recipe) for k, c in old.contests.items()})


def conclude(now: Recording, recipe: Recipe, rankings: dict[str, Ranking]) -> Outcome:
    """What may be promoted of what was recorded."""
    try:
        said = said_from_dict(now.gate) if now.gate else Said()
    except (KeyError, TypeError) as e:
        raise RecordingError(f"gate: {type(e).__name__}: {e}", expected="what tune-kernels --on-gpu recorded") from None
    file = promoted_file(now, rankings, said, datetime.now(UTC).date().isoformat())
    notes = [] if now.gate else ["the full model was not asked, so nothing may be promoted"]
    return Outcome(now, rankings, said, file, recipe, notes=notes)


def complete(outcome: Outcome) -> bool:
    """Whether every kernel has a winner that passed the gate."""
    return bool(outcome.rankings) and not outcome.skipped and set(outcome.said.accepted) == set(outcome.rankings)


def promote(outcome: Outcome, request: Request) -> None:
    """Write the rows to the first folder of the search path. Raises ScheduleError."""
    if outcome.promoted.rows:
        outcome.written = store.promote(store.search_path(request.schedules)[0], outcome.promoted)


def _go_on(now: Recording, path: Path) -> None:
    """Take what an earlier run into the same folder measured of the same candidates."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise cannot_write(path.parent, e) from None
    if not path.exists():
        return
    before = recording.load(path)
    for name, value in now.conditions().items():
        if before.conditions()[name] != value:
            raise RecordingError(f"{path} was recorded with {name} {before.conditions()[name]}", expected=f"{value}, as now",
                                 action="name another folder with --out, or remove this one")
    now.seconds_to_first_sample = before.seconds_to_first_sample
    now.gpu_seconds = before.gpu_seconds
    for kernel, contest in now.contests.items():
        old = before.contests.get(kernel)
        if old and (old.kernel_digest, list(old.entrants)) == (contest.kernel_digest, list(contest.entrants)):
            contest.checked, contest.dead = old.checked, old.dead
            if old.incumbent == contest.incumbent:
                contest.batches, contest.finished = old.batches, old.finished


class _Run:
    """One run's contests, in turn, within the budget."""

    def __init__(self, request: Request, now: Recording, recipe: Recipe, measurer: Measurer, folder: Path, path: Path,
                 watch: Watch) -> None:
        self.request, self.now, self.recipe, self.measurer, self.watch = request, now, recipe, measurer, watch
        self.folder, self.path = folder.absolute(), path
        self.began = time.time()
        self.spent = now.gpu_seconds
        self.budget = Budget(request.budget)

    def save(self) -> None:
        if isinstance(self.measurer, GpuMeasurer):
            self.now.calls = self.measurer.calls
            self.now.gpu_seconds = round(self.spent + self.measurer.busy_seconds, 2)
            if self.measurer.first_sample and self.now.seconds_to_first_sample is None:
                self.now.seconds_to_first_sample = round(self.measurer.first_sample - self.began, 2)
        recording.save(self.now, self.path)

    def contests(self) -> None:
        """Each contest has an equal share of what is left for timing; those that it didn't do for share what the others left."""
        reserve = self.request.budget * GATE_SHARE
        for _ in range(2):
            todo = [c for c in self.now.contests.values() if not c.finished]
            for index, contest in enumerate(todo):
                share = max(0.0, self.budget.left - reserve) / (len(todo) - index)
                end = self.budget.left - share
                self._contest(contest, lambda end=end: self.budget.left <= max(end, 0.0))  # type: ignore[misc]
                self.save()

    def _contest(self, contest: Contest, out_of_time: Callable[[], bool]) -> None:
        problem = Problem(contest.kernel, contest.shape, self.now.target, self.now.recipe, str(self.folder))
        searched = len(contest.entrants) > LARGE or self.request.storage is not None

        def admit(name: str) -> bool:
            if name not in contest.checked:
                contest.checked[name] = self.measurer.check(problem, name, contest.entrants[name].schedule)
                require_some_life(contest)
            return contest.failure(name) is None

        for name in [contest.incumbent] if searched else sorted(contest.entrants, key=lambda n: n != contest.incumbent):
            if out_of_time():
                break
            admit(name)
        while (base := contest.base()) is not None:
            self._timed_against(base, contest, problem, searched, admit, out_of_time)
            if base not in contest.dead:
                break
        contest.finished |= base is None and not out_of_time()
        fit = len(contest.fit())
        self.watch(f"{contest.kernel}: {fit} of {len(contest.checked)} right, row-invariant and deterministic; "
                   f"{len(contest.batches)} batches, {'done' if contest.finished else 'out of time'}")

    def _timed_against(self, base: str, contest: Contest, problem: Problem, searched: bool, admit: Callable[[str], bool],
                       out_of_time: Callable[[], bool]) -> None:
        def timed(phase: str, names: Sequence[str], rounds: int) -> Batch | None:
            seed = self.now.seed + len(contest.batches)
            alive: dict[str, Schedule] = {n: contest.entrants[n].schedule for n in names if not contest.failure(n)}
            batch, dead = self.measurer.time(problem, alive, phase, rounds, seed)
            contest.dead |= dead
            if batch is not None:
                batch = batch_from_dict(batch_to_dict(batch))  # as a replay will see it
                contest.batches.append(batch)
                self.save()
            return batch if batch is not None and base in batch.samples_us else None

        before = [b for b in contest.batches if b.phase == "race" and base in b.samples_us]
        if searched:
            order = self._searched(base, contest, admit, timed, out_of_time)
        else:
            batches = race(contest.groups(self.recipe), contest.home() or "", base, timed, out_of_time, before)
            order = fastest_first(batches, [n for n in contest.fit() if n != base], base)
        if not out_of_time():
            last = finalists(order, contest.groups(self.recipe), contest.home() or "")
            contest.finished = timed("confirm", [base, *last], CONFIRM_ROUNDS) is not None

    def _searched(self, base: str, contest: Contest, admit: Callable[[str], bool], timed: Timed,
                  out_of_time: Callable[[], bool]) -> list[str]:
        """The best that anyone found who shares the study, checked here, fastest first."""
        from .samples.search import Study, search

        storage = self.request.storage or str(self.path.parent.absolute() / "study.journal")
        name = f"{self.now.target}/{self.now.recipe}/{self.now.toolchain.triton}/{contest.kernel}/{contest.kernel_digest}"
        study = Study(storage, name, {n: e.schedule for n, e in contest.entrants.items()}, self.now.seed)
        search(study, base, admit, timed, out_of_time)
        return [n for n in study.best(3 * FINALISTS, lambda n: n != base) if admit(n)]
