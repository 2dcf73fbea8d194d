"""Imports of a worker on the GPU, made before it is forked. CUDA itself is begun in each worker."""

import torch

from ...offline import warm
from . import checks, timing

__all__ = ["checks", "timing", "torch", "warm"]
