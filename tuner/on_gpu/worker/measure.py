"""On the GPU, in a worker that may die: check one candidate, or time several in turns. Tasks and answers are plain values.

What a candidate does to the process is its own fault: an illegal access breaks the CUDA context for good, so the worker
writes its last words and exits, and the next one starts afresh. `worker` reads them.
"""

import contextlib
import gc
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....schedules.recipe import load_recipe
from ....schedules.schedule import Schedule
from ....shapes.errors import UserError
from ....shapes.model import KernelShape
from ....shapes.target import load_sku
from ...errors import GpuError
from ..samples.gate import Checked, Failure
from ..samples.timing import Batch, State, round_order
from .calls import count_calls
from .operands import CLASS_OUTPUTS, OCCUPANCIES, Case, Operands, make_case, poisoned, read_bytes

if TYPE_CHECKING:
    import torch

REPEATS = 8  # of one launch, back to back, that must give the same bytes
SAMPLE_US = 400  # a sample's launches last at least so long: an event resolves 0.5 us
L2_TURNS = 3  # copies of the large operands together are at least so many times the L2
MAX_LAUNCHES = 256  # in one graph
STATE_SECONDS = 0.02  # between looks at clocks and throttling: short rounds share one
CRASHED = 70  # a worker's exit code after it wrote its last words


@dataclass(frozen=True)
class Problem:
    """One kernel and shape on one SKU, from one bundle. occupancies: tokens in the cache when attention and merge are timed."""

    kernel: str
    shape: KernelShape
    target: str
    recipe: str
    bundle: str
    occupancies: tuple[int, ...] = OCCUPANCIES


@dataclass(frozen=True)
class CheckTask:
    """words: the file in which the worker says what it is at."""

    problem: Problem
    name: str
    schedule: Schedule
    words: str


@dataclass(frozen=True)
class TimeTask:
    """rounds of one sample each. words: as in CheckTask; serial: wait after each sample and say whose it is, to find which
    candidate kills."""

    problem: Problem
    candidates: tuple[tuple[str, Schedule], ...]
    phase: str
    rounds: int
    seed: int
    words: str
    serial: bool = False


@dataclass(frozen=True)
class Answer:
    """A task's result, the calls of compiler and assemblers in its process so far, and who it was."""

    value: Any
    calls: dict[str, int]
    process: int
    first_sample: float | None = None


@dataclass
class Bench:
    """What a worker keeps of one problem between tasks: operands, and a graph for each schedule that was timed.

    copies: of the large operands; launches: in a graph."""

    case: Case
    wide: Case
    copies: int
    launches: int
    graphs: dict[tuple[str, Schedule], "torch.cuda.CUDAGraph"] = field(default_factory=dict)

    def graph(self, name: str, schedule: Schedule) -> "torch.cuda.CUDAGraph":
        """Launches of one candidate, on one copy after another. Two names of one schedule have a graph each."""
        import torch

        if (name, schedule) not in self.graphs:
            for copy in range(min(self.copies, 2)):  # loads the module, which can't be done while capturing
                self.case.timed(schedule, copy)
            torch.cuda.synchronize()
            self.graphs[name, schedule] = _captured(lambda i: self.case.timed(schedule, i % self.copies), self.launches)
        return self.graphs[name, schedule]


def _captured(launch: Callable[[int], None], launches: int) -> "torch.cuda.CUDAGraph":
    """A graph of launch(0), launch(1), ... Without torch.cuda.graph, which empties the allocator's cache each time; without
    garbage collection, which could free what a capture may not touch."""
    import torch

    made = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            made.capture_begin()
            for i in range(launches):
                launch(i)
            made.capture_end()
    finally:
        if collects:
            gc.enable()
    return made


def check(task: CheckTask) -> Answer:
    """The checks of one candidate that need no decoder, cheapest first; the first that fails ends them."""
    def checks() -> Checked:
        bench = bench_of(task.problem)
        return run_checks(bench.case, bench.wide, task.schedule)

    return _from_bundle(task, checks)


def classify(task: CheckTask) -> Answer:
    """The numerics class of one candidate, and no check."""
    return _from_bundle(task, lambda: Checked(numerics_class=numerics_class(wide_case(task.problem), task.schedule)))


