"""The cases of attention and of the merge of its partials: operands, launches and references for checks and timings."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....schedules.recipe import Numerics, Recipe
from ....schedules.schedule import AttentionSchedule, MergeSchedule
from ....shapes.model import AttentionShape, MergeShape
from .case import RowsCase
from .operands import CLASS_ROWS, Operands, around, relative_rms

if TYPE_CHECKING:
    import torch

    from ....kernels.attention import Partials


class AttentionCase(RowsCase[AttentionSchedule]):
    """Split-KV attention. Partials have no reference of their own: `output` merges them under the recipe's default."""

    def __init__(self, shape: AttentionShape, recipe: Recipe, make: Operands, merging: MergeSchedule) -> None:
        assert max(make.sizes.occupancies) <= make.sizes.capacity - make.sizes.rows
        self.sizes = make.sizes
        self.shape, self.numerics, self.limits = shape, recipe.numerics, recipe.max_rms_error
        self.merging, self.make = merging, make
        slots = (self.sizes.capacity, shape.num_kv_heads)
        self.q = make.bf16(self.sizes.rows, shape.num_heads, shape.head_dim, seed=1, low=-6, high=1)
        k = make.bf16(*slots, shape.head_dim, seed=2, low=-6, high=1)
        v = make.bf16(*slots, shape.head_dim + 16, seed=3)  # strides unlike K's
        if not make.wide:  # slots past the cursor may hold anything
            end = self.sizes.checked_length + self.sizes.rows
            k[end:], v[end:] = float("nan"), float("nan")
        self.k, self.v = make.copied(k), [t[:, :, :shape.head_dim] for t in make.copied(v)]
        self.lengths = [self._length(n) for n in self.sizes.occupancies]

    def _length(self, length: int) -> "torch.Tensor":
        import torch

        return torch.tensor([length], dtype=torch.int32, device=self.make.device)

    def limit(self, schedule: AttentionSchedule) -> float:
        return self.limits.output

    def rows(self, schedule: AttentionSchedule) -> int:
        from ....kernels.attention import max_rows

        return min(self.sizes.rows, max_rows(self.shape, schedule))

    def launch(self, schedule: AttentionSchedule, first: int, rows: int, length: int, where: "torch.Tensor",
               copy: int = 0) -> "Partials":
        from ....kernels.attention import attention

        chunks = (length + rows - 1) // schedule.chunk + 1
        return attention(self.q[first:first + rows], self.k[copy], self.v[copy], where, chunks=chunks, schedule=schedule,
                         numerics=self.numerics)

    def output(self, schedule: AttentionSchedule, first: int, rows: int) -> "torch.Tensor":
        where = self._length(self.sizes.checked_length + first)
        partials = self.launch(schedule, first, rows, self.sizes.checked_length + first, where)
        return merged(partials, where, rows, schedule.chunk, self.merging, self.numerics)

    def error(self, output: "torch.Tensor") -> float:
        from ....kernels.attention import attention_reference

        return relative_rms(output, attention_reference(self.q[:len(output)], self.k[0], self.v[0], self.sizes.checked_length))

    def timed(self, schedule: AttentionSchedule, copy: int) -> None:
        turn = copy % len(self.sizes.occupancies)
        rows = min(CLASS_ROWS[-1], self.rows(schedule))
        self.launch(schedule, 0, rows, self.sizes.occupancies[turn], self.lengths[turn], copy)

    def bits(self, schedule: AttentionSchedule) -> Iterator["torch.Tensor"]:
        while True:
            for rows in CLASS_ROWS:
                rows = min(rows, self.rows(schedule))
                for length in around(schedule.chunk, self.sizes):
                    made = self.launch(schedule, 0, rows, length, self._length(length))
                    yield from (made.acc[:, :rows], made.m[:, :rows], made.l[:, :rows], made.o)


