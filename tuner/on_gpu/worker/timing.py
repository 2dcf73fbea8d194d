"""Times of several candidates in turns, on the GPU in a worker that may die."""

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ....schedules.recipe import load_recipe
from ....schedules.schedule import Schedule
from ....shapes.target import load_sku
from ..samples.bytes import read_bytes
from ..samples.timing import Batch, State, round_order
from .calls import count_calls
from .checks import MAX_LAUNCHES, copies_of, require_artefact, usual_case
from .gpu_state import read_state
from .operands import Case
from .process import install, last_words
from .tasks import Answer, Problem, TimeTask

if TYPE_CHECKING:
    import torch

SAMPLE_US = 400  # a sample's launches last at least so long: an event resolves 0.5 us
STATE_SECONDS = 0.02  # between looks at clocks and throttling: short rounds share one
Note = Callable[[str], None]  # writes down which candidate is at work


@dataclass
class Bench:
    """The operands of one problem, and a graph for each schedule that was timed, kept between tasks.

    copies: of the large operands; launches: in a graph."""

    case: Case[Schedule]
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
    garbage collection, which could free memory that a capture may not touch."""
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
    """Samples of several candidates in turns. A sample is the time of one launch, averaged over those of a graph."""
    import torch

    counter = count_calls()
    with last_words(Path(task.words), "") as note:
        install(task.problem.bundle)
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
    """(us of each candidate in each round, the GPU's state in each). A round is queued whole, so that the GPU never waits for
    Python between samples."""
    import torch

    names = [name for name, _ in task.candidates]
    graphs = {name: bench.graph(name, schedule) for name, schedule in task.candidates}
    events = {name: (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    states: list[State] = []
    read_at = time.time()
    for index in range(-1, task.rounds):  # round -1 warms up
        graphs[names[0]].replay()  # busy while the round is queued, so that no sample holds launch latency
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
            samples[name].append(events[name][0].elapsed_time(events[name][1]) * 1e3 / bench.launches)
    return samples, states


@lru_cache(maxsize=1)
def bench_of(problem: Problem) -> Bench:
    """Operands of one problem, on the GPU. Only the last problem's are kept."""
    size = read_bytes(problem.shape, load_recipe(problem.recipe).kv_chunk, problem.occupancies)
    copies = copies_of(problem)
    at_least = math.ceil(SAMPLE_US / (size / load_sku(problem.target).peak_tb_s / 1e6 + 1))
    launches = min(MAX_LAUNCHES, copies * math.ceil(max(1, at_least / copies)))
    return Bench(usual_case(problem), copies, launches)
