"""A worker's imports, done before the fork: the compiler, never torch. Only the fork server imports this module."""

import atexit
import gc

from triton._C import libtriton
from triton.backends.nvidia import compiler as nvidia

from ...kernels import registry
from . import compile as compilation

# Imported objects stay: a worker's garbage collector skips them. A compilation makes some 100,000 objects; at the default
# threshold of 700, collection took 4% of its time.
gc.freeze()
gc.set_threshold(50_000, 20, 20)
# Unfrozen at the fork server's exit: Triton 3.9's bindings otherwise report the objects as leaked, on stderr.
atexit.register(gc.unfreeze)

__all__ = ["compilation", "libtriton", "nvidia", "registry"]
