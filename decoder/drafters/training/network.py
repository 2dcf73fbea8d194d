"""The drafter's network for training: parameters under the published names, a draft's steps unrolled over whole sequences.

Row t of a sequence is entry t: the embedding of token t + 1 joined to the feature at t, at RoPE position t. It predicts token t +
2. At step j the feature of row t is the network's own output of row t - 1 at step j - 1. The row sees the keys of a draft of j
tokens: those of the target's features up to t - j, then those of its own steps (EAGLE-3's training-time test, Li et al. 2025,
§3.2).
"""

import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from ....shapes.model import ModelShape
from ...checkpoint.rope import rope_table

Keys = tuple[torch.Tensor, torch.Tensor]  # k and v, each [B, heads, T, head_dim]


class Norm(nn.Module):
    """RMSNorm in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Projections of 2H inputs, and grouped-query attention over the keys of all steps."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width, wide, narrow = 2 * shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.shape = shape
        self.q_proj = nn.Linear(width, wide, bias=False)
        self.k_proj = nn.Linear(width, narrow, bias=False)
        self.v_proj = nn.Linear(width, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, rope: Keys, chain: list[Keys]) -> torch.Tensor:
        """x [B, T, 2H] to [B, T, H]. chain: keys and values of earlier steps; this step's are appended."""
        batch, length, _ = x.shape
        q, k, v = (m(x).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
                   for m in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (rotate(q, *rope) / math.sqrt(self.shape.head_dim)).to(x.dtype), rotate(k, *rope).to(x.dtype)
        group = self.shape.num_heads // self.shape.num_kv_heads
        chain.append((k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        step = len(chain) - 1
        own = [tuple(part.roll(step - i, 2) for part in chain[i]) for i in range(1, step + 1)]  # row t: key of row t - (step - i)
        rows = torch.arange(length, device=x.device)
        hidden = rows[None, :] > rows[:, None] - step
        scores = (q @ chain[0][0].transpose(-1, -2)).float().masked_fill(hidden, -torch.inf)
        near = [(q * key).sum(-1, keepdim=True).float() for key, _ in own]
        weights = torch.softmax(torch.cat([scores, *near], -1), -1).to(x.dtype)
        out = weights[..., :length] @ chain[0][1]
        for place, (_, value) in enumerate(own):
            out = out + weights[..., length + place, None] * value
        result: torch.Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return result


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Midlayer(nn.Module):
    """The drafter's one layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.self_attn, self.mlp = Attention(shape), Mlp(shape)
        self.hidden_norm, self.input_layernorm = Norm(hidden, eps), Norm(hidden, eps)
        self.post_attention_layernorm = Norm(hidden, eps)

    def forward(self, embedded: torch.Tensor, feature: torch.Tensor, rope: Keys, chain: list[Keys]) -> torch.Tensor:
        joined = torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], -1).to(embedded.dtype)
        x = feature + self.self_attn(joined, rope, chain)
        return x + self.mlp(self.post_attention_layernorm(x).to(embedded.dtype))


class DrafterNetwork(nn.Module):
    """The drafter. shape: from `drafter_shape`; ids [V_d]: the target id of each draft id."""

    ids: torch.Tensor
    cos: torch.Tensor  # [positions, head_dim / 2]
    sin: torch.Tensor

    def __init__(self, shape: ModelShape, ids: torch.Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = Midlayer(shape)
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, len(ids), bias=False)
        cos, sin = rope_table(shape, shape.max_position, torch.device("cpu"))
        for name, buffer in (("ids", ids), ("cos", cos), ("sin", sin)):
            self.register_buffer(name, buffer, persistent=False)

    def unroll(self, features: torch.Tensor, embedded: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
        """Yields the recurrent feature of every row, [B, T, H] in fp32, for each of `steps` drafted tokens.

        features [B, T, 3H], embedded [B, T, H]: the target's, of the sequence.
        """
        rope = self.cos[:features.shape[1]], self.sin[:features.shape[1]]
        following = embedded.roll(-1, 1)
        feature, chain = self.fc(features).float(), list[Keys]()
        for step in range(steps):
            feature = self.midlayer(following, feature.roll(1, 1) if step else feature, rope, chain)
            yield feature

    def logits(self, feature: torch.Tensor) -> torch.Tensor:
        """The logits [..., V_d] of recurrent features [..., H]."""
        out: torch.Tensor = self.lm_head(self.norm(feature).to(self.lm_head.weight.dtype))
        return out


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs (i, i + head_dim / 2) of x [B, heads, T, head_dim] turned by the position's angles, in fp32."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
