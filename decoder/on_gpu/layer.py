"""One decoder layer as launches of the project's kernels, in two phases: `Decode`, up to a row tile of rows through the tuned
kernels, and `Prefill`, many rows through kernels/prefill.py. Both read the same weights and write the same cache.

What one launch leaves, the next one finishes: partials of a linear are summed by the norm, or by RoPE and append, after it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels.activation import quantise, segments, swiglu
from ...kernels.attention import attention, max_rows
from ...kernels.fixed import FIXED
from ...kernels.layout import Activation
from ...kernels.linear import interleave, linear
from ...kernels.merge import merge, parts
from ...kernels.norm import Residual, norm
from ...kernels.prefill import prefill_attention, prefill_linear
from ...kernels.rope import rope_append
from ...schedules.recipe import Numerics, Precision, Recipe
from ...schedules.schedule import LinearSchedule, StepSchedules
from ...shapes.model import AttentionShape, MergeShape, ModelShape
from ..checkpoint.weights import Tensors, take
from ..errors import LoadError
from .cache import DeviceCache
from .packing import Packed, pack
from .workspace import Workspace

Launched = tuple[str, Callable[[], object]]  # the kind of kernel, and its launch


def launch_all(launches: Iterable[Launched]) -> None:
    """In order."""
    for _, launch in launches:
        launch()


def summed(partials: torch.Tensor) -> torch.Tensor:
    """Partials [split_k, rows, N] added in index order, as the kernels add them: [rows, N] fp32."""
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return total


def decode_linear(x: torch.Tensor, scale: torch.Tensor | None, weights: Packed, rows: int, schedule: LinearSchedule,
                  numerics: Numerics, **more: Any) -> torch.Tensor:
    """The first rows of x, terms [2, >= rows, K] e4m3 with scale [>= rows], or [1, >= rows, K] bf16 without, through the decode
    linear; more: as kernels/linear.py has it."""
    return linear(Activation(x, scale).first(rows), weights, schedule=schedule, numerics=numerics, **more)


@dataclass(frozen=True)
class PackedLayer:
    """One layer's weights; norms [H] bf16."""

    input_norm: torch.Tensor
    qkv: Packed
    o: Packed
    post_norm: torch.Tensor
    gate_up: Packed
    down: Packed

    @property
    def linears(self) -> dict[str, Packed]:
        """By kernel name."""
        return {"qkv": self.qkv, "o": self.o, "gate_up": self.gate_up, "down": self.down}


def pack_layer(tensors: Tensors, prefix: str, precision: Precision, qkv_bias: bool, device: torch.device) -> PackedLayer:
    """A layer out of the tensors whose names begin with `prefix`; q, k, v and gate, up become one linear each."""
    def packed(*names: str, bias: bool = False, turns: bool = False) -> Packed:
        w = take(tensors, [f"{prefix}{name}.weight" for name in names])
        w = interleave(w) if turns else w
        b = take(tensors, [f"{prefix}{name}.bias" for name in names]) if bias else None
        return pack(w, precision, device, b)

    def vector(name: str) -> torch.Tensor:
        return tensors.pop(f"{prefix}{name}.weight").to(device, torch.bfloat16)

    return PackedLayer(input_norm=vector("input_layernorm"),
                       qkv=packed(*(f"self_attn.{name}_proj" for name in "qkv"), bias=qkv_bias),
                       o=packed("self_attn.o_proj"), post_norm=vector("post_attention_layernorm"),
                       gate_up=packed("mlp.gate_proj", "mlp.up_proj", turns=True), down=packed("mlp.down_proj"))


