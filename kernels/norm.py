"""Residual, RMSNorm and activation quantisation of the decode step, in one kernel with one program per row.

    x += sum_s partial_s   (summed in index order, rounded to bf16 before the addition)
    h = x / sqrt(mean(x^2) + eps) * weight
    u = h / scale,  scale = 2^(floor(log2 amax(h)) - 7);  hi = e4m3(u),  lo = e4m3((u - hi) * 16)

An activation is quantised to two e4m3 terms, hi + lo / 16, with a power of two as its row's scale: lossless for bf16 values down
to 2^-13 of the row's maximum; the error of smaller values is at most 2^-21 of it. Division by a power of two is exact.

This kernel sums the split-K partials of the preceding linear. Input: the residual x [rows, N] bf16, with fp32 partials [split_k,
rows, N] or one bf16 y [rows, N]; before the first layer, rows of the embedding by token id. Output: the residual, and h as two
e4m3 terms with a scale per row, or as bf16. `feature_ptr` [rows, stride] receives a copy of the residual for an EAGLE-3 drafter.
RMSNorm rounds to bf16 before the weight, as Hugging Face does.

Row invariance: a row is one program with one tree of sums, independent of the other rows.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..schedules.recipe import Numerics
from ..schedules.schedule import FixedSchedule
from ..shapes.model import DraftNormShape, NormShape
from .layout import LO_FACTOR, Activation
from .operation import (
    AtLeast,
    Constant,
    Launch,
    Operand,
    Operation,
    common_contract,
    no_tensor_core,
    options,
    require,
    require_contract,
    require_rows,
    sizes_of,
)

if TYPE_CHECKING:
    import torch

ROW_VALUES = 32768  # maximum of values per program: 32 per thread of 32 warps


@triton.jit
def row_scale(amax):
    """(scale, 1 / scale) of a row with the largest magnitude amax: powers of two, exact to divide by."""
    exponent = tl.maximum(amax.to(tl.int32, bitcast=True) >> 23, 8)  # 8 is also for rows of zeros and subnormals
    return ((exponent - 7) << 23).to(tl.float32, bitcast=True), ((261 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_terms(hi_ptr, lo_ptr, offset, h, inverse, mask):
    """h / scale as two e4m3 terms: hi + lo / 16."""
    u = h * inverse
    hi = u.to(tl.float8e4nv)
    tl.store(hi_ptr + offset, hi, mask=mask)
    tl.store(lo_ptr + offset, ((u - hi.to(tl.float32)) * 16.0).to(tl.float8e4nv), mask=mask)


@triton.jit
def sum_partials(part_ptr, offset, stride_ps, mask, SPLIT_K: tl.constexpr):
    """y in fp32, rounded to bf16: the sum of partials in index order, or the one bf16 y."""
    y = tl.load(part_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    for s in tl.static_range(1, SPLIT_K):
        y = y + tl.load(part_ptr + s * stride_ps + offset, mask=mask, other=0.0)
    return y.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _sum_and_max(sum_a, max_a, sum_b, max_b):
    return sum_a + sum_b, tl.maximum(max_a, max_b)


@triton.jit
def rms_norm_row(x, weight, eps, H: tl.constexpr):
    """(RMSNorm of one row in fp32, rounded to bf16 before and after the weight; its largest magnitude without these roundings).
    One reduction computes both."""
    total, top = tl.reduce((x * x, tl.abs(x * weight)), 0, _sum_and_max)
    scale = tl.rsqrt(total * (1.0 / H) + eps)
    return ((x * scale).to(tl.bfloat16).to(tl.float32) * weight).to(tl.bfloat16).to(tl.float32), top * scale


@triton.jit(do_not_specialize=["stride_fm"])
def norm_kernel(x_ptr, part_ptr, token_ptr, embedding_ptr, row_ptr, weight_ptr, out_ptr, lo_ptr, scale_ptr, feature_ptr, eps,
                stride_pm, stride_ps, stride_fm, H: tl.constexpr, BLOCK: tl.constexpr, SPLIT_K: tl.constexpr,
                PDL: tl.constexpr):
    """token_ptr [rows] and embedding_ptr [V, H]: set before the first layer. part_ptr: set if a linear's output is added. row_ptr
    [1]: the row to read, in a launch of one program, which writes to row 0."""
    out_row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    mask = offs < H
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        if token_ptr is not None:  # a pass begins: its kernels may read lengths before their wait, so these must be written
            gdc_wait()
            gdc_launch_dependents()
        else:
            gdc_launch_dependents()
            gdc_wait()
    row = out_row
    if row_ptr is not None:
        row = row + tl.load(row_ptr)
    if token_ptr is not None:
        token = tl.maximum(tl.load(token_ptr + row), 0).to(tl.int64)  # -1 means no token
        x = tl.load(embedding_ptr + token * H + offs, mask=mask, other=0.0).to(tl.float32)
    else:
        x = tl.load(x_ptr + row * H + offs, mask=mask, other=0.0).to(tl.float32)
    if part_ptr is not None:
        y = sum_partials(part_ptr, row * stride_pm + offs, stride_ps, mask, SPLIT_K)
        x = (x + y).to(tl.bfloat16).to(tl.float32)
    if part_ptr is not None or token_ptr is not None:
        tl.store(x_ptr + out_row * H + offs, x.to(tl.bfloat16), mask=mask)
    if feature_ptr is not None:
        tl.store(feature_ptr + row * stride_fm + offs, x.to(tl.bfloat16), mask=mask)
    h, top = rms_norm_row(x, weight, eps, H)
    if scale_ptr is not None:
        scale, inverse = row_scale(top)
        store_terms(out_ptr, lo_ptr, out_row * H + offs, h, inverse, mask)
        tl.store(scale_ptr + out_row, scale)
    else:
        tl.store(out_ptr + out_row * H + offs, h.to(tl.bfloat16), mask=mask)


@triton.jit
def draft_norm_kernel(token_ptr, embedding_ptr, feature_ptr, token_weight_ptr, feature_weight_ptr, x_ptr, out_ptr, lo_ptr,
                      scale_ptr, eps, H: tl.constexpr, BLOCK: tl.constexpr, NORMED_RESIDUAL: tl.constexpr, PDL: tl.constexpr):
    """Input of an EAGLE-3 drafter's qkv, [rows, 2 H]: RMSNorm(embedding), then RMSNorm(feature). The residual is the feature, or
    the normed feature if NORMED_RESIDUAL."""
    row = tl.program_id(0)
    if PDL:
        gdc_wait()  # a pass begins: see norm_kernel
        gdc_launch_dependents()
    offs = tl.arange(0, BLOCK)
    mask = offs < H
    token = tl.maximum(tl.load(token_ptr + row), 0).to(tl.int64)  # -1 means no token
    embedded = tl.load(embedding_ptr + token * H + offs, mask=mask, other=0.0).to(tl.float32)
    feature = tl.load(feature_ptr + row * H + offs, mask=mask, other=0.0).to(tl.float32)
    token_weight = tl.load(token_weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    feature_weight = tl.load(feature_weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    left, left_top = rms_norm_row(embedded, token_weight, eps, H)
    right, right_top = rms_norm_row(feature, feature_weight, eps, H)
    tl.store(x_ptr + row * H + offs, (right if NORMED_RESIDUAL else feature).to(tl.bfloat16), mask=mask)
    place = row * (2 * H) + offs
    if scale_ptr is not None:
        scale, inverse = row_scale(tl.maximum(left_top, right_top))
        store_terms(out_ptr, lo_ptr, place, left, inverse, mask)
        store_terms(out_ptr, lo_ptr, place + H, right, inverse, mask)
        tl.store(scale_ptr + row, scale)
    else:
        tl.store(out_ptr + place, left.to(tl.bfloat16), mask=mask)
        tl.store(out_ptr + place + H, right.to(tl.bfloat16), mask=mask)


def norm_contract(shape: NormShape | DraftNormShape, schedule: FixedSchedule) -> str | None:
    """The reason why a schedule doesn't fit a shape, or None."""
    return row_contract(shape.H, schedule)


