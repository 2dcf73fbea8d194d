"""Residual, RMSNorm and activation quantisation of the decode step, in one kernel, a row a program.

    x += sum_s partial_s   (in index order, rounded to bf16 once before it is added)
    h = x / sqrt(mean(x^2) + eps) * weight
    u = h / scale,  scale = 2^(floor(log2 amax(h)) - 7);  hi = e4m3(u),  lo = e4m3((u - hi) * 16)

An activation is quantised in two e4m3 terms, hi + lo / 16, with a power of two as its row's scale: every bf16 value down to 2^-13
of the row's largest is exact, and below that the error is at most 2^-21 of it. Dividing rounds nothing, so no value tips over.

It is where the split-K partials of the linear before it are summed. What it reads: the residual x [rows, N] bf16, and fp32
partials [split_k, rows, N] or one bf16 y [rows, N]; or, at the first layer, rows of the embedding by token id. What it
writes: the residual back, and h as two e4m3 terms with a scale a row, or as bf16. `feature_ptr` [rows, stride] keeps a copy
of the residual, which an EAGLE-3 drafter reads. RMSNorm rounds to bf16 before the weight, as Hugging Face does.

Row invariance: a row is one program with one tree of sums, whatever the other rows.
"""

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..schedules.recipe import Numerics
from ..schedules.schedule import FixedSchedule
from ..shapes.model import DraftNormShape, KernelShape, NormShape
from .operation import Instructions, Launch, Operation, common_contract, options, require, require_aligned

if TYPE_CHECKING:
    import torch

ROW_VALUES = 32768  # of a row that one program holds: 32 a thread of 32 warps


