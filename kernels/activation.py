"""SwiGLU and activation quantisation of the decode step; each program computes one segment of one row.

    act = silu(gate) * up, rounded to bf16 after silu and after the product, as Hugging Face does
    two e4m3 terms of x / scale,  scale = 2^(floor(log2 amax(x)) - 7) over the whole row, as in kernels/norm.py

gate_up [rows, 2 N] bf16 has 8 gates, 8 ups and so on, as `interleave` orders the weights. In decode, SwiGLU is the epilogue of
gate_up; the kernel `swiglu` is for prefill. The scale needs the largest magnitude of the whole row, which is too long for one
program: `swiglu` writes the maximum of each SEGMENT, `quantise` reads them all. A maximum doesn't depend on order: neither the
segments nor the order of programs change the bits.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..schedules.recipe import Numerics
from ..schedules.schedule import FixedSchedule
from ..shapes.model import QuantiseShape, RowShape
from .layout import Activation
from .linear import swiglu_act
from .norm import row_contract, row_scale, store_terms
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
    warps_contract,
)

if TYPE_CHECKING:
    import torch

SEGMENT = 1024  # values of a row per program


@triton.jit
def swiglu_kernel(gate_up_ptr, act_ptr, amax_ptr, N: tl.constexpr, BLOCK: tl.constexpr, SEGMENTS: tl.constexpr,
                  PDL: tl.constexpr):
    """Grid: (rows, SEGMENTS)."""
    row = tl.program_id(0)
    segment = tl.program_id(1)
    offs = segment * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = gate_up_ptr + row * (2 * N) + (offs // 8 * 16 + offs % 8)
    gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(place + 8, mask=mask, other=0.0).to(tl.float32)
    act = swiglu_act(gate, up)
    tl.store(act_ptr + row * N + offs, act.to(tl.bfloat16), mask=mask)
    tl.store(amax_ptr + row * SEGMENTS + segment, tl.max(tl.abs(act), 0))


@triton.jit
def quantise_kernel(x_ptr, amax_ptr, hi_ptr, lo_ptr, scale_ptr, N: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
                    POWER: tl.constexpr, PDL: tl.constexpr):
    """Grid: (rows, segments of BLOCK). amax_ptr [rows, PARTS]: the largest magnitude of each part of a row, or None if one
    segment is the whole row. POWER: PARTS rounded up to a power of two."""
    row = tl.program_id(0)
    segment = tl.program_id(1)
    offs = segment * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row * N + offs, mask=mask, other=0.0).to(tl.float32)
    if amax_ptr is None:
        amax = tl.max(tl.abs(x), 0)
    else:
        parts = tl.arange(0, POWER)
        amax = tl.max(tl.load(amax_ptr + row * PARTS + parts, mask=parts < PARTS, other=0.0), 0)
    scale, inverse = row_scale(amax)
    store_terms(hi_ptr, lo_ptr, row * N + offs, x, inverse, mask)
    if segment == 0:
        tl.store(scale_ptr + row, scale)


def segments(N: int) -> int:
    """Number of programs for a row of N values."""
    return triton.cdiv(N, SEGMENT)


def swiglu_launch(shape: RowShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """The artefact of one row length, the same for every row count."""
    constants: dict[str, Constant] = {"N": shape.N, "BLOCK": SEGMENT, "SEGMENTS": segments(shape.N), "PDL": schedule.pdl}
    types = {"gate_up_ptr": "*bf16", "act_ptr": "*bf16", "amax_ptr": "*fp32"}
    return Launch(swiglu_kernel, types, constants, options(schedule, numerics))


def quantise_launch(shape: QuantiseShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """The artefact of one row length and number of maxima. Without maxima, one program computes a whole row."""
    block = SEGMENT if shape.parts else triton.next_power_of_2(shape.N)
    constants: dict[str, Constant] = {
        "N": shape.N, "BLOCK": block, "PARTS": shape.parts, "POWER": triton.next_power_of_2(max(shape.parts, 1)),
        "PDL": schedule.pdl} | ({} if shape.parts else {"amax_ptr": None})
    types = {"x_ptr": "*bf16", "amax_ptr": "*fp32", "hi_ptr": "*fp8e4nv", "lo_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    return Launch(quantise_kernel, types, constants, options(schedule, numerics))


def quantise_contract(shape: QuantiseShape, schedule: FixedSchedule) -> str | None:
    """The reason why a schedule doesn't fit a shape, or None."""
    return common_contract(schedule) if shape.parts else row_contract(shape.N, schedule)


SWIGLU = Operation(swiglu_kernel, FixedSchedule, warps_contract, swiglu_launch, no_tensor_core)
QUANTISE = Operation(quantise_kernel, FixedSchedule, quantise_contract, quantise_launch, no_tensor_core)


def swiglu(gate_up: "torch.Tensor", act: "torch.Tensor", amax: "torch.Tensor", *, rows: int, schedule: FixedSchedule,
           numerics: Numerics) -> None:
    """act = silu(gate) * up, and the largest magnitude of each segment.

    Args:
        gate_up: [>= rows, 2 N] bf16, contiguous. act: output, [>= rows, N] bf16. amax: output, [>= rows, segments(N)] fp32.

    Raises:
        ContractError: tensors that don't fit each other.
    """
    _, N = sizes_of("act", act, 2)
    require_rows(rows)
    require_contract(SWIGLU, RowShape(N), schedule)
    launch, room = swiglu_launch(RowShape(N), schedule, numerics), AtLeast(rows)
    launch((rows, segments(N)), **launch.arguments({
        "gate_up_ptr": Operand(gate_up, (room, 2 * N)), "act_ptr": Operand(act, (room, N)),
        "amax_ptr": Operand(amax, (room, segments(N)))}))


def quantise(x: "torch.Tensor", out: Activation, *, rows: int, schedule: FixedSchedule, numerics: Numerics,
             amax: "torch.Tensor | None" = None) -> None:
    """Quantises x as two e4m3 terms.

    Args:
        x: [>= rows, N] bf16. out: values [2, >= rows, N] e4m3, scale [>= rows] fp32.
        amax: [>= rows, parts] fp32, the largest magnitude of each part of a row, from `swiglu` or `merge`; or None.

    Raises:
        ContractError: tensors that don't fit each other.
    """
    _, N = sizes_of("x", x, 2)
    terms, *_ = sizes_of("out", out.values, 3)
    shape = QuantiseShape(N, 0 if amax is None else sizes_of("amax", amax, 2)[1])
    require_rows(rows)
    require_contract(QUANTISE, shape, schedule)
    launch, room = quantise_launch(shape, schedule, numerics), AtLeast(rows)
    require(terms == 2, f"an output of {terms} terms", "2")
    hi, lo = out.values
    launch((rows, 1 if amax is None else segments(N)), **launch.arguments({
        "x_ptr": Operand(x, (room, N)), "amax_ptr": Operand(amax, (room, shape.parts)), "hi_ptr": Operand(hi, (room, N)),
        "lo_ptr": Operand(lo, (room, N)), "scale_ptr": Operand(out.scale, (room,))}))


def swiglu_reference(gate_up: "torch.Tensor") -> "torch.Tensor":
    """silu(gate) * up in fp64, [rows, N]. gate_up: [rows, 2 N], 8 gates, 8 ups and so on."""
    gate, up = gate_up.double().unflatten(-1, (-1, 2, 8)).unbind(-2)
    gate, up = gate.flatten(-2), up.flatten(-2)
    return gate / (1 + (-gate).exp()) * up
