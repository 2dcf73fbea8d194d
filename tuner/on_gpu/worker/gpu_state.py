"""CUDA's first GPU: its identity, clocks, temperature and throttling, through NVML. Imports no torch.

CUDA numbers the GPUs of CUDA_VISIBLE_DEVICES in its own order; NVML numbers all. So NVML's device is found by CUDA's UUID, or by
its PCI bus id.
"""

import ctypes
import shutil
import subprocess
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ...errors import GpuError
from ..samples.machine import NOT_RECORDED, Machine
from ..samples.timing import State

if TYPE_CHECKING:
    from types import ModuleType

NO_GPU = ("no GPU on this machine", "an NVIDIA GPU with its driver",
          "run on a GPU machine, or rank a recorded run again: --replay RUN")


@dataclass(frozen=True)
class CudaDevice:
    """CUDA's first device. uuid: `GPU-...`; bus: PCI bus id, such as `00000000:1B:00.0`."""

    uuid: str
    bus: str


@cache
def cuda_device() -> CudaDevice | None:
    """CUDA's device 0, from the driver's library; None without a driver or device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return read_device(driver)


def read_device(driver: ctypes.CDLL) -> CudaDevice | None:
    """As cuda_device, from a given driver library."""
    device, raw, bus = ctypes.c_int(), (ctypes.c_ubyte * 16)(), ctypes.create_string_buffer(32)
    done = (driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0
            and driver.cuDeviceGetUuid(raw, device) == 0 and driver.cuDeviceGetPCIBusId(bus, 32, device) == 0)
    return CudaDevice(f"GPU-{uuid.UUID(bytes=bytes(raw))}", bus.value.decode()) if done else None


@dataclass(frozen=True)
class Nvml:
    """NVML and its handle of one GPU."""

    module: "ModuleType"
    handle: object

    def ask(self, name: str, *arguments: object) -> "int | None":
        """The number that a query returns; None if this GPU or driver doesn't support it."""
        try:
            found: int = getattr(self.module, name)(self.handle, *arguments)
        except (self.module.NVMLError, AttributeError):
            return None
        return found

    def text(self, name: str) -> str:
        """The text that a query returns."""
        found = getattr(self.module, name)(self.handle)
        return found.decode() if isinstance(found, bytes) else str(found)


def this_machine() -> Machine:
    """CUDA's first GPU. Raises GpuError if there is none."""
    nvml = _nvml()
    if nvml is None:
        return _from_nvidia_smi()
    version = int(nvml.module.nvmlSystemGetCudaDriverVersion_v2())
    driver = nvml.module.nvmlSystemGetDriverVersion()
    return Machine(nvml.text("nvmlDeviceGetName"), driver.decode() if isinstance(driver, bytes) else str(driver),
                   f"{version // 1000}.{version % 1000 // 10}", clocks_policy(nvml), nvml.text("nvmlDeviceGetUUID"))


def clocks_policy(nvml: Nvml) -> str:
    """The power limit in W and the application clocks in MHz, as text."""
    module = nvml.module
    limit = nvml.ask("nvmlDeviceGetEnforcedPowerLimit")
    sm, memory = (nvml.ask("nvmlDeviceGetApplicationsClock", clock) for clock in (module.NVML_CLOCK_SM, module.NVML_CLOCK_MEM))
    parts = [f"at most {limit // 1000} W" if limit is not None else "",
             f"applications at {sm} and {memory} MHz" if sm is not None and memory is not None else ""]
    return ", ".join(part for part in parts if part) or NOT_RECORDED


def _from_nvidia_smi() -> Machine:
    """As this_machine, without pynvml."""
    tool, device = shutil.which("nvidia-smi"), cuda_device()
    if tool is None or device is None:
        raise GpuError(NO_GPU[0], expected=NO_GPU[1], action=NO_GPU[2])
    done = subprocess.run([tool, f"--id={device.uuid}", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                          capture_output=True, text=True)
    listed = done.stdout.strip().splitlines()
    if done.returncode or not listed:
        raise GpuError(NO_GPU[0], expected=NO_GPU[1], action=NO_GPU[2])
    name, driver = (part.strip() for part in listed[0].split(",")[:2])
    return Machine(name, driver, uuid=device.uuid)


def read_state() -> State:
    """Clocks, temperature, power and throttling now; None for each value that can't be read."""
    nvml = _nvml()
    if nvml is None:
        return State()
    module = nvml.module
    power = nvml.ask("nvmlDeviceGetPowerUsage")
    sm, memory = (nvml.ask("nvmlDeviceGetClockInfo", clock) for clock in (module.NVML_CLOCK_SM, module.NVML_CLOCK_MEM))
    return State(sm, memory, nvml.ask("nvmlDeviceGetTemperature", module.NVML_TEMPERATURE_GPU),
                 None if power is None else power / 1000,
                 nvml.ask("nvmlDeviceGetCurrentClocksThrottleReasons"))


@cache
def _nvml() -> Nvml | None:
    """NVML's handle of CUDA's device, or None: nvidia-ml-py is optional."""
    device = cuda_device()
    if device is None:
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or it doesn't support the driver
        return None
    return found_by(pynvml, device)


def found_by(module: "ModuleType", device: CudaDevice) -> Nvml | None:
    """NVML's handle of one of CUDA's devices; None if it has none, for example of a MIG instance."""
    ways: tuple[tuple[Callable[[bytes], object], str], ...] = (
        (module.nvmlDeviceGetHandleByUUID, device.uuid), (module.nvmlDeviceGetHandleByPciBusId, device.bus))
    for handle_by, name in ways:
        try:
            return Nvml(module, handle_by(name.encode()))
        except module.NVMLError:
            continue
    return None