def row_contract(N: int, schedule: FixedSchedule) -> str | None:
    """The reason why one program can't hold a row of N values, or None."""
    if N > ROW_VALUES:
        return f"a row of {N:,} values is more than the {ROW_VALUES:,} that one program holds"
    return common_contract(schedule, most_warps=32)


def norm_launch(shape: NormShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """The artefact of one position in the step, the same for every row count."""
    types = {"x_ptr": "*bf16", "part_ptr": "*bf16" if shape.split_k == 1 else "*fp32", "token_ptr": "*i32",
             "embedding_ptr": "*bf16", "row_ptr": "*i32", "weight_ptr": "*bf16",
             "out_ptr": "*fp8e4nv" if shape.quantised else "*bf16", "lo_ptr": "*fp8e4nv", "scale_ptr": "*fp32",
             "feature_ptr": "*bf16",
             "eps": "fp32", "stride_pm": "i32", "stride_ps": "i32", "stride_fm": "i32"}
    absent = {"part_ptr": not shape.split_k, "token_ptr": not shape.embeds, "embedding_ptr": not shape.embeds,
              "row_ptr": not shape.one_row, "lo_ptr": not shape.quantised, "scale_ptr": not shape.quantised,
              "feature_ptr": not shape.feature}
    constants: dict[str, Constant] = {name: None for name, gone in absent.items() if gone}
    constants |= {"H": shape.H, "BLOCK": triton.next_power_of_2(shape.H), "SPLIT_K": shape.split_k, "PDL": schedule.pdl}
    return Launch(norm_kernel, types, constants, options(schedule, numerics))


def draft_norm_launch(shape: DraftNormShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """The artefact of a drafter's first norms, the same for every row count."""
    pointers = ("token_weight_ptr", "feature_weight_ptr", "embedding_ptr", "feature_ptr", "x_ptr")
    types = {**dict.fromkeys(pointers, "*bf16"), "token_ptr": "*i32", "out_ptr": "*fp8e4nv" if shape.quantised else "*bf16",
             "lo_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "eps": "fp32"}
    constants: dict[str, Constant] = {"H": shape.H, "BLOCK": triton.next_power_of_2(shape.H), "PDL": schedule.pdl,
                                      "NORMED_RESIDUAL": shape.normed_residual}
    constants |= {} if shape.quantised else {"lo_ptr": None, "scale_ptr": None}
    return Launch(draft_norm_kernel, types, constants, options(schedule, numerics))


OPERATION = Operation(norm_kernel, FixedSchedule, norm_contract, norm_launch, no_tensor_core, early_reads=("weight_ptr",))
DRAFT = Operation(draft_norm_kernel, FixedSchedule, norm_contract, draft_norm_launch, no_tensor_core)


@dataclass(frozen=True)
class Residual:
    """Input of a norm. x: [>= rows, H] bf16, contiguous, updated in place.

    part: added to x; [split_k, >= rows, H] fp32, or [1, >= rows, H] bf16. tokens: [>= rows] int32, with embedding [V, H] bf16,
    whose rows replace x. row: [1] int32, the only row of x and part to read; the launch then has one row and writes to row 0."""

    x: "torch.Tensor"
    part: "torch.Tensor | None" = None
    tokens: "torch.Tensor | None" = None
    embedding: "torch.Tensor | None" = None
    row: "torch.Tensor | None" = None


def _output_operands(out: Activation, rows: int, N: int) -> dict[str, Operand]:
    """The operands of an output: values [2, >= rows, N] with scale [>= rows], or [1, >= rows, N] without."""
    terms, *_ = sizes_of("out", out.values, 3)
    require(terms == (1 if out.scale is None else 2), f"an output of {terms} terms "
            + ("without a scale" if out.scale is None else "with a scale"), "2 terms with a scale, or 1 without")
    room, lo = AtLeast(rows), None if out.scale is None else out.values[1]
    return {"out_ptr": Operand(out.values[0], (room, N)), "lo_ptr": Operand(lo, (room, N)),
            "scale_ptr": Operand(out.scale, (room,))}


def norm(source: Residual, weight: "torch.Tensor", eps: float, out: Activation, *, rows: int, schedule: FixedSchedule,
         numerics: Numerics, feature: "torch.Tensor | None" = None) -> None:
    """h = RMSNorm(x + part), quantised or not; x is updated.

    Args:
        weight: [H] bf16.
        out: values [2, >= rows, H] e4m3 with scale [>= rows] fp32, or [1, >= rows, H] bf16 without.
        feature: output, [>= rows, H] bf16, row stride a multiple of 16: a copy of the updated x.

    Raises:
        ContractError: tensors that don't fit each other.
    """
    x, part, tokens, row = source.x, source.part, source.tokens, source.row
    H, split_k = sizes_of("x", x, 2)[1], 0 if part is None else len(part)
    shape = NormShape(H, split_k, embeds=tokens is not None, quantised=out.scale is not None, feature=feature is not None,
                      one_row=row is not None)
    require_rows(rows, None if row is None else 1)
    require_contract(OPERATION, shape, schedule)
    launch, room = norm_launch(shape, schedule, numerics), AtLeast(rows)
    launch((rows,), eps=eps, **launch.arguments({
        "x_ptr": Operand(x, (room, H)), "part_ptr": Operand(part, (split_k, room, H), ("stride_ps", "stride_pm")),
        "token_ptr": Operand(tokens, (room,)), "embedding_ptr": Operand(source.embedding, (AtLeast(1), H)),
        "row_ptr": Operand(row, (1,)), "weight_ptr": Operand(weight, (H,)), **_output_operands(out, rows, H),
        "feature_ptr": Operand(feature, (room, H), ("stride_fm",))}))


@dataclass(frozen=True)
class DraftEntry:
    """Weights of an EAGLE-3 drafter's first norms: embedding [V, H], weights [H], all bf16. normed_residual: whether the residual
    is the normed feature."""

    embedding: "torch.Tensor"
    token_weight: "torch.Tensor"
    feature_weight: "torch.Tensor"
    eps: float
    normed_residual: bool


def draft_norm(entry: DraftEntry, tokens: "torch.Tensor", feature: "torch.Tensor", x: "torch.Tensor", out: Activation, *,
               rows: int, schedule: FixedSchedule, numerics: Numerics) -> None:
    """RMSNorm of embedding and feature, concatenated, for a drafter's qkv. Writes the residual to x.

    Args:
        tokens: [>= rows] int32. feature, x: [>= rows, H] bf16; x may be feature.
        out: values [2, >= rows, 2 H] e4m3 with scale [>= rows] fp32, or [1, >= rows, 2 H] bf16.

    Raises:
        ContractError: tensors that don't fit each other.
    """
    H, room = sizes_of("feature", feature, 2)[1], AtLeast(rows)
    shape = DraftNormShape(H, out.scale is not None, entry.normed_residual)
    require_rows(rows)
    require_contract(DRAFT, shape, schedule)
    launch = draft_norm_launch(shape, schedule, numerics)
    launch((rows,), eps=entry.eps, **launch.arguments({
        "token_ptr": Operand(tokens, (room,)), "embedding_ptr": Operand(entry.embedding, (AtLeast(1), H)),
        "feature_ptr": Operand(feature, (room, H)), "token_weight_ptr": Operand(entry.token_weight, (H,)),
        "feature_weight_ptr": Operand(entry.feature_weight, (H,)), "x_ptr": Operand(x, (room, H)),
        **_output_operands(out, rows, 2 * H)}))


def quantise_reference(h: "torch.Tensor") -> Activation:
    """h [rows, N] as two e4m3 terms."""
    import torch

    amax = h.float().abs().amax(-1)
    exponent = torch.frexp(amax).exponent.masked_fill(amax == 0, -118).clamp(min=-118) - 1  # floor(log2 amax); frexp(0) is 0
    scale = torch.ldexp(torch.ones_like(amax), exponent - 7)
    u = h.float() / scale[:, None]
    hi = u.to(torch.float8_e4m3fn)
    return Activation(torch.stack([hi, ((u - hi.float()) * LO_FACTOR).to(torch.float8_e4m3fn)]), scale)


def norm_reference(x: "torch.Tensor", weight: "torch.Tensor", eps: float) -> "torch.Tensor":
    """RMSNorm in fp64, unrounded: [rows, H]."""
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
