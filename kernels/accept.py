"""Accept and reject on the device: the verdict of one speculative round, without the host.

    accepted = length of the longest prefix with draft_i = winner_i;  emitted = winners_0 .. winners_accepted
    (greedy speculative decoding: Leviathan, Kalman, Matias 2023), cut after the first end-of-sequence id

One program. `state` holds what a round needs and leaves (indices below); `row_tokens` [ROWS] are the rows that were verified:
the pending token and the draft. Afterwards row 0 is the new pending token and the cursor has moved; a request that is finished
moves no more. Every round leaves a record the host reads when it likes: [emitted, accepted, finished, tokens...].
"""

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..schedules.recipe import Numerics
from ..schedules.schedule import FixedSchedule
from ..shapes.model import AcceptShape, DraftTokenShape
from .attention import ROWS
from .norm import no_instructions
from .operation import Launch, Operation, common_contract, options, require_aligned

if TYPE_CHECKING:
    import torch

# Places in `state`, int32. LENGTH: tokens in the cache. TIP: accepted drafts of the round. LEFT: tokens that may still be
# emitted. ROUND: rounds so far. FINISHED: 0 or 1.
LENGTH, TIP, LEFT, ROUND, FINISHED, STATE = 0, 4, 8, 9, 10, 16
STRIDE = 4  # int32 values from one of `starts` to the next: each must lie on 16 bytes, as a kernel's length does
STARTS = 32  # LENGTH before the round, then LENGTH - 1, LENGTH, LENGTH + 1, ...: where passes of a drafter begin
ENDS = 32  # end-of-sequence ids a request may have
RECORD = 32  # int32 values of one round's record
HEADER = 3  # of which: emitted, accepted, finished


@triton.jit(do_not_specialize=["ring", "draft_length"])
def accept_kernel(winner_ptr, row_token_ptr, pair_ptr, state_ptr, start_ptr, end_ptr, record_ptr, ring, draft_length,
                  ROWS: tl.constexpr, STARTS: tl.constexpr, STRIDE: tl.constexpr, ENDS: tl.constexpr, RECORD: tl.constexpr,
                  HEADER: tl.constexpr, LENGTH: tl.constexpr, TIP: tl.constexpr, LEFT: tl.constexpr, ROUND: tl.constexpr,
                  FINISHED: tl.constexpr, PDL: tl.constexpr):
    """record_ptr [ring, RECORD]; draft_length: at most ROWS - 1; pair_ptr [2]: the last two tokens of the sequence, for a
    drafter that feeds both."""
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
    """Drafted token `step` of a round becomes row 1 + step to verify. Where a script stands for the drafter (reference_ptr
    [size], the recorded sequence; accepted_ptr [rounds]), it is the recorded token while the round's script says right, and a
    wrong one after."""
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
    """The artefact: the same for every draft length."""
    pointers = ("winner_ptr", "row_token_ptr", "pair_ptr", "state_ptr", "start_ptr", "end_ptr", "record_ptr")
    constants: dict[str, Any] = {"ROWS": shape.rows, "STARTS": STARTS, "STRIDE": STRIDE, "ENDS": ENDS, "RECORD": RECORD,
                                 "HEADER": HEADER, "LENGTH": LENGTH, "TIP": TIP, "LEFT": LEFT, "ROUND": ROUND,
                                 "FINISHED": FINISHED, "PDL": schedule.pdl}
    return Launch(accept_kernel, {**dict.fromkeys(pointers, "*i32"), "ring": "i32", "draft_length": "i32"}, constants,
                  options(schedule, numerics))


def draft_token_launch(shape: DraftTokenShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """The artefact: the same for every place in a draft."""
    pointers = ("token_ptr", "row_token_ptr", "reference_ptr", "accepted_ptr", "state_ptr")
    types = {**dict.fromkeys(pointers, "*i32"), **dict.fromkeys(("rounds", "size", "step"), "i32")}
    constants: dict[str, Any] = {"LENGTH": LENGTH, "ROUND": ROUND, "PDL": schedule.pdl}
    constants |= {} if shape.scripted else {"reference_ptr": None, "accepted_ptr": None}
    return Launch(draft_token_kernel, types, constants, options(schedule, numerics))


def one_program_contract(shape: AcceptShape | DraftTokenShape, schedule: FixedSchedule) -> str | None:
    """Why a shape and a schedule can't go together, or None."""
    return common_contract(schedule)


ACCEPT = Operation(accept_kernel, FixedSchedule, one_program_contract, accept_launch, no_instructions)
DRAFT_TOKEN = Operation(draft_token_kernel, FixedSchedule, one_program_contract, draft_token_launch, no_instructions)


def accept(winners: "torch.Tensor", row_tokens: "torch.Tensor", pair: "torch.Tensor", state: "torch.Tensor",
           starts: "torch.Tensor", ends: "torch.Tensor", records: "torch.Tensor", *, draft_length: int,
           schedule: FixedSchedule, numerics: Numerics) -> None:
    """winners, row_tokens [ROWS], pair [2], state [STATE], starts [STARTS * STRIDE], ends [ENDS] padded with -2, records
    [ring, RECORD], all int32."""
    given = {"winner_ptr": winners, "row_token_ptr": row_tokens, "pair_ptr": pair, "state_ptr": state, "start_ptr": starts,
             "end_ptr": ends, "record_ptr": records}
    require_aligned(**given)
    accept_launch(AcceptShape(ROWS), schedule, numerics)((1,), ring=records.shape[0], draft_length=draft_length, **given)


def draft_token(token: "torch.Tensor", row_tokens: "torch.Tensor", state: "torch.Tensor", *, step: int,
                schedule: FixedSchedule, numerics: Numerics, reference: "torch.Tensor | None" = None,
                accepted: "torch.Tensor | None" = None) -> None:
    """token [1] int32 into row_tokens [ROWS], place 1 + step; reference [size] and accepted [rounds] int32, or neither."""
    scripted = reference is not None and accepted is not None
    given = {"reference_ptr": reference, "accepted_ptr": accepted} if scripted else {}
    require_aligned(token=token, row_tokens=row_tokens, state=state, **given)
    draft_token_launch(DraftTokenShape(scripted), schedule, numerics)(
        (1,), token_ptr=token, row_token_ptr=row_tokens, state_ptr=state, step=step,
        rounds=0 if accepted is None else len(accepted), size=0 if reference is None else len(reference), **given)
