"""Linears of the torch backend in the recipe's precision: y = x @ w.T (+ bias).

FP8 (e4m3): weights have one scale per output channel, activations one per row, each amax / 448, and 1 where a row is
all zero. y = (x_q @ w_q.T) * x_scale * w_scale, the product of exact e4m3 values in fp32 (a bf16 product would round
before the scales), then rounded to bf16, then the bias. The split-K order of a GPU recipe and the tensor core's
narrow accumulator are not emulated: each backend is row-invariant on its own, and their last bits differ.
"""

from dataclasses import dataclass

import torch

from .ops import matmul, pad_columns
from .precision import Precision

E4M3_MAX = 448.0
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(x_q [rows, K] in e4m3, scale [rows, 1] in fp32) with x ~ x_q * scale."""
    wide = x.float()
    amax = wide.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(amax > 0, amax / E4M3_MAX, torch.ones_like(amax))
    return (wide / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


@dataclass(frozen=True)
class Linear:
    """w [N padded, K] ready for `matmul`; for e4m3 its values in fp32, with w_scale [N] beside it."""

    w: torch.Tensor
    n: int
    bias: torch.Tensor | None
    w_scale: torch.Tensor | None
    dtype: torch.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, K] in the activation type; [rows, N] in the same type."""
        if self.w_scale is None:
            y = matmul(x.to(self.w.dtype), self.w, self.n)
        else:
            x_q, x_scale = quantise(x)
            y = (matmul(x_q.float(), self.w, self.n) * x_scale * self.w_scale).to(self.dtype)
        return y if self.bias is None else y + self.bias


def make_linear(w: torch.Tensor, precision: Precision, bias: torch.Tensor | None = None) -> Linear:
    """A projection in the recipe's precision from w [N, K] and bias [N] in any float type."""
    dtype = TORCH[precision.attention]
    bias = None if bias is None else bias.to(dtype)
    if precision.is_e4m3:
        w_q, scale = quantise(w)
        return Linear(pad_columns(w_q.float()), w.shape[0], bias, scale[:, 0], dtype)
    return Linear(pad_columns(w.to(dtype)), w.shape[0], bias, None, dtype)


def make_head(w: torch.Tensor, precision: Precision) -> Linear:
    """The language-model head: weights rounded to its precision, logits in fp32 (bf16 logits tie where fp32 ones
    don't)."""
    rounded = w.to(TORCH[precision.lm_head]).float()
    return Linear(pad_columns(rounded), w.shape[0], None, None, torch.float32)
