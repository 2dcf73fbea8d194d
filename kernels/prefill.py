"""Prefill: linears and attention over many rows at once, for prompts.

    linear:     y = (x @ w.T) * x_scale * w_scale + bias,  x [rows, K], w [N, K], y [rows, N] bf16
    attention:  o = softmax(scale * q k^T, causal) v,  q [rows, num_heads, head_dim] at positions length .. length + rows - 1,
                over the keys of the cache (Dao 2023, arXiv 2307.08691)

Weights, cache and scale rules are those of decode. The order of sums differs: the last bits may differ from a decode pass.
A row's bits depend neither on its tile's position nor on the tile's width: an output is one chain of BLOCK_K steps, and a row of
attention has key steps that begin at multiples of BLOCK_N; steps past its end don't change it. So a prompt's bits don't depend on
its chunks, and narrow tiles can replace wide ones that are too few to fill the GPU.

The products of first terms are promoted to fp32 at each step. The products of second terms, and their sum's error, are divided by
16: they are never promoted, which saves half of the promotion's cost.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..schedules.recipe import Numerics
from ..schedules.schedule import PrefillSchedule
from ..shapes.model import AttentionShape, LinearShape
from .attention import attention_instructions, attention_step, cache_operands
from .layout import Activation, Weights
from .linear import is_e4m3, linear_instructions
from .operation import (
    AtLeast,
    Constant,
    Launch,
    Operand,
    Operation,
    common_contract,
    num_sms,
    options,
    power_of_two,
    require,
    require_contract,
    require_rows,
    sizes_of,
)

if TYPE_CHECKING:
    import torch

WIDE = PrefillSchedule(num_warps=4, pdl=True, BLOCK_M=64, BLOCK_N=128, num_stages=3)
NARROW = PrefillSchedule(num_warps=4, pdl=True, BLOCK_M=64, BLOCK_N=64, num_stages=4)  # if there is at most one wide tile per SM
GROUP_M = 8  # consecutive row tiles, which share weights in L2
ROW_BYTES = 128  # of one BLOCK_K step
ATTENTION_SCHEDULE = PrefillSchedule(num_warps=4, pdl=True, BLOCK_M=64, BLOCK_N=64, num_stages=3)  # rows and keys per step


@triton.jit(do_not_specialize=["rows"])
def prefill_linear_kernel(x_ptr, x_lo_ptr, w_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, rows, stride_xm, stride_wn,
                          stride_om, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                          BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PROMOTE: tl.constexpr, PDL: tl.constexpr):
    """Grid: (row tiles * column tiles): GROUP_M row tiles of one column, then the next column."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pid = tl.program_id(0)
    num_m = tl.cdiv(rows, BLOCK_M)
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    first_m = pid // (GROUP_M * NUM_N) * GROUP_M
    group = tl.minimum(num_m - first_m, GROUP_M)
    pid_m = first_m + pid % (GROUP_M * NUM_N) % group
    pid_n = pid % (GROUP_M * NUM_N) // group
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    tile_k = tl.arange(0, BLOCK_K)
    x_rows = offs_m.to(tl.int64)[:, None] * stride_xm + tile_k[None, :]
    w_rows = w_ptr + offs_n.to(tl.int64)[:, None] * stride_wn + tile_k[None, :]
    live = (offs_m < rows)[:, None]
    there = (offs_n < N)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    low = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in tl.range(0, K, BLOCK_K):
        x_mask = live
        w_mask = there
        if K % BLOCK_K != 0:
            x_mask = live & (tile_k[None, :] < K - k0)
            w_mask = there & (tile_k[None, :] < K - k0)
        w = tl.load(w_rows + k0, mask=w_mask, other=0.0)
        acc = tl.dot(tl.load(x_ptr + x_rows + k0, mask=x_mask, other=0.0), w.T, acc, max_num_imprecise_acc=PROMOTE)
        if x_lo_ptr is not None:
            x_lo = tl.load(x_lo_ptr + x_rows + k0, mask=x_mask, other=0.0)
            low = tl.dot(x_lo, w.T, low)
    if x_lo_ptr is not None:
        acc = acc + low * 0.0625  # 1 / LO_FACTOR
    if x_scale_ptr is not None:
        x_scale = tl.load(x_scale_ptr + offs_m, mask=offs_m < rows, other=0.0)
        w_scale = tl.load(w_scale_ptr + offs_n, mask=offs_n < N, other=0.0)
        acc = acc * x_scale[:, None] * w_scale[None, :]
    if bias_ptr is not None:
        acc = acc + tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + offs_m.to(tl.int64)[:, None] * stride_om + offs_n[None, :], acc.to(tl.bfloat16),
             mask=live & (offs_n < N)[None, :])


