"""Language-model head: logits = x @ w.T in fp32, and either the winning token of each row or the logits.

    x [rows, K], w [N, K] (N: vocabulary), both with K contiguous: bf16, or (a drafter's head) e4m3 with scales and x in one
    or two terms, as in kernels/linear.py.

Two kernels. `head_kernel` computes one block of logits. Its two variants share the reduction: the argmax of the logits variant is
the token of the argmax variant, in ties too. The argmax variant writes only the largest value and its id per block;
`head_reduce_kernel` reduces the blocks in id order.

A tie goes to the lowest token id: leftmost within a block, and a later block must be strictly greater. -0.0 counts as 0.0.
A NaN never wins; a row of NaN alone gives -1. The head isn't split over K: each logit is one chain of BLOCK_K steps.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..schedules.recipe import Numerics
from ..schedules.schedule import FixedSchedule, HeadSchedule
from ..shapes.model import HeadShape, ReduceShape
from .layout import Activation, Weights
from .linear import input_operands, is_e4m3, linear_reference, load_rows
from .operation import (
    NO_STRIDE,
    AtLeast,
    Constant,
    Instructions,
    Launch,
    Operand,
    Operation,
    common_contract,
    first_problem,
    no_tensor_core,
    options,
    power_of_two,
    require,
    require_contract,
    require_rows,
    sizes_of,
    tensor_core,
    warps_contract,
)

if TYPE_CHECKING:
    import torch

REDUCE_SCHEDULE = FixedSchedule(num_warps=8, pdl=True)
REDUCE_TILE = 256  # blocks that head_reduce_kernel compares at once; it doesn't change the token


@triton.jit(do_not_specialize=["rows", "limit"])
def head_kernel(x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, logits_ptr, best_ptr, id_ptr, rows, limit, stride_xm, stride_xt,
                stride_wn, stride_lm, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                ROW_TILE: tl.constexpr, TERMS: tl.constexpr, PROMOTE: tl.constexpr, PDL: tl.constexpr):
    """x_scale_ptr [rows] and w_scale_ptr [N] fp32, or None for bf16. logits_ptr [rows, N] fp32, or None. best_ptr, id_ptr
    [ROW_TILE, blocks], or None. limit: ids >= limit never win."""
    pid = tl.program_id(0)
    n0 = pid * BLOCK_N
    tile_n = tl.arange(0, BLOCK_N)
    tile_k = tl.arange(0, BLOCK_K)
    offs_n = n0 + tile_n
    offs_m = tl.arange(0, ROW_TILE)
    acc = tl.zeros((BLOCK_N, TERMS * ROW_TILE), tl.float32)
    if w_scale_ptr is not None:
        w_scale = tl.load(w_scale_ptr + offs_n, mask=offs_n < N, other=0.0)
    if PDL:
        gdc_wait()
    for k0 in tl.range(0, K, BLOCK_K):
        # int64, because a vocabulary times a hidden size can exceed 2^31; on the scalar base alone, which saves registers
        w_pointers = w_ptr + (n0.to(tl.int64) * stride_wn + k0) + (tile_n[:, None] * stride_wn + tile_k[None, :])
        if N % BLOCK_N == 0 and K % BLOCK_K == 0:
            w = tl.load(w_pointers)
        else:
            w = tl.load(w_pointers, mask=(tile_n[:, None] < N - n0) & (tile_k[None, :] < K - k0), other=0.0)
        x = load_rows(x_ptr, k0, rows, stride_xm, stride_xt, K, BLOCK_K, BLOCK_K, ROW_TILE, TERMS)
        acc = tl.dot(w, x, acc, max_num_imprecise_acc=PROMOTE)
    if PDL:
        gdc_launch_dependents()
    if TERMS == 2:
        acc, low = acc.reshape(BLOCK_N, 2, ROW_TILE).permute(0, 2, 1).split()
        acc = acc + low * 0.0625  # 1 / LO_FACTOR
    live = offs_m < rows
    if x_scale_ptr is not None:
        acc = acc * tl.load(x_scale_ptr + offs_m, mask=live, other=0.0)[None, :] * w_scale[:, None]
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
    """One row per program: the id of the largest value over its blocks, in ties the lowest. map_ptr [N]: the token of each id, or
    None."""
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
    """The reason why a schedule doesn't fit a head's shape, or None."""
    problem = first_problem(
        common_contract(schedule),
        power_of_two("BLOCK_N", schedule.BLOCK_N, 16, 512),
        power_of_two("BLOCK_K", schedule.BLOCK_K, 16, 256),
        power_of_two("row_tile", schedule.row_tile, 8, 16),
    )
    if problem:
        return problem
    if shape.K % 16:
        return f"K {shape.K} isn't a multiple of 16"
    if schedule.num_stages > 8:
        return f"num_stages {schedule.num_stages} is more than 8"
    return None


def _head_launch(shape: HeadShape, schedule: HeadSchedule, numerics: Numerics, logits: bool) -> Launch:
    fp8 = shape.dtype == "e4m3"
    element = "*fp8e4nv" if fp8 else "*bf16"
    constants: dict[str, Constant] = {
        "N": shape.N, "K": shape.K, "BLOCK_N": schedule.BLOCK_N, "BLOCK_K": schedule.BLOCK_K, "ROW_TILE": schedule.row_tile,
        "TERMS": shape.terms, "PDL": schedule.pdl,
        "PROMOTE": min(numerics.promote_every, schedule.BLOCK_K) or None if fp8 else None}
    types = {"x_ptr": element, "w_ptr": element, "x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32", "logits_ptr": "*fp32",
             "best_ptr": "*fp32", "id_ptr": "*i32", "rows": "i32", "limit": "i32",
             **dict.fromkeys(("stride_xm", "stride_xt", "stride_wn", "stride_lm"), "i32")}
    absent = {"x_scale_ptr": not fp8, "w_scale_ptr": not fp8, "logits_ptr": not logits, "best_ptr": logits, "id_ptr": logits}
    return Launch(head_kernel, types, constants | {name: None for name, gone in absent.items() if gone},
                  options(schedule, numerics))


def head_argmax_launch(shape: HeadShape, schedule: HeadSchedule, numerics: Numerics) -> Launch:
    """The variant that writes the largest value and its id per block."""
    return _head_launch(shape, schedule, numerics, logits=False)


def head_logits_launch(shape: HeadShape, schedule: HeadSchedule, numerics: Numerics) -> Launch:
    """The variant that writes the logits."""
    return _head_launch(shape, schedule, numerics, logits=True)


def head_reduce_launch(shape: ReduceShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """One artefact for every vocabulary and block size."""
    types = {"best_ptr": "*fp32", "id_ptr": "*i32", "token_ptr": "*i32", "map_ptr": "*i32", "blocks": "i32"}
    constants: dict[str, Constant] = {"TILE": REDUCE_TILE, "PDL": schedule.pdl, **({} if shape.mapped else {"map_ptr": None})}
    return Launch(head_reduce_kernel, types, constants, options(schedule, numerics))


def head_instructions(shape: HeadShape, arch: str) -> Instructions:
    return tensor_core(shape.dtype, arch)


def head_shared_bytes(shape: HeadShape, schedule: HeadSchedule) -> int:
    """Lower bound: the tiles in flight."""
    stages = max(1, min(schedule.num_stages - 1, triton.cdiv(shape.K, schedule.BLOCK_K)))
    size = 1 if shape.dtype == "e4m3" else 2
    return stages * (schedule.BLOCK_N + schedule.row_tile * shape.terms) * schedule.BLOCK_K * size


EARLY_READS = ("w_ptr", "w_scale_ptr")
ARGMAX = Operation(head_kernel, HeadSchedule, head_contract, head_argmax_launch, head_instructions, head_shared_bytes,
                   EARLY_READS)
LOGITS = Operation(head_kernel, HeadSchedule, head_contract, head_logits_launch, head_instructions, head_shared_bytes,
                   EARLY_READS)
REDUCE = Operation(head_reduce_kernel, FixedSchedule, warps_contract, head_reduce_launch, no_tensor_core)


def _shape(x: Activation, w: Weights, schedule: HeadSchedule) -> HeadShape:
    """The shape of a launch. Raises ContractError."""
    terms, rows, K = sizes_of("x", x.values, 3)
    shape = HeadShape(len(w.w), K, "e4m3" if is_e4m3(w.w) else "bf16", terms)
    require(w.bias is None, "a head with a bias", "none")
    require_rows(rows, schedule.row_tile)
    require_contract(ARGMAX, shape, schedule)
    return shape


@dataclass(frozen=True)
class HeadScratch:
    """Output of the argmax variant. best: largest value per block, [row_tile, blocks] fp32. ids: their ids, [row_tile, blocks]
    int32. tokens: [row_tile] int32."""

    best: "torch.Tensor"
    ids: "torch.Tensor"
    tokens: "torch.Tensor"


def new_scratch(N: int, schedule: HeadSchedule, device: "torch.device") -> HeadScratch:
    """Buffers for one launch over N ids."""
    import torch

    blocks = triton.cdiv(N, schedule.BLOCK_N)
    return HeadScratch(torch.empty((schedule.row_tile, blocks), dtype=torch.float32, device=device),
                       torch.empty((schedule.row_tile, blocks), dtype=torch.int32, device=device),
                       torch.zeros(schedule.row_tile, dtype=torch.int32, device=device))


def lm_head(x: Activation, w: Weights, *, schedule: HeadSchedule, numerics: Numerics, limit: int | None = None,
            ids: "torch.Tensor | None" = None, scratch: HeadScratch | None = None) -> "torch.Tensor":
    """argmax over the vocabulary of x @ w.T, without writing logits: [rows] int32, the lowest id on a tie.

    Args:
        x: values [terms, rows, K], 1 <= rows <= schedule.row_tile. w: w [N, K] of x's type, no bias.
        limit: ids >= limit never win. ids: [N] int32, the token of each row of w; None: the row's index.
        scratch: buffers to use, instead of new ones.

    Raises:
        ContractError: tensors, shape and schedule don't fit each other.
    """
    shape, rows = _shape(x, w, schedule), x.values.shape[1]
    out = scratch or new_scratch(shape.N, schedule, w.w.device)
    blocks = triton.cdiv(shape.N, schedule.BLOCK_N)
    best, best_id = (Operand(tensor, (AtLeast(rows), blocks)) for tensor in (out.best, out.ids))
    head = head_argmax_launch(shape, schedule, numerics)
    reduce = head_reduce_launch(ReduceShape(ids is not None), REDUCE_SCHEDULE, numerics)
    reducing = reduce.arguments({"best_ptr": best, "id_ptr": best_id, "token_ptr": Operand(out.tokens, (AtLeast(rows),)),
                                 "map_ptr": Operand(ids, (shape.N,))})
    head((blocks,), rows=rows, limit=shape.N if limit is None else limit, stride_lm=NO_STRIDE,
         **head.arguments({**input_operands(x, w, rows), "best_ptr": best, "id_ptr": best_id}))
    reduce((rows,), blocks=blocks, **reducing)
    return out.tokens[:rows]


def lm_head_logits(x: Activation, w: Weights, *, schedule: HeadSchedule, numerics: Numerics) -> "torch.Tensor":
    """x @ w.T in fp32: [rows, N]. The reduction, arguments and errors are those of `lm_head`."""
    import torch

    shape, rows = _shape(x, w, schedule), x.values.shape[1]
    room = triton.cdiv(shape.N, 16) * 16
    logits = torch.empty((rows, room), dtype=torch.float32, device=w.w.device)
    launch = head_logits_launch(shape, schedule, numerics)
    launch((triton.cdiv(shape.N, schedule.BLOCK_N),), rows=rows, limit=shape.N, **launch.arguments({
        **input_operands(x, w, rows), "logits_ptr": Operand(logits, (rows, room), ("stride_lm",))}))
    return logits[:, :shape.N]


def lm_head_reference(x: Activation, w: Weights) -> "torch.Tensor":
    """Logits in fp64: [rows, N]."""
    return linear_reference(x, w)
