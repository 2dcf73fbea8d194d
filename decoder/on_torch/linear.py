"""Linears of the torch backend in the recipe's precision: y = x @ w.T (+ bias).

FP8: weights are e4m3 with one fp32 scale per output channel. Activations are two e4m3 terms (`e4m3x2`) with one scale per row, a
power of two: x = (hi + lo / 16) * scale. This is exact for every bf16 value down to 2^-13 of the row's largest, and within 2^-21
of the largest below. So activations lose nothing, and a different rounding of one value can't move another to the next e4m3
value. A tensor core multiplies hi and lo as two rows of its tile.

    y = bf16((hi @ w_q.T + lo @ w_q.T / 16) * scale * w_scale + bias)

Here hi + lo / 16 is one exact fp32 value, and the product runs in fp32. The split-K order of a GPU recipe and the tensor core's
narrow accumulator are not emulated. Each backend is row-invariant, and their last bits differ.
"""

from dataclasses import dataclass, replace

import torch

from ...schedules.recipe import Precision
from ..checkpoint.fp8 import scaled
from .ops import matmul, prepare, tree_sum

E4M3_MAX = 448.0
SCALES = 8  # candidates for a weight's scale, in equal ratios over an octave
LOW = 16.0  # factor of the second term: half a step of the largest e4m3 values, 16, becomes 256
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


def quantise_weights(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(w_q [N, K] in e4m3, scale [N] in fp32) with w ~ w_q * scale. w [N, K]: any float type.

    The scale is the one of amax / 448 * 2^(j/8), j = 0..7, with the least sum of squared errors over the row, in fp64; the first
    on ties; 1 for a row of zeros. The scale's place in an octave decides which weights are rounded coarsely. Scales beyond the
    octave repeat the pattern; smaller ones saturate.
    """
    wide = w.float()
    amax = wide.abs().amax(dim=-1, keepdim=True)
    # The divisor is a tensor: a GPU divides by a number through its reciprocal, and the last bit of a scale moves weights.
    first = torch.where(amax > 0, amax / torch.full_like(amax, E4M3_MAX), torch.ones_like(amax))
    scale, least = first, _squared_error(wide, first)
    for j in range(1, SCALES):
        candidate = first * 2 ** (j / SCALES)
        error = _squared_error(wide, candidate)
        better = error < least
        scale, least = torch.where(better, candidate, scale), torch.where(better, error, least)
    return _to_e4m3(wide / scale), scale[:, 0]


def _to_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _squared_error(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[N, 1] in fp64."""
    error = _to_e4m3(w / scale).double() * scale - w
    return tree_sum(error * error)


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hi, lo [rows, K] in e4m3, scale [rows, 1] in fp32) with x ~ (hi + lo / 16) * scale. x [rows, K]: bf16.

    scale = 2^(floor(log2 amax) - 7), from the bits of amax, so |x / scale| < 256 and nothing saturates; 2^-126 if amax is below
    2^-118, as in a row of zeros.
    """
    wide = x.float()
    exponent = (wide.abs().amax(dim=-1, keepdim=True).view(torch.int32) >> 23).clamp_(min=8)
    scale, inverse = ((exponent - 7) << 23).view(torch.float32), ((261 - exponent) << 23).view(torch.float32)
    scaled = wide * inverse
    hi = scaled.to(torch.float8_e4m3fn)
    return hi, ((scaled - hi.float()) * LOW).to(torch.float8_e4m3fn), scale


@dataclass(frozen=True)
class Linear:
    """One linear. w: from `prepare`, of [n, K]; bias [n] in `dtype`; w_scale [n] in fp32 for e4m3, else None. The bias is added
    in fp32, before the one rounding to `dtype`. On a CPU w keeps its precision, e4m3 in the two bytes of bf16."""

    w: torch.Tensor
    n: int
    bias: torch.Tensor | None
    w_scale: torch.Tensor | None
    dtype: torch.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, K] in the activation type to [rows, n] in `dtype`."""
        if self.w_scale is None:
            return matmul(x.to(self.dtype), self.w, self.n, self.bias)
        hi, lo, scale = split(x)
        y = matmul(hi.float() + lo.float() / LOW, self.w, self.n) * scale * self.w_scale
        return (y if self.bias is None else y + self.bias).to(self.dtype)


def make_linear(w: torch.Tensor, precision: Precision, bias: torch.Tensor | None = None,
                scale: torch.Tensor | None = None) -> Linear:
    """A projection in the recipe's precision. w [N, K] and bias [N]: any float type; scale [N] fp32: of an e4m3 w."""
    dtype = TORCH[precision.attention]
    bias = None if bias is None else bias.to(dtype)
    if precision.is_e4m3:
        w_q, scale = quantise_weights(w) if scale is None else (w, scale)
        return Linear(prepare(w_q.bfloat16(), torch.float32), w.shape[0], bias, scale, dtype)
    return Linear(prepare(scaled(w, scale).to(dtype), dtype), w.shape[0], bias, None, dtype)


def make_head(w: torch.Tensor, precision: Precision, drafter: bool = False) -> Linear:
    """The language-model head of w [V, H]: weights in its precision, logits in fp32, since bf16 logits tie more often. A
    drafter's head has the precision of the projections."""
    if drafter and precision.is_e4m3:
        return replace(make_linear(w, precision), dtype=torch.float32)
    return Linear(prepare(w.to(TORCH[precision.lm_head]), torch.float32), w.shape[0], None, None, torch.float32)
