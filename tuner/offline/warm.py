"""A worker's imports, made before it is forked: the compiler, never torch. Imported by the fork server alone."""

import atexit
import gc

from triton._C import libtriton
from triton.backends.nvidia import compiler as nvidia

from ...kernels import registry
from . import compile as compilation

# Imported objects stay: the garbage collector of a worker skips them. A compilation makes some 100,000 objects; at the
# usual threshold of 700 their collection took 4% of its time.
gc.freeze()
gc.set_threshold(50_000, 20, 20)
# At its own end the fork server frees what it froze: Triton 3.9's bindings otherwise report it as leaked, on stderr (F37).
atexit.register(gc.unfreeze)

__all__ = ["compilation", "libtriton", "nvidia", "registry"]
