"""The language-model head's case: operands, launches and reference for checks and timings."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ....schedules.recipe import Recipe
from ....schedules.schedule import HeadSchedule
from ....shapes.model import HeadShape
from .operands import CLASS_ROWS, Factors, Operands, relative_rms

if TYPE_CHECKING:
    import torch


class HeadCase:
    """The head. The error of the argmax variant is the distance of its token's logit from the largest. Its class is that of the
    logits under the same schedule: both use the same reduction."""

    def __init__(self, shape: HeadShape, recipe: Recipe, make: Operands, logits: bool) -> None:
        self.sizes = make.sizes
        self.shape, self.numerics, self.limits, self.logits = shape, recipe.numerics, recipe.max_rms_error, logits
        self.factors = Factors(shape, make, self.sizes.rows)

    def limit(self, schedule: HeadSchedule) -> float:
        return self.limits.output

    def rows(self, schedule: HeadSchedule) -> int:
        return min(self.sizes.rows, schedule.row_tile)

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
            for first in range(self.sizes.rows - CLASS_ROWS[-1] + 1):
                for rows in CLASS_ROWS:
                    yield self.launch(schedule, first, rows, logits=True)
