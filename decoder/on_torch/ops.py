"""Row-invariant operations on torch: row r of every result depends on row r of the input alone, bit for bit.

How, by kind:
- matrix products run in blocks of exactly 8 rows, zero-padded, against weights whose N is padded to a multiple of
  16: the
  library sees one shape, whatever the number of rows. (`F.linear`, `bmm`, `mv` and SDPA on the true shapes changed
  bits with the number of rows.)
- everything else is made of single IEEE operations on elements (+, -, *, /, sqrt, comparisons), whose bits depend on
  nothing but the operands. Sums are halving trees over the row. `exp` is a polynomial: torch.exp takes another code
  path in the tail of a vector than in its body, and where the tail lies depends on rows and threads.

Left out: fused or threaded shortcuts. Prefill is this same path, so its bits are those of decoding.
"""

import math

import torch
import torch.nn.functional as F

ROW_BLOCK = 8  # rows one matrix product is padded to
COLUMN_BLOCK = 16  # multiple that N of a weight is padded to

LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # ln 2 in two parts; n * LN2_HIGH is exact for |n| < 2^15
EXP_LOWEST = -87.0  # below, exp gives 0: 1.6e-38 and less would leave the normal range
EXP_TERMS = [1.0 / math.factorial(k) for k in range(7, -1, -1)]  # Taylor, |r| <= ln2 / 2: error 5e-9


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """x [rows, K] with zero rows up to a multiple of ROW_BLOCK."""
    padded = x.new_zeros(-(-x.shape[0] // ROW_BLOCK) * ROW_BLOCK, *x.shape[1:])
    padded[:x.shape[0]] = x
    return padded


def pad_columns(w: torch.Tensor) -> torch.Tensor:
    """w [N, K] or [N] with zeros up to a multiple of COLUMN_BLOCK rows. Once, at load."""
    extra = -w.shape[0] % COLUMN_BLOCK
    return torch.cat([w, w.new_zeros(extra, *w.shape[1:])]) if extra else w.contiguous()


def matmul(x: torch.Tensor, w: torch.Tensor, n: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ w.T + bias: x [rows, K], w [N padded, K] and bias [N padded] as `pad_columns` made them, of one type; [rows,
    n]. The library adds the bias before it rounds to bf16."""
    rows = x.shape[0]
    blocks = pad_rows(x).split(ROW_BLOCK)
    out = [F.linear(block, w, bias) for block in blocks]
    return (out[0] if len(out) == 1 else torch.cat(out))[:rows, :n]


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


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight: x [rows, H], computed in fp32, rounded to x's type before the weight."""
    wide = x.float()
    scale = 1.0 / torch.sqrt(tree_sum(wide * wide) / x.shape[-1] + eps)
    return (wide * scale).to(x.dtype) * weight


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + e^-x), in fp32, rounded to x's type."""
    wide = x.float()
    small = exp(-wide.abs())
    return (wide * (torch.where(wide >= 0, torch.ones_like(small), small) / (1.0 + small))).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE: x [rows, heads, head_dim], cos and sin [rows, head_dim / 2] in x's type; pair i is (i, i + head_dim /
    2)."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The index of the largest value of each row, the lowest where several tie. [rows, n] to [rows]; n where a row
    has NaN."""
    best = logits.amax(dim=-1, keepdim=True)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == best, ids, logits.shape[-1]).amin(dim=-1)


class Attention:
    """softmax(q k^T / sqrt(head_dim)) v over chunks of keys, merged in chunk order (Dao et al. 2022, online softmax).

    A chunk that a row doesn't reach leaves that row's sums bit for bit alone: its maximum is -inf, its weights are 0.
    """

    def __init__(self, q: torch.Tensor, num_kv_heads: int, chunk: int) -> None:
        """q [rows, num_heads, head_dim]; chunk in keys."""
        self.rows, self.num_heads, self.head_dim = q.shape
        self.chunk, self.group = chunk, self.num_heads // num_kv_heads
        padded = pad_rows(q.float())
        by_group = padded.view(-1, num_kv_heads, self.group, self.head_dim).permute(2, 1, 0, 3)
        self.blocks = [block.contiguous() for block in by_group.split(ROW_BLOCK, dim=2)]  # [group, kv_heads, 8, head_dim]
        self.scale = self.head_dim ** -0.5
        self.state: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def _products(self, left: list[torch.Tensor], right: torch.Tensor) -> torch.Tensor:
        """left: per row block [group, kv_heads, 8, k]; right [kv_heads, k, n]; [group, kv_heads, rows, n]."""
        out = [torch.stack([torch.bmm(part, right) for part in block]) for block in left]
        return (out[0] if len(out) == 1 else torch.cat(out, dim=2))[:, :, :self.rows]

    def _weights(self, scores: torch.Tensor, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(maximum [.., rows, 1], e^(score - maximum) [.., rows, chunk]); visible [rows, chunk]."""
        scores = scores.mul_(self.scale).masked_fill_(~visible, -torch.inf)
        top = scores.amax(dim=-1, keepdim=True)
        return top, exp(scores - torch.where(torch.isinf(top), torch.zeros_like(top), top))

    def add(self, index: int, k: torch.Tensor, v: torch.Tensor, first: int) -> None:
        """Takes in chunk `index`: k [kv_heads, head_dim, chunk], v [kv_heads, chunk, head_dim]; row i sees keys
        0..first+i."""
        slots = torch.arange(index * self.chunk, (index + 1) * self.chunk, device=k.device)
        visible = slots[None, :] <= torch.arange(first, first + self.rows, device=k.device)[:, None]
        top, weights = self._weights(self._products(self.blocks, k.float()), visible)
        total = tree_sum(weights)
        padded = F.pad(weights, (0, 0, 0, -self.rows % ROW_BLOCK))
        left = [block.contiguous() for block in padded.split(ROW_BLOCK, dim=2)]
        part = self._products(left, v.float()) + 0.0  # + 0.0: -0 and 0 are one value
        if self.state is not None:
            top, total, part = merge(self.state, (top, total, part))
        self.state = (top, total, part)

    def result(self) -> torch.Tensor:
        """[rows, num_heads, head_dim] in fp32."""
        assert self.state is not None
        _, total, part = self.state
        return (part / total).permute(2, 1, 0, 3).reshape(self.rows, self.num_heads, self.head_dim)


def merge(old: tuple[torch.Tensor, ...], new: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two partial softmaxes (maximum, sum, weighted values) as one. The old one's maximum is finite."""
    top = torch.maximum(old[0], new[0])
    keep, add = exp(old[0] - top), exp(new[0] - top)
    return top, old[1] * keep + new[1] * add, old[2] * keep + new[2] * add
