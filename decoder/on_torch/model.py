"""A Qwen2 or Llama decoder on the `torch` backend, in the recipe's precision.

One layer: x += o(attention(rope(qkv(norm(x))))), then x += down(silu(gate(norm(x))) * up(norm(x))). Every operation
is row-invariant (see ops.py), so a row's bits don't depend on the rows beside it, and prefill is the decode path in
more rows.
"""

from dataclasses import dataclass

import torch

from ...schedules.recipe import Precision, Recipe
from ...shapes.model import ModelShape
from ..backend import BackendNotes, Hidden, RequestState, RoundPlan
from ..checkpoint.loader import Checkpoint
from ..checkpoint.rope import rope_table
from ..checkpoint.weights import EMBEDDING, FINAL_NORM, HEAD, Tensors, take
from ..errors import NumericsError
from ..selection import Options
from .cache import KVCache, Rows
from .linear import TORCH, Linear, make_head, make_linear
from .ops import Attention, argmax, rms_norm, rotate, silu

PREFILL_ROWS = 128  # rows of one pass over a prompt; the bits don't depend on it
AHEAD = 64  # positions past max_position for which RoPE is tabled: SSD branches look ahead of what is ever emitted


@dataclass(frozen=True)
class Layer:
    """One decoder layer: norms [hidden_size], linears as make_linear made them."""

    input_norm: torch.Tensor
    qkv: Linear
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class RopeTable:
    """Cosines and sines of every position a model knows."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.cos, self.sin = rope_table(shape, shape.max_position + AHEAD, device)

    def at(self, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Each [rows, head_dim / 2] in the activation type."""
        index = torch.tensor(positions, device=self.device)
        return self.cos[index].to(self.dtype), self.sin[index].to(self.dtype)


