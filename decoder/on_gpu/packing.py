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


def token_table(w: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An embedding w [V, H] in bf16, behind a row of zeros: a row of NaN logits drafts token -1, which must read memory that is
    there and finite. The rows after it are those of w."""
    if w.device == device and w.dtype == torch.bfloat16 and w.storage_offset() == w.shape[1]:
        return w  # made here
    table = torch.empty(w.shape[0] + 1, w.shape[1], dtype=torch.bfloat16, device=device)
    table[0] = 0
    table[1:] = w
    return table[1:]


def pack(w: torch.Tensor, precision: Precision, device: torch.device, bias: torch.Tensor | None = None) -> Packed:
    """w [N, K] and bias [N] in any float type."""
    bias = None if bias is None else bias.to(device, torch.bfloat16)
    if precision.is_e4m3:
        w_q, scale = quantise_weights(w.to(device))
        return Packed(w_q, scale.contiguous(), bias)
    return Packed(w.to(device, torch.bfloat16).contiguous(), None, bias)