class Phase:
    """What both phases share: the launches of a layer, in order. eps and shape of the model; rope: cosines and sines."""

    def __init__(self, shape: ModelShape, recipe: Recipe, space: Workspace, rope: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.shape, self.recipe, self.numerics, self.space, self.rope = shape, recipe, recipe.numerics, space, rope
        self.act_amax: torch.Tensor | None = None  # [rows, parts] fp32: the largest magnitudes of parts of act's rows

    def linear(self, kernel: str, weights: Packed, x: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor,
               rows: int) -> None:
        """x, terms [2, rows, K] e4m3 or [1, rows, K] bf16, through one linear into out [split_k, rows, N]."""
        raise NotImplementedError

    def gated(self, weights: Packed, rows: int) -> Iterator[Launched]:
        """gate_up and SwiGLU, into space.act and act_amax."""
        raise NotImplementedError

    def attend(self, index: int, cache: DeviceCache, length: torch.Tensor, rows: int, chunks: int) -> Iterator[Launched]:
        """Attention of all rows, into space.heads."""
        raise NotImplementedError

    def narrow(self, o: torch.Tensor, rows: int, amax: torch.Tensor | None = None) -> Iterator[Launched]:
        """o [>= rows, num_heads, head_dim] bf16 into space.heads; amax: as `merge` wrote it."""
        heads, scale = self.space.heads, self.space.heads_scale
        flat = o.view(-1, heads.shape[2])
        if scale is None:
            yield "quantise", lambda: heads[0, :rows].copy_(flat[:rows])
        else:
            schedule = FIXED["quantise_row" if amax is None else "quantise"].schedule
            yield "quantise", lambda: quantise(flat, Activation(heads, scale), rows=rows, amax=amax, schedule=schedule,
                                               numerics=self.numerics)

    def mix(self, index: int, cache: DeviceCache, length: torch.Tensor, rows: int, chunks: int) -> Iterator[Launched]:
        """What the rows learn from the sequence: from qkv's partials to space.heads."""
        yield "rope", lambda: rope_append(
            self.space.qkv, self.rope, length, rows=rows, q=self.space.q, cache=(cache.keys[index], cache.values[index]),
            schedule=FIXED["rope"].schedule, numerics=self.numerics)
        yield from self.attend(index, cache, length, rows, chunks)

    def begin(self, tokens: torch.Tensor, embedding: torch.Tensor, weight: torch.Tensor, rows: int) -> None:
        """x = embedding of the tokens, normed for the first layer."""
        space = self.space
        norm(Residual(space.x, tokens=tokens, embedding=embedding), weight, self.shape.rms_norm_eps,
             Activation(space.entry, space.x_scale), rows=rows, schedule=FIXED["norm"].schedule, numerics=self.numerics)

    def layer(self, index: int, weights: PackedLayer, cache: DeviceCache, length: torch.Tensor, rows: int,
              chunks: int) -> Iterator[Launched]:
        """From what qkv reads to the partials of `down`, launch by launch."""
        space, numerics = self.space, self.numerics
        yield "qkv", lambda: self.linear("qkv", weights.qkv, space.entry, space.x_scale, space.qkv, rows)
        yield from self.mix(index, cache, length, rows, chunks)
        yield "o", lambda: self.linear("o", weights.o, space.heads, space.heads_scale, space.y_o, rows)
        yield "norm", lambda: norm(Residual(space.x, space.y_o), weights.post_norm, self.shape.rms_norm_eps,
                                   Activation(space.hidden, space.x_scale), rows=rows, schedule=FIXED["norm"].schedule,
                                   numerics=numerics)
        yield from self.gated(weights.gate_up, rows)
        if (act_scale := space.act_scale) is not None:
            yield "quantise", lambda: quantise(space.act, Activation(space.act_q, act_scale), rows=rows, amax=self.act_amax,
                                               schedule=FIXED["quantise"].schedule, numerics=numerics)
        yield "down", lambda: self.linear("down", weights.down, space.act_q, space.act_scale, space.y_down, rows)

    def end(self, weight: torch.Tensor, rows: int, last: bool, feature: torch.Tensor | None = None,
            row: torch.Tensor | None = None) -> None:
        """x += down, normed: for the next layer, or in bf16 for the head where `last`. row: as in kernels/norm.py."""
        space = self.space
        norm(Residual(space.x, space.y_down, row=row), weight, self.shape.rms_norm_eps,
             Activation(space.final[None]) if last else Activation(space.entry, space.x_scale), rows=rows, feature=feature,
             schedule=FIXED["norm"].schedule, numerics=self.numerics)


class Decode(Phase):
    """Up to a row tile of rows, one artefact a kernel whatever their number."""

    def __init__(self, shape: ModelShape, recipe: Recipe, space: Workspace, rope: tuple[torch.Tensor, torch.Tensor],
                 schedules: StepSchedules) -> None:
        super().__init__(shape, recipe, space, rope)
        self.schedules = schedules
        chunk = schedules.attention.chunk
        if chunk != recipe.kv_chunk:
            raise LoadError(f"attention's chunk is {chunk}", expected=f"{recipe.kv_chunk}, the KV chunk of recipe {recipe.name}")
        pieces = parts(MergeShape(shape.num_heads, shape.head_dim), schedules.merge)
        self.amax = space.heads.new_empty(space.rows, pieces, dtype=torch.float32)
        if space.act_scale is not None:
            tiles = -(-2 * shape.intermediate_size // schedules.gate_up.BLOCK_N)
            self.act_amax = space.heads.new_empty(space.rows, tiles, dtype=torch.float32)

    @property
    def row_tile(self) -> int:
        """Rows that the linears take at once: the row tile of the recipe or of a schedule."""
        return min(self.recipe.row_tile, self.schedules.row_tile)

    @property
    def max_rows(self) -> int:
        """Rows of one pass: a row tile, or as many as attention's tile holds."""
        heads = AttentionShape(self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim)
        return min(self.row_tile, max_rows(heads, self.schedules.attention))

    def linear(self, kernel: str, weights: Packed, x: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor,
               rows: int) -> None:
        """See Phase."""
        schedule = self.schedules.linear(kernel)
        decode_linear(x, scale, weights, rows, schedule, self.numerics,
                      out=out[0, :rows] if schedule.split_k == 1 else out[:, :rows])

    def gated(self, weights: Packed, rows: int) -> Iterator[Launched]:
        """See Phase; SwiGLU is gate_up's epilogue."""
        space, schedule = self.space, self.schedules.gate_up
        yield "gate_up", lambda: decode_linear(space.hidden, space.x_scale, weights, rows, schedule, self.numerics,
                                               out=space.act[:rows], swiglu=True, amax=self.act_amax)

    def attend(self, index: int, cache: DeviceCache, length: torch.Tensor, rows: int, chunks: int) -> Iterator[Launched]:
        """See Phase. chunks: covered by the launch; they must reach the last key."""
        schedule = self.schedules.attention
        yield "attention", lambda: attention(self.space.q[:rows], cache.keys[index], cache.values[index], length, chunks=chunks,
                                             out=cache.partials, schedule=schedule, numerics=self.numerics)
        yield "merge", lambda: merge(cache.partials, length, rows=rows, chunk=schedule.chunk, chunks=chunks, amax=self.amax,
                                     schedule=self.schedules.merge, numerics=self.numerics)
        yield from self.narrow(cache.partials.o, rows, self.amax)

    def project(self, kernel: str, weights: Packed, x: torch.Tensor) -> torch.Tensor:
        """One linear on its own, partials summed and rounded: x [rows, K] bf16 to [rows, N] bf16."""
        schedule = self.schedules.linear(kernel)
        terms, scale = x[None], None
        if weights.scale is not None:
            terms = x.new_empty(2, *x.shape, dtype=weights.w.dtype)
            scale = x.new_empty(len(x), dtype=torch.float32)
            quantise(x, Activation(terms, scale), rows=len(x), schedule=FIXED["quantise_row"].schedule, numerics=self.numerics)
        y = decode_linear(terms, scale, weights, len(x), schedule, self.numerics)
        return y if schedule.split_k == 1 else summed(y).to(torch.bfloat16)


class Prefill(Phase):
    """Many rows. out: attention's output [rows, num_heads, head_dim] bf16."""

    def __init__(self, shape: ModelShape, recipe: Recipe, space: Workspace, rope: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__(shape, recipe, space, rope)
        self.out = torch.empty_like(space.q)
        self.gate_up = space.act.new_empty(1, space.rows, 2 * shape.intermediate_size)
        self.parts = space.act.new_empty(space.rows, segments(shape.intermediate_size), dtype=torch.float32)
        self.act_amax = self.parts

    def linear(self, kernel: str, weights: Packed, x: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor,
               rows: int) -> None:
        """See Phase."""
        prefill_linear(Activation(x, scale), weights, out[0], rows=rows, numerics=self.numerics)

    def gated(self, weights: Packed, rows: int) -> Iterator[Launched]:
        """See Phase."""
        space = self.space
        yield "gate_up", lambda: self.linear("gate_up", weights, space.hidden, space.x_scale, self.gate_up, rows)
        yield "swiglu", lambda: swiglu(self.gate_up[0], space.act, self.parts, rows=rows,
                                       schedule=FIXED["swiglu"].schedule, numerics=self.numerics)

    def attend(self, index: int, cache: DeviceCache, length: torch.Tensor, rows: int, chunks: int) -> Iterator[Launched]:
        """See Phase."""
        yield "attention", lambda: prefill_attention(self.space.q, cache.keys[index], cache.values[index], length, self.out,
                                                     rows=rows, numerics=self.numerics)
        yield from self.narrow(self.out, rows)