@triton.jit(do_not_specialize=["rows"])
def prefill_attention_kernel(q_ptr, k_ptr, v_ptr, length_ptr, o_ptr, scale, rows, stride_kt, stride_kh, stride_vt, stride_vh,
                             NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
                             BLOCK_N: tl.constexpr, PDL: tl.constexpr):
    """Grid: (row tiles, num_heads)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(1)
    length = tl.load(length_ptr)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    tile_n = tl.arange(0, BLOCK_N)
    live = offs_m < rows
    # A scalar base and small offsets: a 64-bit offset per element would cost too many registers.
    base = (tl.program_id(0).to(tl.int64) * BLOCK_M * NUM_HEADS + head) * HEAD_DIM
    place = tl.arange(0, BLOCK_M)[:, None] * (NUM_HEADS * HEAD_DIM) + offs_d[None, :]
    q = tl.load(q_ptr + base + place, mask=live[:, None], other=0.0)
    last = length + offs_m
    end = tl.minimum(length + (tl.program_id(0) + 1) * BLOCK_M, length + rows)
    k_base = k_ptr + (head // GROUP) * stride_kh
    v_base = v_ptr + (head // GROUP) * stride_vh
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    for n0 in tl.range(0, end, BLOCK_N):
        offs_n = n0 + tile_n
        there = offs_n < length + rows
        k = tl.load(k_base + tl.cast(n0, tl.int64) * stride_kt + (tile_n[None, :] * stride_kt + offs_d[:, None]),
                    mask=there[None, :], other=0.0)
        v = tl.load(v_base + tl.cast(n0, tl.int64) * stride_vt + (tile_n[:, None] * stride_vt + offs_d[None, :]),
                    mask=there[:, None], other=0.0)
        m, l, acc = attention_step(q, k, v, offs_n, n0, last, m, l, acc, scale)
    tl.store(o_ptr + base + place, (acc / l[:, None]).to(tl.bfloat16), mask=live[:, None])


def prefill_linear_launch(shape: LinearShape, schedule: PrefillSchedule, numerics: Numerics) -> Launch:
    """The artefact of one linear, the same for every number of rows."""
    fp8 = shape.dtype == "e4m3"
    element = "*fp8e4nv" if fp8 else "*bf16"
    constants: dict[str, Constant] = {
        "N": shape.N, "K": shape.K, "BLOCK_M": schedule.BLOCK_M, "BLOCK_N": schedule.BLOCK_N,
        "BLOCK_K": ROW_BYTES if fp8 else ROW_BYTES // 2, "GROUP_M": GROUP_M,
        "PROMOTE": min(numerics.promote_every, ROW_BYTES) or None if fp8 else None, "PDL": schedule.pdl}
    constants |= {} if fp8 else {"x_lo_ptr": None, "x_scale_ptr": None, "w_scale_ptr": None}
    constants |= {} if shape.bias else {"bias_ptr": None}
    types = {**dict.fromkeys(("x_ptr", "x_lo_ptr", "w_ptr"), element), **dict.fromkeys(("x_scale_ptr", "w_scale_ptr"), "*fp32"),
             "bias_ptr": "*bf16", "out_ptr": "*bf16",
             **dict.fromkeys(("rows", "stride_xm", "stride_wn", "stride_om"), "i32")}
    return Launch(prefill_linear_kernel, types, constants, options(schedule, numerics))


def prefill_linear_contract(shape: LinearShape, schedule: PrefillSchedule) -> str | None:
    """The reason why a schedule doesn't fit a shape, or None."""
    if shape.swiglu:
        return "swiglu is a separate kernel in prefill"
    return common_contract(schedule)


def prefill_attention_launch(shape: AttentionShape, schedule: PrefillSchedule, numerics: Numerics) -> Launch:
    """The artefact of one shape, the same for every number of rows, length and cache layout."""
    types = {**dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), "*bf16"), "length_ptr": "*i32", "scale": "fp32",
             **dict.fromkeys(("rows", "stride_kt", "stride_kh", "stride_vt", "stride_vh"), "i32")}
    constants: dict[str, Constant] = {
        "NUM_HEADS": shape.num_heads, "GROUP": shape.group, "HEAD_DIM": shape.head_dim, "BLOCK_M": schedule.BLOCK_M,
        "BLOCK_N": schedule.BLOCK_N, "PDL": schedule.pdl}
    return Launch(prefill_attention_kernel, types, constants, options(schedule, numerics))


