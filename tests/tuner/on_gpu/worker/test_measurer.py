"""The worker on the GPU: what it dies of is named, costs one candidate, and the next worker goes on. Cases: tuning 17."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import triton
from tune_kernels.schedules.schedule import LinearSchedule
from tune_kernels.shapes.model import LinearShape
from tune_kernels.tuner import pool
from tune_kernels.tuner.on_gpu.samples.usage import Calls
from tune_kernels.tuner.on_gpu.worker.measurer import GpuMeasurer
from tune_kernels.tuner.on_gpu.worker.tasks import Problem

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(triton.knobs.runtime.interpret, reason="interpreting")]
PROBLEM = Problem("down", LinearShape(64, 128), "nvidia-h200", "fp8-v1", "no-bundle")


def candidate(num_stages: int) -> LinearSchedule:
    return LinearSchedule(64, 128, num_stages, 4)


@pytest.fixture
def measurer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuMeasurer]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "support"))
    import gpu_tasks  # type: ignore[import-not-found]

    measurer = GpuMeasurer(lambda: pool.LocalExecutor(1, tmp_path, pool.Limits(memory_bytes=None)), tmp_path / "words",
                           gpu_tasks.check,
                           gpu_tasks.timed, wall_seconds=4)
    yield measurer
    measurer.close()


@pytest.mark.parametrize(("num_stages", "stage", "said"), [
    (2, "crash", "SIGSEGV"), (3, "hang", "did not end within its wall time"),
])
def test_a_candidate_that_kills_the_worker_is_named(measurer: GpuMeasurer, num_stages: int, stage: str, said: str) -> None:
    found = measurer.time(PROBLEM, {"good": candidate(1), "bad": candidate(num_stages), "last": candidate(1)}, "race", 3, 0)
    batch, dead = found
    assert batch and set(batch.samples_us) == {"good", "last"}
    assert (dead["bad"].stage, said in dead["bad"].detail) == (stage, True)


def test_where_all_die_nothing_is_timed(measurer: GpuMeasurer) -> None:
    batch, dead = measurer.time(PROBLEM, {"a": candidate(2), "b": candidate(2)}, "race", 3, 0)
    assert batch is None
    assert set(dead) == {"a", "b"}


@pytest.mark.parametrize(("num_stages", "stage", "said"), [
    (2, "crash", "SIGSEGV"), (3, "hang", "did not end"), (4, "crash", "RuntimeError: CUDA error: an illegal memory access"),
    (5, "crash", "MemoryError: CUDA out of memory"),
])
def test_a_check_that_kills_the_worker_costs_one_candidate(measurer: GpuMeasurer, num_stages: int, stage: str, said: str) -> None:
    """Last words survive the process: what CUDA said is in the report."""
    checked = measurer.check(PROBLEM, "bad", candidate(num_stages))
    assert checked.failure
    assert (checked.failure.stage, said in checked.failure.detail) == (stage, True), checked.failure
    assert measurer.check(PROBLEM, "good", candidate(1)).failure is None


def test_calls_add_up_over_workers(measurer: GpuMeasurer) -> None:
    measurer.calls_of = {"1": Calls(1, 2, 0), "2": Calls(1, 0, 3)}
    assert measurer.usage().calls == Calls(2, 2, 3)
    measurer.time(PROBLEM, {"good": candidate(1)}, "race", 1, 0)
    assert measurer.usage().first_sample == 1.0
    assert measurer.usage().busy_seconds > 0


def test_a_fresh_process_is_another_one(measurer: GpuMeasurer) -> None:
    """F11: a confirmation spans processes."""
    first, _ = measurer.time(PROBLEM, {"good": candidate(1)}, "confirm", 1, 0)
    again, _ = measurer.time(PROBLEM, {"good": candidate(1)}, "confirm", 1, 0)
    measurer.fresh_process()
    other, _ = measurer.time(PROBLEM, {"good": candidate(1)}, "confirm", 1, 0)
    assert first and again and other
    assert first.process == again.process != other.process


def test_calls_of_compiler_and_assembler_are_counted() -> None:
    """In a process of its own: an audit hook can't be taken back."""
    import subprocess
    import sys

    code = """
import subprocess
from tune_kernels.kernels import bundle
from tune_kernels.tuner.on_gpu.worker.calls import count_calls
from tune_kernels.kernels.toolchain import ptxas_path
from tune_kernels.shapes.target import load_sku
counter = count_calls()
ptxas = ptxas_path(90)
subprocess.run([ptxas, "--version"], capture_output=True)
before = counter.calls
subprocess.run([ptxas, "nothing.ptx"], capture_output=True)
print(before, counter.calls)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "Calls(compiler=0, ptxas=0, c_compiler=0) Calls(compiler=0, ptxas=1, c_compiler=0)", \
        done.stderr