class MergeCase(RowsCase[MergeSchedule]):
    """Merge of partials, each of the recipe's chunk of keys."""

    def __init__(self, shape: MergeShape, recipe: Recipe, make: Operands) -> None:
        import torch

        from ....kernels.layout import FOLD
        from ....kernels.layout import ROWS as ROOM

        self.shape, self.numerics, self.limits = shape, recipe.numerics, recipe.max_rms_error
        self.make, self.sizes = make, make.sizes
        self.chunk = chunk = recipe.kv_chunk
        chunks = max(*self.sizes.occupancies, self.sizes.checked_length, FOLD * chunk) // chunk + 2
        self.acc = make.copied(make.fp32(chunks, ROOM, shape.num_heads, shape.head_dim, seed=1))
        self.m = make.fp32(chunks, ROOM, shape.num_heads, seed=2, low=-2, high=3) * 8
        self.l = make.fp32(chunks, ROOM, shape.num_heads, seed=3, low=-2, high=6).abs() + 0.5
        self.lengths = [torch.tensor([n], dtype=torch.int32, device=make.device) for n in self.sizes.occupancies]
        edge = FOLD * chunk  # of a group of chunks
        self.probed = [*around(chunk, self.sizes), edge - 5, edge - 1, edge]

    def limit(self, schedule: MergeSchedule) -> float:
        return self.limits.output

    def rows(self, schedule: MergeSchedule) -> int:
        return self.sizes.rows

    def launch(self, schedule: MergeSchedule, first: int, rows: int, length: int, where: "torch.Tensor",
               copy: int = 0) -> "torch.Tensor":
        """Launches as the decoder does, over the chunks that the keys fill."""
        import torch

        from ....kernels.attention import Partials

        acc, m, l = self.acc[copy], self.m, self.l
        if first:  # row `first` becomes row 0
            acc, m, l = (torch.roll(t, -first, 1) for t in (acc, m, l))
        o = torch.empty((rows, *acc.shape[2:]), dtype=torch.bfloat16, device=acc.device)
        chunks = (length + rows - 1) // self.chunk + 1
        return merged(Partials(acc, m, l, o), where, rows, self.chunk, schedule, self.numerics, chunks)

    def output(self, schedule: MergeSchedule, first: int, rows: int) -> "torch.Tensor":
        import torch

        where = torch.tensor([self.sizes.checked_length + first], dtype=torch.int32, device=self.make.device)
        return self.launch(schedule, first, rows, self.sizes.checked_length + first, where)

    def error(self, output: "torch.Tensor") -> float:
        from ....kernels.merge import merge_reference

        return relative_rms(output, merge_reference(self.acc[0], self.m, self.l, self.sizes.checked_length, rows=len(output),
                                                    chunk=self.chunk))

    def timed(self, schedule: MergeSchedule, copy: int) -> None:
        turn = copy % len(self.sizes.occupancies)
        self.launch(schedule, 0, CLASS_ROWS[-1], self.sizes.occupancies[turn], self.lengths[turn], copy)

    def bits(self, schedule: MergeSchedule) -> Iterator["torch.Tensor"]:
        import torch

        while True:
            for first in range(0, self.sizes.rows + 1, CLASS_ROWS[-1]):
                for rows in CLASS_ROWS:
                    for length in self.probed:
                        where = torch.tensor([length], dtype=torch.int32, device=self.make.device)
                        yield self.launch(schedule, first, rows, length, where)


def merged(partials: "Partials", where: "torch.Tensor", rows: int, chunk: int, schedule: MergeSchedule,
           numerics: Numerics, chunks: int | None = None) -> "torch.Tensor":
    """The merge as a quantising decode step launches it, with maxima of |o|. Returns o [rows, heads, head_dim]. chunks: see
    kernels/merge.py."""
    import torch

    from ....kernels.layout import ROWS as ROOM
    from ....kernels.merge import merge, parts

    heads, head_dim = partials.acc.shape[2:]
    amax = torch.empty((ROOM, parts(MergeShape(heads, head_dim), schedule)), dtype=torch.float32, device=partials.acc.device)
    return merge(partials, where, rows=rows, chunk=chunk, schedule=schedule, numerics=numerics, amax=amax, chunks=chunks)
