"""The GPU of this machine: which it is, and its clocks, temperature and throttling, through NVML. Imports no torch."""

import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from typing import Any

from ....shapes import target as shapes_target
from ....shapes.target import Target
from ...errors import GpuError
from ..samples.timing import State

NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Machine:
    """A GPU as its driver names it."""

    gpu: str
    driver: str
    cuda: str = NOT_RECORDED


def this_machine() -> Machine:
    """The first GPU. Raises GpuError where there is none."""
    if (nvml := _nvml()) is not None:
        version = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        return Machine(_text(nvml.nvmlDeviceGetName(_handle())), _text(nvml.nvmlSystemGetDriverVersion()),
                       f"{version // 1000}.{version % 1000 // 10}")
    tool = shutil.which("nvidia-smi")
    said = ""
    if tool:
        done = subprocess.run([tool, "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True)
        said = done.stdout.strip() if done.returncode == 0 else ""
    if not said:
        raise GpuError("no GPU on this machine", expected="an NVIDIA GPU with its driver",
                       action="run where there is one, or rank a recorded run again: --replay RUN")
    name, driver = (part.strip() for part in said.splitlines()[0].split(",")[:2])
    return Machine(name, driver)


def sku_of(machine: Machine) -> Target:
    """The SKU of this machine's GPU. Raises ShapeError for an unlisted one: no GPU gets a silent default."""
    return shapes_target.sku_of(machine.gpu)


def read_state() -> State:
    """Clocks and the like now; what can't be read is None."""
    nvml = _nvml()
    if nvml is None:
        return State()
    handle = _handle()

    def asked(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    power = asked("nvmlDeviceGetPowerUsage")
    return State(asked("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM), asked("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
                 asked("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU), None if power is None else power / 1000,
                 asked("nvmlDeviceGetCurrentClocksThrottleReasons"))


@cache
def _nvml() -> Any:
    """The initialised module, or None: nvidia-ml-py is optional."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, no driver, no GPU: all mean that there is nothing to ask
        return None
    return pynvml


@cache
def _handle() -> Any:
    return _nvml().nvmlDeviceGetHandleByIndex(0)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
