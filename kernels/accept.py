"""Accept and reject on the device: the verdict on one speculative round, without the host.

    accepted = length of the longest prefix with draft_i = winner_i;  emitted = winners_0 .. winners_accepted
    (greedy speculative decoding: Leviathan, Kalman, Matias 2023), cut after the first end-of-sequence id

One program. The state of a round (kernels/layout.py) is int32. `row_tokens` [ROWS] holds the verified tokens: the pending token
and the draft. The kernel writes the new pending token to row 0 and advances the cursor, unless the request is finished. Each
round writes a record, which the host reads later: [emitted, accepted, finished, tokens...], and appends its tokens to the
history, which n-gram look-up reads (kernels/ngram.py).
"""

from typing import TYPE_CHECKING, Protocol

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..schedules.recipe import Numerics
from ..schedules.schedule import FixedSchedule
from ..shapes.model import AcceptShape, DraftTokenShape
from .layout import ENDS, FINISHED, HEADER, LEFT, LENGTH, PAIR, RECORD, ROUND, ROWS, STARTS, STATE, STRIDE, TIP
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


@triton.jit(do_not_specialize=["ring", "draft_length"])
def accept_kernel(winner_ptr, row_token_ptr, pair_ptr, state_ptr, start_ptr, end_ptr, record_ptr, history_ptr, ring, draft_length,
                  ROWS: tl.constexpr, STARTS: tl.constexpr, STRIDE: tl.constexpr, ENDS: tl.constexpr, RECORD: tl.constexpr,
                  HEADER: tl.constexpr, LENGTH: tl.constexpr, TIP: tl.constexpr, LEFT: tl.constexpr, ROUND: tl.constexpr,
                  FINISHED: tl.constexpr, PDL: tl.constexpr):
    """record_ptr [ring, RECORD]. draft_length: at most ROWS - 1. pair_ptr [2]: the last two tokens of the sequence, for a drafter
    that takes both. history_ptr [tokens]: the sequence, the pending token included."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.arange(0, ROWS)
    winner = tl.load(winner_ptr + i, mask=i <= draft_length, other=-1)
    draft = tl.load(row_token_ptr + 1 + i, mask=i < draft_length, other=-2)
    pending = tl.load(row_token_ptr)
    length = tl.load(state_ptr + LENGTH)
    left = tl.load(state_ptr + LEFT)
    number = tl.load(state_ptr + ROUND)
    finished = tl.load(state_ptr + FINISHED)
    accepted = tl.min(tl.where((i < draft_length) & (winner == draft), ROWS, i), 0)
    ends = tl.load(end_ptr + tl.arange(0, ENDS))
    is_end = tl.max((winner[:, None] == ends[None, :]).to(tl.int32), 1)
    first_end = tl.min(tl.where((is_end > 0) & (i <= accepted), i, ROWS), 0)
    emitted = tl.minimum(tl.minimum(accepted, first_end) + 1, left)
    emitted = tl.where(finished > 0, 0, emitted)
    ended = (finished > 0) | (first_end < ROWS) | (emitted >= left)
    last = tl.sum(tl.where(i == accepted, winner, 0), 0)
    before = tl.sum(tl.where(i == accepted - 1, winner, 0), 0)
    before = tl.where(accepted == 0, pending, before)
    if finished == 0:
        tl.store(row_token_ptr, last)
        tl.store(pair_ptr, before)
        tl.store(pair_ptr + 1, last)
        after = length + accepted + 1
        j = tl.arange(0, STARTS)
        tl.store(start_ptr + j * STRIDE, tl.where(j == 0, length, after - 2 + j))
        tl.store(state_ptr + LENGTH, after)
        tl.store(state_ptr + TIP, accepted)
        tl.store(state_ptr + LEFT, left - emitted)
        tl.store(history_ptr + length + 1 + i, winner, mask=i <= accepted)
    tl.store(state_ptr + ROUND, number + 1)
    tl.store(state_ptr + FINISHED, ended.to(tl.int32))
    record = record_ptr + (number % ring) * RECORD
    tl.store(record, emitted)
    tl.store(record + 1, accepted)
    tl.store(record + 2, ended.to(tl.int32))
    tl.store(record + HEADER + i, winner)


@triton.jit(do_not_specialize=["rounds", "size", "step"])
def draft_token_kernel(token_ptr, row_token_ptr, reference_ptr, accepted_ptr, state_ptr, rounds, size, step,
                       LENGTH: tl.constexpr, ROUND: tl.constexpr, PDL: tl.constexpr):
    """Writes draft token `step` of a round to row 1 + step. With a script in place of the drafter: the recorded token if step is
    below the round's number of accepted tokens, else a wrong one. reference_ptr [size]: the recorded sequence. accepted_ptr
    [rounds]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.load(token_ptr)
    if reference_ptr is not None:
        right = tl.load(accepted_ptr + tl.load(state_ptr + ROUND) % rounds)
        at = tl.load(state_ptr + LENGTH) + 1 + step
        known = tl.load(reference_ptr + tl.minimum(at, size - 1))
        token = tl.where(step < right, known, tl.where(known == 0, 1, 0))
    tl.store(row_token_ptr + 1 + step, token)