@triton.jit
def row_scale(amax):
    """(scale, 1 / scale) of a row whose largest magnitude is amax: powers of two, so that dividing by it rounds nothing."""
    exponent = tl.maximum(amax.to(tl.int32, bitcast=True) >> 23, 8)  # 8: also for rows of zeros and subnormals
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
    """y, rounded to bf16 and back to fp32: partials in index order, or what is bf16 already."""
    y = tl.load(part_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    for s in tl.static_range(1, SPLIT_K):
        y = y + tl.load(part_ptr + s * stride_ps + offset, mask=mask, other=0.0)
    return y.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _sum_and_max(sum_a, max_a, sum_b, max_b):
    return sum_a + sum_b, tl.maximum(max_a, max_b)


@triton.jit
def rms_norm_row(x, weight, eps, H: tl.constexpr):
    """(RMSNorm of one row of fp32 values, rounded to bf16 before the weight and after it, in fp32; its largest magnitude but for
    those roundings). One reduction gives both."""
    total, top = tl.reduce((x * x, tl.abs(x * weight)), 0, _sum_and_max)
    scale = tl.rsqrt(total * (1.0 / H) + eps)
    return ((x * scale).to(tl.bfloat16).to(tl.float32) * weight).to(tl.bfloat16).to(tl.float32), top * scale


@triton.jit(do_not_specialize=["stride_fm"])
def norm_kernel(x_ptr, part_ptr, token_ptr, embedding_ptr, row_ptr, weight_ptr, out_ptr, lo_ptr, scale_ptr, feature_ptr, eps,
                stride_pm, stride_ps, stride_fm, H: tl.constexpr, BLOCK: tl.constexpr, SPLIT_K: tl.constexpr,
                PDL: tl.constexpr):
    """token_ptr [rows] and embedding_ptr [V, H] where the residual begins; part_ptr where a linear is added; row_ptr [1]:
    the row to read, for a launch of one program (its residual goes to row 0)."""
    out_row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    mask = offs < H
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        if token_ptr is not None:  # a pass begins: what follows may read lengths before it waits, so they must be written
            gdc_wait()
            gdc_launch_dependents()
        else:
            gdc_launch_dependents()
            gdc_wait()
    row = out_row
    if row_ptr is not None:
        row = row + tl.load(row_ptr)
    if token_ptr is not None:
        token = tl.maximum(tl.load(token_ptr + row), 0).to(tl.int64)  # -1 stands for no token
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
    """What an EAGLE-3 drafter's qkv reads: RMSNorm(embedding) and RMSNorm(feature) side by side, [rows, 2 H]. The residual is
    the feature, or the normed feature where NORMED_RESIDUAL."""
    row = tl.program_id(0)
    if PDL:
        gdc_wait()  # a pass begins: see norm_kernel
        gdc_launch_dependents()
    offs = tl.arange(0, BLOCK)
    mask = offs < H
    token = tl.maximum(tl.load(token_ptr + row), 0).to(tl.int64)  # -1 stands for no token
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
    """Why a shape and a schedule can't go together, or None."""
    return row_contract(shape.H, schedule)


def row_contract(N: int, schedule: FixedSchedule) -> str | None:
    """Why one program can't hold a row of N values, or None."""
    if N > ROW_VALUES:
        return f"a row of {N:,} values is more than the {ROW_VALUES:,} that one program holds"
    return common_contract(schedule, most_warps=32)


def norm_launch(shape: NormShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """The artefact of one place in the step: the same for every row count."""
    types = {"x_ptr": "*bf16", "part_ptr": "*bf16" if shape.split_k == 1 else "*fp32", "token_ptr": "*i32",
             "embedding_ptr": "*bf16", "row_ptr": "*i32", "weight_ptr": "*bf16",
             "out_ptr": "*fp8e4nv" if shape.quantised else "*bf16", "lo_ptr": "*fp8e4nv", "scale_ptr": "*fp32",
             "feature_ptr": "*bf16",
             "eps": "fp32", "stride_pm": "i32", "stride_ps": "i32", "stride_fm": "i32"}
    absent = {"part_ptr": not shape.split_k, "token_ptr": not shape.embeds, "embedding_ptr": not shape.embeds,
              "row_ptr": not shape.one_row, "lo_ptr": not shape.quantised, "scale_ptr": not shape.quantised,
              "feature_ptr": not shape.feature}
    constants: dict[str, Any] = {name: None for name, gone in absent.items() if gone}
    constants |= {"H": shape.H, "BLOCK": triton.next_power_of_2(shape.H), "SPLIT_K": shape.split_k, "PDL": schedule.pdl}
    return Launch(norm_kernel, types, constants, options(schedule, numerics))


def draft_norm_launch(shape: DraftNormShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """The artefact of an EAGLE-3 entry: the same for every row count."""
    pointers = ("token_weight_ptr", "feature_weight_ptr", "embedding_ptr", "feature_ptr", "x_ptr")
    types = {**dict.fromkeys(pointers, "*bf16"), "token_ptr": "*i32", "out_ptr": "*fp8e4nv" if shape.quantised else "*bf16",
             "lo_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "eps": "fp32"}
    constants: dict[str, Any] = {"H": shape.H, "BLOCK": triton.next_power_of_2(shape.H), "PDL": schedule.pdl,
                                 "NORMED_RESIDUAL": shape.normed_residual}
    constants |= {} if shape.quantised else {"lo_ptr": None, "scale_ptr": None}
    return Launch(draft_norm_kernel, types, constants, options(schedule, numerics))


def no_instructions(shape: KernelShape, arch: str) -> Instructions:
    """Nothing to multiply: no tensor-core instruction has business here."""
    return Instructions(forbidden=("HMMA", "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA"))


OPERATION = Operation(norm_kernel, FixedSchedule, norm_contract, norm_launch, no_instructions, ahead=("weight_ptr",))
DRAFT = Operation(draft_norm_kernel, FixedSchedule, norm_contract, draft_norm_launch, no_instructions)


def norm(x: "torch.Tensor", weight: "torch.Tensor", eps: float, *, rows: int, out: "torch.Tensor", schedule: FixedSchedule,
         numerics: Numerics, scale: "torch.Tensor | None" = None, part: "torch.Tensor | None" = None,
         tokens: "torch.Tensor | None" = None, embedding: "torch.Tensor | None" = None, row: "torch.Tensor | None" = None,
         feature: "torch.Tensor | None" = None) -> None:
    """h = RMSNorm(x + part), quantised or not; x is updated.

    Args:
        x: [>= rows, H] bf16, contiguous. weight: [H] bf16.
        out: terms [2, >= rows, H] e4m3 with scale [>= rows] fp32, or [1, >= rows, H] bf16 without.
        part: [split_k, >= rows, H] fp32, or [1, >= rows, H] bf16.
        tokens: [rows] int32 with embedding [V, H] bf16, where x begins.
        row: [1] int32: the one row to read; rows is then 1.
        feature: [rows, H] bf16, any row stride: a copy of the updated x.

    Raises:
        ContractError: tensors that don't go together.
    """
    H = x.shape[1]
    split_k = 0 if part is None else part.shape[0]
    shape = NormShape(H, split_k, embeds=tokens is not None, quantised=scale is not None, feature=feature is not None,
                      one_row=row is not None)
    require((tokens is None) == (embedding is None), "tokens without embedding, or the reverse", "both or neither")
    require(row is None or rows == 1, f"{rows} rows beside a row to read", "1")
    hi, lo = terms(out)
    require_aligned(x=x, weight=weight, hi=hi, lo=lo, scale=scale, part=part, tokens=tokens, embedding=embedding, row=row,
                    feature=feature)
    given = {"part_ptr": part, "token_ptr": tokens, "embedding_ptr": embedding, "row_ptr": row, "lo_ptr": lo,
             "scale_ptr": scale, "feature_ptr": feature}
    norm_launch(shape, schedule, numerics)(
        (rows,), x_ptr=x, weight_ptr=weight, out_ptr=hi, eps=eps, stride_pm=16 if part is None else part.stride(1),
        stride_ps=16 if part is None else part.stride(0), stride_fm=16 if feature is None else feature.stride(0),
        **{name: tensor for name, tensor in given.items() if tensor is not None})


def draft_norm(tokens: "torch.Tensor", embedding: "torch.Tensor", feature: "torch.Tensor", token_weight: "torch.Tensor",
               feature_weight: "torch.Tensor", eps: float, *, rows: int, x: "torch.Tensor", out: "torch.Tensor",
               scale: "torch.Tensor | None", normed_residual: bool, schedule: FixedSchedule, numerics: Numerics) -> None:
    """An EAGLE-3 entry: tokens [rows] int32, feature and x [>= rows, H] bf16, out [2, >= rows, 2 H] e4m3 with scale, or
    [1, >= rows, 2 H] bf16."""
    shape = DraftNormShape(feature.shape[1], scale is not None, normed_residual)
    hi, lo = terms(out)
    require_aligned(tokens=tokens, embedding=embedding, feature=feature, token_weight=token_weight,
                    feature_weight=feature_weight, x=x, hi=hi, lo=lo, scale=scale)
    draft_norm_launch(shape, schedule, numerics)(
        (rows,), token_ptr=tokens, embedding_ptr=embedding, feature_ptr=feature, token_weight_ptr=token_weight,
        feature_weight_ptr=feature_weight, x_ptr=x, out_ptr=hi, eps=eps,
        **({} if scale is None else {"lo_ptr": lo, "scale_ptr": scale}))


def terms(out: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor | None]":
    """(hi, lo) of [2, rows, N], or (out, None) of [1, rows, N]."""
    return out[0], out[1] if out.shape[0] == 2 else None


def quantise_reference(h: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """(terms [2, rows, N] e4m3, scale [rows] fp32) of h [rows, N]."""
    import torch

    amax = h.float().abs().amax(-1)
    exponent = torch.frexp(amax).exponent.masked_fill(amax == 0, -118).clamp(min=-118) - 1  # floor(log2 amax); frexp(0) is 0
    scale = torch.ldexp(torch.ones_like(amax), exponent - 7)
    u = h.float() / scale[:, None]
    hi = u.to(torch.float8_e4m3fn)
    return torch.stack([hi, ((u - hi.float()) * 16).to(torch.float8_e4m3fn)]), scale


def norm_reference(x: "torch.Tensor", weight: "torch.Tensor", eps: float) -> "torch.Tensor":
    """RMSNorm in fp64, unrounded: [rows, H]."""
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
