"""One worker process on the GPU. If it dies, the candidate that killed it is identified and excluded, and a new worker continues.

`Measurer` is the interface to the rest of the tuner; tests replace it.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Protocol, TypeVar

from ....kernels.arguments import KernelError
from ....kernels.loading import Source
from ....schedules.schedule import Schedule
from ... import pool
from ...offline.own import OwnKernel
from ..samples.gate import Checked, Failure
from ..samples.timing import Batch
from ..samples.usage import Calls, Usage
from . import checks, timing
from .cases import DescribeTask, describe
from .tasks import Answer, CheckTask, Problem, TimeTask

T = TypeVar("T")
Task = TypeVar("Task")
WALL_SECONDS = 45  # per task, with the import of torch and the making of operands; a hang reaches it
CPU_SECONDS = 300  # per task


class Measurer(Protocol):
    """Checks and times candidates of one problem. A candidate's death is a value, never an error."""

    def describe(self, source: Source) -> tuple[OwnKernel, ...]:
        """Kernels of one's own, that can be checked. Raises KernelError."""

    def check(self, problem: Problem, name: str, schedule: Schedule) -> Checked:
        """The checks that need no decoder."""

    def time(self, problem: Problem, candidates: Mapping[str, Schedule], phase: str, rounds: int,
             seed: int) -> tuple[Batch | None, dict[str, Failure]]:
        """(samples of the survivors, None if there are none; failure by candidate that died). rounds: samples per candidate."""

    def fresh_process(self) -> None:
        """Later calls run in another process than earlier ones."""

    def usage(self) -> Usage:
        """Seconds and calls so far."""


class WorkerExecutor(Protocol):
    """An executor of one worker. within: the same worker, with another wall time limit per task."""

    def within(self, wall_seconds: float) -> Executor: ...

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None: ...


class GpuMeasurer:
    """Measures in an executor's only worker. make_executor: makes an executor with a new worker. words: the file in which the
    worker notes its current candidate. wall_seconds: limit per task."""

    def __init__(self, make_executor: Callable[[], WorkerExecutor], words: Path,
                 check: Callable[[CheckTask], Answer[Checked]] = checks.check,
                 timed: Callable[[TimeTask], Answer[Batch]] = timing.measure, wall_seconds: float = WALL_SECONDS) -> None:
        self.make_executor, self.words, self._check, self._time = make_executor, words, check, timed
        self.wall_seconds = wall_seconds
        self.executor = make_executor()
        self.calls_of: dict[str, Calls] = {}
        self.first_sample: float | None = None
        self.busy_seconds = 0.0

    def usage(self) -> Usage:
        """As Measurer."""
        return Usage(sum(self.calls_of.values(), Calls()), self.busy_seconds, self.first_sample)

    def fresh_process(self) -> None:
        """As Measurer."""
        self.close()
        self.executor = self.make_executor()

    def close(self) -> None:
        """End the worker."""
        self.executor.shutdown(cancel_futures=True)

    def describe(self, source: Source) -> tuple[OwnKernel, ...]:
        """As Measurer."""
        found = self.ask(describe, DescribeTask(source, str(self.words)))
        if isinstance(found, pool.Died):
            raise KernelError(f"{source.place}: its process died: {self.words_of(found)}", expected="a file that Python imports")
        return found

    def check(self, problem: Problem, name: str, schedule: Schedule) -> Checked:
        """As Measurer."""
        result = self.ask(self._check, CheckTask(problem, name, schedule, str(self.words)))
        return Checked(failure=self._failure(result)) if isinstance(result, pool.Died) else result

    def time(self, problem: Problem, candidates: Mapping[str, Schedule], phase: str, rounds: int,
             seed: int) -> tuple[Batch | None, dict[str, Failure]]:
        """As Measurer. After a death of unknown cause the rest is timed again, one at a time, which identifies the next
        culprit."""
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
            elif serial:  # no culprit can be identified: all are excluded
                dead |= dict.fromkeys(alive, self._failure(result))
                return None, dead
            serial = True
        return None, dead

    def ask(self, function: Callable[[Task], Answer[T]], task: Task, wall_seconds: float | None = None) -> "T | pool.Died":
        """The value of one task, or Died. wall_seconds: another limit than usual."""
        self.words.unlink(missing_ok=True)
        started = time.monotonic()
        [(_, answer)] = pool.run(self.executor.within(wall_seconds or self.wall_seconds), function, [task], in_flight=1)
        self.busy_seconds += time.monotonic() - started
        if isinstance(answer, pool.Died):
            return answer
        self.calls_of[answer.process] = answer.calls
        self.first_sample = self.first_sample or answer.first_sample
        return answer.value

    def _words(self) -> tuple[str, str]:
        """(candidate, error) that the worker wrote before it died; empty if it wrote nothing."""
        try:
            name, _, error = self.words.read_text().partition("\n")
        except OSError:
            return "", ""
        return name, error

    def words_of(self, died: pool.Died) -> str:
        """The error that the worker wrote before it died, or the pool's description of its death."""
        return self._words()[1] or died.detail

    def _failure(self, died: pool.Died) -> Failure:
        return Failure("hang" if died.timeout else "crash", self.words_of(died))


def gpu_executor(scratch: Path) -> pool.LocalExecutor:
    """One worker, forked from a server that has imported torch. No memory limit: CUDA maps far more memory than it uses."""
    return pool.LocalExecutor(1, scratch, pool.Limits(cpu_seconds=CPU_SECONDS, memory_bytes=None),
                              preload="tune_kernels.tuner.on_gpu.worker.warm")
