"""Operands, output and reference of each kernel: the one place where a kernel of the step is launched for a check or a timing.

A case holds operands for one kernel and shape; a schedule is given with each launch, so that all candidates see the same
data. `normal` operands are for errors and times, `wide` ones for numerics classes (see `values`).
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ....schedules.recipe import Numerics, Recipe
from ....schedules.schedule import AttentionSchedule, HeadSchedule, LinearSchedule, MergeSchedule
from ....shapes.model import AttentionShape, HeadShape, KernelShape, LinearShape, MergeShape
from . import values

if TYPE_CHECKING:
    import torch

    from ....kernels.attention import Partials
    from ....kernels.layout import Activation, Weights

ROWS = 9  # a verification of 8 drafted tokens: rows that are checked
CAPACITY = 4096  # slots of the KV cache in a check
CHECKED_LENGTH = 2040  # 9 rows from here pass a chunk boundary at 2,048
OCCUPANCIES = (128, 2048)  # tokens in the cache when attention and merge are timed, in turns
CLASS_ROWS = (1, 5)
CLASS_OUTPUTS = 100_000  # at least so many outputs are hashed: a change of order shows in few of them


class Case(Protocol):
    """One kernel on one shape's operands."""

    def limit(self, schedule: Any) -> float:
        """Of the error of this schedule's output, by the recipe."""

    def rows(self, schedule: Any) -> int:
        """Rows that a launch with this schedule can be checked with."""

    def output(self, schedule: Any, first: int, rows: int) -> "torch.Tensor":
        """Output of rows first .. first + rows - 1, in the form that `error` judges; row r is [r]."""

    def error(self, output: "torch.Tensor") -> float:
        """Error of `output(schedule, 0, n)` against fp64, relative RMS; NaN where a NaN is in it."""

    def timed(self, schedule: Any, copy: int) -> None:
        """One launch, as it is timed, on one copy of the large operands."""

    def bits(self, schedule: Any) -> Iterator["torch.Tensor"]:
        """What the kernel writes, for the numerics class: without end, other inputs each time. Where it leaves some of its
        output alone, what stood there is in it: `poisoned`."""


@dataclass(frozen=True)
class Operands:
    """How operands are made. copies: of the large ones, which take turns when launches are timed."""

    device: str
    wide: bool = False
    copies: int = 1

    def bf16(self, *shape: int, seed: int, low: int = -8, high: int = 8) -> "torch.Tensor":
        import torch

        return self._filled(shape, seed, low, high, torch.bfloat16)

    def fp32(self, *shape: int, seed: int, low: int = -8, high: int = 8) -> "torch.Tensor":
        import torch

        return self._filled(shape, seed, low, high, torch.float32)

    def e4m3(self, *shape: int, seed: int) -> "torch.Tensor":
        import torch

        count = _count(shape)
        if self.wide:
            return values.fill(values.wide_e4m3(count, seed), shape, torch.float8_e4m3fn, self.device)
        return values.fill(values.normal(count, seed), shape, torch.float8_e4m3fn, self.device)

    def _filled(self, shape: tuple[int, ...], seed: int, low: int, high: int, dtype: "torch.dtype") -> "torch.Tensor":
        block = values.wide(_count(shape), seed, low, high) if self.wide else values.normal(_count(shape), seed)
        return values.fill(block, shape, dtype, self.device)

    def copied(self, tensor: "torch.Tensor") -> list["torch.Tensor"]:
        return [tensor, *(tensor.clone() for _ in range(self.copies - 1))]


