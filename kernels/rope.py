"""Rotary embedding and KV append of the decode step: from the output of qkv to queries and cached keys and values.

    y = sum_s partial_s rounded to bf16;  q, k rotated by the angle of position length + row, v unchanged
    (RoFormer, Su et al. 2021; pair i is (i, i + head_dim / 2))

A model with norms of heads (Qwen3) applies RMSNorm to each head of q and k before the rotation, rounded to bf16 before and after
the weight, as Hugging Face does.

qkv [split_k, rows, (num_heads + 2 num_kv_heads) * head_dim]: fp32 partials, or one bf16 y (both with bias). cos, sin
[positions, head_dim / 2] fp32. q [rows, num_heads, head_dim] bf16. Keys and values go to slot length + row of k_cache and v_cache
[slots, num_kv_heads, head_dim] bf16, each with its own strides. The rotation is computed in fp32 and rounded once. Weights of the
norms: [head_dim] bf16.
"""

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..schedules.recipe import Numerics
from ..schedules.schedule import FixedSchedule
from ..shapes.model import RopeShape
from .attention import cache_operands
from .layout import ROWS
from .norm import sum_partials
from .operation import (
    AtLeast,
    Constant,
    Launch,
    Operand,
    Operation,
    common_contract,
    no_tensor_core,
    options,
    require_contract,
    require_rows,
    sizes_of,
)

if TYPE_CHECKING:
    import torch

PROMPT_ROWS = 8  # rows per program in a launch of more than ROWS; one row per program in a smaller launch


