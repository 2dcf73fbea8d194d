"""tuned(kernel): the promoted artefact is launched and nothing compiled, on a GPU that is played; everything else is refused."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faulty_kernels
import pytest
import stand_in_driver
import triton
from promoted_rows import promoted
from stand_in_driver import Driver
from triton.runtime import driver
from tune_kernels import KernelError, tuned
from tune_kernels.kernels import bundle, registry, toolchain
from tune_kernels.kernels.bundle import BundleError
from tune_kernels.schedules import store
from tune_kernels.schedules.errors import NotPromoted
from tune_kernels.schedules.promoted import PromotedSchedule
from tune_kernels.schedules.recipe import OWN
from tune_kernels.schedules.schedule import LinearSchedule
from tune_kernels.schedules.store import PromotedFile
from tune_kernels.shapes.model import LinearShape
from tune_kernels.shapes.target import load_sku

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(triton.knobs.runtime.interpret, reason="interpreting")]
KERNEL = faulty_kernels.few
SHAPE, SCHEDULE = KERNEL.own_shapes[0], KERNEL.schedules[0]


class Tensor(stand_in_driver.Tensor):
    """Contiguous, on the GPU that is played."""

    def __init__(self, dtype: str, *shape: int, address: int = 4096, contiguous: bool = True) -> None:
        super().__init__(dtype, address)
        self.shape, self.contiguous = shape, contiguous
        self.device = SimpleNamespace(type="cuda")

    def is_contiguous(self) -> bool:
        return self.contiguous

    def get_device(self) -> int:
        return 0

    def stride(self) -> tuple[int, ...]:
        return self.shape[1:]


def tensors(rows: int = 5, H: int = 96, **changes: Any) -> list[Tensor]:
    return [Tensor("float32", rows, H, **changes), Tensor("float32", rows, H), Tensor("int32", 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with the artefact of one shape and schedule."""
    from tune_kernels.tuner.offline.compile import compile_task, make_task

    made = tmp_path_factory.mktemp("bundle")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.IN_SPACES, KERNEL.name, KERNEL.operation)
        record = compile_task(make_task(KERNEL.name, "sm_90", SHAPE, SCHEDULE, OWN.numerics, made))
    assert record.artefact
    return made


def row_of(folder: Path) -> PromotedSchedule:
    target = load_sku("nvidia-h200")
    key = bundle.artefact_key(KERNEL.operation.launch(SHAPE, SCHEDULE, OWN.numerics), target.capability)
    [cubin] = [data for name, data in bundle.read(folder / "artefacts" / key).items() if name.endswith(".cubin")]
    made = promoted("down", LinearShape(64, 128), LinearSchedule(64, 128, 3, 4))
    from tune_kernels.schedules.schedule import schedule_id

    mine = schedule_id(SCHEDULE)
    return replace(made, model=KERNEL.name, recipe=OWN.name, kernel=KERNEL.name, shape=SHAPE, schedule=SCHEDULE, schedule_id=mine,
                   kernel_digest=bundle.kernel_digest(KERNEL.jitted), toolchain=toolchain.installed(target, OWN.numerics),
                   artefact=replace(made.artefact, cubin_sha256=bundle.sha256(cubin)),
                   timing=replace(made.timing, schedule_id=mine), evidence=replace(made.evidence, schedule_id=mine)).sealed()


@pytest.fixture
def schedules(folder: Path, tmp_path: Path) -> Path:
    store.promote(tmp_path, PromotedFile("nvidia-h200", KERNEL.name, OWN.name, (row_of(folder),)))
    return tmp_path


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    played = Driver(90)
    monkeypatch.setattr(driver, "_active", played)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    yield played
    KERNEL.jitted.device_caches.clear()


def test_the_promoted_artefact_is_launched(gpu: Driver, folder: Path, schedules: Path) -> None:
    """Twice for one look-up; scalars may be given. The user's own function is left as it is."""
    KERNEL.jitted.device_caches[0]
    compiler = KERNEL.jitted.compile
    launch = tuned(KERNEL, bundle=folder, schedules=schedules)
    assert launch.names == ("x_ptr", "y_ptr", "ticket_ptr", "rows", "H")
    x, y, ticket = tensors()
    launch(x, y, ticket)
    store.promote(schedules, replace(store.read(schedules / "nvidia-h200" / "few.json"), rows=()))
    launch(x, y, ticket)
    launch(x, y, ticket_ptr=ticket, rows=5, H=96)
    assert gpu.launched == ["double"] * 3
    assert KERNEL.jitted.compile is compiler
    assert launch.schedule(x, y, ticket) == (SCHEDULE, row_of(folder))


