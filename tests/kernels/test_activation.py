"""SwiGLU against fp64; two-term quantisation exact over the bf16 values it promises, and the bytes of the `torch` backend."""

import math
from typing import TYPE_CHECKING

import pytest
from helpers import assert_close, assert_same_bytes
from tune_kernels.kernels.activation import SEGMENT, quantise, segments, swiglu, swiglu_reference
from tune_kernels.kernels.layout import LO_FACTOR, Activation
from tune_kernels.kernels.norm import quantise_reference
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import FixedSchedule

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.interpreter
NUMERICS = load_recipe("fp8-v1").numerics
SCHEDULE = FixedSchedule(num_warps=8)
ROOM, MOST = 12, 9  # rows of the buffers, and of a launch at the most
SIZES = [16, 48, SEGMENT, SEGMENT + 16, 2 * SEGMENT + 48]
EXACT_BITS = 13  # down to 2^-EXACT_BITS of a row's largest, a bf16 value is two terms exactly
ERROR_BITS = 21  # below that, the error is at most 2^-ERROR_BITS of the largest


def poisoned(*size: int, dtype: "torch.dtype", device: str) -> "torch.Tensor":
    import torch

    return torch.full(size, float("nan"), device=device).to(dtype)


def gates_and_ups(N: int, device: str) -> "torch.Tensor":
    """[ROOM, 2 N] in turns of 8, wide enough for silu to saturate at both ends; NaN past MOST rows."""
    import torch

    values = torch.randn(ROOM, 2 * N, generator=torch.Generator().manual_seed(N)) * 6
    values[0, :8] = torch.tensor([0.0, -0.0, 90.0, -90.0, 200.0, -200.0, 1e-30, -1e30])
    values[MOST:] = float("nan")
    return values.to(device).bfloat16()


def run_swiglu(gate_up: "torch.Tensor", rows: int) -> "tuple[torch.Tensor, torch.Tensor]":
    import torch

    N = gate_up.shape[1] // 2
    act = poisoned(ROOM, N, dtype=torch.bfloat16, device=gate_up.device)
    top = poisoned(ROOM, segments(N), dtype=torch.float32, device=gate_up.device)
    swiglu(gate_up, act, top, rows=rows, schedule=SCHEDULE, numerics=NUMERICS)
    return act, top


@pytest.mark.parametrize("N", SIZES)
def test_swiglu_equals_fp64_and_its_maxima_are_theirs(N: int, device: str) -> None:
    gate_up = gates_and_ups(N, device)
    act, amax = run_swiglu(gate_up, MOST)
    assert_close(act[:MOST], swiglu_reference(gate_up[:MOST]), rms=6e-3, worst=2e-1)
    assert act[MOST:].isnan().all() and amax[MOST:].isnan().all()
    for segment in range(segments(N)):
        part = act[:MOST, segment * SEGMENT:(segment + 1) * SEGMENT]
        assert_same_bytes(amax[:MOST, segment], part.float().abs().amax(-1), f"segment {segment}")


@pytest.mark.parametrize("N", [48, SEGMENT + 16])
def test_swiglu_of_rows_alone_and_among_others(N: int, device: str) -> None:
    gate_up = gates_and_ups(N, device)
    act, amax = run_swiglu(gate_up, MOST)
    for rows in range(1, MOST):
        some, top = run_swiglu(gate_up, rows)
        assert_same_bytes(some[:rows], act[:rows], f"{rows} rows")
        assert_same_bytes(top[:rows], amax[:rows], f"{rows} rows")
        assert some[rows:].isnan().all() and top[rows:].isnan().all()
    alone, top = run_swiglu(gate_up.roll(1 - MOST, 0), 1)
    assert_same_bytes(alone[0], act[MOST - 1], "last row alone")
    assert_same_bytes(top[0], amax[MOST - 1], "last row alone")


