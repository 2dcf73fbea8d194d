"""On a GPU: candidates that really crash, hang, write nothing, are wrong, differ from run to run or run out of memory. Each is
named, and the next candidate is checked as if nothing had been."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tune_kernels.schedules.schedule import LinearSchedule
from tune_kernels.shapes.model import LinearShape
from tune_kernels.tuner.on_gpu.worker.measurer import GpuMeasurer, gpu_executor
from tune_kernels.tuner.on_gpu.worker.tasks import Problem

pytestmark = pytest.mark.gpu
PROBLEM = Problem("down", LinearShape(64, 128), "nvidia-h200", "fp8-v1", "no-bundle")


@pytest.fixture(scope="module")
def measurer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuMeasurer]:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "support"))
        import gpu_misbehaving  # type: ignore[import-not-found]

        folder = tmp_path_factory.mktemp("worker")
        measurer = GpuMeasurer(lambda: gpu_executor(folder), folder / "words", gpu_misbehaving.check, wall_seconds=25)
        yield measurer
        measurer.close()


@pytest.mark.parametrize(("kind", "stage", "said"), [
    ("crash", "crash", "illegal memory access"), ("hang", "hang", "did not end within its wall time"),
    ("nothing", "reference", "36864 of 36864 outputs were not written"), ("wrong", "reference", "relative RMS error"),
    ("unsteady", "rows", "bits differ"), ("memory", "crash", "out of memory"),
])
def test_what_misbehaves_is_named_and_the_next_is_checked(measurer: GpuMeasurer, kind: str, stage: str, said: str) -> None:
    import gpu_misbehaving

    def schedule(name: str) -> LinearSchedule:
        return LinearSchedule(64, 128, gpu_misbehaving.KINDS.index(name) + 1, 4)

    checked = measurer.check(PROBLEM, kind, schedule(kind))
    assert checked.failure
    assert (checked.failure.stage, said in checked.failure.detail) == (stage, True), checked.failure
    good = measurer.check(PROBLEM, "good", schedule("good"))
    assert good.failure is None, good.failure
    assert good.numerics_class
