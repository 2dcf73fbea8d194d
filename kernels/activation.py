"""SwiGLU and activation quantisation of the decode step, a segment of a row a program.

    act = silu(gate) * up, rounded to bf16 after silu and after the product, as Hugging Face does
    two e4m3 terms of x / scale,  scale = 2^(floor(log2 amax(x)) - 7) over the whole row, as in kernels/norm.py

gate_up [rows, 2 N] bf16, gates and ups in turns of 8, as `interleave` leaves the weights. The decode step's gate_up has this
as its epilogue; `swiglu` is for prompts. A row's largest magnitude needs the whole row, and a row is too long for one program to
be quick: `swiglu` writes the largest of each SEGMENT beside act, `quantise` reads them all. A maximum has no order of its own,
so neither the segments nor their programs' order reach the bits.
"""

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..schedules.recipe import Numerics
from ..schedules.schedule import FixedSchedule
from ..shapes.model import QuantiseShape, RowShape
from .linear import swiglu_act
from .norm import no_instructions, row_contract, row_scale, store_terms, terms
from .operation import Launch, Operation, common_contract, options, require_aligned

if TYPE_CHECKING:
    import torch

SEGMENT = 1024  # values of a row that one program takes


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
    """Grid: (rows, segments of BLOCK). amax_ptr [rows, PARTS], the largest of each part of a row, or None where one segment is
    the row. POWER: PARTS rounded up."""
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
    """Programs that a row of N values takes."""
    return triton.cdiv(N, SEGMENT)


def swiglu_launch(shape: RowShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """The artefact of one length of rows: the same for every row count."""
    constants: dict[str, Any] = {"N": shape.N, "BLOCK": SEGMENT, "SEGMENTS": segments(shape.N), "PDL": schedule.pdl}
    types = {"gate_up_ptr": "*bf16", "act_ptr": "*bf16", "amax_ptr": "*fp32"}
    return Launch(swiglu_kernel, types, constants, options(schedule, numerics))


def quantise_launch(shape: QuantiseShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """The artefact of one length of rows and number of maxima; without maxima one program takes a whole row."""
    block = SEGMENT if shape.parts else triton.next_power_of_2(shape.N)
    constants: dict[str, Any] = {"N": shape.N, "BLOCK": block, "PARTS": shape.parts,
                                 "POWER": triton.next_power_of_2(max(shape.parts, 1)),
                                 "PDL": schedule.pdl} | ({} if shape.parts else {"amax_ptr": None})
    types = {"x_ptr": "*bf16", "amax_ptr": "*fp32", "hi_ptr": "*fp8e4nv", "lo_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    return Launch(quantise_kernel, types, constants, options(schedule, numerics))


def swiglu_contract(shape: RowShape, schedule: FixedSchedule) -> str | None:
    """Why a shape and a schedule can't go together, or None."""
    return common_contract(schedule)


def quantise_contract(shape: QuantiseShape, schedule: FixedSchedule) -> str | None:
    """Why a shape and a schedule can't go together, or None."""
    return common_contract(schedule) if shape.parts else row_contract(shape.N, schedule)


SWIGLU = Operation(swiglu_kernel, FixedSchedule, swiglu_contract, swiglu_launch, no_instructions)
QUANTISE = Operation(quantise_kernel, FixedSchedule, quantise_contract, quantise_launch, no_instructions)


def swiglu(gate_up: "torch.Tensor", act: "torch.Tensor", amax: "torch.Tensor", *, rows: int, schedule: FixedSchedule,
           numerics: Numerics) -> None:
    """gate_up [>= rows, 2 N], act [>= rows, N], contiguous bf16; amax [>= rows, segments(N)] fp32."""
    N = act.shape[1]
    require_aligned(gate_up=gate_up, act=act, amax=amax)
    swiglu_launch(RowShape(N), schedule, numerics)((rows, segments(N)), gate_up_ptr=gate_up, act_ptr=act, amax_ptr=amax)


def quantise(x: "torch.Tensor", out: "torch.Tensor", scale: "torch.Tensor", *, rows: int, schedule: FixedSchedule,
             numerics: Numerics, amax: "torch.Tensor | None" = None) -> None:
    """x [>= rows, N] bf16 to out [2, >= rows, N] e4m3 and scale [>= rows] fp32; amax [>= rows, parts],
    as `swiglu` or `merge` wrote it, or None."""
    N = x.shape[1]
    hi, lo = terms(out)
    require_aligned(x=x, hi=hi, lo=lo, scale=scale, amax=amax)
    launch = quantise_launch(QuantiseShape(N, 0 if amax is None else amax.shape[1]), schedule, numerics)
    launch((rows, 1 if amax is None else segments(N)), x_ptr=x, hi_ptr=hi, lo_ptr=lo, scale_ptr=scale,
           **({} if amax is None else {"amax_ptr": amax}))


def swiglu_reference(gate_up: "torch.Tensor") -> "torch.Tensor":
    """silu(gate) * up in fp64: [rows, N], of gate_up [rows, 2 N] in turns of 8."""
    gate, up = gate_up.double().unflatten(-1, (-1, 2, 8)).unbind(-2)
    gate, up = gate.flatten(-2), up.flatten(-2)
    return gate / (1 + (-gate).exp()) * up
