"""Linear layers of the decode step: y = (x @ w.T) * x_scale * w_scale + bias, for 1 to row_tile rows.

    x [rows, K], w [N, K], both row-major (K contiguous); e4m3 with one fp32 scale per row of x and per row of w (output
    channel), or bf16 without scales. y [rows, N] in bf16; with split_k > 1 fp32 partials [split_k, rows, N], which the
    next kernel adds in index order.

An e4m3 activation may have two terms, x + x_lo / 16 (see kernels/norm.py): lossless for bf16 values down to 2^-13 of the row's
maximum. Weights are still read once, and the tensor cores have spare time: the second product costs next to nothing.

Weights are large and rows are few, so the tensor core's operands are swapped: `weights_as_m` computes w @ x.T. Its M is a block
of output columns (64 or more, as the FP8 instructions require), its N is the row tile. `activations_as_m` is the natural order;
with a row tile below 64 it falls back to the FP16 instruction on every target, which the inspection shows.

Row invariance: an output of row r is one chain of BLOCK_K steps over one K range, independent of the other rows. The row tile,
not the row count, determines the shape of the instruction; the grid only determines which block computes a tile. The K range of
split s is steps [s * steps // split_k, (s + 1) * steps // split_k): it depends on K, BLOCK_K and split_k alone.

Done elsewhere: the sum of the partials (by the next kernel), activation quantisation.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..schedules.recipe import Numerics
from ..schedules.schedule import LinearSchedule
from ..shapes.model import LinearShape
from .layout import LO_FACTOR, TURN, Activation, Weights
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
    num_sms,
    options,
    power_of_two,
    require,
    require_contract,
    require_rows,
    sizes_of,
    tensor_core,
)

if TYPE_CHECKING:
    import torch

PRELOADED = 2**16  # maximum of weights that a block preloads into its registers


@triton.jit
def swiglu_act(gate, up):
    """silu(gate) * up in fp32, rounded to bf16 after silu and after the product, as Hugging Face does."""
    # An exactly rounded division takes a slow path for a gate of 0, as in every empty row of the tile: 2.5 us per launch.
    silu = (gate / (1.0 + tl.exp(-gate))).to(tl.bfloat16).to(tl.float32)
    return (silu * up).to(tl.bfloat16).to(tl.float32)


@triton.jit
def load_weights(w_ptr, stride_wn, n0, k0, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                  STEP_K: tl.constexpr, TMA: tl.constexpr):
    """One tile of w, [BLOCK_N, STEP_K]; zero past N and K."""
    if TMA:
        w = w_ptr.load([n0, k0])
    else:
        # The tile's offsets are constant; only the scalar base moves, which saves registers.
        tile_n = tl.arange(0, BLOCK_N)
        tile_k = tl.arange(0, STEP_K)
        pointers = w_ptr + (n0 * stride_wn + k0) + (tile_n[:, None] * stride_wn + tile_k[None, :])
        if N % BLOCK_N == 0 and K % BLOCK_K == 0:
            w = tl.load(pointers)
        elif N % BLOCK_N == 0:
            w = tl.load(pointers, mask=tile_k[None, :] < K - k0, other=0.0)
        else:
            w = tl.load(pointers, mask=(tile_n[:, None] < N - n0) & (tile_k[None, :] < K - k0), other=0.0)
    return w


@triton.jit
def load_rows(x_ptr, k0, rows, stride_xm, stride_xt, K: tl.constexpr, BLOCK_K: tl.constexpr, STEP_K: tl.constexpr,
               ROW_TILE: tl.constexpr, TERMS: tl.constexpr):
    """Columns k0 .. k0 + STEP_K of x, [STEP_K, TERMS * ROW_TILE]: the rows' first terms, then their second terms."""
    offs_m = tl.arange(0, TERMS * ROW_TILE)
    row = offs_m % ROW_TILE
    tile_k = tl.arange(0, STEP_K)
    mask = row[None, :] < rows
    if K % BLOCK_K != 0:
        mask = mask & (tile_k[:, None] < K - k0)
    offs_x = (offs_m // ROW_TILE) * stride_xt + row * stride_xm
    return tl.load(x_ptr + k0 + (offs_x[None, :] + tile_k[:, None]), mask=mask, other=0.0)


@triton.jit
def _linear_tile(tile, x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, amax_ptr, rows, stride_xm, stride_xt,
                 stride_wn, stride_om, stride_os, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_K: tl.constexpr, ROW_TILE: tl.constexpr, TERMS: tl.constexpr, SPLIT_K: tl.constexpr,
                 WEIGHTS_AS_M: tl.constexpr, TMA: tl.constexpr, PRELOAD: tl.constexpr, PROMOTE: tl.constexpr,
                 SWIGLU: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr):
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    pid_n = tile % NUM_N
    split = tile // NUM_N
    n0 = pid_n * BLOCK_N
    offs_n = n0 + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, ROW_TILE)
    WHOLE: tl.constexpr = STEPS // SPLIT_K * BLOCK_K  # the K range of a split with preloaded weights
    PROMOTE_STEP: tl.constexpr = None if PROMOTE is None else min(PROMOTE, BLOCK_K)
    PROMOTE_WHOLE: tl.constexpr = None if PROMOTE is None else min(PROMOTE, WHOLE)

    if STEPS % SPLIT_K == 0:
        first = split * (STEPS // SPLIT_K)
        count = STEPS // SPLIT_K
    else:
        first = split * STEPS // SPLIT_K
        count = (split + 1) * STEPS // SPLIT_K - first
    if WEIGHTS_AS_M:
        acc = tl.zeros((BLOCK_N, TERMS * ROW_TILE), tl.float32)
    else:
        acc = tl.zeros((TERMS * ROW_TILE, BLOCK_N), tl.float32)
    if WEIGHTS_AS_M:
        n_axis = offs_n[:, None]
        m_axis = offs_m[None, :]
    else:
        n_axis = offs_n[None, :]
        m_axis = offs_m[:, None]
    if PDL and EARLY:
        gdc_launch_dependents()
    # Data that no preceding kernel writes is prefetched before the dependency wait: scales of weights, bias, preloaded weights.
    if w_scale_ptr is not None:
        w_scale = tl.load(w_scale_ptr + n_axis, mask=n_axis < N, other=0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n_axis, mask=n_axis < N, other=0.0).to(tl.float32)
    if PRELOAD:
        w_all = load_weights(w_ptr, stride_wn, n0, first * BLOCK_K, N, K, BLOCK_N, BLOCK_K, WHOLE, False)
    if PDL:
        gdc_wait()
    if x_scale_ptr is not None:
        x_scale = tl.load(x_scale_ptr + m_axis, mask=m_axis < rows, other=0.0)
    if PRELOAD:
        x_all = load_rows(x_ptr, first * BLOCK_K, rows, stride_xm, stride_xt, K, BLOCK_K, WHOLE, ROW_TILE, TERMS)
        if WEIGHTS_AS_M:
            acc = tl.dot(w_all, x_all, acc, max_num_imprecise_acc=PROMOTE_WHOLE)
        else:
            acc = tl.dot(x_all.T, w_all.T, acc, max_num_imprecise_acc=PROMOTE_WHOLE)
    for step in tl.range(0, 0 if PRELOAD else count):
        k0 = (first + step) * BLOCK_K
        w = load_weights(w_ptr, stride_wn, n0, k0, N, K, BLOCK_N, BLOCK_K, BLOCK_K, TMA)
        x = load_rows(x_ptr, k0, rows, stride_xm, stride_xt, K, BLOCK_K, BLOCK_K, ROW_TILE, TERMS)
        if WEIGHTS_AS_M:
            acc = tl.dot(w, x, acc, max_num_imprecise_acc=PROMOTE_STEP)
        else:
            acc = tl.dot(x.T, w.T, acc, max_num_imprecise_acc=PROMOTE_STEP)
    if PDL and not EARLY:
        gdc_launch_dependents()

    if TERMS == 2:
        if WEIGHTS_AS_M:
            acc, low = acc.reshape(BLOCK_N, 2, ROW_TILE).permute(0, 2, 1).split()
        else:
            acc, low = acc.reshape(2, ROW_TILE, BLOCK_N).permute(1, 2, 0).split()
        acc = acc + low * 0.0625  # 1 / LO_FACTOR
    there = (m_axis < rows) & (n_axis < N)
    if x_scale_ptr is not None:
        acc = acc * x_scale * w_scale
    if bias_ptr is not None:
        if SPLIT_K == 1:
            acc = acc + bias
        else:
            acc = tl.where(split == 0, acc + bias, acc)
    if SWIGLU:
        # Rows of w are 8 gates, 8 ups and so on. Both are rounded to bf16, as if they went through memory.
        y = acc.to(tl.bfloat16).to(tl.float32).reshape(BLOCK_N // 16, 2, 8, ROW_TILE).permute(0, 2, 3, 1)
        gate, up = y.split()
        act = swiglu_act(gate, up).reshape(BLOCK_N // 2, ROW_TILE)
        offs_i = pid_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        act = tl.where(offs_i[:, None] < N // 2, act, 0.0)
        tl.store(out_ptr + offs_m[None, :] * stride_om + offs_i[:, None], act.to(tl.bfloat16),
                 mask=(offs_m[None, :] < rows) & (offs_i[:, None] < N // 2))
        if amax_ptr is not None:
            tl.store(amax_ptr + offs_m * NUM_N + pid_n, tl.max(tl.abs(act), 0), mask=offs_m < rows)
    else:
        tl.store(out_ptr + split * stride_os + m_axis * stride_om + n_axis, acc.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, amax_ptr, rows, stride_xm, stride_xt, stride_wn,
                  stride_om, stride_os, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                  ROW_TILE: tl.constexpr, TERMS: tl.constexpr, SPLIT_K: tl.constexpr, WEIGHTS_AS_M: tl.constexpr,
                  TMA: tl.constexpr, PRELOAD: tl.constexpr, PROMOTE: tl.constexpr, SWIGLU: tl.constexpr,
                  PERSISTENT: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr):
    """w_ptr: a tensor descriptor if TMA. amax_ptr [ROW_TILE, tiles of N] or None, if SWIGLU. Tiles run over N first, then over
    splits."""
    if PERSISTENT:
        TILES: tl.constexpr = ((N + BLOCK_N - 1) // BLOCK_N) * SPLIT_K
        for tile in tl.range(tl.program_id(0), TILES, tl.num_programs(0)):
            _linear_tile(tile, x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, amax_ptr, rows, stride_xm, stride_xt,
                         stride_wn, stride_om, stride_os, N, K, BLOCK_N, BLOCK_K, ROW_TILE, TERMS, SPLIT_K, WEIGHTS_AS_M, TMA,
                         PRELOAD, PROMOTE, SWIGLU, PDL, EARLY)
    else:
        _linear_tile(tl.program_id(0), x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, amax_ptr, rows, stride_xm,
                     stride_xt, stride_wn, stride_om, stride_os, N, K, BLOCK_N, BLOCK_K, ROW_TILE, TERMS, SPLIT_K, WEIGHTS_AS_M,
                     TMA, PRELOAD, PROMOTE, SWIGLU, PDL, EARLY)


def linear_contract(shape: LinearShape, schedule: LinearSchedule) -> str | None:
    """The reason why a schedule doesn't fit a linear's shape, or None."""
    steps = triton.cdiv(shape.K, schedule.BLOCK_K)
    problem = first_problem(
        common_contract(schedule),
        power_of_two("BLOCK_N", schedule.BLOCK_N, 16, 512),
        power_of_two("BLOCK_K", schedule.BLOCK_K, 32, 512),
        power_of_two("row_tile", schedule.row_tile, 4, 16),
    )
    if problem:
        return problem
    if shape.K % 16:
        return f"K {shape.K} isn't a multiple of 16, so rows of weights aren't aligned to 16 bytes"
    if shape.N * shape.K >= 2**31:
        return f"N x K is {shape.N * shape.K:,} elements; offsets are 32-bit"
    if schedule.split_k > steps:
        return f"split_k {schedule.split_k} is more than the {steps} steps of BLOCK_K {schedule.BLOCK_K} in K {shape.K}"
    if schedule.num_stages > 8:
        return f"num_stages {schedule.num_stages} is more than 8"
    if schedule.blocks_per_sm > 8:
        return f"blocks_per_sm {schedule.blocks_per_sm} is more than 8"
    if shape.swiglu and (schedule.split_k > 1 or schedule.orientation != "weights_as_m"):
        return "swiglu needs complete sums of gates and ups in one tile: split_k 1 and weights_as_m"
    if shape.swiglu and shape.N % (2 * TURN):
        return f"N {shape.N} isn't a multiple of {2 * TURN}: gates and ups alternate in groups of {TURN}"
    if schedule.preload:
        if schedule.load == "tma" or schedule.blocks_per_sm:
            return "preload loads a block's weights by pointer before the dependency wait: load pointer, blocks_per_sm 0"
        depth = steps // schedule.split_k
        if steps % schedule.split_k or depth & (depth - 1) or depth * schedule.BLOCK_K * schedule.BLOCK_N > PRELOADED:
            return (f"preload needs equal splits of a power of two of steps and at most {PRELOADED:,} values; here are "
                    f"{steps} steps in {schedule.split_k} splits of {schedule.BLOCK_N} columns")
    if schedule.load == "tma" and schedule.BLOCK_N > 256:
        return f"load tma copies at most 256 rows; BLOCK_N is {schedule.BLOCK_N}"
    return None


def linear_launch(shape: LinearShape, schedule: LinearSchedule, numerics: Numerics) -> Launch:
    """The artefact of one shape and schedule, the same for every row count and stride."""
    fp8 = shape.dtype == "e4m3"
    element = "fp8e4nv" if fp8 else "bf16"
    tma = schedule.load == "tma"
    constants: dict[str, Constant] = {
        "N": shape.N, "K": shape.K, "BLOCK_N": schedule.BLOCK_N, "BLOCK_K": schedule.BLOCK_K,
        "ROW_TILE": schedule.row_tile, "TERMS": shape.terms, "SPLIT_K": schedule.split_k,
        "WEIGHTS_AS_M": schedule.orientation == "weights_as_m", "TMA": tma, "PRELOAD": schedule.preload,
        "PROMOTE": numerics.promote_every or None if fp8 else None, "SWIGLU": shape.swiglu,
        "PERSISTENT": schedule.blocks_per_sm > 0, "PDL": schedule.pdl, "EARLY": schedule.early,
    }
    types = {
        "x_ptr": f"*{element}",
        "w_ptr": f"tensordesc<{element}[{schedule.BLOCK_N}, {schedule.BLOCK_K}]>" if tma else f"*{element}",
        "x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32", "amax_ptr": "*fp32", "bias_ptr": "*bf16",
        "out_ptr": "*bf16" if schedule.split_k == 1 else "*fp32",
        **dict.fromkeys(("rows", "stride_xm", "stride_xt", "stride_wn", "stride_om", "stride_os"), "i32"),
    }
    absent = {"x_scale_ptr": not fp8, "w_scale_ptr": not fp8, "amax_ptr": not (shape.swiglu and fp8), "bias_ptr": not shape.bias}
    return Launch(linear_kernel, types, constants | {name: None for name, gone in absent.items() if gone},
                  options(schedule, numerics))


def linear_instructions(shape: LinearShape, arch: str) -> Instructions:
    return tensor_core(shape.dtype, arch)


def linear_shared_bytes(shape: LinearShape, schedule: LinearSchedule) -> int:
    """Lower bound: the tiles of num_stages - 1 stages, because the pipeliner may keep one in registers."""
    size = 1 if shape.dtype == "e4m3" else 2
    steps = triton.cdiv(shape.K, schedule.BLOCK_K) // schedule.split_k
    stages = max(1, min(schedule.num_stages - 1, steps))
    return stages * (schedule.BLOCK_N + schedule.row_tile * shape.terms) * schedule.BLOCK_K * size


OPERATION = Operation(linear_kernel, LinearSchedule, linear_contract, linear_launch, linear_instructions, linear_shared_bytes,
                      early_reads=("w_ptr", "w_scale_ptr", "bias_ptr"))


def input_operands(x: Activation, w: Weights, rows: int) -> dict[str, Operand]:
    """The operands x and w of a linear or a head."""
    N, K = sizes_of("w", w.w, 2)
    terms = len(x.values)
    require(terms in (1, 2), f"an activation of {terms} terms", "1 or 2")
    return {"x_ptr": Operand(x.values, (terms, rows, K), ("stride_xt", "stride_xm")),
            "w_ptr": Operand(w.w, (N, K), ("stride_wn",)),
            "x_scale_ptr": Operand(x.scale, (rows,)), "w_scale_ptr": Operand(w.scale, (N,))}


def is_e4m3(w: "torch.Tensor") -> bool:
    """Whether weights are e4m3, which have scales."""
    import torch

    return w.dtype == torch.float8_e4m3fn


def linear(x: Activation, w: Weights, *, schedule: LinearSchedule, numerics: Numerics, out: "torch.Tensor | None" = None,
           swiglu: bool = False, amax: "torch.Tensor | None" = None) -> "torch.Tensor":
    """y = (x @ w.T) * x.scale * w.scale + bias.

    Args:
        x: values [terms, rows, K], 1 <= rows <= schedule.row_tile; strides of terms and rows multiples of 16 elements.
        w: w [N, K] of x's type, its row stride a multiple of 16 elements.
        out: a tensor to write to, instead of a new one.
        swiglu: w's rows are 8 gates, 8 ups and so on (`interleave`), and the output is silu(gate) * up.
        amax: [>= rows, column tiles] fp32, for swiglu with e4m3: the largest magnitude in each tile's part of a row.

    Returns:
        With swiglu: [rows, N / 2] bf16. Else, if schedule.split_k is 1: [rows, N] bf16. Else fp32 partials [split_k, rows, N], to
        be added in index order; scales are applied to each, the bias to the first.

    Raises:
        ContractError: tensors, shape and schedule don't fit each other.
    """
    import torch

    terms, rows, K = sizes_of("x", x.values, 3)
    N, columns, split_k = len(w.w), len(w.w) // 2 if swiglu else len(w.w), schedule.split_k
    shape = LinearShape(N, K, "e4m3" if is_e4m3(w.w) else "bf16", w.bias is not None, terms, swiglu)
    require_rows(rows, schedule.row_tile)
    require_contract(OPERATION, shape, schedule)
    if out is None:
        room = (rows, triton.cdiv(columns, 16) * 16)  # a row stride that is a multiple of 16
        out = x.values.new_empty(room if split_k == 1 else (split_k, *room),
                                 dtype=torch.bfloat16 if split_k == 1 else torch.float32)[..., :columns]
    launch, grid = linear_launch(shape, schedule, numerics), linear_grid(shape, schedule, num_sms(out))
    result = Operand(out, (rows, columns), ("stride_om",)) if split_k == 1 else Operand(out, (split_k, rows, columns),
                                                                                        ("stride_os", "stride_om"))
    arguments = launch.arguments({
        **input_operands(x, w, rows), "bias_ptr": Operand(w.bias, (N,)), "out_ptr": result,
        "amax_ptr": Operand(amax, (AtLeast(rows), triton.cdiv(N, schedule.BLOCK_N)))})
    if schedule.load == "tma":
        from triton.tools.tensor_descriptor import TensorDescriptor

        arguments["w_ptr"] = TensorDescriptor(w.w, [N, K], [w.w.stride(0), 1], [schedule.BLOCK_N, schedule.BLOCK_K])
    launch(grid, rows=rows, **{"stride_os": NO_STRIDE, **arguments})
    return out


def linear_grid(shape: LinearShape, schedule: LinearSchedule, num_sms: int) -> tuple[int]:
    """Blocks per launch: one per tile, or at most blocks_per_sm per SM."""
    tiles = triton.cdiv(shape.N, schedule.BLOCK_N) * schedule.split_k
    return (min(tiles, schedule.blocks_per_sm * num_sms) if schedule.blocks_per_sm else tiles,)


def interleave(w: "torch.Tensor") -> "torch.Tensor":
    """Reorders rows of [2 I, ...], gates then ups, to 8 gates, 8 ups and so on, as swiglu reads them."""
    import torch

    gate, up = w.reshape(2, w.shape[0] // (2 * TURN), TURN, *w.shape[1:])
    return torch.stack([gate, up], 1).reshape(w.shape)


def linear_reference(x: Activation, w: Weights) -> "torch.Tensor":
    """`linear` in fp64, unrounded: [rows, N]."""
    values = x.values.float().double()
    y = (values[0] if len(values) == 1 else values[0] + values[1] / LO_FACTOR) @ w.w.float().double().T
    if x.scale is not None and w.scale is not None:
        y = y * x.scale.double()[:, None] * w.scale.double()[None, :]
    return y if w.bias is None else y + w.bias.double()
