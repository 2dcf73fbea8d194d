"""The certified head: the argmax of kernels/lm_head.py with half its bytes, winners and values bit for bit, by proof.

Four launches: the two of kernels/screen.py, which has the bound and the proof; `head_rescore_kernel`, which computes again the
ids that may still win; `head_reduce_kernel` of kernels/lm_head.py. A program of the second has a region of ids, lists those that
survive in rising order, and walks its list in tiles, each row of w where it lies. So all ids survive as easily as one.

The survivors that are computed again are counted, and the launches with a row that isn't bounded: see CertifiedScratch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..schedules.recipe import Numerics
from ..schedules.schedule import FixedSchedule, HeadSchedule, ScreenSchedule
from ..shapes.model import CertifiedHeadShape, ReduceShape, RescoreShape, RowShape
from .layout import ROWS, Activation, Weights
from .linear import load_rows
from .lm_head import REDUCE_SCHEDULE, HeadScratch, head_reduce_launch
from .operation import (
    AtLeast,
    Constant,
    Instructions,
    Launch,
    Operand,
    Operation,
    common_contract,
    first_problem,
    options,
    power_of_two,
    require,
    require_contract,
    require_rows,
    sizes_of,
    tensor_core,
)
from .screen import SCREEN, ScreenWeights, digits_launch, screen_launch

if TYPE_CHECKING:
    import torch

DIGITS_SCHEDULE = FixedSchedule(num_warps=16, pdl=True)
RESCORE_SCHEDULE = FixedSchedule(num_warps=4, pdl=True)
REGION = 1024  # ids of one program
TILE = 64  # survivors of one product
STAGES = 3  # of its loop over K


@triton.jit(do_not_specialize=["rows", "limit"])
def head_rescore_kernel(x_ptr, w_ptr, upper_ptr, greatest_ptr, list_ptr, best_ptr, id_ptr, count_ptr, rows, limit, stride_xm,
                        stride_wn, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                        ROW_TILE: tl.constexpr, REGION: tl.constexpr, STAGES: tl.constexpr,
                        PDL: tl.constexpr):
    """Grid: (regions of REGION ids,). greatest_ptr [ROW_TILE]; list_ptr [regions, REGION] int32: room for a region's
    survivors; best_ptr, id_ptr [ROW_TILE, regions]: as head_kernel's of a block. count_ptr [regions + 1] int32: the survivors
    computed again are added, and 1 in the last place for a launch with a row that isn't bounded."""
    region = tl.program_id(0)
    first = region * REGION
    offs_m = tl.arange(0, ROW_TILE)
    tile_n = tl.arange(0, BLOCK_N)
    tile_k = tl.arange(0, BLOCK_K)
    ids = first + tl.arange(0, REGION)
    live = offs_m < rows
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    upper = tl.load(upper_ptr + offs_m[:, None].to(tl.int64) * N + ids[None, :], mask=live[:, None] & (ids[None, :] < N),
                    other=float("-inf"))
    greatest = tl.load(greatest_ptr + offs_m, mask=live, other=float("inf"))
    keep = tl.max(((upper >= greatest[:, None]) & live[:, None]).to(tl.int32), 0) * (ids < min(limit, N)).to(tl.int32)
    count = tl.sum(keep, 0)
    tl.store(list_ptr + first + tl.cumsum(keep, 0) - 1, ids, mask=keep > 0)
    tl.store(count_ptr + region, tl.load(count_ptr + region) + count)
    if region == 0:
        unbounded = tl.max((live & (greatest == float("-inf"))).to(tl.int32), 0)
        last = count_ptr + tl.num_programs(0)
        tl.store(last, tl.load(last) + unbounded)
    tl.debug_barrier()  # the list is read by other threads of this program than wrote it
    best = tl.full((ROW_TILE,), float("-inf"), tl.float32)
    token = tl.zeros((ROW_TILE,), tl.int32)
    for at in tl.range(0, count, BLOCK_N, num_stages=1):
        alive = at + tile_n < count
        n = tl.load(list_ptr + first + at + tile_n, mask=alive, other=0)
        rows_of_w = w_ptr + n.to(tl.int64) * stride_wn
        acc = tl.zeros((BLOCK_N, ROW_TILE), tl.float32)
        for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            mask = alive[:, None]
            if K % BLOCK_K != 0:
                mask = mask & (tile_k[None, :] < K - k0)
            w = tl.load(rows_of_w[:, None] + (k0 + tile_k)[None, :], mask=mask, other=0.0)
            x = load_rows(x_ptr, k0, rows, stride_xm, 0, K, BLOCK_K, BLOCK_K, ROW_TILE, 1)
            acc = tl.dot(w, x, acc)
        value = tl.where((acc == acc) & alive[:, None], acc + 0.0, float("-inf"))
        top = tl.max(value, 0)
        lowest = tl.min(tl.where(value == top[None, :], n[:, None], N), 0)
        token = tl.where(top > best, lowest, token)  # survivors are in rising order
        best = tl.maximum(best, top)
    out = offs_m * tl.num_programs(0) + region
    tl.store(best_ptr + out, best, mask=live)
    tl.store(id_ptr + out, token, mask=live)


def rescore_contract(shape: RescoreShape, schedule: FixedSchedule) -> str | None:
    """Why a shape and a schedule can't go together, or None."""
    return first_problem(common_contract(schedule), power_of_two("BLOCK_K", shape.BLOCK_K, 16, 256))


