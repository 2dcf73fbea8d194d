"""A model's head on the device: the plain one, or the certified one, whose winners are the same.

The certified head reads an int8 copy of the weights, made here when a model is loaded; the bf16 ones stay, for the rows that are
computed again and for logits.
"""

from functools import partial

import torch

from ...kernels.certified_head import CertifiedScratch, certified_head, new_certified_scratch
from ...kernels.layout import Activation, Weights
from ...kernels.lm_head import HeadScratch, lm_head, new_scratch
from ...kernels.screen import screen_bytes, screen_weights
from ...schedules.recipe import Numerics
from ...schedules.schedule import StepSchedules
from ...shapes.model import CertifiedHeadShape


class DeviceHead:
    """w [vocab_size, H] bf16. schedule: of the plain head, whose bits both have. scratch: the winners of its last launch."""

    def __init__(self, w: torch.Tensor, schedules: StepSchedules, numerics: Numerics) -> None:
        self.w, self.schedule, screen = w, schedules.lm_head, schedules.lm_head_certified
        self._certified: CertifiedScratch | None = None
        if screen is None:
            self.scratch: HeadScratch = new_scratch(w.shape[0], self.schedule, w.device)
            self._launch = partial(lm_head, w=Weights(w), schedule=self.schedule, numerics=numerics, scratch=self.scratch)
        else:
            self._certified = new_certified_scratch(len(w), w.shape[1], w.device)
            self.scratch = self._certified.winners
            self._launch = partial(certified_head, w=Weights(w), screen=screen_weights(w, screen.product), schedule=screen,
                                   head=self.schedule, numerics=numerics, scratch=self._certified)

    def launch(self, final: torch.Tensor, limit: int) -> torch.Tensor:
        """The winners below `limit` of up to a row tile of rows [rows, H] bf16: [rows] int32, at a fixed address; -1 for a row of
        NaN."""
        return self._launch(Activation(final[None]), limit=limit)

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a launch reads, but for the rows that are computed again."""
        return 2 * self.w.numel() if self._certified is None else screen_bytes(CertifiedHeadShape(*self.w.shape))

    def counts(self) -> tuple[int, int]:
        """(ids that the certified head computed again, its launches with a row that it couldn't bound) since the last call."""
        if self._certified is None:
            return 0, 0
        *rescored, unbounded = self._certified.counts.tolist()
        self._certified.counts.zero_()
        return sum(rescored), unbounded