def test_a_second_launch_is_checked_like_the_first(gpu: Driver, folder: Path, schedules: Path) -> None:
    """The first tensor's sizes are known by now: the others are looked at all the same."""
    launch = tuned(KERNEL, bundle=folder, schedules=schedules)
    x, y, ticket = tensors()
    launch(x, y, ticket)
    for wrong in (Tensor("float32", 5, 97), Tensor("float32", 5, 96, contiguous=False), Tensor("bfloat16", 5, 96)):
        with pytest.raises(KernelError, match="y_ptr is"):
            launch(x, wrong, ticket)
    with pytest.raises(KernelError, match="no ticket_ptr"):
        launch(x, y)
    assert gpu.launched == ["double"]


@pytest.mark.parametrize(("arguments", "error", "said"), [
    (tensors(rows=7), NotPromoted, r"no promoted schedule of few \{'rows': 7, 'H': 96\} for nvidia-h200: the nearest has shape"),
    (tensors(rows=7)[:1] + tensors()[1:], KernelError, "y_ptr is torch.float32"), (tensors()[:2], KernelError, "no ticket_ptr"),
    ([Tensor("bfloat16", 5, 96), *tensors()[1:]], KernelError, "x_ptr is torch.bfloat16"),
    ([*tensors(), 6], KernelError, "rows is 6"), ([*tensors(), 5, 96, 1], KernelError, "6 arguments"),
    (tensors(contiguous=False), KernelError, "x_ptr is torch.float32"), ([1.0, *tensors()[1:]], KernelError, "x_ptr is 1.0"),
    (tensors(address=4100), BundleError, "no artefact"),
])
def test_what_was_not_promoted_is_refused(gpu: Driver, folder: Path, schedules: Path, arguments: list[Any],
                                          error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        tuned(KERNEL, bundle=folder, schedules=schedules)(*arguments)
    assert not gpu.launched


def test_another_toolchain_source_gpu_or_cubin_is_refused(gpu: Driver, folder: Path, schedules: Path, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    path = schedules / "nvidia-h200" / "few.json"
    [row] = store.read(path).rows
    for changes, error, said in (
            ({"toolchain": replace(row.toolchain, triton="3.5.0")}, NotPromoted, "Triton 3.5.0"),
            ({"kernel_digest": "feed" * 4}, NotPromoted, "kernel source"),
            ({"artefact": replace(row.artefact, cubin_sha256="ab" * 32)}, BundleError, "its cubin is")):
        other = tmp_path / said.split()[0]
        store.promote(other, PromotedFile("nvidia-h200", KERNEL.name, OWN.name, (replace(row, **changes).sealed(),)))
        with pytest.raises(error, match=said):
            tuned(KERNEL, bundle=folder, schedules=other)(*tensors())
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA B200")
    with pytest.raises(NotPromoted, match="nvidia-b200"):
        tuned(KERNEL, bundle=folder, schedules=schedules)(*tensors())


@pytest.mark.parametrize("default", ["first", {"FAULT": "none", "BLOCK": 256, "num_warps": 8}])
def test_a_named_default_runs_where_nothing_is_promoted(gpu: Driver, folder: Path, tmp_path: Path, default: Any) -> None:
    launch = tuned(KERNEL, bundle=folder, schedules=tmp_path, default=default)
    schedule, row = launch.schedule(*tensors(rows=7))
    assert row is None
    assert dict(schedule.knobs) == (dict(KERNEL.schedules[0].knobs) if default == "first" else default)
    launch(*tensors(rows=7))
    assert gpu.launched == ["double"]


def test_a_default_that_is_none_is_refused() -> None:
    with pytest.raises(KernelError, match="default is 'last'"):
        tuned(KERNEL, default="last")