def rescore_launch(shape: RescoreShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """The artefact of one head and BLOCK_K of the plain head's schedule."""
    constants: dict[str, Constant] = {"N": shape.N, "K": shape.K, "BLOCK_N": TILE, "BLOCK_K": shape.BLOCK_K, "ROW_TILE": ROWS,
                                      "REGION": REGION, "STAGES": STAGES, "PDL": schedule.pdl}
    types = {"x_ptr": "*bf16", "w_ptr": "*bf16", **dict.fromkeys(("upper_ptr", "greatest_ptr", "best_ptr"), "*fp32"),
             **dict.fromkeys(("list_ptr", "id_ptr", "count_ptr"), "*i32"),
             **dict.fromkeys(("rows", "limit", "stride_xm", "stride_wn"), "i32")}
    return Launch(head_rescore_kernel, types, constants, options(schedule, numerics))


def rescore_instructions(shape: RescoreShape, arch: str) -> Instructions:
    """The plain head's."""
    return tensor_core("bf16", arch)


RESCORE = Operation(head_rescore_kernel, FixedSchedule, rescore_contract, rescore_launch, rescore_instructions,
                    early_reads=("w_ptr",))


@dataclass(frozen=True)
class CertifiedScratch:
    """Room of one launch. digits [2, ROWS, K] int8; norms [3, ROWS], upper [ROWS, N], greatest [ROWS] fp32; survivors
    [regions, REGION] int32; winners: of the regions, and the tokens. counts [regions + 1] int32: ids computed again in each
    region since the counts were zeroed, and launches with a row that wasn't bounded."""

    digits: "torch.Tensor"
    norms: "torch.Tensor"
    upper: "torch.Tensor"
    greatest: "torch.Tensor"
    survivors: "torch.Tensor"
    winners: HeadScratch
    counts: "torch.Tensor"


def new_certified_scratch(N: int, K: int, device: "torch.device") -> CertifiedScratch:
    """Room for launches over N ids."""
    import torch

    def room(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    regions, i32 = triton.cdiv(N, REGION), torch.int32
    winners = HeadScratch(room(ROWS, regions), room(ROWS, regions, dtype=i32), torch.zeros(ROWS, dtype=i32, device=device))
    return CertifiedScratch(room(2, ROWS, K, dtype=torch.int8), room(3, ROWS), room(ROWS, N), room(ROWS),
                            room(regions, REGION, dtype=i32), winners,
                            torch.zeros(regions + 1, dtype=i32, device=device))


def certified_head(x: Activation, w: Weights, screen: ScreenWeights, *, schedule: ScreenSchedule, head: HeadSchedule,
                   numerics: Numerics, limit: int | None = None, scratch: CertifiedScratch | None = None) -> "torch.Tensor":
    """As `lm_head` of kernels/lm_head.py under the schedule `head`, bit for bit: [rows] int32.

    Args:
        x: values [1, rows, K] bf16, 1 <= rows <= ROWS. w: w [N, K] bf16, no bias. screen: of w and schedule.product.
        limit: ids from it on never win. scratch: where to write, instead of new tensors.

    Raises:
        ContractError: tensors, shape and schedules can't go together.
    """
    _, rows, K = sizes_of("x", x.values, 3)
    N, blocks, regions = len(w.w), triton.cdiv(len(w.w), schedule.BLOCK_N), triton.cdiv(len(w.w), REGION)
    shape, limit = CertifiedHeadShape(N, K), N if limit is None else limit
    require(w.bias is None and w.scale is None, "a head with a bias or scales", "a bf16 head")
    require(head.row_tile == ROWS, f"a plain head with row tile {head.row_tile}", f"{ROWS}")
    require_rows(rows, ROWS)
    require_contract(SCREEN, shape, schedule)
    out = scratch or new_certified_scratch(N, K, w.w.device)
    given = Operand(x.values[0], (rows, K), ("stride_xm",))
    digits, norms = Operand(out.digits, (2, ROWS, K)), Operand(out.norms, (3, ROWS))
    upper, greatest = Operand(out.upper, (ROWS, N)), Operand(out.greatest, (ROWS,))
    best, ids = Operand(out.winners.best, (ROWS, regions)), Operand(out.winners.ids, (ROWS, regions))
    bounds = {"digits_ptr": digits, "norms_ptr": norms, "greatest_ptr": greatest}
    digit = digits_launch(RowShape(K), DIGITS_SCHEDULE, numerics)
    digit((rows,), **digit.arguments({"x_ptr": given, **bounds}))
    screening = screen_launch(shape, schedule, numerics)
    screening((blocks,), rows=rows, limit=limit, **screening.arguments({
        "x_ptr": given, **bounds, "q_ptr": Operand(screen.q, (N, K)), "upper_ptr": upper,
        **{f"{name}_ptr": Operand(getattr(screen, name), (N,)) for name in ("scale", "error", "norm")}}))
    rescore = rescore_launch(RescoreShape(N, K, head.BLOCK_K), RESCORE_SCHEDULE, numerics)
    rescore((regions,), rows=rows, limit=limit, **rescore.arguments({
        "x_ptr": given, "w_ptr": Operand(w.w, (N, K), ("stride_wn",)), "upper_ptr": upper, "greatest_ptr": greatest,
        "list_ptr": Operand(out.survivors, (regions, REGION)), "best_ptr": best, "id_ptr": ids,
        "count_ptr": Operand(out.counts, (regions + 1,))}))
    reduce = head_reduce_launch(ReduceShape(False), REDUCE_SCHEDULE, numerics)
    reduce((rows,), blocks=regions, **reduce.arguments({
        "best_ptr": best, "id_ptr": ids, "token_ptr": Operand(out.winners.tokens, (AtLeast(rows),)), "map_ptr": Operand(None)}))
    return out.winners.tokens[:rows]
