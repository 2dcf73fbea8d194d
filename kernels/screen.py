"""The screen of a certified head: half the bytes of kernels/lm_head.py, and the same winners and values by proof, bit for bit.

    x [rows, K] bf16, w [N, K] bf16, and of w an int8 copy: w_n ~ scale_n q_n, scale_n = max |w_n| / 127

`head_digits_kernel` writes each row of x as two int8 digits: x ~ x_scale (256 h + l), x_scale a power of two.
`head_screen_kernel` reads q and bounds every logit from both sides. kernels/certified_head.py computes again, from w, the ids
whose upper bound reaches the row's greatest lower bound: in the plain head's steps over K and by its instruction, so with its
bits.

The bound. t = sum_i x_i w_i is the exact logit, p the plain head's, v the screened one; |.| of a vector is its Euclidean norm.

1. p is a sum of K exact products in fp32, in steps along K. A tensor core aligns the products of g >= 4 columns and the sum so
   far to the largest of them, and truncates each and their sum to 24 bits or more: at most (g + 2) 2^-23 A for g columns, where
   A = sum_i |x_i w_i|; for all, with second-order terms, |p - t| <= 2 K 2^-23 A. Additions that round to nearest, in any order,
   stay below it. A <= |x| |w|.
2. Quantised weights: |sum_i x_i (w_i - scale q_i)| <= |x| |w - scale q|, by Cauchy-Schwarz.
3. Quantised x: |sum_i (x_i - x'_i) scale q_i| <= |x - x'| |scale q|, x' the digits' value. x_scale is a power of two, so that
   values down to 2^-6 of the row's largest are exact in bf16, and each difference is exact too.
4. v = (256 H + L) scale x_scale, where H and L are exact integer sums. H, L, their sum and the product with scale are rounded:
   at most 4 2^-24 x_scale scale (256 |H| + |L|). |256 h + l| and 256 |h| + |l| differ by at most 256, and 256 x_scale is at most
   max |x| / 32 <= |x| / 32, so this is at most 4 2^-24 (1 + sqrt(K) / 32) |x| |scale q|. v -+ bound rounds once more. With
   product "bf16", v = scale sum_i x_i q_i in fp32: 1. instead, once more, and 3. is 0.
5. Below 2^-126 a product, an operand or a sum may be flushed to zero: 4 K 2^-126 (1 + |x| + |w|) covers all of them.

So |p - v| <= |x| error_n + |x - x'| norm_n + tiny, where error_n = |w - scale q| + (2 K 2^-23 + roundings) norm_n and norm_n =
max(|w|, |scale q|) are computed at load in fp64. Norms of x come from fp32 sums, 2^-10 too large for safety; K is at most 8192.

The proof. Let n be the plain winner of a row. Its upper bound is at least p_n, which is at least every p_m, so at least every
lower bound: n is computed again, and so is each id that ties with it; any others carry their plain values and lose, or tie
with a higher id. What the other rows add to the list changes nothing: a row's result depends on its own data.

No bound holds where |x| |w_n| is not below 1e37 or |x| not below 1e30 (an overflow, a NaN, an infinity): the id survives and is
below every other. A row of which no id is bounded, and one whose largest value is below 2^-80 (zeros), is read in full. That is
decided on the device: programs walk their lists of survivors, whatever the length.

On sm_90 int8 digits take the integer instruction. sm_103 has no int8 tensor core: there, and on sm_100, for which Triton has
none either, q is converted to bf16 in registers (exact) and x taken as it is.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..schedules.recipe import Numerics
from ..schedules.schedule import FixedSchedule, ScreenSchedule
from ..shapes.model import CertifiedHeadShape, RowShape
from .layout import ROWS
from .linear import load_rows
from .norm import row_contract
from .operation import (
    Constant,
    Instructions,
    Launch,
    Operation,
    common_contract,
    first_problem,
    no_tensor_core,
    options,
    power_of_two,
)

if TYPE_CHECKING:
    import torch

MOST_K = 8192  # of a head: the bound's fp32 sums
PART = 2**14  # rows of w that are quantised at once, in fp64


@triton.jit
def head_digits_kernel(x_ptr, digits_ptr, norms_ptr, greatest_ptr, stride_xm, K: tl.constexpr, BLOCK: tl.constexpr,
                       ROW_TILE: tl.constexpr, PDL: tl.constexpr):
    """Grid: (rows,). digits_ptr [2, ROW_TILE, K] int8: h, then l. norms_ptr [3, ROW_TILE] fp32: x_scale, |x|, |x - x'|; |x| is
    infinite where the row can't be bounded. greatest_ptr [ROW_TILE] fp32: -inf, before the screen raises it."""
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    mask = offs < K
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * stride_xm + offs, mask=mask, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(x), 0)
    exponent = tl.maximum(amax.to(tl.int32, bitcast=True) >> 23, 47)  # 47: of 2^-80
    scale = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
    y = x * ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    whole = tl.where(tl.abs(y) < 16384.0, tl.floor(y + 0.5), 0.0)
    rest = y - whole
    norm = tl.sqrt(tl.sum(y * y, 0)) * (1.001 * scale)
    norm = tl.where(amax >= 8.271806125530277e-25, norm, float("inf"))  # 2^-80
    value = whole.to(tl.int32)
    high = (value + 128) >> 8
    tl.store(digits_ptr + row * K + offs, high.to(tl.int8), mask=mask)
    tl.store(digits_ptr + (ROW_TILE + row) * K + offs, (value - (high << 8)).to(tl.int8), mask=mask)
    tl.store(greatest_ptr + row, float("-inf"))
    tl.store(norms_ptr + row, scale)
    tl.store(norms_ptr + ROW_TILE + row, norm)
    # 2^-40: what underflows in y or in a square
    tl.store(norms_ptr + 2 * ROW_TILE + row, (tl.sqrt(tl.sum(rest * rest, 0)) * 1.001 + 9.094947017729282e-13) * scale)


