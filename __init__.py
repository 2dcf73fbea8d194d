"""Compile, check, time and promote Triton kernels; an exact LLM decoder on what was promoted.

    from tune_kernels import Kernel, Scalar, Stride, Tensor, tuned

Names are imported when they are asked for: the command line and offline work load no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .kernels.arguments import KernelError, Scalar, Stride, Tensor
    from .kernels.kernel import Kernel
    from .kernels.tuned import tuned

__all__ = ["Kernel", "KernelError", "Scalar", "Stride", "Tensor", "tuned"]

_PLACES = {"Kernel": ".kernels.kernel", "tuned": ".kernels.tuned",
           **dict.fromkeys(("KernelError", "Scalar", "Stride", "Tensor"), ".kernels.arguments")}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name], __name__), name)
