"""Which prepared branch serves the next round, on the device: the outcome of a round, (accepted, recovery token), is looked up
among those that a drafter prepared for (speculative speculative decoding: Kumar, Dao, May).

One program, after `accept`. `table` [TABLE, ROWS] int32, a column a branch: the accepted count and the recovery token it is for,
the round it was made in, then its drafted tokens; -1 in columns without a branch. A column of another round serves nothing. On a
hit its tokens become the rows to verify; the round's record says at HIT which it was.
"""

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..schedules.recipe import Numerics
from ..schedules.schedule import FixedSchedule
from ..shapes.model import DraftTokenShape
from .accept import RECORD, ROUND, TIP, one_program_contract
from .attention import ROWS
from .norm import no_instructions
from .operation import Launch, Operation, options, require, require_aligned

if TYPE_CHECKING:
    import torch

COUNT, TOKEN, MADE, DRAFT = 0, 1, 2, 3  # rows of the table
TABLE = DRAFT + ROWS
HIT = RECORD - 1  # place in a round's record: 1 where a branch serves the next round, else 0


@triton.jit(do_not_specialize=["ring", "rounds", "draft_length"])
def serve_kernel(table_ptr, row_token_ptr, state_ptr, record_ptr, hits_ptr, ring, rounds, draft_length, ROWS: tl.constexpr,
                 RECORD: tl.constexpr, HIT: tl.constexpr, TIP: tl.constexpr, ROUND: tl.constexpr, PDL: tl.constexpr):
    """record_ptr [ring, RECORD]. draft_length: at most ROWS - 1. hits_ptr [rounds]: a script's word on which rounds hit, or
    None."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.arange(0, ROWS)
    number = tl.load(state_ptr + ROUND) - 1  # of the round that was verified
    right = (tl.load(table_ptr + i) == tl.load(state_ptr + TIP)) & (tl.load(table_ptr + ROWS + i) == tl.load(row_token_ptr))
    right = right & (tl.load(table_ptr + 2 * ROWS + i) == number)
    branch = tl.min(tl.where(right, i, ROWS), 0)
    hit = branch < ROWS
    served = hit & (i < draft_length)
    tl.store(row_token_ptr + 1 + i, tl.load(table_ptr + (3 + i) * ROWS + branch, mask=served, other=0), mask=served)
    if hits_ptr is not None:
        hit = tl.load(hits_ptr + number % rounds) > 0
    tl.store(record_ptr + (number % ring) * RECORD + HIT, hit.to(tl.int32))


def serve_launch(shape: DraftTokenShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """The artefact: the same for every draft length, with a script or without."""
    types = {**dict.fromkeys(("table_ptr", "row_token_ptr", "state_ptr", "record_ptr", "hits_ptr"), "*i32"),
             **dict.fromkeys(("ring", "rounds", "draft_length"), "i32")}
    constants: dict[str, Any] = {"ROWS": ROWS, "RECORD": RECORD, "HIT": HIT, "TIP": TIP, "ROUND": ROUND,
                                 "PDL": schedule.pdl} | ({} if shape.scripted else {"hits_ptr": None})
    return Launch(serve_kernel, types, constants, options(schedule, numerics))


OPERATION = Operation(serve_kernel, FixedSchedule, one_program_contract, serve_launch, no_instructions)


def serve(table: "torch.Tensor", row_tokens: "torch.Tensor", state: "torch.Tensor", records: "torch.Tensor", *,
          draft_length: int, schedule: FixedSchedule, numerics: Numerics, hits: "torch.Tensor | None" = None) -> None:
    """table [TABLE, ROWS], row_tokens [ROWS], state [STATE] and records [ring, RECORD] as `accept` left them, hits [rounds], all
    int32 and contiguous.

    Raises:
        ContractError: a table of another size, a draft that doesn't fit it, pointers that aren't aligned.
    """
    require(1 <= draft_length < ROWS, f"{draft_length} drafted tokens", f"1 to {ROWS - 1}")
    require(tuple(table.shape) == (TABLE, ROWS), f"a table of {list(table.shape)}", f"[{TABLE}, {ROWS}]")
    given = {"table_ptr": table, "row_token_ptr": row_tokens, "state_ptr": state, "record_ptr": records}
    given |= {} if hits is None else {"hits_ptr": hits}
    require_aligned(**given)
    serve_launch(DraftTokenShape(hits is not None), schedule, numerics)(
        (1,), ring=records.shape[0], rounds=0 if hits is None else len(hits), draft_length=draft_length, **given)
