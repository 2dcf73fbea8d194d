"""n-gram look-up on the device (prompt lookup decoding, Saxena 2023): the draft of decoder/drafters/ngram.py, token for token.

    key = (size, q): the longest ending of the sequence, of at most `longest` tokens, that also ends at q, and the latest such q
    draft = the tokens after q, as far as the sequence goes

One program reads the history, which `accept` writes, and writes the rows to verify. Places without a token hold -1, which is
embedded as zeros and never accepted. Time grows with the length of the sequence: one pass over it per round.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..schedules.recipe import Numerics
from ..schedules.schedule import FixedSchedule
from ..shapes.model import LookupShape
from .accept import Round
from .layout import LENGTH, LONGEST, ROWS, STATE
from .operation import (
    AtLeast,
    Constant,
    Launch,
    Operand,
    Operation,
    no_tensor_core,
    options,
    require,
    require_contract,
    warps_contract,
)

if TYPE_CHECKING:
    import torch

BLOCK = 2048  # tokens compared at once
SCHEDULE = FixedSchedule(num_warps=8, pdl=True)


@triton.jit(do_not_specialize=["draft_length"])
def ngram_kernel(history_ptr, row_token_ptr, state_ptr, draft_length, LONGEST: tl.constexpr, BLOCK: tl.constexpr,
                 ROWS: tl.constexpr, LENGTH: tl.constexpr, PDL: tl.constexpr):
    """history_ptr [tokens]: the sequence, whose last token is at state[LENGTH]. draft_length: at most ROWS - 1. A key
    (size, q) is one int32: size in the bits from 28 on."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    last = tl.load(state_ptr + LENGTH)
    best = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, last, BLOCK):
        q = start + tl.arange(0, BLOCK)
        size = tl.full([BLOCK], 0, tl.int32)
        same = q < last
        for back in tl.static_range(LONGEST):
            inside = same & (q >= back)
            token = tl.load(history_ptr + q - back, mask=inside, other=-1)
            ending = tl.load(history_ptr + last - back, mask=last >= back, other=-2)
            same = inside & (token == ending)
            size += same.to(tl.int32)
        best = tl.maximum(best, tl.where(size > 0, (size << 28) + q, 0))
    found = tl.max(best, 0)
    i = tl.arange(0, ROWS)
    at = (found & 0xFFFFFFF) + 1 + i
    token = tl.load(history_ptr + at, mask=(found > 0) & (at <= last), other=-1)
    tl.store(row_token_ptr + 1 + i, token, mask=i < draft_length)


def ngram_launch(shape: LookupShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """The artefact: the same for every draft length and every length of the sequence."""
    types = {**dict.fromkeys(("history_ptr", "row_token_ptr", "state_ptr"), "*i32"), "draft_length": "i32"}
    constants: dict[str, Constant] = {"LONGEST": shape.longest, "BLOCK": BLOCK, "ROWS": ROWS, "LENGTH": LENGTH,
                                      "PDL": schedule.pdl}
    return Launch(ngram_kernel, types, constants, options(schedule, numerics))


OPERATION = Operation(ngram_kernel, FixedSchedule, warps_contract, ngram_launch, no_tensor_core)


def ngram_draft(history: "torch.Tensor", now: Round, *, draft_length: int, schedule: FixedSchedule, numerics: Numerics) -> None:
    """The draft of the round that begins, into rows 1 to draft_length of `now`.

    Args:
        history: [tokens] int32, ROWS + 1 to 2^28 - 1: the sequence up to the pending token, which is at state[LENGTH].
        draft_length: drafted tokens, 1 to ROWS - 1.

    Raises:
        ContractError: tensors that don't go together.
    """
    require(1 <= draft_length < ROWS, f"{draft_length} drafted tokens", f"1 to {ROWS - 1}")
    require(len(history) < 1 << 28, f"a history of {len(history)} tokens", f"fewer than {1 << 28}")
    shape = LookupShape(LONGEST)
    require_contract(OPERATION, shape, schedule)
    launch = ngram_launch(shape, schedule, numerics)
    launch((1,), draft_length=draft_length, **launch.arguments({
        "history_ptr": Operand(history, (AtLeast(ROWS + 1),)),
        "row_token_ptr": Operand(now.row_tokens, (ROWS,)),
        "state_ptr": Operand(now.state, (STATE,)),
    }))
