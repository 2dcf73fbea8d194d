"""The answers of `torch.cuda` for the GPU that is played."""

import contextlib
import types
from typing import TYPE_CHECKING, Any

import torch
import torch.cuda

if TYPE_CHECKING:
    from .settings import Gpu

CUDA = "13.0"  # the version that torch.version.cuda says where torch was built without


class Stream:
    """The default stream, under any name."""

    cuda_stream = stream_id = device_index = 0
    device_type = 1

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = torch.device("cuda", 0)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def record_event(self, event: object = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    wait_event = wait_stream = lambda self, other: None


class Event:
    """Has always happened already."""

    cuda_event = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "Event") -> float:
        return 1.0


class CUDAGraph:
    """Not played."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError("tune-kernels record plays no CUDA graphs: run the program without them")


class Generator(torch.Generator):
    """Of the CPU."""

    def __new__(cls, device: object = None) -> "Generator":
        made: Generator = super().__new__(cls, "cpu")
        return made


def _properties(gpu: "Gpu") -> types.SimpleNamespace:
    major, minor = divmod(gpu.capability, 10)
    return types.SimpleNamespace(
        name=gpu.name, major=major, minor=minor, total_memory=gpu.memory_bytes, multi_processor_count=gpu.sms, warp_size=32,
        regs_per_multiprocessor=gpu.registers_per_sm, max_threads_per_multi_processor=32 * gpu.warps_per_sm,
        max_threads_per_block=1024, shared_memory_per_block=48 << 10, shared_memory_per_block_optin=gpu.shared_bytes,
        shared_memory_per_multiprocessor=gpu.shared_bytes_per_sm, L2_cache_size=gpu.l2_bytes, is_integrated=0,
        is_multi_gpu_board=0)


def answer(gpu: "Gpu") -> None:
    """Replaces the functions of torch.cuda, and the few of torch and torch.accelerator that ask for a device."""
    properties, capability = _properties(gpu), divmod(gpu.capability, 10)
    stream = Stream()
    values: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0, "get_device_name": gpu.name,
        "get_device_properties": properties, "get_device_capability": capability, "is_bf16_supported": True,
        "is_tf32_supported": True, "get_arch_list": [f"sm_{gpu.capability}"], "mem_get_info": (gpu.memory_bytes,) * 2,
        "current_stream": stream, "default_stream": stream, "is_current_stream_capturing": False, "memory_allocated": 0,
        "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0, "_exchange_device": 0,
        "_maybe_exchange_device": 0, "can_device_access_peer": False, "memory_stats": {}, "_device_count_nvml": 1}
    for name, value in values.items():
        setattr(torch.cuda, name, _saying(value))
    for name in ("synchronize", "init", "_lazy_init", "set_device", "empty_cache", "reset_peak_memory_stats", "manual_seed",
                 "manual_seed_all", "seed", "seed_all", "ipc_collect", "set_stream", "reset_max_memory_allocated",
                 "_lazy_call", "set_rng_state"):
        setattr(torch.cuda, name, _saying(None))
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.Stream, torch.cuda.Event, torch.cuda.CUDAGraph = Stream, Event, CUDAGraph
    torch.Generator = Generator
    torch.version.cuda = torch.version.cuda or CUDA
    torch._C._cuda_getCurrentRawStream = _saying(0)
    torch._C._cuda_getDeviceCount = _saying(1)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self.to(torch.device("cuda", 0))
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None:
        for name, value in {"is_available": True, "device_count": 1, "current_device_index": 0, "synchronize": None,
                            "current_accelerator": torch.device("cuda"), "current_stream": stream, "set_device_index": None,
                            "set_device_idx": None, "current_device_idx": 0}.items():
            setattr(accelerator, name, _saying(value))


def _saying(value: Any) -> Any:
    def said(*args: object, **kwargs: object) -> Any:
        return value

    return said