def _from_bundle(task: CheckTask, checks: Callable[[], Checked]) -> Answer:
    """What `checks` find of a candidate that is launched from the bundle; a failure where its artefact isn't there, or it goes
    against the kernel's contract."""
    from ....kernels.bundle import BundleError
    from ....kernels.operation import ContractError

    def checked() -> Checked:
        try:
            require_artefact(task.problem, task.schedule)
            install(task.problem.bundle)
            return checks()
        except (BundleError, ContractError) as e:
            return Checked(failure=Failure("launch", e.found))

    return at_work(task.words, checked, task.name)


def at_work(words: str, work: Callable[[], Any], name: str = "") -> Answer:
    """What `work` returns, with the calls it made. Raises UserErrors as they are; after anything else the worker exits."""
    calls = count_calls()
    with _last_words(Path(words), name):
        return Answer(work(), calls.as_dict(), os.getpid())


def require_artefact(problem: Problem, schedule: Schedule) -> None:
    """Raises BundleError where a candidate's artefact isn't in the bundle: one compiled here was never inspected."""
    from ....kernels import bundle, registry

    launch = registry.operation(problem.kernel).launch(problem.shape, schedule, load_recipe(problem.recipe).numerics)
    key = bundle.artefact_key(launch, load_sku(problem.target).capability)
    bundle.read(Path(problem.bundle) / "artefacts" / key)


def run_checks(case: Case, wide: Case, schedule: Schedule) -> Checked:
    """Reference with poisoned output, rows, determinism, class. Cases as `make_case` makes them."""
    rows = case.rows(schedule)
    with poisoned():
        whole = case.output(schedule, 0, rows)
    error, limit = case.error(whole), case.limit(schedule)
    checks = {"reference": (1, int(error <= limit))}
    if not error <= limit:
        wrong = f"relative RMS error {error:.2e} against fp64, at most {limit:.0e} in this recipe"
        return Checked(checks, error, failure=Failure("reference", unwritten(whole) or wrong))
    with poisoned():
        differ = [what for what, found, right in _row_pairs(case, schedule, whole) if not same(found, right)]
        checks["rows"] = (2 * rows - 1, 2 * rows - 1 - len(differ))
        if differ:
            return Checked(checks, error, failure=Failure("rows", f"bits differ: {', '.join(differ[:3])}"))
        again = [case.output(schedule, 0, rows) for _ in range(REPEATS)]
    differing = sum(not same(one, whole) for one in again)
    checks["determinism"] = (REPEATS, REPEATS - differing)
    if differing:
        return Checked(checks, error, failure=Failure("determinism", f"{differing} of {REPEATS} runs gave other bits"))
    return Checked(checks, error, numerics_class(wide, schedule))


def _row_pairs(case: Case, schedule: Schedule, whole: "torch.Tensor") -> Iterator[tuple[str, Any, Any]]:
    for rows in range(1, len(whole)):
        yield f"{rows} rows of {len(whole)}", case.output(schedule, 0, rows), whole[:rows]
    for r in range(len(whole)):
        yield f"row {r} alone", case.output(schedule, r, 1), whole[r:r + 1]


def numerics_class(wide: Case, schedule: Schedule) -> str:
    """SHA-256 of the bits of at least CLASS_OUTPUTS outputs on `wide` operands."""
    import torch

    digest, count = hashlib.sha256(), 0
    with poisoned():
        for part in wide.bits(schedule):
            digest.update(part.contiguous().view(torch.uint8).cpu().numpy().tobytes())
            count += part.numel()
            if count >= CLASS_OUTPUTS:
                break
    return digest.hexdigest()


def unwritten(output: "torch.Tensor") -> str:
    """What says that an output, or some of it, is still the poison; empty where none is."""
    import torch

    poison = output.isnan() if output.is_floating_point() else output == torch.iinfo(output.dtype).max
    left = int(poison.sum())
    return f"{left} of {output.numel()} outputs were not written, or are NaN" if left else ""


