"""Row-invariant operations in torch: row r of every result depends on row r of the input alone, bit for bit.

- Matrix products on a CPU are sums in order of k, rounded at every step (cpu.py). On a GPU the library computes them, in blocks
of
  one shape (gpu.py).
- Everything else consists of IEEE operations on single elements (+, -, *, /, sqrt, comparisons), whose bits depend on the
operands
  alone. Sums are halving trees over the row. `exp` is a polynomial: torch.exp takes another code path in the tail of a vector
  than in its body, and the tail's place depends on rows and threads.
"""

import functools
from types import ModuleType

import torch

from . import gpu


@functools.cache
def cpu() -> ModuleType:
    """The module cpu.py, imported on first use: it imports numba, which a GPU doesn't need."""
    from . import cpu

    return cpu


def prepare(w: torch.Tensor, operand: torch.dtype) -> torch.Tensor:
    """w [N, K] in fp32 or bf16 in the layout of `matmul` on w's device, for rows of type `operand`. Called once, at load."""
    if w.device.type != "cpu":
        return gpu.pad_columns(w.to(operand))
    return cpu().pack(w)


def matmul(x: torch.Tensor, w: torch.Tensor, n: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ w.T + bias of x [rows, K] in fp32 or bf16, w from `prepare` of [n, K] and bias [n]: [rows, n] in x's type. Sums are
    fp32; the bias is added before the one rounding to x's type."""
    if x.device.type != "cpu":
        return gpu.linear(x, w, n, bias)
    y = cpu().linear(x.float().contiguous(), w)[:, :n]
    return (y if bias is None else y + bias).to(x.dtype)


def batched(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w per batch of x [batches, rows, K] in fp32 and w [batches, K, n] in fp32 or bf16, contiguous: [batches, rows, n] in
    fp32."""
    if x.device.type != "cpu":
        return gpu.batched(x, w.float())
    return cpu().batched(x, w)


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x for x <= 88 in fp32, within 2 ulp; 0 below -87, and e^0 is exactly 1."""
    y: torch.Tensor = cpu().exp(x) if x.device.type == "cpu" else gpu.exp(x)
    return y


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last axis, [..., n] to [..., 1], by halving: the same additions for every row."""
    total: torch.Tensor = cpu().tree_sum(x) if x.device.type == "cpu" else gpu.tree_sum(x)
    return total


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """The square root in fp32, rounded once."""
    y: torch.Tensor = cpu().sqrt(x) if x.device.type == "cpu" else torch.sqrt(x)
    return y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight of x [..., H], in fp32, rounded to x's type before the weight."""
    wide = x.float()
    scale = 1.0 / sqrt(tree_sum(wide * wide) / x.shape[-1] + eps)
    return (wide * scale).to(x.dtype) * weight


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + e^-x), in fp32, rounded to x's type."""
    wide = x.float()
    small = exp(-wide.abs())
    return (wide * (torch.where(wide >= 0, torch.ones_like(small), small) / (1.0 + small))).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of x [rows, heads, head_dim] by cos and sin [rows, head_dim / 2], all in one type. Pair i is (i, i + head_dim / 2)."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The index of the largest value per row, the lowest on ties: [rows, n] to [rows]; n for a row with NaN."""
    best = logits.amax(dim=-1, keepdim=True)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == best, ids, logits.shape[-1]).amin(dim=-1)


class Attention:
    """softmax(q k^T / sqrt(head_dim)) v over chunks of keys, merged in chunk order (Dao et al. 2022, online softmax).

    A chunk that a row doesn't see doesn't change the bits of the row's sums: its maximum is -inf, its weights are 0.
    """

    def __init__(self, q: torch.Tensor, num_kv_heads: int, chunk: int) -> None:
        """q [rows, num_heads, head_dim]; chunk: keys per chunk."""
        self.rows, self.num_heads, self.head_dim = q.shape
        self.chunk, self.num_kv_heads = chunk, num_kv_heads
        by_head = q.float().view(self.rows, num_kv_heads, -1, self.head_dim).permute(1, 2, 0, 3)
        self.q = by_head.reshape(num_kv_heads, -1, self.head_dim).contiguous()  # [kv_heads, group * rows, head_dim]
        self.scale = self.head_dim ** -0.5
        self.state: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def _product(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x [kv_heads, group * rows, k] @ w [kv_heads, k, n]: [kv_heads, group, rows, n]."""
        return batched(x, w).view(self.num_kv_heads, -1, self.rows, w.shape[2])

    def _weights(self, scores: torch.Tensor, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(maximum [.., rows, 1], e^(score - maximum) [.., rows, chunk]) of scores [.., rows, chunk]; visible [rows, chunk]."""
        scores = scores.mul_(self.scale).masked_fill_(~visible, -torch.inf)
        top = scores.amax(dim=-1, keepdim=True)
        return top, exp(scores - torch.where(torch.isinf(top), torch.zeros_like(top), top))

    def add(self, index: int, k: torch.Tensor, v: torch.Tensor, first: int) -> None:
        """Adds chunk `index`: k [kv_heads, head_dim, chunk], v [kv_heads, chunk, head_dim]. Row i sees keys 0..first + i."""
        slots = torch.arange(index * self.chunk, (index + 1) * self.chunk, device=k.device)
        visible = slots[None, :] <= torch.arange(first, first + self.rows, device=k.device)[:, None]
        top, weights = self._weights(self._product(self.q, k), visible)
        total = tree_sum(weights)
        part = self._product(weights.view(self.num_kv_heads, -1, self.chunk), v) + 0.0  # + 0.0: -0 and 0 are one value
        if self.state is not None:
            top, total, part = merge(self.state, (top, total, part))
        self.state = (top, total, part)

    def result(self) -> torch.Tensor:
        """The output [rows, num_heads, head_dim] in fp32."""
        assert self.state is not None
        _, total, part = self.state
        return (part / total).permute(2, 0, 1, 3).reshape(self.rows, self.num_heads, self.head_dim)


def merge(old: tuple[torch.Tensor, ...], new: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merges two partial softmaxes (maximum, sum, weighted values). The maximum of `old` is finite."""
    top = torch.maximum(old[0], new[0])
    keep, add = exp(old[0] - top), exp(new[0] - top)
    return top, old[1] * keep + new[1] * add, old[2] * keep + new[2] * add