def accept_launch(shape: AcceptShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """The artefact, the same for every draft length."""
    pointers = ("winner_ptr", "row_token_ptr", "pair_ptr", "state_ptr", "start_ptr", "end_ptr", "record_ptr", "history_ptr")
    constants: dict[str, Constant] = {
        "ROWS": shape.rows, "STARTS": STARTS, "STRIDE": STRIDE, "ENDS": ENDS, "RECORD": RECORD, "HEADER": HEADER,
        "LENGTH": LENGTH, "TIP": TIP, "LEFT": LEFT, "ROUND": ROUND, "FINISHED": FINISHED, "PDL": schedule.pdl}
    return Launch(accept_kernel, {**dict.fromkeys(pointers, "*i32"), "ring": "i32", "draft_length": "i32"}, constants,
                  options(schedule, numerics))


def draft_token_launch(shape: DraftTokenShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """The artefact, the same for every step of a draft."""
    pointers = ("token_ptr", "row_token_ptr", "reference_ptr", "accepted_ptr", "state_ptr")
    types = {**dict.fromkeys(pointers, "*i32"), **dict.fromkeys(("rounds", "size", "step"), "i32")}
    constants: dict[str, Constant] = {"LENGTH": LENGTH, "ROUND": ROUND, "PDL": schedule.pdl}
    constants |= {} if shape.scripted else {"reference_ptr": None, "accepted_ptr": None}
    return Launch(draft_token_kernel, types, constants, options(schedule, numerics))


ACCEPT = Operation(accept_kernel, FixedSchedule, warps_contract, accept_launch, no_tensor_core)
DRAFT_TOKEN = Operation(draft_token_kernel, FixedSchedule, warps_contract, draft_token_launch, no_tensor_core)


class Round(Protocol):
    """The state of a round, int32 on the device: row_tokens [ROWS], pair [PAIR], state [STATE], starts [STARTS * STRIDE], ends
    [ENDS], padded with -2."""

    row_tokens: "torch.Tensor"
    pair: "torch.Tensor"
    state: "torch.Tensor"
    starts: "torch.Tensor"
    ends: "torch.Tensor"


def accept(winners: "torch.Tensor", now: Round, records: "torch.Tensor", history: "torch.Tensor", *, draft_length: int,
           schedule: FixedSchedule, numerics: Numerics) -> None:
    """Writes the verdict on a draft to `now` and `records`, and the tokens to `history`.

    Args:
        winners: [>= draft_length + 1] int32. records: [ring, RECORD] int32.
        history: int32, for the tokens in the cache, the pending one and ROWS more.
        draft_length: number of draft tokens, 0 to ROWS - 1.

    Raises:
        ContractError: tensors that don't fit each other.
    """
    require(0 <= draft_length < ROWS, f"{draft_length} draft tokens", f"0 to {ROWS - 1}")
    shape = AcceptShape(ROWS)
    require_contract(ACCEPT, shape, schedule)
    launch = accept_launch(shape, schedule, numerics)
    launch((1,), ring=len(records), draft_length=draft_length, **launch.arguments({
        "winner_ptr": Operand(winners, (AtLeast(draft_length + 1),)),
        "row_token_ptr": Operand(now.row_tokens, (ROWS,)),
        "pair_ptr": Operand(now.pair, (PAIR,)),
        "state_ptr": Operand(now.state, (STATE,)),
        "start_ptr": Operand(now.starts, (STARTS * STRIDE,)),
        "end_ptr": Operand(now.ends, (ENDS,)),
        "record_ptr": Operand(records, (AtLeast(1), RECORD)),
        "history_ptr": Operand(history, (AtLeast(ROWS + 1),)),
    }))


def draft_token(token: "torch.Tensor", now: Round, *, step: int, schedule: FixedSchedule, numerics: Numerics,
                reference: "torch.Tensor | None" = None, accepted: "torch.Tensor | None" = None) -> None:
    """Writes a draft token to row_tokens[1 + step].

    Args:
        token: [1] int32. step: 0 to ROWS - 2.
        reference, accepted: [size] and [rounds] int32, a script in place of the drafter; or neither.

    Raises:
        ContractError: tensors that don't fit each other.
    """
    require(0 <= step < ROWS - 1, f"step {step} of a draft", f"0 to {ROWS - 2}")
    shape = DraftTokenShape(reference is not None)
    require_contract(DRAFT_TOKEN, shape, schedule)
    launch = draft_token_launch(shape, schedule, numerics)
    launch((1,), step=step, rounds=0 if accepted is None else len(accepted), size=0 if reference is None else len(reference),
           **launch.arguments({
               "token_ptr": Operand(token, (AtLeast(1),)),
               "row_token_ptr": Operand(now.row_tokens, (ROWS,)),
               "state_ptr": Operand(now.state, (STATE,)),
               "reference_ptr": Operand(reference, (AtLeast(1),)),
               "accepted_ptr": Operand(accepted, (AtLeast(1),)),
           }))