@triton.jit(do_not_specialize=["rows", "limit"])
def head_screen_kernel(x_ptr, digits_ptr, norms_ptr, q_ptr, scale_ptr, error_ptr, norm_ptr, upper_ptr, greatest_ptr, rows, limit,
                       stride_xm, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                       ROW_TILE: tl.constexpr, INT8: tl.constexpr, TINY: tl.constexpr, PDL: tl.constexpr):
    """Grid: (blocks,). upper_ptr [ROW_TILE, N] fp32: upper bounds; greatest_ptr [ROW_TILE]: the greatest lower bounds, an atomic
    maximum, which no order of the blocks changes. limit: ids from it on never win. INT8: digits are read, else x."""
    pid = tl.program_id(0)
    n0 = pid * BLOCK_N
    tile_n = tl.arange(0, BLOCK_N)
    tile_k = tl.arange(0, BLOCK_K)
    offs_n = n0 + tile_n
    offs_m = tl.arange(0, ROW_TILE)
    there = offs_n < N
    scale = tl.load(scale_ptr + offs_n, mask=there, other=0.0)
    error = tl.load(error_ptr + offs_n, mask=there, other=0.0)
    norm = tl.load(norm_ptr + offs_n, mask=there, other=0.0)
    if INT8:
        acc = tl.zeros((BLOCK_N, 2 * ROW_TILE), tl.int32)
    else:
        acc = tl.zeros((BLOCK_N, ROW_TILE), tl.float32)
    if PDL:
        gdc_wait()
    for k0 in tl.range(0, K, BLOCK_K):
        # int64 on the scalar base alone, as in kernels/lm_head.py
        q_pointers = q_ptr + (n0.to(tl.int64) * K + k0) + (tile_n[:, None] * K + tile_k[None, :])
        if N % BLOCK_N == 0 and K % BLOCK_K == 0:
            q = tl.load(q_pointers)
        else:
            q = tl.load(q_pointers, mask=(tile_n[:, None] < N - n0) & (tile_k[None, :] < K - k0), other=0)
        if INT8:
            digits = load_rows(digits_ptr, k0, rows, K, ROW_TILE * K, K, BLOCK_K, BLOCK_K, ROW_TILE, 2)
            acc = tl.dot(q, digits, acc, out_dtype=tl.int32)
        else:
            x = load_rows(x_ptr, k0, rows, stride_xm, 0, K, BLOCK_K, BLOCK_K, ROW_TILE, 1)
            acc = tl.dot(q.to(tl.bfloat16), x, acc)
    if PDL:
        gdc_launch_dependents()
    live = offs_m < rows
    x_norm = tl.load(norms_ptr + ROW_TILE + offs_m, mask=live, other=0.0)[None, :]
    if INT8:
        high, low = acc.reshape(BLOCK_N, 2, ROW_TILE).permute(0, 2, 1).split()
        value = high.to(tl.float32) * 256.0 + low.to(tl.float32)
        value = value * scale[:, None] * tl.load(norms_ptr + offs_m, mask=live, other=0.0)[None, :]
        rest = tl.load(norms_ptr + 2 * ROW_TILE + offs_m, mask=live, other=0.0)[None, :]
        slack = x_norm * error[:, None] + rest * norm[:, None]
    else:
        value = acc * scale[:, None]
        slack = x_norm * error[:, None]
    slack = slack + TINY * (1.0 + x_norm + norm[:, None])
    bounded = (x_norm * norm[:, None] < 1e37) & (x_norm < 1e30)
    counts = (offs_n < limit)[:, None]
    upper = tl.where(counts, tl.where(bounded, value + slack, float("inf")), float("-inf"))
    lower = tl.where(counts & bounded, value - slack, float("-inf"))
    tl.store(upper_ptr + offs_m[None, :].to(tl.int64) * N + offs_n[:, None], upper, mask=live[None, :] & there[:, None])
    tl.atomic_max(greatest_ptr + offs_m, tl.max(lower, 0), mask=live, sem="relaxed")


