"""One worker process on the GPU. What it dies of is found out, costs one candidate, and a new worker goes on.

`Measurer` is what the rest of the tuner sees; a test puts another one in its place.
"""

import time
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Protocol

from ....schedules.schedule import Schedule
from ... import pool
from ..samples.gate import Checked, Failure
from ..samples.timing import Batch
from . import measure
from .measure import Answer, CheckTask, Problem, TimeTask

WALL_SECONDS = 45  # of one task; importing torch and making operands take some of it, a hang takes all
CPU_SECONDS = 300


class Measurer(Protocol):
    """Checks and times candidates of one problem. Dead candidates are told, never raised."""

    def check(self, problem: Problem, name: str, schedule: Schedule) -> Checked:
        """The checks that need no decoder."""

    def time(self, problem: Problem, candidates: dict[str, Schedule], phase: str, rounds: int,
             seed: int) -> tuple[Batch | None, dict[str, Failure]]:
        """A batch of those that lived (None where none did), and those that died."""


class GpuMeasurer:
    """Measures in the one worker of an executor. words: the file in which the worker says what it is at; calls: of compiler
    and assemblers, over all workers."""

    def __init__(self, executor: Executor, words: Path, check: Callable[[CheckTask], Answer] = measure.check,
                 timed: Callable[[TimeTask], Answer] = measure.measure) -> None:
        self.executor, self.words, self._check, self._time = executor, words, check, timed
        self.by_process: dict[int, dict[str, int]] = {}
        self.first_sample: float | None = None
        self.busy_seconds = 0.0

    @property
    def calls(self) -> dict[str, int]:
        total = {"compiler": 0, "ptxas": 0, "c_compiler": 0}
        for counts in self.by_process.values():
            total = {name: total[name] + counts[name] for name in total}
        return total

    def check(self, problem: Problem, name: str, schedule: Schedule) -> Checked:
        """As Measurer."""
        result = self.ask(self._check, CheckTask(problem, name, schedule, str(self.words)))
        return Checked(failure=self._failure(result)) if isinstance(result, pool.Died) else result

    def time(self, problem: Problem, candidates: dict[str, Schedule], phase: str, rounds: int,
             seed: int) -> tuple[Batch | None, dict[str, Failure]]:
        """As Measurer: after a death all are timed again, one at a time, so that the next death has a name."""
        alive, serial = dict(candidates), False
        dead: dict[str, Failure] = {}
        while alive:
            result = self.ask(self._time, TimeTask(problem, tuple(alive.items()), phase, rounds, seed, str(self.words), serial))
            if not isinstance(result, pool.Died):
                return result, dead
            culprit = self._words()[0]
            if culprit in alive:
                dead[culprit] = self._failure(result)
                del alive[culprit]
            elif serial:  # dies wherever: nobody can be named, so all are out
                dead |= dict.fromkeys(alive, self._failure(result))
                return None, dead
            serial = True
        return None, dead

    def ask(self, function: Callable[[Any], Answer], task: Any, wall_seconds: float | None = None) -> Any:
        """The value of one task, or Died. wall_seconds: more than the executor's own."""
        self.words.unlink(missing_ok=True)
        if isinstance(self.executor, pool.LocalExecutor) and wall_seconds:
            usual, self.executor.wall_seconds = self.executor.wall_seconds, wall_seconds
            try:
                return self.ask(function, task)
            finally:
                self.executor.wall_seconds = usual
        started = time.monotonic()
        [(_, answer)] = pool.run(self.executor, function, [task], in_flight=1)
        self.busy_seconds += time.monotonic() - started
        if isinstance(answer, pool.Died):
            return answer
        self.by_process[answer.process] = answer.calls
        self.first_sample = self.first_sample or answer.first_sample
        return answer.value

    def _words(self) -> tuple[str, str]:
        """(candidate, what it died of), as the worker wrote them."""
        try:
            name, _, said = self.words.read_text().partition("\n")
        except OSError:
            return "", ""
        return name, said

    def words_of(self, died: pool.Died) -> str:
        """What the last worker said that it died of, or what was seen of its death."""
        return self._words()[1] or died.detail

    def _failure(self, died: pool.Died) -> Failure:
        return Failure("hang" if died.timeout else "crash", self.words_of(died))


def gpu_executor(scratch: Path) -> pool.LocalExecutor:
    """One worker, forked from a server that has imported torch. CUDA maps far more memory than it uses: no limit on that."""
    return pool.LocalExecutor(1, scratch, cpu_seconds=CPU_SECONDS, wall_seconds=WALL_SECONDS, memory_bytes=None,
                              preload="tune_kernels.tuner.on_gpu.worker.warm")
