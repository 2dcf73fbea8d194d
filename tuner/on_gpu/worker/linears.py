"""The linears' case: operands, launches and reference for checks and timings."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....schedules.recipe import Recipe
from ....schedules.schedule import LinearSchedule
from ....shapes.model import LinearShape
from .case import RowsCase
from .operands import CLASS_ROWS, Factors, Operands, relative_rms

if TYPE_CHECKING:
    import torch


class LinearCase(RowsCase[LinearSchedule]):
    """y = x @ w.T with scales and bias. Partials are added in index order, as the next kernel does."""

    def __init__(self, shape: LinearShape, recipe: Recipe, make: Operands) -> None:
        self.sizes = make.sizes
        self.shape, self.numerics, self.limits = shape, recipe.numerics, recipe.max_rms_error
        outputs = sum(CLASS_ROWS) * (shape.N // 2 if shape.swiglu else shape.N)
        hashed = CLASS_ROWS[-1] * -(-self.sizes.class_outputs // outputs)
        self.pool = max(self.sizes.rows, hashed) if make.wide else self.sizes.rows
        self.factors = Factors(shape, make, self.pool)
        self.bias = make.bf16(shape.N, seed=5) if shape.bias else None

    def limit(self, schedule: LinearSchedule) -> float:
        if schedule.split_k > 1:
            return self.limits.partials
        return self.limits.swiglu if self.shape.swiglu else self.limits.output

    def rows(self, schedule: LinearSchedule) -> int:
        return min(self.sizes.rows, schedule.row_tile)

    def launch(self, schedule: LinearSchedule, first: int, rows: int, copy: int = 0) -> "torch.Tensor":
        from ....kernels.linear import linear

        x, amax = self.factors.rows(first, rows), None
        if self.shape.swiglu and x.scale is not None:  # for the next quantisation; one per block, so not part of the class
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
        """The first n rows of y in fp64 from the stored operands: [n, N], with swiglu [n, N / 2]."""
        from ....kernels.linear import linear_reference

        y = linear_reference(self.factors.rows(0, n), self.factors.linear(0, self.bias))
        if self.shape.swiglu:  # 8 gates, 8 ups, and so on
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
