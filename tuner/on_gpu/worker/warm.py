"""Imports of a GPU worker, done before the fork. CUDA is initialised in each worker."""

import torch

from ...offline import warm
from . import checks, timing

__all__ = ["checks", "timing", "torch", "warm"]
