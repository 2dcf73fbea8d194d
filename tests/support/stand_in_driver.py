"""A simulated GPU driver: `kernel[grid](...)` runs up to the launcher on a machine without a GPU."""

import types
from typing import Any

from triton.backends.compiler import GPUTarget


class Tensor:
    """A dtype and an address, all that Triton's specialisation reads."""

    def __init__(self, dtype: str, address: int = 4096) -> None:
        self.dtype = _Name(dtype)
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class _Name:
    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"torch.{self.name}"

    __repr__ = __str__

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other)


class Driver:
    """Enough of a driver to specialise, load and 'launch'."""

    def __init__(self, capability: int) -> None:
        self.launched: list[str] = []
        launched = self.launched

        class Launcher:
            def __init__(self, src: Any, metadata: Any) -> None:
                self.name = metadata.name

            def __call__(self, *args: Any) -> None:
                launched.append(self.name)

        self.launcher_cls = Launcher
        self.capability = capability
        self.utils = types.SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=lambda name, binary, shared, device: ("module", ("function", len(binary)), 32, 0, 1024),
            unload_module=lambda module: None)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
