"""Numbers and values that several kernels share. Each has its one owner here; jitted functions take the numbers as constants.

Not here: the literals inside jitted functions (0.0625 is 1 / LO_FACTOR). A change of a jitted function's text changes the digest
under which its schedules are promoted.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROWS = 16  # rows of one decode launch at most: the row tile of the recipes
FOLD = 32  # attention chunks that one group has, where a launch covers more of them: see kernels/merge.py
LO_FACTOR = 16.0  # factor on the second term of a two-term activation, which gives it the range of the first one
TURN = 8  # consecutive rows of gates, then of ups, in the weights of gate_up

# The state of a round, int32. Places in `state`: LENGTH, tokens in the cache; TIP, accepted drafts of the round; LEFT, tokens
# that may still be emitted; ROUND, rounds so far; FINISHED, 0 or 1. STATE is its size.
LENGTH, TIP, LEFT, ROUND, FINISHED, STATE = 0, 4, 8, 9, 10, 16
STRIDE = 4  # int32 values from one of `starts` to the next: each lies on 16 bytes, as a kernel's length must
STARTS = 32  # LENGTH before the round, then LENGTH - 1, LENGTH, LENGTH + 1, ...: where passes of a drafter begin
PAIR = 4  # room for the last two tokens of the sequence
ENDS = 32  # end-of-sequence ids of a request at most
RECORD = 32  # int32 values of one round's record
HEADER = 3  # of which: emitted, accepted, finished
HIT = RECORD - 1  # place in a record: 1 where a prepared branch serves the next round, else 0

# Rows of the table of prepared branches, a column per branch.
COUNT, TOKEN, MADE, DRAFT = 0, 1, 2, 3
TABLE = DRAFT + ROWS


@dataclass(frozen=True)
class Activation:
    """Input of a linear. values [2, rows, K] e4m3, the terms of values[0] + values[1] / LO_FACTOR, or [1, rows, K] e4m3 or bf16;
    scale [rows] fp32, for e4m3."""

    values: "torch.Tensor"
    scale: "torch.Tensor | None" = None

    def first(self, rows: int) -> "Activation":
        """The first rows."""
        return replace(self, values=self.values[:, :rows], scale=None if self.scale is None else self.scale[:rows])


@dataclass(frozen=True)
class Weights:
    """One linear. w [N, K] e4m3 with scale [N] fp32, one per output channel, or bf16 without; bias [N] bf16 or None."""

    w: "torch.Tensor"
    scale: "torch.Tensor | None" = None
    bias: "torch.Tensor | None" = None
