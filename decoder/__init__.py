"""The decoder: AR, SD and SSD decoding of one request, byte-identical. `from tune_kernels.decoder import Decoder`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Decoder as Decoder
    from .request.stream import Result as Result
    from .request.stream import Stream as Stream

__all__ = ["Decoder", "Result", "Stream"]


def __getattr__(name: str) -> object:
    """Loads the engine on first use: the command line imports this package without torch."""
    if name == "Decoder":
        from .engine import Decoder

        return Decoder
    if name in __all__:
        from .request import stream

        return getattr(stream, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
