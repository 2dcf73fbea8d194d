"""Branch selection on the device: looks up the outcome of a round, (accepted, recovery token), among the branches that a drafter
prepared (speculative speculative decoding: Kumar, Dao, May).

One program, after `accept`. `table` [TABLE, ROWS] int32 has a column per branch: its accepted count, its recovery token, the
round it was made in, then its draft tokens; -1 in columns without a branch. A column of another round never matches. On a hit,
the column's tokens become the rows to verify. The round's record has 1 at HIT on a hit, else 0.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..schedules.recipe import Numerics
from ..schedules.schedule import FixedSchedule
from ..shapes.model import DraftTokenShape
from .accept import Round
from .layout import HIT, RECORD, ROUND, ROWS, STATE, TABLE, TIP
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


@triton.jit(do_not_specialize=["ring", "rounds", "draft_length"])
def serve_kernel(table_ptr, row_token_ptr, state_ptr, record_ptr, hits_ptr, ring, rounds, draft_length, ROWS: tl.constexpr,
                 RECORD: tl.constexpr, HIT: tl.constexpr, TIP: tl.constexpr, ROUND: tl.constexpr, PDL: tl.constexpr):
    """record_ptr [ring, RECORD]. draft_length: at most ROWS - 1. hits_ptr [rounds]: a script of hits, or None."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.arange(0, ROWS)
    number = tl.load(state_ptr + ROUND) - 1  # the verified round
    right = (tl.load(table_ptr + i) == tl.load(state_ptr + TIP)) & (tl.load(table_ptr + ROWS + i) == tl.load(row_token_ptr))
    right = right & (tl.load(table_ptr + 2 * ROWS + i) == number)
    branch = tl.min(tl.where(right, i, ROWS), 0)
    hit = branch < ROWS
    served = hit & (i < draft_length)
    tl.store(row_token_ptr + 1 + i, tl.load(table_ptr + (3 + i) * ROWS + branch, mask=served, other=0), mask=served)
    if hits_ptr is not None:
        hit = tl.load(hits_ptr + number % rounds) > 0
    tl.store(record_ptr + (number % ring) * RECORD + HIT, hit.to(tl.int32))


def select_branch_launch(shape: DraftTokenShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """The artefact, the same for every draft length."""
    types = {**dict.fromkeys(("table_ptr", "row_token_ptr", "state_ptr", "record_ptr", "hits_ptr"), "*i32"),
             **dict.fromkeys(("ring", "rounds", "draft_length"), "i32")}
    constants: dict[str, Constant] = {"ROWS": ROWS, "RECORD": RECORD, "HIT": HIT, "TIP": TIP, "ROUND": ROUND,
                                      "PDL": schedule.pdl} | ({} if shape.scripted else {"hits_ptr": None})
    return Launch(serve_kernel, types, constants, options(schedule, numerics))


OPERATION = Operation(serve_kernel, FixedSchedule, warps_contract, select_branch_launch, no_tensor_core)


def select_branch(table: "torch.Tensor", now: Round, records: "torch.Tensor", *, draft_length: int, schedule: FixedSchedule,
                  numerics: Numerics, hits: "torch.Tensor | None" = None) -> None:
    """Writes the tokens of the outcome's branch to the rows to verify.

    Args:
        table: [TABLE, ROWS] int32. now: after `accept`. records: [ring, RECORD] int32.
        draft_length: number of draft tokens, 1 to ROWS - 1.
        hits: [rounds] int32, a script of hits (1) and misses (0), or None.

    Raises:
        ContractError: tensors that don't fit each other.
    """
    require(1 <= draft_length < ROWS, f"{draft_length} draft tokens", f"1 to {ROWS - 1}")
    shape = DraftTokenShape(hits is not None)
    require_contract(OPERATION, shape, schedule)
    launch = select_branch_launch(shape, schedule, numerics)
    launch((1,), ring=len(records), rounds=0 if hits is None else len(hits), draft_length=draft_length, **launch.arguments({
        "table_ptr": Operand(table, (TABLE, ROWS)),
        "row_token_ptr": Operand(now.row_tokens, (ROWS,)),
        "state_ptr": Operand(now.state, (STATE,)),
        "record_ptr": Operand(records, (AtLeast(1), RECORD)),
        "hits_ptr": Operand(hits, (AtLeast(1),)),
    }))
