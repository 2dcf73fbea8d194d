"""What a worker on the GPU needs imported before it is forked. CUDA itself is begun in each worker."""

import torch

from ...offline import warm
from . import checks, timing

__all__ = ["checks", "timing", "torch", "warm"]