def prefill_attention_contract(shape: AttentionShape, schedule: PrefillSchedule) -> str | None:
    """The reason why a schedule doesn't fit a shape, or None."""
    return power_of_two("head_dim", shape.head_dim, 16, 256) or common_contract(schedule)


LINEAR = Operation(prefill_linear_kernel, PrefillSchedule, prefill_linear_contract, prefill_linear_launch, linear_instructions)
ATTENTION = Operation(prefill_attention_kernel, PrefillSchedule, prefill_attention_contract, prefill_attention_launch,
                      attention_instructions)


def prefill_schedule(rows: int, N: int, sms: int) -> PrefillSchedule:
    """The schedule of a linear on a GPU with `sms` multiprocessors."""
    tiles = triton.cdiv(rows, WIDE.BLOCK_M) * triton.cdiv(N, WIDE.BLOCK_N)
    return WIDE if tiles > sms else NARROW


def prefill_linear(x: Activation, w: Weights, out: "torch.Tensor", *, rows: int, numerics: Numerics,
                   schedule: PrefillSchedule | None = None) -> None:
    """y = (x @ w.T) * x.scale * w.scale + bias.

    Args:
        x: values [2, >= rows, K] e4m3 with scale [>= rows], or [1, >= rows, K] bf16 without; w of its type.
        out: [>= rows, N] bf16, row stride a multiple of 16.
        schedule: WIDE or NARROW; None: by rows, N and GPU.

    Raises:
        ContractError: tensors that don't fit each other.
    """
    N, K = sizes_of("w", w.w, 2)
    terms, room, fp8 = sizes_of("x", x.values, 3)[0], AtLeast(rows), is_e4m3(w.w)
    require_rows(rows)
    require(terms == (2 if fp8 else 1), f"an activation of {terms} terms", "2 with e4m3 weights, 1 with bf16 ones")
    shape = LinearShape(N, K, "e4m3" if fp8 else "bf16", w.bias is not None, terms)
    tiles = schedule or prefill_schedule(rows, N, num_sms(out))
    require_contract(LINEAR, shape, tiles)
    launch, lo = prefill_linear_launch(shape, tiles, numerics), x.values[1] if fp8 else None
    arguments = launch.arguments({
        "x_ptr": Operand(x.values[0], (room, K), ("stride_xm",)), "x_lo_ptr": Operand(lo, (room, K), ("stride_xm",)),
        "w_ptr": Operand(w.w, (N, K), ("stride_wn",)), "x_scale_ptr": Operand(x.scale, (room,)),
        "w_scale_ptr": Operand(w.scale, (N,)), "bias_ptr": Operand(w.bias, (N,)),
        "out_ptr": Operand(out, (room, N), ("stride_om",))})
    launch((triton.cdiv(rows, tiles.BLOCK_M) * triton.cdiv(N, tiles.BLOCK_N),), rows=rows, **arguments)


def prefill_attention(q: "torch.Tensor", k_cache: "torch.Tensor", v_cache: "torch.Tensor", length: "torch.Tensor",
                      out: "torch.Tensor", *, rows: int, numerics: Numerics) -> None:
    """Causal attention over the cache.

    Args:
        q, out: [>= rows, num_heads, head_dim] bf16, contiguous. k_cache, v_cache: [slots, num_kv_heads, head_dim] bf16, strides
            multiples of 16. length: [1] int32 on the device, tokens in the cache before the first row. The rows' own keys are
            already in the cache.

    Raises:
        ContractError: tensors that don't fit each other.
    """
    _, num_heads, head_dim = sizes_of("q", q, 3)
    shape, tiles = AttentionShape(num_heads, sizes_of("k", k_cache, 3)[1], head_dim), ATTENTION_SCHEDULE
    cache = cache_operands(k_cache, v_cache, num_heads, head_dim)
    require_rows(rows)
    require_contract(ATTENTION, shape, tiles)
    launch, room = prefill_attention_launch(shape, tiles, numerics), (AtLeast(rows), num_heads, head_dim)
    launch((triton.cdiv(rows, tiles.BLOCK_M), num_heads), scale=head_dim**-0.5, rows=rows, **launch.arguments({
        "q_ptr": Operand(q, room), **cache, "length_ptr": Operand(length, (1,)), "o_ptr": Operand(out, room)}))