def _count(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return min(size, values.PERIOD)


def relative_rms(output: "torch.Tensor", reference: "torch.Tensor") -> float:
    difference = (output.double() - reference).pow(2).mean().sqrt()
    return float(difference / reference.pow(2).mean().sqrt())


class Factors:
    """What a linear or a head multiplies. x [terms, pool, K]; weights: copies of w [N, K]; w_scale [N] fp32, for e4m3."""

    def __init__(self, shape: LinearShape | HeadShape, make: Operands, pool: int) -> None:
        fp8 = shape.dtype == "e4m3"
        draw = make.e4m3 if fp8 else make.bf16
        self.x = draw(shape.terms, pool, shape.K, seed=1)
        self.weights = make.copied(draw(shape.N, shape.K, seed=2))
        self.x_scale = make.fp32(pool, seed=3, low=-4, high=4).abs() + 0.1 if fp8 else None
        self.w_scale = make.fp32(shape.N, seed=4, low=-4, high=4).abs() + 0.1 if fp8 else None

    def rows(self, first: int, rows: int) -> "Activation":
        """Some rows of x, with their scales."""
        from ....kernels.layout import Activation

        part = slice(first, first + rows)
        scale = self.x_scale[part] if self.x_scale is not None else None
        if scale is not None and first:
            scale = scale.clone()  # a slice that starts off 16 bytes is refused
        return Activation(self.x[:, part], scale)

    def linear(self, copy: int, bias: "torch.Tensor | None" = None) -> "Weights":
        """One copy of the weights."""
        from ....kernels.layout import Weights

        return Weights(self.weights[copy], self.w_scale, bias)


class LinearCase:
    """y = x @ w.T with scales and bias; partials are added in index order, as the kernel that reads them does."""

    def __init__(self, shape: LinearShape, recipe: Recipe, make: Operands) -> None:
        self.shape, self.numerics, self.limits = shape, recipe.numerics, recipe.max_rms_error
        outputs = sum(CLASS_ROWS) * (shape.N // 2 if shape.swiglu else shape.N)
        self.pool = max(ROWS, CLASS_ROWS[-1] * -(-CLASS_OUTPUTS // outputs)) if make.wide else ROWS
        self.factors = Factors(shape, make, self.pool)
        self.bias = make.bf16(shape.N, seed=5) if shape.bias else None

    def limit(self, schedule: LinearSchedule) -> float:
        if schedule.split_k > 1:
            return self.limits.partials
        return self.limits.swiglu if self.shape.swiglu else self.limits.output

    def rows(self, schedule: LinearSchedule) -> int:
        return min(ROWS, schedule.row_tile)

    def launch(self, schedule: LinearSchedule, first: int, rows: int, copy: int = 0) -> "torch.Tensor":
        from ....kernels.linear import linear

        x, amax = self.factors.rows(first, rows), None
        if self.shape.swiglu and x.scale is not None:  # read by the next quantisation; one per block, so no part of the class
            amax = x.scale.new_empty((schedule.row_tile, -(-self.shape.N // schedule.BLOCK_N)))
        return linear(x, self.factors.linear(copy, self.bias), schedule=schedule, numerics=self.numerics,
                      swiglu=self.shape.swiglu, amax=amax)

    def output(self, schedule: LinearSchedule, first: int, rows: int) -> "torch.Tensor":
        y = self.launch(schedule, first, rows)
        if schedule.split_k == 1:
            return y
        total = y[0]
        for partial in y[1:]:
            total = total + partial
        return total

    def error(self, output: "torch.Tensor") -> float:
        return relative_rms(output, self.reference(len(output)))

    def reference(self, n: int) -> "torch.Tensor":
        """The first n rows of y in fp64, from the values that the operands hold: [n, N], with swiglu [n, N / 2]."""
        from ....kernels.linear import linear_reference

        y = linear_reference(self.factors.rows(0, n), self.factors.linear(0, self.bias))
        if self.shape.swiglu:  # gates and ups in turns of 8
            gate, up = y.reshape(n, -1, 2, 8).unbind(2)
            y = (gate * gate.sigmoid() * up).reshape(n, -1)
        return y

    def timed(self, schedule: LinearSchedule, copy: int) -> None:
        self.launch(schedule, 0, CLASS_ROWS[-1], copy)

    def bits(self, schedule: LinearSchedule) -> Iterator["torch.Tensor"]:
        while True:
            for first in range(0, self.pool - CLASS_ROWS[-1] + 1, CLASS_ROWS[-1]):
                for rows in CLASS_ROWS:
                    yield self.launch(schedule, first, rows)


class HeadCase:
    """The head. The argmax variant is judged by how far the logit of its token is from the greatest; its class is that of
    the logits under the same schedule, which it shares the reduction with."""

    def __init__(self, shape: HeadShape, recipe: Recipe, make: Operands, logits: bool) -> None:
        self.shape, self.numerics, self.limits, self.logits = shape, recipe.numerics, recipe.max_rms_error, logits
        self.factors = Factors(shape, make, ROWS)

    def limit(self, schedule: HeadSchedule) -> float:
        return self.limits.output

    def rows(self, schedule: HeadSchedule) -> int:
        return min(ROWS, schedule.row_tile)

    def launch(self, schedule: HeadSchedule, first: int, rows: int, logits: bool, copy: int = 0) -> "torch.Tensor":
        import torch

        from ....kernels.lm_head import lm_head, lm_head_logits, new_scratch

        x, w = self.factors.rows(first, rows), self.factors.linear(copy)
        if logits:
            return lm_head_logits(x, w, schedule=schedule, numerics=self.numerics)
        scratch = new_scratch(self.shape.N, schedule, w.w.device)
        scratch = replace(scratch, tokens=torch.empty_like(scratch.ids[:, 0]))  # zeros could pass for a token
        return lm_head(x, w, schedule=schedule, numerics=self.numerics, scratch=scratch)

    def output(self, schedule: HeadSchedule, first: int, rows: int) -> "torch.Tensor":
        return self.launch(schedule, first, rows, self.logits)

    def error(self, output: "torch.Tensor") -> float:
        from ....kernels.lm_head import lm_head_reference

        reference = lm_head_reference(self.factors.rows(0, len(output)), self.factors.linear(0))
        if self.logits:
            return relative_rms(output, reference)
        if not bool(((output >= 0) & (output < self.shape.N)).all()):
            return float("nan")
        chosen = reference.gather(1, output.long()[:, None])[:, 0]
        return float((reference.amax(1) - chosen).max() / reference.pow(2).mean().sqrt())

    def timed(self, schedule: HeadSchedule, copy: int) -> None:
        self.launch(schedule, 0, CLASS_ROWS[-1], self.logits, copy)

    def bits(self, schedule: HeadSchedule) -> Iterator["torch.Tensor"]:
        while True:
            for first in range(ROWS - CLASS_ROWS[-1] + 1):
                for rows in CLASS_ROWS:
                    yield self.launch(schedule, first, rows, logits=True)


class AttentionCase:
    """Split-KV attention. Partials alone have no reference, so `output` puts the recipe's merge after it."""

    def __init__(self, shape: AttentionShape, recipe: Recipe, make: Operands, merging: MergeSchedule,
                 occupancies: tuple[int, ...]) -> None:
        assert max(occupancies) <= CAPACITY - ROWS
        self.shape, self.numerics, self.limits = shape, recipe.numerics, recipe.max_rms_error
        self.merging, self.make, self.occupancies = merging, make, occupancies
        slots = (CAPACITY, shape.num_kv_heads)
        self.q = make.bf16(ROWS, shape.num_heads, shape.head_dim, seed=1, low=-6, high=1)
        k = make.bf16(*slots, shape.head_dim, seed=2, low=-6, high=1)
        v = make.bf16(*slots, shape.head_dim + 16, seed=3)  # strides unlike K's
        if not make.wide:  # slots past the cursor may hold anything
            k[CHECKED_LENGTH + ROWS:], v[CHECKED_LENGTH + ROWS:] = float("nan"), float("nan")
        self.k, self.v = make.copied(k), [t[:, :, :shape.head_dim] for t in make.copied(v)]
        self.lengths = [self._length(n) for n in occupancies]

    def _length(self, length: int) -> "torch.Tensor":
        import torch

        return torch.tensor([length], dtype=torch.int32, device=self.make.device)

    def limit(self, schedule: AttentionSchedule) -> float:
        return self.limits.output

    def rows(self, schedule: AttentionSchedule) -> int:
        from ....kernels.attention import max_rows

        return min(ROWS, max_rows(self.shape, schedule))

    def launch(self, schedule: AttentionSchedule, first: int, rows: int, length: int, where: "torch.Tensor",
               copy: int = 0) -> "Partials":
        from ....kernels.attention import attention

        chunks = (length + rows - 1) // schedule.chunk + 1
        return attention(self.q[first:first + rows], self.k[copy], self.v[copy], where, chunks=chunks, schedule=schedule,
                         numerics=self.numerics)

    def output(self, schedule: AttentionSchedule, first: int, rows: int) -> "torch.Tensor":
        where = self._length(CHECKED_LENGTH + first)
        partials = self.launch(schedule, first, rows, CHECKED_LENGTH + first, where)
        return merged(partials, where, rows, schedule.chunk, self.merging, self.numerics)

    def error(self, output: "torch.Tensor") -> float:
        from ....kernels.attention import attention_reference

        return relative_rms(output, attention_reference(self.q[:len(output)], self.k[0], self.v[0], CHECKED_LENGTH))

    def timed(self, schedule: AttentionSchedule, copy: int) -> None:
        turn = copy % len(self.occupancies)
        rows = min(CLASS_ROWS[-1], self.rows(schedule))
        self.launch(schedule, 0, rows, self.occupancies[turn], self.lengths[turn], copy)

    def bits(self, schedule: AttentionSchedule) -> Iterator["torch.Tensor"]:
        while True:
            for rows in CLASS_ROWS:
                rows = min(rows, self.rows(schedule))
                for length in around(schedule.chunk):
                    made = self.launch(schedule, 0, rows, length, self._length(length))
                    yield from (made.acc[:, :rows], made.m[:, :rows], made.l[:, :rows], made.o)


class MergeCase:
    """Merge of partials that cover the recipe's chunk of keys each."""

    def __init__(self, shape: MergeShape, recipe: Recipe, make: Operands, occupancies: tuple[int, ...]) -> None:
        import torch

        from ....kernels.layout import FOLD
        from ....kernels.layout import ROWS as ROOM

        self.shape, self.numerics, self.limits, self.make = shape, recipe.numerics, recipe.max_rms_error, make
        self.chunk = chunk = recipe.kv_chunk
        chunks = max(*occupancies, CHECKED_LENGTH, FOLD * chunk) // chunk + 2
        self.acc = make.copied(make.fp32(chunks, ROOM, shape.num_heads, shape.head_dim, seed=1))
        self.m = make.fp32(chunks, ROOM, shape.num_heads, seed=2, low=-2, high=3) * 8
        self.l = make.fp32(chunks, ROOM, shape.num_heads, seed=3, low=-2, high=6).abs() + 0.5
        self.occupancies = occupancies
        self.lengths = [torch.tensor([n], dtype=torch.int32, device=make.device) for n in occupancies]
        edge = FOLD * chunk  # of a group of chunks
        self.probed = [*around(chunk), edge - 5, edge - 1, edge]

    def limit(self, schedule: MergeSchedule) -> float:
        return self.limits.output

    def rows(self, schedule: MergeSchedule) -> int:
        return ROWS

    def launch(self, schedule: MergeSchedule, first: int, rows: int, length: int, where: "torch.Tensor",
               copy: int = 0) -> "torch.Tensor":
        """As the decoder launches it: over as many chunks as the keys fill."""
        import torch

        from ....kernels.attention import Partials

        acc, m, l = self.acc[copy], self.m, self.l
        if first:  # rows first.. in the places of rows 0..
            acc, m, l = (torch.roll(t, -first, 1) for t in (acc, m, l))
        o = torch.empty((rows, *acc.shape[2:]), dtype=torch.bfloat16, device=acc.device)
        chunks = (length + rows - 1) // self.chunk + 1
        return merged(Partials(acc, m, l, o), where, rows, self.chunk, schedule, self.numerics, chunks)

    def output(self, schedule: MergeSchedule, first: int, rows: int) -> "torch.Tensor":
        import torch

        where = torch.tensor([CHECKED_LENGTH + first], dtype=torch.int32, device=self.make.device)
        return self.launch(schedule, first, rows, CHECKED_LENGTH + first, where)

    def error(self, output: "torch.Tensor") -> float:
        from ....kernels.merge import merge_reference

        return relative_rms(output, merge_reference(self.acc[0], self.m, self.l, CHECKED_LENGTH, rows=len(output),
                                                    chunk=self.chunk))

    def timed(self, schedule: MergeSchedule, copy: int) -> None:
        turn = copy % len(self.occupancies)
        self.launch(schedule, 0, CLASS_ROWS[-1], self.occupancies[turn], self.lengths[turn], copy)

    def bits(self, schedule: MergeSchedule) -> Iterator["torch.Tensor"]:
        import torch

        while True:
            for first in range(0, ROWS + 1, CLASS_ROWS[-1]):
                for rows in CLASS_ROWS:
                    for length in self.probed:
                        where = torch.tensor([length], dtype=torch.int32, device=self.make.device)
                        yield self.launch(schedule, first, rows, length, where)


def read_bytes(shape: KernelShape, chunk: int, occupancies: tuple[int, ...] = OCCUPANCIES) -> float:
    """Bytes that one launch can't do without, as it is timed: weights, cache, partials."""
    if isinstance(shape, LinearShape | HeadShape):
        return float(shape.N * shape.K * (1 if shape.dtype == "e4m3" else 2))
    if isinstance(shape, AttentionShape):
        return sum(occupancies) / len(occupancies) * shape.num_kv_heads * shape.head_dim * 4.0
    assert isinstance(shape, MergeShape)
    used = sum(n // chunk + 1 for n in occupancies if n >= chunk) / len(occupancies)
    return max(used, 1.0) * CLASS_ROWS[-1] * shape.num_heads * (shape.head_dim + 2) * 4.0


def merged(partials: "Partials", where: "torch.Tensor", rows: int, chunk: int, schedule: MergeSchedule,
           numerics: Numerics, chunks: int | None = None) -> "torch.Tensor":
    """The merge as a quantising decode step launches it, which wants the largest magnitudes beside the output. chunks: see
    kernels/merge.py."""
    import torch

    from ....kernels.layout import ROWS as ROOM
    from ....kernels.merge import merge, parts

    heads, head_dim = partials.acc.shape[2:]
    amax = torch.empty((ROOM, parts(MergeShape(heads, head_dim), schedule)), dtype=torch.float32, device=partials.acc.device)
    return merge(partials, where, rows=rows, chunk=chunk, schedule=schedule, numerics=numerics, amax=amax, chunks=chunks)


def around(chunk: int) -> list[int]:
    """Lengths around the edges of chunks, as far as the cache goes."""
    edges = [0, *(n * chunk + d for n in (1, 2, 8) for d in (-5, -1, 0, 1))]
    return [n for n in edges if 0 <= n <= CAPACITY - ROWS]


def make_case(kernel: str, shape: KernelShape, recipe: Recipe, make: Operands, merging: MergeSchedule,
              occupancies: tuple[int, ...] = OCCUPANCIES) -> Case:
    """The case of one kernel. merging: the recipe's; occupancies: tokens in the cache in timings, for attention and merge."""
    if isinstance(shape, LinearShape):
        return LinearCase(shape, recipe, make)
    if isinstance(shape, HeadShape):
        return HeadCase(shape, recipe, make, logits=kernel == "lm_head_logits")
    if isinstance(shape, AttentionShape):
        return AttentionCase(shape, recipe, make, merging, occupancies)
    assert isinstance(shape, MergeShape), f"{kernel} isn't tuned"
    return MergeCase(shape, recipe, make, occupancies)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Whatever is allocated in here holds NaN (the greatest integer where it is of integers) until it is written."""
    import torch

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled
