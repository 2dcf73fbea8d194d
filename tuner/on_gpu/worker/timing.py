"""Times several candidates in turns. Runs in the worker on the GPU."""

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ....schedules.schedule import Schedule
from ....shapes.target import load_sku
from ..samples.timing import Batch, State, round_order
from .calls import count_calls
from .case import Case
from .cases import workload_of
from .checks import MAX_LAUNCHES, copies_of, require_artefact, usual_case
from .gpu_state import read_state
from .process import last_words
from .tasks import Answer, Problem, TimeTask

if TYPE_CHECKING:
    import torch

SAMPLE_US = 400  # minimum duration of a sample: an event resolves 0.5 us
TRIED = 4  # launches that tell how long one takes
STATE_SECONDS = 0.02  # between readings of clocks and throttling: short rounds share one
Note = Callable[[str], None]  # notes the current candidate


@dataclass
class Bench:
    """The case of one problem and the graphs of its timed candidates, kept between tasks. copies: of the large operands.
    launches: per graph, None until a launch was timed."""

    case: Case[Schedule]
    copies: int
    launches: int | None
    graphs: dict[tuple[str, Schedule], "torch.cuda.CUDAGraph"] = field(default_factory=dict)

    def graph(self, name: str, schedule: Schedule) -> "torch.cuda.CUDAGraph":
        """One candidate's launches, on one copy after another. Each name has its own graph, even for equal schedules."""
        import torch

        if (name, schedule) not in self.graphs:
            for copy in range(min(self.copies, 2)):  # loads the module, which a capture can't do
                self.case.timed(schedule, copy)
            torch.cuda.synchronize()
            if self.launches is None:
                self.launches = launches_of(self.copies, self._launch_us(schedule))
            self.graphs[name, schedule] = _captured(lambda i: self.case.timed(schedule, i % self.copies), self.launches)
        return self.graphs[name, schedule]

    def _launch_us(self, schedule: Schedule) -> float:
        """Time of a launch, launched one by one: no less than in a graph."""
        import torch

        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for i in range(TRIED):
            self.case.timed(schedule, i % self.copies)
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) * 1e3 / TRIED


def _captured(launch: Callable[[int], None], launches: int) -> "torch.cuda.CUDAGraph":
    """A graph of launch(0), launch(1), ... torch.cuda.graph isn't used because it empties the allocator's cache. Garbage
    collection is off because it could free memory, which a capture forbids."""
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


def measure(task: TimeTask) -> Answer[Batch]:
    """Samples of several candidates in turns. A sample is the mean time per launch of one graph, in us."""
    import torch

    counter = count_calls()
    with last_words(Path(task.words), "") as note:
        workload_of(task.problem).install()
        bench = bench_of(task.problem)
        for name, schedule in task.candidates:
            note(name)
            if (name, schedule) not in bench.graphs:
                require_artefact(task.problem, schedule)
            bench.graph(name, schedule)
            torch.cuda.synchronize()
        note("")
        first = time.time()
        samples, states = rounds_of(task, bench, note)
    return Answer(Batch(task.phase, task.seed, samples, states, counter.process), counter.calls, counter.process, first)


def rounds_of(task: TimeTask, bench: Bench, note: Note) -> tuple[dict[str, list[float]], list[State]]:
    """(us per launch by candidate, [rounds]; the GPU's state, [rounds]). A whole round is queued at once: the GPU never waits for
    Python between samples."""
    import torch

    names = [name for name, _ in task.candidates]
    graphs = {name: bench.graph(name, schedule) for name, schedule in task.candidates}
    events = {name: (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    states: list[State] = []
    read_at = time.time()
    for index in range(-1, task.rounds):  # round -1 warms up
        graphs[names[0]].replay()  # keeps the GPU busy while the round is queued: samples have no launch latency
        for name in round_order(names, task.seed, index):
            if task.serial:
                note(name)
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
            samples[name].append(events[name][0].elapsed_time(events[name][1]) * 1e3 / (bench.launches or 1))
    return samples, states


@lru_cache(maxsize=1)
def bench_of(problem: Problem) -> Bench:
    """The bench of one problem. Only the last problem's is kept."""
    work, copies = workload_of(problem), copies_of(problem)
    if not work.bandwidth_bound:
        return Bench(usual_case(problem), copies, None)
    return Bench(usual_case(problem), copies, launches_of(copies, work.read_bytes / load_sku(problem.target).peak_tb_s / 1e6 + 1))


def launches_of(copies: int, launch_us: float) -> int:
    """Launches per graph: SAMPLE_US at least, each copy equally often, at most MAX_LAUNCHES."""
    return min(MAX_LAUNCHES, copies * math.ceil(max(1, math.ceil(SAMPLE_US / launch_us) / copies)))
