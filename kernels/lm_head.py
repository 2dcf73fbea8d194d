"""Language-model head in bf16: logits = x @ w.T in fp32, and either the winning token of each row or the logits.

    x [rows, K] bf16, w [N, K] bf16 (N: vocabulary), both with K contiguous.

Two kernels. `head_kernel` computes one block of logits; its two variants share the reduction, so the argmax of the logits
variant is the token of the argmax variant, ties included. The argmax variant writes only the best value and id of each
block; `head_reduce_kernel` walks the blocks in id order.

A tie goes to the lowest token id: leftmost within a block, and a later block must be strictly greater. -0.0 counts as 0.0.
A NaN never wins, and a row of nothing else gives -1. The head is not split over K: each logit is one chain of BLOCK_K steps.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..schedules.recipe import Numerics
from ..schedules.schedule import FixedSchedule, HeadSchedule
from ..shapes.model import HeadShape, KernelShape, ReduceShape
from .norm import no_instructions
from .operation import (
    Instructions,
    Launch,
    Operation,
    common_contract,
    first_problem,
    options,
    power_of_two,
    require,
    require_aligned,
    require_contract,
    require_strides,
)

if TYPE_CHECKING:
    import torch

REDUCE_SCHEDULE = FixedSchedule(num_warps=8, pdl=True)
REDUCE_TILE = 256  # blocks that head_reduce_kernel compares at once; any size gives the same token


@triton.jit(do_not_specialize=["rows", "limit"])
def head_kernel(x_ptr, w_ptr, logits_ptr, best_ptr, id_ptr, rows, limit, stride_xm, stride_wn, stride_lm, N: tl.constexpr,
                K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROW_TILE: tl.constexpr,
                PDL: tl.constexpr):
    """logits_ptr [rows, N] fp32, or None; best_ptr, id_ptr [ROW_TILE, blocks], or None. limit: ids from it on never win."""
    pid = tl.program_id(0)
    n0 = pid * BLOCK_N
    tile_n = tl.arange(0, BLOCK_N)
    tile_k = tl.arange(0, BLOCK_K)
    offs_n = n0 + tile_n
    offs_m = tl.arange(0, ROW_TILE)
    acc = tl.zeros((BLOCK_N, ROW_TILE), tl.float32)
    if PDL:
        gdc_wait()
    for k0 in tl.range(0, K, BLOCK_K):
        # int64: a vocabulary times a hidden size can pass 2^31 elements; on the scalar base alone, which saves registers
        w_pointers = w_ptr + (n0.to(tl.int64) * stride_wn + k0) + (tile_n[:, None] * stride_wn + tile_k[None, :])
        if N % BLOCK_N == 0 and K % BLOCK_K == 0:
            w = tl.load(w_pointers)
        else:
            w = tl.load(w_pointers, mask=(tile_n[:, None] < N - n0) & (tile_k[None, :] < K - k0), other=0.0)
        x_mask = offs_m[None, :] < rows
        if K % BLOCK_K != 0:
            x_mask = x_mask & (tile_k[:, None] < K - k0)
        x = tl.load(x_ptr + k0 + (offs_m[None, :] * stride_xm + tile_k[:, None]), mask=x_mask, other=0.0)
        acc = tl.dot(w, x, acc)
    if PDL:
        gdc_launch_dependents()
    live = offs_m < rows
    if logits_ptr is not None:
        tl.store(logits_ptr + offs_m[None, :].to(tl.int64) * stride_lm + offs_n[:, None], acc,
                 mask=live[None, :] & (offs_n[:, None] < N))
    else:
        value = tl.where(acc == acc, acc + 0.0, float("-inf"))
        value = tl.where(offs_n[:, None] < limit, value, float("-inf"))
        best, where = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
        out = offs_m * tl.num_programs(0) + pid
        tl.store(best_ptr + out, best, mask=live)
        tl.store(id_ptr + out, pid * BLOCK_N + where, mask=live)


@triton.jit(do_not_specialize=["blocks"])
def head_reduce_kernel(best_ptr, id_ptr, token_ptr, map_ptr, blocks, TILE: tl.constexpr, PDL: tl.constexpr):
    """One row a program: the id of the greatest of its blocks, the lowest id of those that are equal. map_ptr: what each id
    stands for, or None."""
    row = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    best = float("-inf")
    token = 0
    for b0 in tl.range(0, blocks, TILE):
        offs = b0 + tl.arange(0, TILE)
        value = tl.load(best_ptr + row * blocks + offs, mask=offs < blocks, other=float("-inf"))
        top, where = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
        candidate = tl.load(id_ptr + row * blocks + b0 + where)
        token = tl.where(top > best, candidate, token)
        best = tl.maximum(best, top)
    token = tl.where(best == float("-inf"), -1, token)
    if map_ptr is not None:
        token = tl.where(token < 0, -1, tl.load(map_ptr + tl.maximum(token, 0)))
    tl.store(token_ptr + row, token)


def head_contract(shape: HeadShape, schedule: HeadSchedule) -> str | None:
    """Why a head's shape and schedule can't go together, or None."""
    problem = first_problem(
        common_contract(schedule),
        power_of_two("BLOCK_N", schedule.BLOCK_N, 16, 512),
        power_of_two("BLOCK_K", schedule.BLOCK_K, 16, 256),
        power_of_two("row_tile", schedule.row_tile, 8, 16),
    )
    if problem:
        return problem
    if shape.K % 16:
        return f"K {shape.K} is no multiple of 16"
    if schedule.num_stages > 8:
        return f"num_stages {schedule.num_stages} is more than 8"
    return None


def _head_launch(shape: HeadShape, schedule: HeadSchedule, numerics: Numerics, logits: bool) -> Launch:
    constants: dict[str, Any] = {"N": shape.N, "K": shape.K, "BLOCK_N": schedule.BLOCK_N, "BLOCK_K": schedule.BLOCK_K,
                                 "ROW_TILE": schedule.row_tile, "PDL": schedule.pdl}
    types = {"x_ptr": "*bf16", "w_ptr": "*bf16", "rows": "i32", "limit": "i32", "stride_xm": "i32",
             "stride_wn": "i32", "stride_lm": "i32"}
    if logits:
        types["logits_ptr"] = "*fp32"
        constants |= {"best_ptr": None, "id_ptr": None}
    else:
        types |= {"best_ptr": "*fp32", "id_ptr": "*i32"}
        constants["logits_ptr"] = None
    return Launch(head_kernel, types, constants, options(schedule, numerics))


def head_argmax_launch(shape: HeadShape, schedule: HeadSchedule, numerics: Numerics) -> Launch:
    """The variant that writes the best token of each block."""
    return _head_launch(shape, schedule, numerics, logits=False)


def head_logits_launch(shape: HeadShape, schedule: HeadSchedule, numerics: Numerics) -> Launch:
    """The variant that writes the logits."""
    return _head_launch(shape, schedule, numerics, logits=True)


def head_reduce_launch(shape: ReduceShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """One artefact for every vocabulary and block size."""
    types = {"best_ptr": "*fp32", "id_ptr": "*i32", "token_ptr": "*i32", "map_ptr": "*i32", "blocks": "i32"}
    constants = {"TILE": REDUCE_TILE, "PDL": schedule.pdl, **({} if shape.mapped else {"map_ptr": None})}
    return Launch(head_reduce_kernel, types, constants, options(schedule, numerics))


def head_instructions(shape: KernelShape, arch: str) -> Instructions:
    return Instructions(required=("HGMMA",) if arch == "sm_90" else ("UTCHMMA",), forbidden=("HMMA",))


def head_shared_bytes(shape: HeadShape, schedule: HeadSchedule) -> int:
    """Lower bound: the tiles in flight."""
    stages = max(1, min(schedule.num_stages - 1, triton.cdiv(shape.K, schedule.BLOCK_K)))
    return stages * (schedule.BLOCK_N + schedule.row_tile) * schedule.BLOCK_K * 2


ARGMAX = Operation(head_kernel, HeadSchedule, head_contract, head_argmax_launch, head_instructions, head_shared_bytes)
LOGITS = Operation(head_kernel, HeadSchedule, head_contract, head_logits_launch, head_instructions, head_shared_bytes)
REDUCE = Operation(head_reduce_kernel, FixedSchedule, lambda shape, schedule: common_contract(schedule), head_reduce_launch,
                   no_instructions)


def _checked(x: "torch.Tensor", w: "torch.Tensor", schedule: HeadSchedule) -> HeadShape:
    import torch

    rows, K = x.shape
    shape = HeadShape(w.shape[0], K)
    require(x.dtype == w.dtype == torch.bfloat16, f"x is {x.dtype}, w is {w.dtype}", "both bfloat16")
    require(w.shape[1] == K and x.stride(1) == 1 and w.stride(1) == 1, f"x {list(x.shape)}, w {list(w.shape)}",
            "x [rows, K] and w [N, K] with K contiguous")
    require(1 <= rows <= schedule.row_tile, f"{rows} rows", f"1 to {schedule.row_tile}, the row tile")
    require_contract(ARGMAX, shape, schedule)
    require_strides(stride_xm=x.stride(0), stride_wn=w.stride(0))
    require_aligned(x=x, w=w)
    return shape


@dataclass(frozen=True)
class HeadScratch:
    """What the argmax variant writes: the best value and id of each block [row_tile, blocks], and tokens [row_tile] int32."""

    best: "torch.Tensor"
    ids: "torch.Tensor"
    tokens: "torch.Tensor"


def new_scratch(N: int, schedule: HeadSchedule, device: "torch.device") -> HeadScratch:
    """Room for one launch over N ids."""
    import torch

    blocks = triton.cdiv(N, schedule.BLOCK_N)
    return HeadScratch(torch.empty((schedule.row_tile, blocks), dtype=torch.float32, device=device),
                       torch.empty((schedule.row_tile, blocks), dtype=torch.int32, device=device),
                       torch.zeros(schedule.row_tile, dtype=torch.int32, device=device))


def lm_head(x: "torch.Tensor", w: "torch.Tensor", *, schedule: HeadSchedule, numerics: Numerics, limit: int | None = None,
            ids: "torch.Tensor | None" = None, scratch: HeadScratch | None = None) -> "torch.Tensor":
    """argmax over the vocabulary of x @ w.T, without writing logits: [rows] int32, the lowest id on a tie.

    Args:
        x: [rows, K] bf16, 1 <= rows <= schedule.row_tile.
        w: [N, K] bf16.
        limit: ids from it on never win. ids: [N] int32, what each row of w stands for; the row's number where not given.
        scratch: where to write, instead of new tensors.

    Raises:
        ContractError: tensors, shape and schedule can't go together.
    """
    shape = _checked(x, w, schedule)
    rows = x.shape[0]
    out = scratch or new_scratch(shape.N, schedule, x.device)
    blocks = triton.cdiv(shape.N, schedule.BLOCK_N)
    head_argmax_launch(shape, schedule, numerics)(
        (blocks,), x_ptr=x, w_ptr=w, best_ptr=out.best, id_ptr=out.ids, rows=rows, limit=shape.N if limit is None else limit,
        stride_xm=x.stride(0), stride_wn=w.stride(0), stride_lm=16)
    head_reduce_launch(ReduceShape(ids is not None), REDUCE_SCHEDULE, numerics)(
        (rows,), best_ptr=out.best, id_ptr=out.ids, token_ptr=out.tokens, blocks=blocks,
        **({} if ids is None else {"map_ptr": ids}))
    return out.tokens[:rows]


def lm_head_logits(x: "torch.Tensor", w: "torch.Tensor", *, schedule: HeadSchedule,
                   numerics: Numerics) -> "torch.Tensor":
    """x @ w.T in fp32: [rows, N]. Same reduction as `lm_head`, same arguments and errors."""
    import torch

    shape = _checked(x, w, schedule)
    rows = x.shape[0]
    stride_lm = triton.cdiv(shape.N, 16) * 16
    logits = torch.empty((rows, stride_lm), dtype=torch.float32, device=x.device)
    head_logits_launch(shape, schedule, numerics)(
        (triton.cdiv(shape.N, schedule.BLOCK_N),), x_ptr=x, w_ptr=w, logits_ptr=logits, rows=rows,
        limit=shape.N, stride_xm=x.stride(0), stride_wn=w.stride(0), stride_lm=stride_lm)
    return logits[:, :shape.N]


def lm_head_reference(x: "torch.Tensor", w: "torch.Tensor") -> "torch.Tensor":
    """Logits in fp64: [rows, N]."""
    return x.double() @ w.double().T
