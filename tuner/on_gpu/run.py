"""`tune-kernels --on-gpu`: survivors of an offline bundle → checked → raced → confirmed → tried in the full model → promoted.

Each result is saved in OUT/recording.json at once: a run that was stopped, or whose budget ended, continues from it.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ...kernels.loading import Source
from ...schedules import store
from ...schedules.promoted import NO_WEIGHTS
from ...schedules.recipe import OWN, Recipe, load_recipe, recipe_called
from ...shapes.model import load_model_shape
from ..errors import GpuError, RecordingError, cannot_write
from . import survivors
from .full_model import DecoderProbe, choose
from .rows import Promotable, promotable
from .samples import recording
from .samples.gate import GateResult
from .samples.machine import Machine, sku_of
from .samples.race import CONFIRM_ROUNDS, FINALISTS, Timed, fastest_first, finalists, race
from .samples.ranking import Ranking, rank_all
from .samples.recording import Contest, Recording, require_some_life
from .samples.timing import CONFIRM, RACE, Batch, batch_of, stored_batch
from .survivors import Conditions
from .worker.measurer import Measurer
from .worker.tasks import Problem

LARGE = 200  # candidates per kernel: more are searched, fewer are all raced
GATE_SHARE = 0.4  # of the budget, reserved for the full model
SECOND_SHARE = 0.25  # of the time left for timing, reserved for the second process
BUDGET_SECONDS = 600.0


@dataclass(frozen=True)
class Request:
    """The settings of a run. budget: seconds. storage: a file or database URL for the search in a large space, which machines can
    share. schedules: the folder that promoted schedules are read from first and written to. sources: of kernels of one's own, as
    `kernels` names them by file or module; then model, weights and recipe mean nothing."""

    model: str = "qwen2.5-7b"
    bundle: Path = Path("build/offline")
    kernels: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    weights: str = "random:0"
    recipe: str = "fp8-v1"
    budget: float = BUDGET_SECONDS
    storage: str | None = None
    schedules: Path | None = None
    out: Path = Path("build/on-gpu")
    seed: int = 0


@dataclass
class Outcome:
    """The result of a run or a replay. promoted: rows that may be promoted. skipped: reason by kernel that wasn't tuned. notes:
    for the user."""

    recording: Recording
    recipe: Recipe
    rankings: dict[str, Ranking]
    gate: GateResult
    promoted: Promotable
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every kernel has a schedule that passed the gate."""
        return (bool(self.rankings) and not self.skipped and set(self.gate.accepted) == set(self.rankings)
                and not any(map(self.gate.throttled, self.rankings)))


