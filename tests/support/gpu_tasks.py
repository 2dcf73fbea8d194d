"""Tasks of a GPU worker for its tests; the candidate's schedule encodes the behaviour."""

import os
import signal
import time
from pathlib import Path

from tune_kernels.schedules.promoted import Checks
from tune_kernels.tuner.on_gpu.samples.gate import Checked
from tune_kernels.tuner.on_gpu.samples.timing import Batch, State
from tune_kernels.tuner.on_gpu.samples.usage import Calls
from tune_kernels.tuner.on_gpu.worker.process import at_work
from tune_kernels.tuner.on_gpu.worker.tasks import Answer, CheckTask, TimeTask

CRASHES, HANGS, RAISES, RUNS_OUT = 2, 3, 4, 5  # num_stages of candidates that do


def misbehave(stages: int) -> None:
    """A candidate's effect on its process."""
    if stages == CRASHES:
        os.kill(os.getpid(), signal.SIGSEGV)
    elif stages == HANGS:
        time.sleep(3600)
    elif stages == RAISES:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    elif stages == RUNS_OUT:
        raise MemoryError("CUDA out of memory")


def check(task: CheckTask) -> Answer[Checked]:
    """Right, unless the candidate misbehaves."""
    def work() -> Checked:
        misbehave(task.schedule.num_stages)  # type: ignore[union-attr]
        return Checked({"reference": Checks(1, 1)}, 0.0, "a" * 64)

    return at_work(task.words, work, task.name)


def timed(task: TimeTask) -> Answer[Batch]:
    """All samples are 10 us; a candidate that misbehaves does so in the first round, named only where the task is serial."""
    words = Path(task.words)
    words.write_text("\n")
    for name, schedule in task.candidates:
        if task.serial:
            words.write_text(f"{name}\n")
        misbehave(schedule.num_stages)  # type: ignore[union-attr]
    samples = {name: [10.0] * task.rounds for name, _ in task.candidates}
    process = str(os.getpid())
    return Answer(Batch(task.phase, task.seed, samples, [State()] * task.rounds, process), Calls(), process, 1.0)
