"""What a worker needs imported before it is forked: the compiler, but never torch. Imported by the fork server alone."""

import os

# The checkout's path must not reach the cubin: with line information, equal kernels in two folders differ.
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

from . import compile as compile
from ..kernels import registry as registry
from triton._C import libtriton as libtriton
from triton.backends.nvidia import compiler as nvidia