def screen_contract(shape: CertifiedHeadShape, schedule: ScreenSchedule) -> str | None:
    """Why a shape and a schedule can't go together, or None."""
    problem = first_problem(
        common_contract(schedule),
        power_of_two("BLOCK_N", schedule.BLOCK_N, 16, 512),
        power_of_two("BLOCK_K", schedule.BLOCK_K, 32, 1024),
    )
    if problem:
        return problem
    if shape.K % 16 or shape.K > MOST_K:
        return f"K {shape.K} is no multiple of 16 up to {MOST_K}"
    if schedule.num_stages > 8:
        return f"num_stages {schedule.num_stages} is more than 8"
    return None


def digits_contract(shape: RowShape, schedule: FixedSchedule) -> str | None:
    """Why a shape and a schedule can't go together, or None."""
    return row_contract(shape.N, schedule)


def digits_launch(shape: RowShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """The artefact of one length of rows."""
    constants: dict[str, Constant] = {"K": shape.N, "BLOCK": triton.next_power_of_2(shape.N), "ROW_TILE": ROWS,
                                      "PDL": schedule.pdl}
    types = {"x_ptr": "*bf16", "digits_ptr": "*i8", "norms_ptr": "*fp32", "greatest_ptr": "*fp32", "stride_xm": "i32"}
    return Launch(head_digits_kernel, types, constants, options(schedule, numerics))


def screen_launch(shape: CertifiedHeadShape, schedule: ScreenSchedule, numerics: Numerics) -> Launch:
    """The artefact of one head and schedule."""
    constants: dict[str, Constant] = {
        "N": shape.N, "K": shape.K, "BLOCK_N": schedule.BLOCK_N, "BLOCK_K": schedule.BLOCK_K, "ROW_TILE": ROWS,
        "INT8": schedule.product == "int8", "TINY": 4.0 * shape.K * 2.0**-126, "PDL": schedule.pdl}
    types = {"x_ptr": "*bf16", "digits_ptr": "*i8", "norms_ptr": "*fp32", "q_ptr": "*i8",
             **dict.fromkeys(("scale_ptr", "error_ptr", "norm_ptr", "upper_ptr", "greatest_ptr"), "*fp32"),
             **dict.fromkeys(("rows", "limit", "stride_xm"), "i32")}
    return Launch(head_screen_kernel, types, constants, options(schedule, numerics))


def screen_instructions(shape: CertifiedHeadShape, arch: str) -> Instructions:
    """int8 digits on sm_90; q converted to bf16 elsewhere."""
    if arch == "sm_90":
        return Instructions(required=("IGMMA",), forbidden=("IMMA", "HMMA", "HGMMA"))
    return Instructions(required=("UTCHMMA",), forbidden=("IMMA", "HMMA"))


def screen_shared_bytes(shape: CertifiedHeadShape, schedule: ScreenSchedule) -> int:
    """Lower bound: the tiles in flight."""
    stages = max(1, min(schedule.num_stages - 1, triton.cdiv(shape.K, schedule.BLOCK_K)))
    return stages * (schedule.BLOCK_N + 2 * ROWS) * schedule.BLOCK_K


DIGITS = Operation(head_digits_kernel, FixedSchedule, digits_contract, digits_launch, no_tensor_core)
SCREEN = Operation(head_screen_kernel, ScreenSchedule, screen_contract, screen_launch, screen_instructions, screen_shared_bytes,
                   ("q_ptr", "scale_ptr", "error_ptr", "norm_ptr"))


@dataclass(frozen=True)
class ScreenWeights:
    """The int8 copy of a head: q [N, K] int8; scale, error, norm [N] fp32, see above."""

    q: "torch.Tensor"
    scale: "torch.Tensor"
    error: "torch.Tensor"
    norm: "torch.Tensor"


def screen_bytes(shape: CertifiedHeadShape) -> int:
    """Bytes of the int8 copy with its bounds."""
    return shape.N * (shape.K + 12)


def screen_weights(w: "torch.Tensor", product: str = "int8") -> ScreenWeights:
    """w [N, K] bf16 quantised, with the bounds of a screen by this product. A row that isn't finite has the norm NaN."""
    import torch

    (N, K), device = w.shape, w.device
    roundings = 8 * 2.0**-24 * (1 + K**0.5 / 32) if product == "int8" else 2 * K * 2.0**-23 + 8 * 2.0**-24
    found = ScreenWeights(torch.empty(N, K, dtype=torch.int8, device=device),
                          *(torch.empty(N, dtype=torch.float32, device=device) for _ in range(3)))
    for first in range(0, N, PART):
        part = slice(first, first + PART)
        exact = w[part].double()
        finite = exact.isfinite().all(1)
        exact = torch.where(finite[:, None], exact, 0.0)
        scale = (exact.abs().amax(1) / 127).clamp(min=2.0**-100).float()
        q = (exact / scale[:, None].double()).round().clamp(-127, 127)
        near = q * scale[:, None].double()
        norm = torch.maximum(exact.norm(dim=1), near.norm(dim=1))
        error = (exact - near).norm(dim=1) + (2 * K * 2.0**-23 + roundings) * norm
        found.q[part], found.scale[part], found.error[part] = q.to(torch.int8), scale, (error * 1.001).float()
        found.norm[part] = torch.where(finite, norm * 1.001, torch.nan).float()
    return found