def run_quantise(x: "torch.Tensor", rows: int, amax: "torch.Tensor" = None) -> "tuple[torch.Tensor, torch.Tensor]":
    import torch

    out = poisoned(2, *x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = poisoned(x.shape[0], dtype=torch.float32, device=x.device)
    quantise(x, Activation(out, scale), rows=rows, amax=amax, schedule=SCHEDULE, numerics=NUMERICS)
    return out, scale


def value(terms: "torch.Tensor", scale: "torch.Tensor") -> "torch.Tensor":
    """The value of two terms, in fp64."""
    return (terms[0].double() + terms[1].double() / LO_FACTOR) * scale.double()[:, None]


def every_bf16(device: str) -> "torch.Tensor":
    """All 2^16 bit patterns but infinities and NaN, as fp64 beside bf16."""
    import torch

    values = torch.arange(-2**15, 2**15).to(torch.int16).view(torch.bfloat16).to(device)
    return values[values.float().isfinite()]


@pytest.mark.parametrize("exponent", [-100, -20, 0, 1, 6, 7, 8, 60, 126])
@pytest.mark.parametrize("mantissa", [0, 1, 127])
def test_every_bf16_value_near_the_largest_is_exact(exponent: int, mantissa: int, device: str) -> None:
    """(hi + lo / 16) * scale is x down to 2^-13 of the row's largest, and within 2^-21 of it below: all values there are."""
    import torch

    largest = math.ldexp(1 + mantissa / 128, exponent)
    values = every_bf16(device)
    values = values[values.double().abs() <= largest]
    values = values[values.double().abs() >= largest * 2.0**-(EXACT_BITS + 3)]
    x = torch.cat([values, values.new_zeros(-len(values) % 16)])[None]
    assert float(x.double().abs().max()) == largest
    out, scale = run_quantise(x.contiguous(), 1)
    error = (value(out, scale) - x.double()).abs()
    near = x.double().abs() >= largest * 2.0**-EXACT_BITS
    assert near.sum() >= 2 * 128 * EXACT_BITS
    assert (error[near] == 0).all(), f"{float(x[near][error[near].argmax()])} of {largest}"
    assert float(error.max()) <= largest * 2.0**-ERROR_BITS


def rows_to_quantise(N: int, device: str) -> "torch.Tensor":
    """Magnitudes from subnormal to the largest, a row of zeros and one of negative zeros among them; NaN past MOST rows."""
    import torch

    gen = torch.Generator().manual_seed(N)
    x = torch.randn(ROOM, N, generator=gen) * torch.exp2(torch.randint(-12, 4, (ROOM, N), generator=gen))
    x *= torch.tensor([1.0, 2.0**-126, 2.0**-119, 2.0**-118, 2.0**120, 0.0, -0.0, 3e-5, 1e4, 1.0, 1.0, 1.0])[:, None]
    x[MOST:] = float("nan")
    return x.to(device).bfloat16()


@pytest.mark.parametrize("N", SIZES)
def test_terms_are_those_of_the_torch_backend(N: int, device: str) -> None:
    """Byte for byte, whether one program takes a row or segments read maxima that came with it, however many; rows alone and
    among others."""
    import torch
    from tune_kernels.decoder.on_torch.linear import split

    x = rows_to_quantise(N, device)
    out, scale = run_quantise(x, MOST)
    hi, lo, theirs = split(x[:MOST])
    assert_same_bytes(out[:, :MOST], torch.stack([hi, lo]), "terms")
    assert_same_bytes(scale[:MOST], theirs[:, 0], "scale")
    reference = quantise_reference(x[:MOST])
    assert_same_bytes(out[:, :MOST], reference.values, "the reference's terms")
    assert_same_bytes(scale[:MOST], reference.scale, "the reference's scale")
    assert out[:, MOST:].float().isnan().all() and scale[MOST:].isnan().all()
    for parts in (1, segments(N), N // 16):
        amax = poisoned(ROOM, parts, dtype=torch.float32, device=device)
        amax[:MOST] = torch.stack([part.amax(-1) for part in x[:MOST].float().abs().tensor_split(parts, -1)], -1)
        for rows in (1, 5, MOST):
            some, its = run_quantise(x, rows, amax)
            assert_same_bytes(some[:, :rows], out[:, :rows], f"{parts} parts, {rows} rows")
            assert_same_bytes(its[:rows], scale[:rows], f"{parts} parts, {rows} rows")
            assert its[rows:].isnan().all()
    alone, its = run_quantise(x.roll(1 - MOST, 0), 1)
    assert_same_bytes(alone[:, 0], out[:, MOST - 1], "last row alone")


def test_a_nan_stays_one(device: str) -> None:
    """It must reach the logits, where it is seen."""
    import torch

    x = torch.ones(1, 64, dtype=torch.bfloat16, device=device)
    x[0, 5] = float("nan")
    assert value(*run_quantise(x, 1))[0, 5].isnan()