def attend(layer_index: int, qkv: torch.Tensor, shape: ModelShape, rope: tuple[torch.Tensor, torch.Tensor],
           rows: Rows) -> torch.Tensor:
    """Attention of one layer over the keys that `rows` gives: qkv [rows, (num_heads + 2 num_kv_heads) * head_dim];
    appends the new keys and values; [rows, num_heads * head_dim] in qkv's type."""
    heads = qkv.reshape(qkv.shape[0], -1, shape.head_dim)
    q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    rows.append(layer_index, rotate(k, *rope), v)
    q = rotate(q, *rope)
    chunk = rows.cache.chunk
    out = []
    for group in rows.groups:
        part = q[group.rows]
        attention = Attention(part, shape.num_kv_heads, chunk)
        for index in range((group.first + part.shape[0] - 1) // chunk + 1):
            k_chunk, v_chunk = rows.read(layer_index, group, index)
            attention.add(index, k_chunk, v_chunk, group.first)
        out.append(attention.result())
    return (out[0] if len(out) == 1 else torch.cat(out)).to(qkv.dtype).reshape(qkv.shape[0], -1)


def run_layer(index: int, layer: Layer, x: torch.Tensor, normed: torch.Tensor, shape: ModelShape,
              rope: tuple[torch.Tensor, torch.Tensor], rows: Rows) -> torch.Tensor:
    """x [rows, hidden_size] through one layer; `normed` is what its qkv reads."""
    x = x + layer.o(attend(index, layer.qkv(normed), shape, rope, rows))
    gate, up = layer.gate_up(rms_norm(x, layer.post_norm, shape.rms_norm_eps)).chunk(2, dim=-1)
    return x + layer.down(silu(gate) * up)


class TorchModel:
    """See backend.Model."""

    def __init__(self, shape: ModelShape, tensors: Tensors, recipe: Recipe, device: torch.device) -> None:
        """Takes the tensors out of the dictionary as it goes, so that they are freed."""
        self.shape, self.device, self.recipe = shape, device, recipe
        self.precision = recipe.precision
        self.dtype = TORCH[self.precision.attention]
        self.notes = BackendNotes("torch", str(device))
        self.embedding = tensors.pop(EMBEDDING).to(device, self.dtype)
        head = self.embedding if shape.tie_embeddings else tensors.pop(HEAD).to(device)
        self.head = make_head(head, self.precision)
        self.final_norm = tensors.pop(FINAL_NORM).to(device, self.dtype)
        self.layers = [make_layer(tensors, f"model.layers.{i}.", self.precision, shape.qkv_bias, device)
                       for i in range(shape.num_layers)]
        self.rope = RopeTable(shape, self.dtype, device)
        self.vocab_limit = shape.vocab_size
        self.max_rows = recipe.row_tile
        self.prefill_rows = PREFILL_ROWS
        self.prefill_is_decode = True
        self.has_device_rounds, self.warm_up_repeats = False, int(device.type == "cuda")

    def new_cache(self, capacity: int) -> KVCache:
        """A cache of `capacity` slots in the recipe's precision and chunk."""
        return KVCache(self.shape, capacity, self.recipe.kv_chunk, TORCH[self.precision.kv_cache], self.device)

    @torch.inference_mode()
    def forward(self, tokens: list[int], rows: Rows, layers: tuple[int, ...] = ()) -> Hidden:
        """See backend.Model.forward."""
        x = self.embedding[torch.tensor(tokens, device=self.device)]
        rope = self.rope.at(rows.positions)
        kept = []
        for index, layer in enumerate(self.layers):
            x = run_layer(index, layer, x, rms_norm(x, layer.input_norm, self.shape.rms_norm_eps), self.shape, rope, rows)
            if index in layers:
                kept.append(x)
        rows.finish()
        final = rms_norm(x, self.final_norm, self.shape.rms_norm_eps)
        return Hidden(final, torch.cat(kept, dim=-1) if kept else None)

    def prefill(self, tokens: list[int], rows: Rows, layers: tuple[int, ...] = ()) -> Hidden:
        """See backend.Model.prefill."""
        return self.forward(tokens, rows, layers)

    @torch.inference_mode()
    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """[rows, vocab_size] in fp32; -inf at ids beyond the tokenizer's."""
        logits = self.head(final.float())
        if self.vocab_limit < self.shape.vocab_size:
            logits = logits.clone()
            logits[:, self.vocab_limit:] = -torch.inf
        return logits

    def greedy(self, final: torch.Tensor) -> list[int]:
        """See backend.Model.greedy. Raises NumericsError where a row's logits hold NaN."""
        winners: list[int] = argmax(self.logits(final)).tolist()
        if max(winners) >= self.shape.vocab_size:
            raise NumericsError("the model's logits hold NaN", expected="finite logits",
                                action="check the weights; try the fp32 recipe")
        return winners

    def device_rounds(self, request: RequestState, cache: KVCache, plan: RoundPlan) -> None:
        """None: every round is driven from Python."""

    def project(self, index: int, kernel: str, x: torch.Tensor) -> torch.Tensor:
        """See backend.Model.project."""
        linear: Linear = getattr(self.layers[index], kernel)
        return linear(x.to(self.device, linear.dtype))

    def limit_vocabulary(self, size: int) -> None:
        """See backend.Model.limit_vocabulary."""
        self.vocab_limit = min(size, self.shape.vocab_size)


def make_layer(tensors: Tensors, prefix: str, precision: Precision, qkv_bias: bool, device: torch.device) -> Layer:
    """A layer out of the tensors whose names begin with `prefix`; q, k, v and gate, up become one linear each."""
    dtype = TORCH[precision.attention]

    def linear(*names: str, bias: bool = False) -> Linear:
        w = take(tensors, [f"{prefix}{name}.weight" for name in names]).to(device)
        b = take(tensors, [f"{prefix}{name}.bias" for name in names]).to(device) if bias else None
        return make_linear(w, precision, b)

    qkv = [f"self_attn.{name}_proj" for name in "qkv"]
    return Layer(
        input_norm=tensors.pop(f"{prefix}input_layernorm.weight").to(device, dtype),
        qkv=linear(*qkv, bias=qkv_bias),
        o=linear("self_attn.o_proj"),
        post_norm=tensors.pop(f"{prefix}post_attention_layernorm.weight").to(device, dtype),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"))


def load_torch_model(checkpoint: Checkpoint, recipe: Recipe, device: torch.device, options: Options) -> TorchModel:
    """The checkpoint on this backend; its tensors are consumed. It has no schedules, so the options mean nothing to it."""
    model = TorchModel(checkpoint.config.shape, checkpoint.tensors, recipe, device)
    assert not checkpoint.tensors, f"unused: {list(checkpoint.tensors)}"
    return model


