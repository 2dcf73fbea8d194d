"""Constants and values that several kernels share. Jitted functions take the constants as arguments.

Exception: literals inside jitted functions (0.0625 is 1 / LO_FACTOR). A change of a jitted function's source changes the digest
that its schedules are promoted under.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROWS = 16  # maximum of rows per decode launch: the row tile of the recipes
FOLD = 32  # attention chunks per group, in launches over more chunks: see kernels/merge.py
LO_FACTOR = 16.0  # scale of a two-term activation's second term: gives it the range of the first
TURN = 8  # consecutive rows of gates, then of ups, in the weights of gate_up

# The state of a round, int32. Indices into `state`: LENGTH, tokens in the cache; TIP, accepted draft tokens of the round; LEFT,
# tokens that may still be emitted; ROUND, rounds so far; FINISHED, 0 or 1. STATE is its size.
LENGTH, TIP, LEFT, ROUND, FINISHED, STATE = 0, 4, 8, 9, 10, 16
STRIDE = 4  # int32 values between entries of `starts`: each is aligned to 16 bytes, as a kernel's length must be
STARTS = 32  # start lengths of a drafter's passes: LENGTH before the round, then LENGTH - 1, LENGTH, LENGTH + 1, ...
PAIR = 4  # allocated size for the last two tokens of the sequence
ENDS = 32  # maximum of end-of-sequence ids per request
RECORD = 64  # int32 values per round's record
HEADER = 3  # first values of a record: emitted, accepted, finished
HIT = RECORD - 1  # index in a record: 1 if a prepared branch serves the next round, else 0

LONGEST = 3  # maximum of tokens in the key of an n-gram look-up; longer keys match less often and guess hardly better

# Rows of the table of prepared branches, which has a column per branch.
COUNT, TOKEN, MADE, DRAFT = 0, 1, 2, 3
TABLE = DRAFT + ROWS


@dataclass(frozen=True)
class Activation:
    """Input of a linear. values: [2, rows, K] e4m3, which means values[0] + values[1] / LO_FACTOR, or [1, rows, K] e4m3 or bf16.
    scale: [rows] fp32, for e4m3."""

    values: "torch.Tensor"
    scale: "torch.Tensor | None" = None

    def first(self, rows: int) -> "Activation":
        """The first rows."""
        return replace(self, values=self.values[:, :rows], scale=None if self.scale is None else self.scale[:rows])


@dataclass(frozen=True)
class Weights:
    """One linear. w: [N, K] e4m3 with scale [N] fp32, one per output channel, or bf16 without. bias: [N] bf16 or None."""

    w: "torch.Tensor"
    scale: "torch.Tensor | None" = None
    bias: "torch.Tensor | None" = None