@triton.jit
def normed(y, scale, weight_ptr, mask):
    """y * scale rounded to bf16, times the weight, rounded again; in fp32."""
    weight = tl.load(weight_ptr, mask=mask, other=0.0).to(tl.float32)
    return ((y * scale).to(tl.bfloat16).to(tl.float32) * weight).to(tl.bfloat16).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def rope_kernel(qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, length_ptr, q_ptr, k_ptr, v_ptr, rows, eps, stride_pm,
                stride_ps, stride_kt, stride_kh, stride_vt, stride_vh, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
                HEAD_DIM: tl.constexpr, SPLIT_K: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    """Grid: (tiles of ROWS rows, num_heads + 2 num_kv_heads). With norms ROWS is 1: a row's sum has one order in every launch."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    head = tl.program_id(1)
    HALF: tl.constexpr = HEAD_DIM // 2
    offs = tl.arange(0, HALF)[None, :]
    mask = (row < rows) & (offs < HALF)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    position = (tl.load(length_ptr) + row).to(tl.int64)
    base = row * stride_pm + head * HEAD_DIM + offs
    low = sum_partials(qkv_ptr, base, stride_ps, mask, SPLIT_K)
    high = sum_partials(qkv_ptr, base + HALF, stride_ps, mask, SPLIT_K)
    if head < NUM_HEADS + NUM_KV_HEADS:
        if q_norm_ptr is not None:
            norm_ptr = q_norm_ptr if head < NUM_HEADS else k_norm_ptr
            scale = tl.rsqrt(tl.sum(low * low + high * high, 1, keep_dims=True) * (1.0 / HEAD_DIM) + eps)
            low = normed(low, scale, norm_ptr + offs, mask)
            high = normed(high, scale, norm_ptr + HALF + offs, mask)
        cos = tl.load(cos_ptr + position * HALF + offs, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + position * HALF + offs, mask=mask, other=0.0)
        rotated = low * cos - high * sin
        high = high * cos + low * sin
        low = rotated
    if head < NUM_HEADS:
        out = q_ptr + (row * NUM_HEADS + head) * HEAD_DIM + offs
    elif head < NUM_HEADS + NUM_KV_HEADS:
        out = k_ptr + position * stride_kt + (head - NUM_HEADS) * stride_kh + offs
    else:
        out = v_ptr + position * stride_vt + (head - NUM_HEADS - NUM_KV_HEADS) * stride_vh + offs
    tl.store(out, low.to(tl.bfloat16), mask=mask)
    tl.store(out + HALF, high.to(tl.bfloat16), mask=mask)


def rope_contract(shape: RopeShape, schedule: FixedSchedule) -> str | None:
    """The reason why a schedule doesn't fit a shape, or None."""
    if shape.head_dim & (shape.head_dim - 1):
        return f"head_dim {shape.head_dim} is not a power of two"
    if shape.qk_norm and shape.rows != 1:
        return f"{shape.rows} rows per program under a norm of heads; expected 1"
    return common_contract(schedule)


def rope_launch(shape: RopeShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """The artefact of one shape, the same for every row count, position and cache layout."""
    types = {"qkv_ptr": "*bf16" if shape.split_k == 1 else "*fp32", "cos_ptr": "*fp32", "sin_ptr": "*fp32",
             "length_ptr": "*i32", "q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "rows": "i32", "eps": "fp32",
             "q_norm_ptr": "*bf16", "k_norm_ptr": "*bf16",
             **dict.fromkeys(("stride_pm", "stride_ps", "stride_kt", "stride_kh", "stride_vt", "stride_vh"), "i32")}
    constants: dict[str, Constant] = {
        "NUM_HEADS": shape.num_heads, "NUM_KV_HEADS": shape.num_kv_heads, "HEAD_DIM": shape.head_dim,
        "SPLIT_K": shape.split_k, "ROWS": shape.rows, "PDL": schedule.pdl}
    if not shape.qk_norm:
        constants |= {"q_norm_ptr": None, "k_norm_ptr": None}
    return Launch(rope_kernel, types, constants, options(schedule, numerics))


class HeadNorms(NamedTuple):
    """RMSNorm of each head of q and k: weights [head_dim] bf16, and their epsilon."""

    q: "torch.Tensor"
    k: "torch.Tensor"
    eps: float


def rows_per_program(rows: int, qk_norm: bool) -> int:
    """Rows per program in a launch over `rows` rows."""
    return 1 if rows <= ROWS or qk_norm else PROMPT_ROWS


OPERATION = Operation(rope_kernel, FixedSchedule, rope_contract, rope_launch, no_tensor_core)


def rope_append(qkv: "torch.Tensor", rope: "tuple[torch.Tensor, torch.Tensor]", length: "torch.Tensor", *, rows: int,
                q: "torch.Tensor", cache: "tuple[torch.Tensor, torch.Tensor]", schedule: FixedSchedule,
                numerics: Numerics, norms: HeadNorms | None = None) -> None:
    """Rotates queries and keys, and appends keys and values; shapes in the module's docstring.

    Args:
        qkv: [split_k, >= rows, N]. rope: cos and sin. length: [1] int32 on the device. q: output, [>= rows, num_heads, head_dim],
            contiguous. cache: k_cache and v_cache. norms: of a model with norms of heads.

    Raises:
        ContractError: tensors that don't fit each other.
    """
    _, num_heads, head_dim = sizes_of("q", q, 3)
    num_kv_heads, room = sizes_of("k", cache[0], 3)[1], AtLeast(rows)
    shape = RopeShape(num_heads, num_kv_heads, head_dim, len(qkv), rows_per_program(rows, norms is not None), norms is not None)
    heads = num_heads + 2 * num_kv_heads
    require_rows(rows)
    require_contract(OPERATION, shape, schedule)
    launch = rope_launch(shape, schedule, numerics)
    table = (len(rope[0]), head_dim // 2)
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    launch((triton.cdiv(rows, shape.rows), heads), rows=rows, eps=eps, **launch.arguments({
        "qkv_ptr": Operand(qkv, (len(qkv), room, heads * head_dim), ("stride_ps", "stride_pm")),
        "cos_ptr": Operand(rope[0], table), "sin_ptr": Operand(rope[1], table), "length_ptr": Operand(length, (1,)),
        "q_ptr": Operand(q, (room, num_heads, head_dim)), "q_norm_ptr": Operand(q_norm, (head_dim,)),
        "k_norm_ptr": Operand(k_norm, (head_dim,)), **cache_operands(*cache, num_heads, head_dim)}))


def rope_reference(y: "torch.Tensor", cos: "torch.Tensor", sin: "torch.Tensor") -> "torch.Tensor":
    """y [rows, heads, head_dim] rotated in fp64; cos, sin [rows, head_dim / 2]."""
    import torch

    low, high = y.double().chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat([low * c - high * s, high * c + low * s], -1)
