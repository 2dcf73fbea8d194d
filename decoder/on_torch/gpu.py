"""The torch backend's operations on a GPU. cpu.py has those on a CPU.

The library computes matrix products. Every call has 8 rows, zero-padded, and N padded to a multiple of 16, so the library sees
one shape for any number of rows. Equal rows of one shape then have equal bits. This was observed; the library doesn't promise it.
"""

import math

import torch
import torch.nn.functional as F

ROW_BLOCK = 8  # rows of one product
COLUMN_BLOCK = 16  # N of a weight is padded to a multiple of it
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # ln 2 in two parts; n * LN2_HIGH is exact for |n| < 2^15
EXP_LOWEST = -87.0  # below, exp is 0: values under 1.6e-38 would leave the normal range
EXP_TERMS = [1.0 / math.factorial(k) for k in range(7, -1, -1)]  # Taylor, |r| <= ln2 / 2: error 5e-9


def pad_columns(w: torch.Tensor) -> torch.Tensor:
    """w [N, K] with zero rows up to a multiple of COLUMN_BLOCK. Called once, at load."""
    return F.pad(w, (0, 0, 0, -w.shape[0] % COLUMN_BLOCK)).contiguous()


def _blocks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """x [..., rows, K] in blocks [..., ROW_BLOCK, K]."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % ROW_BLOCK)).split(ROW_BLOCK, dim=-2)


def linear(x: torch.Tensor, w: torch.Tensor, n: int, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ w.T + bias of x [rows, K], w from `pad_columns` and bias [n], all of one type: [rows, n]. The library adds the bias
    before it rounds to bf16."""
    padded = None if bias is None else F.pad(bias, (0, w.shape[0] - n))
    return torch.cat([F.linear(block, w, padded) for block in _blocks(x)])[:x.shape[0], :n]


def batched(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w per batch of x [batches, rows, K] and w [batches, K, n]: [batches, rows, n]."""
    return torch.cat([torch.bmm(block.contiguous(), w) for block in _blocks(x)], dim=1)[:, :x.shape[1]]


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x for x <= 88 in fp32, within 2 ulp; 0 below -87, and e^0 is exactly 1."""
    inside = x.clamp(min=EXP_LOWEST)
    n = (inside * LOG2_E).round_()
    r = inside.sub_(n * LN2_HIGH).sub_(n * LN2_LOW)
    y = torch.full_like(r, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        y.mul_(r).add_(term)
    power = n.to(torch.int32).add_(127).bitwise_left_shift_(23).view(torch.float32)
    return y.mul_(power).masked_fill_(x < EXP_LOWEST, 0.0)


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last axis, [..., n] to [..., 1], by halving: the same additions for every row."""
    n = x.shape[-1]
    size = 1 << (n - 1).bit_length()
    if size != n:
        x = F.pad(x, (0, size - n))
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x
