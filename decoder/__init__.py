"""The decoder: AR, SD and SSD decoding of one request, byte-identical. `from tune_kernels.decoder import Decoder`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Decoder as Decoder
    from .engine import Result as Result

__all__ = ["Decoder", "Result"]


def __getattr__(name: str) -> Any:
    """Loads the engine on first use, so that the command line imports this package without importing torch."""
    if name in __all__:
        from . import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
