"""Operands of checks and timings.

`normal` operands serve errors and times, `wide` ones numerics classes (see `values`).
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....shapes.model import HeadShape, LinearShape
from ..samples.bytes import OCCUPANCIES, TIMED_ROWS
from . import values

if TYPE_CHECKING:
    import torch

    from ....kernels.layout import Activation, Weights

CLASS_ROWS = (1, TIMED_ROWS)


@dataclass(frozen=True)
class Sizes:
    """Sizes of checks. rows: checked together. capacity: slots of the KV cache. checked_length: tokens in it, so few short of a
    chunk boundary that `rows` rows cross it. occupancies: tokens in it when attention and merge are timed. repeats: launches that
    must give the same bytes. class_outputs: minimum of hashed outputs: a change of order shows in few of them."""

    rows: int = 9
    capacity: int = 4096
    checked_length: int = 2040
    occupancies: tuple[int, ...] = OCCUPANCIES
    repeats: int = 8
    class_outputs: int = 100_000


SIZES = Sizes()


@dataclass(frozen=True)
class Operands:
    """Makes operands on a device. wide: for numerics classes, see `values`. copies: of the large ones, which timed launches use
    in turn."""

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
    return min(math.prod(shape), values.PERIOD)


def relative_rms(output: "torch.Tensor", reference: "torch.Tensor") -> float:
    """RMS of the difference over RMS of the reference."""
    difference = (output.double() - reference).pow(2).mean().sqrt()
    return float(difference / reference.pow(2).mean().sqrt())


class Factors:
    """The factors of a linear or a head: x [terms, pool, K], copies of w [N, K]; for e4m3 also x_scale [pool], w_scale [N],
    fp32."""

    def __init__(self, shape: LinearShape | HeadShape, make: Operands, pool: int) -> None:
        fp8 = shape.dtype == "e4m3"
        draw = make.e4m3 if fp8 else make.bf16
        self.x = draw(shape.terms, pool, shape.K, seed=1)
        self.weights = make.copied(draw(shape.N, shape.K, seed=2))
        self.x_scale = make.fp32(pool, seed=3, low=-4, high=4).abs() + 0.1 if fp8 else None
        self.w_scale = make.fp32(shape.N, seed=4, low=-4, high=4).abs() + 0.1 if fp8 else None

    def rows(self, first: int, rows: int) -> "Activation":
        """x[:, first:first + rows] with its scales."""
        from ....kernels.layout import Activation

        part = slice(first, first + rows)
        scale = self.x_scale[part] if self.x_scale is not None else None
        if scale is not None and first:
            scale = scale.clone()  # aligned to 16 bytes again
        return Activation(self.x[:, part], scale)

    def linear(self, copy: int, bias: "torch.Tensor | None" = None) -> "Weights":
        """One copy of w, with scales and bias."""
        from ....kernels.layout import Weights

        return Weights(self.weights[copy], self.w_scale, bias)


def around(chunk: int, sizes: Sizes) -> list[int]:
    """Lengths around chunk edges that fit the cache."""
    edges = [0, *(n * chunk + d for n in (1, 2, 8) for d in (-5, -1, 0, 1))]
    return [n for n in edges if 0 <= n <= sizes.capacity - sizes.rows]


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory allocated in this context holds NaN, or the largest integer, until it is written."""
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
