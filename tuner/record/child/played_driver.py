"""A Triton driver that plays a GPU: kernels are compiled for it, loaded from it and launched on it, and nothing is executed."""

import contextlib
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from triton.backends.compiler import GPUTarget

if TYPE_CHECKING:
    from .recorder import Recorder
    from .settings import Gpu

SOME_MS = 1.0  # each time that is "measured"


class Driver:
    """What Triton's runtime asks of a driver."""

    def __init__(self, gpu: "Gpu", recorder: "Recorder") -> None:
        self.gpu = gpu
        properties = {"max_shared_mem": gpu.shared_bytes, "max_num_regs": gpu.registers_per_sm, "multiprocessor_count": gpu.sms,
                      "warpSize": 32}
        self.utils = types.SimpleNamespace(
            get_device_properties=lambda device: dict(properties),
            load_binary=lambda name, binary, shared, device: ("module", ("function", len(binary)), 32, 0, 1024),
            unload_module=lambda module: None)

        class Launcher:
            def __init__(self, src: Any, metadata: Any) -> None:
                self.hash = metadata.hash

            def __call__(self, x: int, y: int, z: int, stream: int, function: object, packed: object, launch_metadata: object,
                         enter: Any, leave: object, *arguments: object) -> None:
                recorder.launched(self.hash, (int(x), int(y), int(z)), arguments)

        self.launcher_cls = Launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.gpu.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return divmod(self.gpu.capability, 10)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda

    def get_benchmarker(self) -> Callable[..., Any]:
        import triton.testing

        return triton.testing.do_bench

    def get_empty_cache_for_benchmark(self) -> Any:
        import torch

        return torch.empty(1, dtype=torch.int)

    def clear_cache(self, cache: object) -> None:
        pass


@contextlib.contextmanager
def _trial(recorder: "Recorder") -> Iterator[None]:
    """Launches inside are trials."""
    before, recorder.trial = recorder.trial, True
    try:
        yield
    finally:
        recorder.trial = before


def _marked(benchmark: Callable[..., object], recorder: "Recorder", played: bool) -> Callable[..., object]:
    def run(call: Callable[[], object], *args: object, quantiles: Sequence[float] | None = None, **kwargs: object) -> object:
        with _trial(recorder):
            if not played:
                return benchmark(call, *args, **kwargs, **({} if quantiles is None else {"quantiles": quantiles}))
            call()
        if quantiles is not None and len(quantiles) > 1:
            return [SOME_MS] * len(quantiles)
        return [SOME_MS] if kwargs.get("return_mode") == "all" else SOME_MS

    return run


def mark_trials(recorder: "Recorder", played: bool) -> None:
    """Launches of a benchmark or of a tuner are trials. played: each runs once and takes SOME_MS; else it is measured as ever."""
    import triton.testing
    from triton.runtime.autotuner import Autotuner

    for name in ("do_bench", "do_bench_cudagraph"):
        setattr(triton.testing, name, _marked(getattr(triton.testing, name), recorder, played))
    try_config, prune = Autotuner._bench, Autotuner.prune_configs

    def tried(self: Any, *args: object, **kwargs: object) -> Any:
        if played and self.__dict__.get("compiled", 0) >= recorder.max_configs:
            return [math.inf] * 3
        with _trial(recorder):
            times = try_config(self, *args, **kwargs)
        self.compiled = self.__dict__.get("compiled", 0) + (times[0] < math.inf)  # one that can't be compiled doesn't count
        return times

    def pruned(self: Any, *args: object, **kwargs: object) -> list[object]:
        configs = list(prune(self, *args, **kwargs))
        recorder.configs(self.base_fn, len(configs), min(len(configs), recorder.max_configs))
        self.compiled = 0
        return configs

    Autotuner._bench = tried
    if played:
        Autotuner.prune_configs = pruned
        Autotuner.do_bench = property(lambda self: triton.testing.do_bench)
        Autotuner.check_disk_cache = lambda self, key, configs, benchmark: bool(benchmark())
