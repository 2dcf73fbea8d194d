"""One decoder layer as launches of the project's kernels, in two phases: `Decode` runs up to a row tile of rows through the tuned
kernels, `Prefill` many rows through kernels/prefill.py. Both read the same weights and write the same cache.

The launch after a linear, the norm or RoPE and append, sums its partials.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from ...kernels.activation import quantise, segments, swiglu
from ...kernels.attention import attention, max_rows
from ...kernels.fixed import FIXED
from ...kernels.layout import Activation
from ...kernels.linear import linear
from ...kernels.merge import merge, parts
from ...kernels.norm import Residual, norm
from ...kernels.prefill import prefill_attention, prefill_linear
from ...kernels.rope import rope_append
from ...schedules.recipe import Recipe
from ...schedules.schedule import StepSchedules
from ...shapes.model import AttentionShape, MergeShape, ModelShape
from ..errors import LoadError
from .buffers import Workspace
from .cache import Pass
from .weights import Packed, PackedLayer

Launched = tuple[str, Callable[[], object]]  # the kind of kernel, and its launch
LINEARS = ("qkv", "o", "gate_up", "down")


def launch_all(launches: Iterable[Launched]) -> None:
    """Launches in order."""
    for _, launch in launches:
        launch()


def summed(partials: torch.Tensor) -> torch.Tensor:
    """The sum [rows, N] fp32 of partials [split_k, rows, N], in index order as in the kernels."""
    total = partials[0]
    for part in partials[1:]:
        total = total + part
    return total


class Phase(ABC):
    """The launches of a layer, in order. Each operation is bound once to its schedule and numerics."""

    def __init__(self, shape: ModelShape, recipe: Recipe, space: Workspace) -> None:
        self.shape, self.recipe, self.numerics, self.space = shape, recipe, recipe.numerics, space
        self.act_amax: torch.Tensor | None = None  # [rows, parts] fp32: the largest magnitude per part of act's rows
        self.norm = partial(norm, schedule=FIXED["norm"].schedule, numerics=self.numerics)
        self.rope_append = partial(rope_append, schedule=FIXED["rope"].schedule, numerics=self.numerics)
        self.quantise = partial(quantise, schedule=FIXED["quantise"].schedule, numerics=self.numerics)
        self.quantise_row = partial(quantise, schedule=FIXED["quantise_row"].schedule, numerics=self.numerics)

    @abstractmethod
    def linear(self, kernel: str, weights: Packed, x: Activation, out: torch.Tensor, rows: int) -> None:
        """Launches one linear over the first `rows` rows of x, into out [split_k, rows, N]."""

    @abstractmethod
    def gated(self, weights: Packed, rows: int) -> Iterator[Launched]:
        """Launches of gate_up and SwiGLU, into space.act and act_amax."""

    @abstractmethod
    def attend(self, index: int, at: Pass) -> Iterator[Launched]:
        """Launches of attention over all rows, into space.heads. index: of the layer."""

    def narrow(self, o: torch.Tensor, rows: int, amax: torch.Tensor | None = None) -> Iterator[Launched]:
        """Launches that narrow o [>= rows, num_heads, head_dim] bf16 into space.heads. amax: the maxima that `merge` wrote."""
        heads = self.space.heads
        flat = o.view(-1, heads.values.shape[2])
        if heads.scale is None:
            yield "quantise", lambda: heads.values[0, :rows].copy_(flat[:rows])
        elif amax is None:
            yield "quantise", lambda: self.quantise_row(flat, heads, rows=rows)
        else:
            yield "quantise", lambda: self.quantise(flat, heads, rows=rows, amax=amax)

    def mix(self, index: int, weights: PackedLayer, at: Pass) -> Iterator[Launched]:
        """Launches from qkv's partials to space.heads: norms of the heads, RoPE, append, attention."""
        yield "rope", lambda: self.rope_append(self.space.qkv, at.cache.rope, at.length, rows=at.rows, q=self.space.q,
                                               cache=(at.cache.keys[index], at.cache.values[index]), norms=weights.head_norms)
        yield from self.attend(index, at)

    def begin(self, tokens: torch.Tensor, embedding: torch.Tensor, weight: torch.Tensor, rows: int) -> None:
        """Launches x = embedding of the tokens, and its norm for the first layer."""
        self.norm(Residual(self.space.x, tokens=tokens, embedding=embedding), weight, self.shape.rms_norm_eps, self.space.entry,
                  rows=rows)

    def layer(self, index: int, weights: PackedLayer, at: Pass) -> Iterator[Launched]:
        """The launches from qkv's input to the partials of `down`."""
        space, rows = self.space, at.rows
        yield "qkv", lambda: self.linear("qkv", weights.qkv, space.entry, space.qkv, rows)
        yield from self.mix(index, weights, at)
        yield "o", lambda: self.linear("o", weights.o, space.heads, space.y_o, rows)
        yield "norm", lambda: self.norm(Residual(space.x, space.y_o), weights.post_norm, self.shape.rms_norm_eps, space.hidden,
                                        rows=rows)
        yield from self.gated(weights.gate_up, rows)
        if space.act_q.scale is not None:
            yield "quantise", lambda: self.quantise(space.act, space.act_q, rows=rows, amax=self.act_amax)
        yield "down", lambda: self.linear("down", weights.down, space.act_q, space.y_down, rows)

    def end(self, weight: torch.Tensor, rows: int, last: bool, feature: torch.Tensor | None = None,
            row: torch.Tensor | None = None) -> None:
        """Launches x += down and the norm of x: for the next layer, or in bf16 for the head if `last`. row: see
        kernels/norm.py."""
        space = self.space
        self.norm(Residual(space.x, space.y_down, row=row), weight, self.shape.rms_norm_eps,
                  Activation(space.final[None]) if last else space.entry, rows=rows, feature=feature)