def same(a: "torch.Tensor", b: "torch.Tensor") -> bool:
    """Byte for byte: NaN equals itself, 0.0 isn't -0.0."""
    import torch

    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def measure(task: TimeTask) -> Answer:
    """Samples of several candidates in turns. A sample is the time of one launch, averaged over those of a graph."""
    import torch

    calls = count_calls()
    with _last_words(Path(task.words), "") as at:
        install(task.problem.bundle)
        bench = bench_of(task.problem)
        for name, schedule in task.candidates:
            at(name)
            bench.graph(name, schedule)
            torch.cuda.synchronize()
        at("")
        samples, states, first = rounds_of(task, bench, at)
    return Answer(Batch(task.phase, task.seed, samples, states), calls.as_dict(), os.getpid(), first)


def rounds_of(task: TimeTask, bench: Bench, at: Callable[[str], None]) -> tuple[dict[str, list[float]], list[State], float]:
    """A round is queued whole, so that the GPU never waits for Python between samples."""
    import torch

    from .gpu_state import read_state

    names = [name for name, _ in task.candidates]
    graphs = {name: bench.graph(name, schedule) for name, schedule in task.candidates}
    events = {name: (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    states: list[State] = []
    first = read_at = time.time()
    for index in range(-1, task.rounds):  # round -1 warms up
        graphs[names[0]].replay()  # busy while the round is queued, so that no sample holds launch latency
        for name in round_order(names, task.seed, index):
            if task.serial:
                at(name)
            events[name][0].record()
            graphs[name].replay()
            events[name][1].record()
            if task.serial:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        if index < 0:
            continue
        if not states or time.time() - read_at > STATE_SECONDS:
            states.append(read_state())
            read_at = time.time()
        else:
            states.append(states[-1])
        for name in names:
            samples[name].append(events[name][0].elapsed_time(events[name][1]) * 1e3 / bench.launches)
    return samples, states, first


@lru_cache(maxsize=1)
def bench_of(problem: Problem) -> Bench:
    """Operands of one problem, on the GPU. Only the last problem's are kept."""
    import torch

    torch.cuda.empty_cache()
    target, chunk = load_sku(problem.target), load_recipe(problem.recipe).kv_chunk
    size = read_bytes(problem.shape, chunk, problem.occupancies)
    copies = math.ceil(L2_TURNS * target.l2_bytes / size)
    copies = 2 * math.ceil(min(copies, MAX_LAUNCHES) / 2) if copies > 1 else 1  # even: two occupancies take turns
    at_least = math.ceil(SAMPLE_US / (size / target.peak_tb_s / 1e6 + 1))
    launches = min(MAX_LAUNCHES, copies * math.ceil(max(1, at_least / copies)))
    return Bench(_case(problem, Operands("cuda", copies=copies)), wide_case(problem), copies, launches)


@lru_cache(maxsize=1)
def wide_case(problem: Problem) -> Case:
    """The operands of one problem's numerics classes, on the GPU. Only the last problem's are kept."""
    return _case(problem, Operands("cuda", wide=True))


def _case(problem: Problem, operands: Operands) -> Case:
    from ....kernels.registry import default_schedule

    recipe = load_recipe(problem.recipe)
    merging: Any = default_schedule(recipe, "merge", load_sku(problem.target).arch)
    return make_case(problem.kernel, problem.shape, recipe, operands, merging, problem.occupancies)


@cache
def install(folder: str) -> None:
    """Kernels launch from the bundle from now on. What isn't in it is compiled, and counted: no candidate gets so far, but a
    kernel of the full model may, where the bundle was made of some kernels only. Raises GpuError where torch finds no GPU."""
    import torch

    from ....kernels import bundle, registry

    if not torch.cuda.is_available():
        raise GpuError("torch finds no GPU", expected="an NVIDIA GPU and a CUDA build of torch")

    for kernel in registry.jitted():
        bundle.install(kernel, Path(folder), compile_missing=True)


@contextlib.contextmanager
def _last_words(words: Path, name: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that notes which candidate is at work. Whatever else than a user's error is raised ends the process."""
    def at(candidate: str, said: str = "") -> None:
        words.write_text(f"{candidate}\n{said}")

    current = [name]

    def note(candidate: str) -> None:
        current[0] = candidate
        at(candidate)

    note(name)
    try:
        yield note
    except UserError:
        raise
    except Exception as e:
        at(current[0], f"{type(e).__name__}: {' '.join(str(e).split())}"[:300])
        os._exit(CRASHED)
