"""The language-model head's case: operands, launches and reference for checks and timings."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ....schedules.recipe import Recipe
from ....schedules.schedule import HeadSchedule, ScreenSchedule
from ....shapes.model import CertifiedHeadShape, HeadShape
from .case import RowsCase
from .operands import CLASS_ROWS, Factors, Operands, relative_rms

if TYPE_CHECKING:
    import torch

    from ....kernels.certified_head import CertifiedScratch
    from ....kernels.screen import ScreenWeights


class HeadCase(RowsCase[HeadSchedule]):
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


class CertifiedCase(RowsCase[ScreenSchedule]):
    """The certified head, its four launches. plain: the schedule whose steps it computes again in. Judged as the argmax variant;
    its class is that of the upper bounds, as its winners are the plain head's under any schedule."""

    def __init__(self, shape: CertifiedHeadShape, recipe: Recipe, make: Operands, plain: HeadSchedule) -> None:
        self.shape, self.plain, self.head = shape, plain, HeadCase(HeadShape(shape.N, shape.K), recipe, make, logits=False)
        self._screens: dict[tuple[str, int], ScreenWeights] = {}
        self._kept: CertifiedScratch | None = None  # of timed launches

    def limit(self, schedule: ScreenSchedule) -> float:
        return self.head.limit(self.plain)

    def rows(self, schedule: ScreenSchedule) -> int:
        return self.head.rows(self.plain)

    def launch(self, schedule: ScreenSchedule, first: int, rows: int, scratch: "CertifiedScratch",
               copy: int = 0) -> "torch.Tensor":
        from ....kernels.certified_head import certified_head
        from ....kernels.screen import screen_weights

        x, w, key = self.head.factors.rows(first, rows), self.head.factors.linear(copy), (schedule.product, copy)
        if key not in self._screens:
            self._screens[key] = screen_weights(w.w, schedule.product)
        return certified_head(x, w, self._screens[key], schedule=schedule, head=self.plain, numerics=self.head.numerics,
                              scratch=scratch)

    def room(self) -> "CertifiedScratch":
        """New scratch; its tokens are no tokens."""
        from ....kernels.certified_head import new_certified_scratch

        made = new_certified_scratch(self.shape.N, self.shape.K, self.head.factors.x.device)
        made.winners.tokens.fill_(-1)
        return made

    def output(self, schedule: ScreenSchedule, first: int, rows: int) -> "torch.Tensor":
        return self.launch(schedule, first, rows, self.room())

    def error(self, output: "torch.Tensor") -> float:
        return self.head.error(output)

    def timed(self, schedule: ScreenSchedule, copy: int) -> None:
        self._kept = self._kept or self.room()
        self.launch(schedule, 0, CLASS_ROWS[-1], self._kept, copy)

    def bits(self, schedule: ScreenSchedule) -> Iterator["torch.Tensor"]:
        while True:
            for first in range(self.head.sizes.rows - CLASS_ROWS[-1] + 1):
                for rows in CLASS_ROWS:
                    scratch = self.room()
                    self.launch(schedule, first, rows, scratch)
                    yield scratch.upper[:rows]