class Decode(Phase):
    """Up to a row tile of rows. Every number of rows runs the same compiled kernels."""

    def __init__(self, shape: ModelShape, recipe: Recipe, space: Workspace, schedules: StepSchedules) -> None:
        super().__init__(shape, recipe, space)
        self.schedules = schedules
        chunk = schedules.attention.chunk
        if chunk != recipe.kv_chunk:
            raise LoadError(f"attention's chunk is {chunk}", expected=f"{recipe.kv_chunk}, the KV chunk of recipe {recipe.name}")
        self.linears = {name: partial(linear, schedule=schedules.linear(name), numerics=self.numerics) for name in LINEARS}
        self.attention = partial(attention, schedule=schedules.attention, numerics=self.numerics)
        self.merge = partial(merge, chunk=chunk, schedule=schedules.merge, numerics=self.numerics)
        pieces = parts(MergeShape(shape.num_heads, shape.head_dim), schedules.merge)
        self.amax = space.x.new_empty(space.rows, pieces, dtype=torch.float32)
        if space.act_q.scale is not None:
            tiles = -(-2 * shape.intermediate_size // schedules.gate_up.BLOCK_N)
            self.act_amax = space.x.new_empty(space.rows, tiles, dtype=torch.float32)

    @property
    def row_tile(self) -> int:
        """Rows per launch of a linear: the smaller of the recipe's and the schedules' row tile."""
        return min(self.recipe.row_tile, self.schedules.row_tile)

    @property
    def max_rows(self) -> int:
        """Rows of one pass: the smaller of the row tile and attention's tile."""
        heads = AttentionShape(self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim)
        return min(self.row_tile, max_rows(heads, self.schedules.attention))

    def linear(self, kernel: str, weights: Packed, x: Activation, out: torch.Tensor, rows: int) -> None:
        """See Phase."""
        self.linears[kernel](x.first(rows), weights, out=out[0, :rows] if len(out) == 1 else out[:, :rows])

    def gated(self, weights: Packed, rows: int) -> Iterator[Launched]:
        """See Phase. SwiGLU is gate_up's epilogue."""
        space = self.space
        yield "gate_up", lambda: self.linears["gate_up"](space.hidden.first(rows), weights, out=space.act[:rows], swiglu=True,
                                                         amax=self.act_amax)

    def attend(self, index: int, at: Pass) -> Iterator[Launched]:
        """See Phase."""
        cache, rows = at.cache, at.rows
        yield "attention", lambda: self.attention(self.space.q[:rows], cache.keys[index], cache.values[index], at.length,
                                                  chunks=at.chunks, out=cache.partials)
        yield "merge", lambda: self.merge(cache.partials, at.length, rows=rows, chunks=at.chunks, amax=self.amax)
        yield from self.narrow(cache.partials.o, rows, self.amax)

    def project(self, kernel: str, weights: Packed, x: torch.Tensor) -> torch.Tensor:
        """One linear alone: x [rows, K] bf16 to [rows, N] bf16, partials summed and rounded."""
        terms = Activation(x[None])
        if weights.scale is not None:
            terms = Activation(x.new_empty(2, *x.shape, dtype=weights.w.dtype), x.new_empty(len(x), dtype=torch.float32))
            self.quantise_row(x, terms, rows=len(x))
        y = self.linears[kernel](terms, weights)
        return y if self.schedules.linear(kernel).split_k == 1 else summed(y).to(torch.bfloat16)


class Prefill(Phase):
    """Many rows. out [rows, num_heads, head_dim] bf16: attention's output."""

    def __init__(self, shape: ModelShape, recipe: Recipe, space: Workspace) -> None:
        super().__init__(shape, recipe, space)
        self.out = torch.empty_like(space.q)
        self.gate_up = space.act.new_empty(1, space.rows, 2 * shape.intermediate_size)
        self.parts = space.act.new_empty(space.rows, segments(shape.intermediate_size), dtype=torch.float32)
        self.act_amax = self.parts
        self.swiglu = partial(swiglu, schedule=FIXED["swiglu"].schedule, numerics=self.numerics)

    def linear(self, kernel: str, weights: Packed, x: Activation, out: torch.Tensor, rows: int) -> None:
        """See Phase."""
        prefill_linear(x, weights, out[0], rows=rows, numerics=self.numerics)

    def gated(self, weights: Packed, rows: int) -> Iterator[Launched]:
        """See Phase."""
        space = self.space
        yield "gate_up", lambda: self.linear("gate_up", weights, space.hidden, self.gate_up, rows)
        yield "swiglu", lambda: self.swiglu(self.gate_up[0], space.act, self.parts, rows=rows)

    def attend(self, index: int, at: Pass) -> Iterator[Launched]:
        """See Phase."""
        yield "attention", lambda: prefill_attention(self.space.q, at.cache.keys[index], at.cache.values[index], at.length,
                                                     self.out, rows=at.rows, numerics=self.numerics)
        yield from self.narrow(self.out, at.rows)
