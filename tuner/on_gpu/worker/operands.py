"""Operands of checks and timings, and the interface of a kernel that is launched on them.

`normal` operands are for errors and times, `wide` ones for numerics classes (see `values`).
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from ....shapes.model import HeadShape, LinearShape
from ..samples.bytes import OCCUPANCIES, TIMED_ROWS
from . import values

if TYPE_CHECKING:
    import torch

    from ....kernels.layout import Activation, Weights

CLASS_ROWS = (1, TIMED_ROWS)
S = TypeVar("S", contravariant=True)


@dataclass(frozen=True)
class Sizes:
    """Sizes of checks. rows: that are checked; capacity: slots of the KV cache; checked_length: tokens in it, from where `rows`
    rows pass a chunk boundary; occupancies: tokens in it when attention and merge are timed; repeats: of one launch that must
    give the same bytes; class_outputs: that are hashed at least: a change of order shows in few of them."""

    rows: int = 9
    capacity: int = 4096
    checked_length: int = 2040
    occupancies: tuple[int, ...] = OCCUPANCIES
    repeats: int = 8
    class_outputs: int = 100_000


SIZES = Sizes()


class Case(Protocol[S]):
    """One kernel on one shape's operands: the one place where it is launched for a check or a timing. A schedule is given with
    each launch: all candidates see the same data."""

    def limit(self, schedule: S) -> float:
        """Of the error of this schedule's output, by the recipe."""

    def rows(self, schedule: S) -> int:
        """Rows that a launch with this schedule can be checked with."""

    def output(self, schedule: S, first: int, rows: int) -> "torch.Tensor":
        """Output of rows first .. first + rows - 1, in the form that `error` judges; row r is [r]."""

    def error(self, output: "torch.Tensor") -> float:
        """Error of `output(schedule, 0, n)` against fp64, relative RMS; NaN where a NaN is in it."""

    def timed(self, schedule: S, copy: int) -> None:
        """One launch, as it is timed, on one copy of the large operands."""

    def bits(self, schedule: S) -> Iterator["torch.Tensor"]:
        """The kernel's outputs, for the numerics class: without end, other inputs each time. Poison stays where it writes
        nothing: `poisoned`."""


@dataclass(frozen=True)
class Operands:
    """How operands are made. wide: for numerics classes, see `values`; copies: of the large ones, which take turns when launches
    are timed."""

    device: str
    wide: bool = False
    copies: int = 1
    sizes: Sizes = SIZES

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
    """The factors of a linear or a head. x [terms, pool, K]; weights: copies of w [N, K]; w_scale [N] fp32, for e4m3."""

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


def around(chunk: int, sizes: Sizes) -> list[int]:
    """Lengths around the edges of chunks, as far as the cache goes."""
    edges = [0, *(n * chunk + d for n in (1, 2, 8) for d in (-5, -1, 0, 1))]
    return [n for n in edges if 0 <= n <= sizes.capacity - sizes.rows]


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory that is allocated in here holds NaN, or the greatest integer, until it is written."""
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
