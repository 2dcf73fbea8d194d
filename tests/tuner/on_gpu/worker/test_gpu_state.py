"""Which GPU is read (F8): CUDA's, whatever CUDA_VISIBLE_DEVICES leaves of those that NVML numbers."""

import ctypes
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from tune_kernels.tuner.on_gpu.worker import gpu_state
from tune_kernels.tuner.on_gpu.worker.gpu_state import CudaDevice, Nvml, found_by, read_device

UUIDS = ("GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b")
BUSES = ("00000000:1B:00.0", "00000000:2C:00.0")
NAMES = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")


class NVMLError(Exception):
    pass


def of(values: tuple[str, str]) -> Any:
    def handle(name: bytes) -> int:
        if name.decode() not in values:
            raise NVMLError
        return values.index(name.decode())
    return handle


NVML: Any = SimpleNamespace(
    NVMLError=NVMLError, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0, nvmlInit=lambda: None,
    nvmlDeviceGetHandleByUUID=of(UUIDS), nvmlDeviceGetHandleByPciBusId=of(BUSES), nvmlDeviceGetName=lambda i: NAMES[i].encode(),
    nvmlDeviceGetUUID=lambda i: UUIDS[i], nvmlSystemGetCudaDriverVersion_v2=lambda: 13000,
    nvmlSystemGetDriverVersion=lambda: b"580.1", nvmlDeviceGetClockInfo=lambda i, clock: 1000 * (i + 1) + clock,
    nvmlDeviceGetTemperature=lambda i, sensor: 40 + i, nvmlDeviceGetPowerUsage=lambda i: 500_000 + i,
    nvmlDeviceGetEnforcedPowerLimit=lambda i: 700_000)


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CUDA's first device is one of NVML's two."""
    def choose(index: int) -> None:
        monkeypatch.setitem(__import__("sys").modules, "pynvml", NVML)
        monkeypatch.setattr(gpu_state, "cuda_device", lambda: CudaDevice(UUIDS[index], BUSES[index]))
        gpu_state._nvml.cache_clear()
    yield choose
    gpu_state._nvml.cache_clear()


@pytest.mark.parametrize("index", [0, 1])
def test_the_gpu_is_the_one_that_cuda_uses(visible: Any, index: int) -> None:
    """F8: with CUDA_VISIBLE_DEVICES=1 NVML's index 0 is another GPU."""
    visible(index)
    machine = gpu_state.this_machine()
    assert (machine.gpu, machine.uuid, machine.driver, machine.cuda) == (NAMES[index], UUIDS[index], "580.1", "13.0")
    assert machine.clocks == "at most 700 W"
    state = gpu_state.read_state()
    assert (state.sm_mhz, state.temperature_c) == (1000 * (index + 1) + 1, 40 + index)
    assert state.throttle_reasons is None, "this driver doesn't answer that"


def test_a_uuid_that_nvml_doesnt_know_is_found_by_its_bus() -> None:
    assert found_by(NVML, CudaDevice("GPU-else", BUSES[1])) == Nvml(NVML, 1)
    assert found_by(NVML, CudaDevice("GPU-else", "else")) is None


class Driver:
    """libcuda with one device."""

    def __init__(self, devices: int = 1) -> None:
        self.devices = devices

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        return 0 if ordinal < self.devices else 101

    def cuDeviceGetUuid(self, raw: Any, device: Any) -> int:
        ctypes.memmove(raw, uuid.UUID(UUIDS[1].removeprefix("GPU-")).bytes, 16)
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, length: int, device: Any) -> int:
        text.value = BUSES[1].encode()
        return 0


def test_cuda_says_uuid_and_bus_of_its_first_device() -> None:
    assert read_device(Driver()) == CudaDevice(UUIDS[1], BUSES[1])  # type: ignore[arg-type]
    assert read_device(Driver(0)) is None  # type: ignore[arg-type]
