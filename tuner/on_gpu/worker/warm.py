"""What a worker on the GPU needs imported before it is forked. CUDA itself is begun in each worker."""

import torch

from ...offline import warm
from . import measure

__all__ = ["measure", "torch", "warm"]