class Budget:
    """Seconds left of a budget, which begins with the object."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.clock, self.began = seconds, clock, clock()

    @property
    def left(self) -> float:
        return self.seconds - (self.clock() - self.began)


Watch = Callable[[str], None]
OutOfTime = Callable[[], bool]


def tune(request: Request, machine: Machine, measurer: Measurer, make_probe: Callable[[Path], DecoderProbe] | None,
         watch: Watch, fingerprint: str | None = None) -> Outcome:
    """One run on this machine's GPU.

    make_probe: makes the probe from the folder of the artefacts; None if the model is a drafter: its kernels change no token.
    watch: takes lines of progress. fingerprint: of the weights.

    Raises:
        UserError: an unusable bundle, recipe, GPU or folder; a recording made under other conditions.
    """
    wanted = _conditions(request, machine, measurer)
    recipe = wanted.recipe
    found = survivors.find_survivors(request.bundle, wanted, request.kernels, request.out, request.schedules)
    if found.differs:
        watch(f"{found.differs}: compiled here")
    made, skipped = survivors.contests(found, request.kernels, wanted)
    now = Recording(wanted.shape.name if wanted.shape else recipe.name, wanted.target.name, recipe.name, found.toolchain, machine,
                    request.seed, NO_WEIGHTS if wanted.own else request.weights, fingerprint, made)
    _go_on(now, request.out, watch)
    run = _Run(request, now, wanted, measurer, found.folder, watch)
    run.contests()
    rankings = rank_all(now, recipe)
    finished = {k: c for k, c in now.contests.items() if c.finished}
    if finished:
        watch("full model: tokens and time with the fastest in place" if make_probe else
              "no decoder is asked" if wanted.own else "a drafter: it changes no token")
        now.gate = choose(finished, {k: rankings[k] for k in finished}, recipe, make_probe(found.folder) if make_probe else None,
                          lambda: run.budget.left <= 0)
    run.save()
    return conclude(now, recipe, rankings, skipped)


def _conditions(request: Request, machine: Machine, measurer: Measurer) -> Conditions:
    """Raises UserError."""
    target, folders = sku_of(machine), store.search_path(request.schedules)
    if request.sources:
        kernels = [kernel for source in request.sources for kernel in measurer.describe(source)]
        return Conditions(OWN.name, None, target, OWN, folders, {kernel.name: kernel for kernel in kernels})
    recipe = load_recipe(request.recipe)
    if target.arch not in recipe.defaults:
        raise GpuError(f"recipe {recipe.name} has no defaults for {target.arch}", expected=f"one of {', '.join(recipe.defaults)}")
    return Conditions(request.model, load_model_shape(request.model), target, recipe, folders)


def replay(path: Path) -> Outcome:
    """Ranks a recorded run again, without a GPU. Raises RecordingError."""
    old = recording.load(path)
    recipe = recipe_called(old.recipe)
    return conclude(old, recipe, rank_all(old, recipe), {})


def conclude(now: Recording, recipe: Recipe, rankings: dict[str, Ranking], skipped: dict[str, str]) -> Outcome:
    """The outcome of a recording: its decisions, and the rows that may be promoted."""
    gate = now.gate or GateResult()
    rows = promotable(now, rankings, gate, datetime.now(UTC).date().isoformat())
    notes = [] if now.gate else ["the full model was not tried: nothing may be promoted"]
    if now.processes == 1:
        notes.append("recorded by a version with one confirming process and no measured resolution: ranked under that rule")
    return Outcome(now, recipe, rankings, gate, rows, skipped, notes)


def promote(outcome: Outcome, schedules: Path | None) -> list[Path]:
    """Write the rows to the first folder of the search path. Returns the files. Raises ScheduleError."""
    return [store.promote(store.search_path(schedules)[0], file) for file in outcome.promoted.files()]


def _go_on(now: Recording, out: Path, watch: Watch) -> None:
    """Take over an earlier run's results in the same folder for the same candidates and GPU. A recording of another GPU, driver
    or clocks policy is renamed with the digest of its machine.

    Raises:
        OutputError: the folder can't be written. RecordingError: recorded under other conditions.
    """
    path = out / "recording.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        before = recording.load(path) if path.exists() else None
        if before and before.machine != now.machine:
            aside = out / f"recording-{before.machine.digest}.json"
            watch(f"{path} is of {before.machine.gpu}, driver {before.machine.driver}, {before.machine.uuid}: renamed to "
                  f"{aside.name}; this GPU starts a new recording")
            os.replace(path, aside)
            mine = out / f"recording-{now.machine.digest}.json"
            before = recording.load(mine) if mine.exists() else None
    except OSError as e:
        raise cannot_write(out, e) from None
    if before is None:
        return
    for name, value in now.conditions().items():
        if before.conditions()[name] != value:
            raise RecordingError(f"{path} was recorded with {name} {before.conditions()[name]}", expected=f"{value}, as now",
                                 action="name another folder with --out, or remove this one")
    now.seconds_to_first_sample, now.gpu_seconds = before.seconds_to_first_sample, before.gpu_seconds
    for kernel, contest in now.contests.items():
        old = before.contests.get(kernel)
        if old and (old.kernel_digest, list(old.entrants)) == (contest.kernel_digest, list(contest.entrants)):
            contest.checked, contest.dead = old.checked, old.dead
            if old.incumbent == contest.incumbent:
                contest.batches = old.batches
                contest.finished = old.finished and before.processes == now.processes


class _Run:
    """One run's contests, in turn, within the budget."""

    def __init__(self, request: Request, now: Recording, wanted: Conditions, measurer: Measurer, folder: Path,
                 watch: Watch) -> None:
        self.request, self.now, self.recipe, self.measurer, self.watch = request, now, wanted.recipe, measurer, watch
        self.own = wanted.own
        self.folder, self.path = folder.absolute(), request.out / "recording.json"
        self.began = time.time()
        self.spent = now.gpu_seconds
        self.budget = Budget(request.budget)

    def save(self) -> None:
        """Raises OutputError."""
        usage = self.measurer.usage()
        self.now.calls = usage.calls
        self.now.gpu_seconds = round(self.spent + usage.busy_seconds, 2)
        if usage.first_sample and self.now.seconds_to_first_sample is None:
            self.now.seconds_to_first_sample = round(usage.first_sample - self.began, 2)
        recording.save(self.now, self.path)

    def contests(self) -> None:
        """Each worker process in turn measures the open contests. Each contest has an equal share of the time left; the next
        process uses the rest."""
        reserve = 0.0 if self.own else self.request.budget * GATE_SHARE
        for process in range(self.now.processes + 1):  # one more than must confirm: some contests lack time in the first
            todo = [c for c in self.now.contests.values() if not c.finished]
            if process and todo:
                self.measurer.fresh_process()
            for index, contest in enumerate(todo):
                left = self.budget.left
                share = max(0.0, left - reserve) / (len(todo) - index) * (1 if process else 1 - SECOND_SHARE)
                self._contest(contest, lambda end=left - share: self.budget.left <= max(end, 0.0))  # type: ignore[misc]
                self.save()
                self.watch(f"process {process + 1}, {index + 1} of {len(todo)}: {self._progress(contest)}; at most "
                           f"{max(0.0, self.budget.left):.0f} of {self.request.budget:.0f} s left")

    def _progress(self, contest: Contest) -> str:
        state = ("done" if contest.finished else "throttled" if contest.throttled else
                 f"confirmed in {len(contest.confirmations())} of {self.now.processes} processes")
        return (f"{contest.name}: {len(contest.fit())} of {len(contest.checked)} correct, row-invariant and deterministic; "
                f"{len(contest.batches)} batches, {state}")

    def _contest(self, contest: Contest, out_of_time: OutOfTime) -> None:
        own = self.own.get(contest.kernel)
        problem = Problem(contest.kernel, contest.shape, self.now.target, self.now.recipe, str(self.folder),
                          source=own.source if own else None)
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
            timed = self._timer(contest, problem, base)
            if searched:
                order = self._searched(base, contest, admit, timed, out_of_time)
            else:
                order = self._raced(base, contest, timed, out_of_time)
            if order is not None and not out_of_time():
                timed(CONFIRM, [base, *finalists(order, contest.groups(self.recipe), contest.home() or "")], CONFIRM_ROUNDS)
                contest.finished = len(contest.confirmations()) >= self.now.processes
            if base not in contest.dead:
                break
        contest.finished |= base is None and not out_of_time()

    def _timer(self, contest: Contest, problem: Problem, base: str) -> Timed:
        def timed(phase: str, names: Sequence[str], rounds: int) -> Batch | None:
            alive = {n: contest.entrants[n].schedule for n in names if not contest.failure(n)}
            batch, dead = self.measurer.time(problem, alive, phase, rounds, self.now.seed + len(contest.batches))
            contest.dead |= dead
            if batch is None:
                return None
            batch = batch_of(stored_batch(batch), contest.name)  # rounded, as a replay will read it
            contest.batches.append(batch)
            self.save()
            return batch if base in batch.samples_us else None

        return timed

    def _raced(self, base: str, contest: Contest, timed: Timed, out_of_time: OutOfTime) -> list[str] | None:
        """Candidates, fastest first; None if throttling left too few rounds."""
        before = [b for b in contest.batches if b.phase == RACE and b.enough and base in b.samples_us]
        batches = race(contest.groups(self.recipe), contest.home() or "", base, timed, out_of_time, before)
        if any(not b.enough for b in batches):
            return None
        return fastest_first(batches, [n for n in contest.fit() if n != base], base)

    def _searched(self, base: str, contest: Contest, admit: Callable[[str], bool], timed: Timed,
                  out_of_time: OutOfTime) -> list[str] | None:
        """The best candidates of the shared study that pass the checks here, fastest first; None if throttling left too few
        rounds."""
        from .samples.search import Study, search

        storage = self.request.storage or str(self.path.parent.absolute() / "study.journal")
        name = "/".join((self.now.target, self.now.machine.kind, self.now.recipe, self.now.toolchain.triton, contest.name,
                         contest.kernel_digest))
        study = Study(storage, name, {n: e.schedule for n, e in contest.entrants.items()}, self.now.seed)
        if not contest.confirmations() and any(not b.enough for b in search(study, base, admit, timed, out_of_time)):
            return None
        return [n for n in study.best(3 * FINALISTS, lambda n: n != base) if admit(n)]
