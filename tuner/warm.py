"""What a worker needs imported before it is forked: the compiler, but never torch. Imported by the fork server alone."""

from triton._C import libtriton
from triton.backends.nvidia import compiler as nvidia

from ..kernels import registry
from . import compile as compilation

__all__ = ["compilation", "libtriton", "nvidia", "registry"]
