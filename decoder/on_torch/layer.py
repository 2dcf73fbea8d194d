"""One decoder layer on the `torch` backend, for a model and for an EAGLE-3 drafter.

x += o(attention(rope(qkv(norm(x))))), then x += down(silu(gate(norm(x))) * up(norm(x))). Every operation is row-invariant (see
ops.py), so a row's bits don't depend on the rows beside it.
"""

from dataclasses import dataclass

import torch

from ...schedules.recipe import Precision
from ...shapes.model import ModelShape
from ..checkpoint.rope import rope_table
from ..checkpoint.weights import Tensors, pop_linear
from ..rows import Rows
from .cache import append, read
from .linear import TORCH, Linear, make_linear
from .ops import Attention, rms_norm, rotate, silu

MARGIN = 64  # positions in RoPE's table past a cache's capacity: SSD's branches reach past the last emitted token


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer. Norms [hidden_size]; linears from make_linear."""

    input_norm: torch.Tensor
    qkv: Linear
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    q_norm: torch.Tensor | None = None  # [head_dim], as k_norm; None if heads aren't normed before RoPE
    k_norm: torch.Tensor | None = None


class RopeTable:
    """Cosines and sines for the longest cache so far. A position's bits don't depend on the table's length."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.tables = rope_table(shape, 1, device)

    def reach(self, capacity: int) -> None:
        """Extends the table to a cache of `capacity` slots."""
        if capacity + MARGIN > len(self.tables[0]):
            self.tables = rope_table(self.shape, capacity + MARGIN, self.device)

    def at(self, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(cosines, sines) of the positions, [rows, head_dim / 2] each in the activation type."""
        index = torch.tensor(positions, device=self.device)
        cos, sin = self.tables
        return cos[index].to(self.dtype), sin[index].to(self.dtype)


def attend(layer_index: int, layer: Layer, normed: torch.Tensor, shape: ModelShape, rope: tuple[torch.Tensor, torch.Tensor],
           rows: Rows) -> torch.Tensor:
    """qkv and attention of one layer. Appends the new keys and values. normed [rows, K of qkv]; returns [rows, num_heads *
    head_dim] in qkv's type."""
    qkv = layer.qkv(normed)
    heads = qkv.reshape(qkv.shape[0], -1, shape.head_dim)
    q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, shape.rms_norm_eps), rms_norm(k, layer.k_norm, shape.rms_norm_eps)
    append(rows, layer_index, rotate(k, *rope), v)
    q = rotate(q, *rope)
    chunk = rows.cache.chunk
    out = []
    for group in rows.groups:
        part = q[group.rows]
        attention = Attention(part, shape.num_kv_heads, chunk)
        for index in range((group.first + part.shape[0] - 1) // chunk + 1):
            k_chunk, v_chunk = read(rows, layer_index, group, index)
            attention.add(index, k_chunk, v_chunk, group.first)
        out.append(attention.result())
    return (out[0] if len(out) == 1 else torch.cat(out)).to(qkv.dtype).reshape(qkv.shape[0], -1)


def run_layer(index: int, layer: Layer, x: torch.Tensor, normed: torch.Tensor, shape: ModelShape,
              rope: tuple[torch.Tensor, torch.Tensor], rows: Rows) -> torch.Tensor:
    """One layer: the residual x [rows, hidden_size] and qkv's input `normed` [rows, K of qkv] to the new residual."""
    x = x + layer.o(attend(index, layer, normed, shape, rope, rows))
    gate, up = layer.gate_up(rms_norm(x, layer.post_norm, shape.rms_norm_eps)).chunk(2, dim=-1)
    return x + layer.down(silu(gate) * up)


def make_layer(tensors: Tensors, prefix: str, precision: Precision, shape: ModelShape, device: torch.device) -> Layer:
    """The layer of the tensors whose names begin with `prefix`; consumes them. q, k, v become one linear; so do gate and up."""
    dtype = TORCH[precision.attention]

    def linear(*names: str, bias: bool = False) -> Linear:
        w, b, scale = (None if part is None else part.to(device) for part in pop_linear(tensors, prefix, names, bias))
        assert w is not None
        return make_linear(w, precision, b, scale)

    def vector(name: str) -> torch.Tensor:
        return tensors.pop(f"{prefix}{name}.weight").to(device, dtype)

    qkv = [f"self_attn.{name}_proj" for name in "qkv"]
    return Layer(
        input_norm=vector("input_layernorm"),
        qkv=linear(*qkv, bias=shape.qkv_bias),
        o=linear("self_attn.o_proj"),
        post_norm=vector("post_attention_layernorm"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
        q_norm=vector("self_attn.q_norm") if shape.qk_norm else None,
        k_norm=vector("self_attn.k_norm") if shape.qk_norm else None)
