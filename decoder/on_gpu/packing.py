"""Weights as the GPU kernels read them: e4m3 with a scale per output channel, or bf16, row-major."""

from dataclasses import dataclass

import torch

from ...kernels.layout import Weights
from ...schedules.recipe import Precision
from ..on_torch.linear import quantise_weights


@dataclass(frozen=True)
class Packed(Weights):
    """One linear on the device."""

    @property
    def nbytes(self) -> int:
        """Bytes that a pass reads."""
        return sum(t.numel() * t.element_size() for t in (self.w, self.scale, self.bias) if t is not None)


def pack(w: torch.Tensor, precision: Precision, device: torch.device, bias: torch.Tensor | None = None) -> Packed:
    """w [N, K] and bias [N] in any float type."""
    bias = None if bias is None else bias.to(device, torch.bfloat16)
    if precision.is_e4m3:
        w_q, scale = quantise_weights(w.to(device))
        return Packed(w_q, scale.contiguous(), bias)
    return Packed(w.to(device, torch.bfloat16).contiguous(), None, bias)
