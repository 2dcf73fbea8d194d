"""Prefill: linear and attention against fp64, around tile edges; the same bytes however a prompt is cut."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from helpers import assert_close, assert_same_bytes, strided
from tune_kernels.kernels.attention import attention_reference
from tune_kernels.kernels.layout import Activation, Weights
from tune_kernels.kernels.linear import linear_reference
from tune_kernels.kernels.norm import quantise_reference
from tune_kernels.kernels.operation import ContractError
from tune_kernels.kernels.prefill import (
    ATTENTION_SCHEDULE,
    GROUP_M,
    NARROW,
    WIDE,
    prefill_attention,
    prefill_linear,
    prefill_schedule,
)
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import PrefillSchedule

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.interpreter
NUMERICS = load_recipe("fp8-v1").numerics
BLOCK_M, BLOCK_N = WIDE.BLOCK_M, WIDE.BLOCK_N
QUERIES, KEYS = ATTENTION_SCHEDULE.BLOCK_M, ATTENTION_SCHEDULE.BLOCK_N


@dataclass(frozen=True)
class Case:
    """N and K with and without tails."""

    name: str
    N: int = BLOCK_N
    K: int = 128
    fp8: bool = True
    bias: bool = False


CASES = [
    Case("plain"),
    Case("both tails, bias", N=80, K=144, bias=True),
    Case("two column tiles, K under one step", N=BLOCK_N + 16, K=48),
    Case("bf16", K=64, fp8=False),
    Case("bf16, both tails, bias", N=BLOCK_N + 80, K=144, fp8=False, bias=True),
]


def operands(case: Case, rows: int, device: str) -> dict[str, Any]:
    """Rows of unlike magnitude; NaN in one more row and between the rows of x and w."""
    import torch

    gen = torch.Generator().manual_seed(case.N + case.K)
    x = torch.randn(rows + 1, case.K, generator=gen) * torch.exp2(torch.randint(-6, 6, (rows + 1, 1), generator=gen))
    x[rows] = float("nan")
    x = x.to(device).bfloat16()
    w = torch.randn(case.N, case.K, generator=gen).to(device)
    found: dict[str, torch.Tensor] = {"w": strided(w.to(torch.float8_e4m3fn if case.fp8 else torch.bfloat16), 48)}
    if case.fp8:
        quantised = quantise_reference(x)
        found["x"], found["x_scale"] = strided(quantised.values, 16), quantised.scale
        found["w_scale"] = torch.exp2(torch.randint(-8, 4, (case.N,), generator=gen).float()).to(device) * 1.3
    else:
        found["x"] = strided(x[None], 16)
    if case.bias:
        found["bias"] = torch.randn(case.N, generator=gen).to(device).bfloat16()
    return found


def weights_of(tensors: "dict[str, torch.Tensor]") -> Weights:
    return Weights(tensors["w"], tensors.get("w_scale"), tensors.get("bias"))


def run_linear(tensors: "dict[str, torch.Tensor]", rows: int, first: int = 0,
               schedule: PrefillSchedule | None = None) -> "torch.Tensor":
    """Rows from `first` on, into a poisoned buffer with room for one more and strides of its own."""
    import torch

    x = tensors["x"]
    part = strided(x[:, first:].contiguous(), 16) if first else x
    scale = tensors["x_scale"][first:].clone() if "x_scale" in tensors else None
    out = torch.full((rows + 1, tensors["w"].shape[0] + 32), float("nan"), dtype=torch.bfloat16, device=x.device)
    prefill_linear(Activation(part, scale), weights_of(tensors), out[:, :-32], rows=rows, schedule=schedule, numerics=NUMERICS)
    assert out[rows].isnan().all() and out[:, -32:].isnan().all(), "written past the last row or column"
    return out[:rows, :-32]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("rows", [1, 5, BLOCK_M - 1, BLOCK_M, BLOCK_M + 1])
def test_linear_equals_fp64(case: Case, rows: int, device: str) -> None:
    """In wide tiles; narrow ones give the same bytes, so that a prompt of any length may change from one to the other."""
    tensors = operands(case, rows, device)
    expected = linear_reference(Activation(tensors["x"], tensors.get("x_scale")).first(rows), weights_of(tensors))
    found = run_linear(tensors, rows, schedule=WIDE)
    assert_close(found, expected, rms=4e-3, worst=2e-1, what=case.name)
    assert_same_bytes(run_linear(tensors, rows, schedule=NARROW), found, "narrow tiles")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_linear_gives_the_same_bytes_however_its_rows_are_cut(case: Case, device: str) -> None:
    """A one-row tail, and cuts beside the edge of a tile."""
    import torch

    rows = BLOCK_M + 9
    tensors = operands(case, rows, device)
    whole = run_linear(tensors, rows)
    for cut in (1, 8, BLOCK_M - 1, BLOCK_M, BLOCK_M + 1, rows - 1):
        parts = [run_linear(tensors, cut), run_linear(tensors, rows - cut, cut)]
        assert_same_bytes(torch.cat(parts), whole, f"cut at {cut}")


def test_tiles_are_narrow_where_wide_ones_would_leave_multiprocessors_idle() -> None:
    """Qwen2.5-7B on an H200: `down` of a prompt of 256 tokens, and of one token more; one wide tile an SM, and one tile more."""
    assert prefill_schedule(256, 3584, 132) == NARROW
    assert prefill_schedule(4 * BLOCK_M + 1, 3584, 132) == WIDE
    assert prefill_schedule(1, 132 * BLOCK_N, 132) == NARROW
    assert prefill_schedule(1, 132 * BLOCK_N + 1, 132) == WIDE
    assert WIDE.BLOCK_M == NARROW.BLOCK_M, "what a prompt is filled up to"


@pytest.mark.parametrize("schedule", [WIDE, NARROW], ids=["wide", "narrow"])
def test_row_tiles_past_one_group(schedule: PrefillSchedule, device: str) -> None:
    """The order of the grid, row tiles in groups, covers every tile once."""
    rows = GROUP_M * BLOCK_M + 3 * BLOCK_M // 2
    tensors = operands(Case("groups", N=2 * BLOCK_N + 16, K=16), rows, device)
    found = run_linear(tensors, rows, schedule=schedule)
    expected = linear_reference(Activation(tensors["x"], tensors["x_scale"]).first(rows), weights_of(tensors))
    assert_close(found, expected, rms=4e-3, worst=2e-1)


@dataclass(frozen=True)
class Heads:
    kv: int
    group: int
    dim: int


HEADS = [Heads(2, 2, 16), Heads(2, 3, 32)]


def cache(heads: Heads, slots: int, device: str, poison_from: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """k and v with no two strides equal, and NaN in every slot from `poison_from` on."""
    import torch

    gen = torch.Generator().manual_seed(heads.dim)
    k = torch.randn(heads.kv, slots, heads.dim + 16, generator=gen).to(device).bfloat16()[:, :, :heads.dim].transpose(0, 1)
    v = torch.randn(slots, heads.kv, heads.dim + 32, generator=gen).to(device).bfloat16()[:, :, :heads.dim]
    k[poison_from:] = float("nan")
    v[poison_from:] = float("nan")
    assert len({k.stride(0), k.stride(1), v.stride(0), v.stride(1)}) == 4
    return k, v


def queries(heads: Heads, rows: int, device: str) -> "torch.Tensor":
    """One row more than there are, of NaN."""
    import torch

    q = torch.randn(rows + 1, heads.kv * heads.group, heads.dim, generator=torch.Generator().manual_seed(rows))
    q[rows] = float("nan")
    return q.to(device).bfloat16()


def run_attention(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", length: int, rows: int) -> "torch.Tensor":
    import torch

    out = torch.full_like(q, float("nan"))
    prefill_attention(q, k, v, torch.tensor([length], dtype=torch.int32, device=q.device), out, rows=rows, numerics=NUMERICS)
    assert out[rows:].isnan().all(), "written past the last row"
    return out[:rows]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("length", "rows"), [
    (0, 1), (0, 17), (1, 5), (KEYS - 1, 1), (KEYS - 1, 2), (KEYS, 3), (0, KEYS + 1), (3, QUERIES - 1), (0, QUERIES + 2),
    (2 * KEYS, QUERIES)])
def test_attention_equals_fp64(heads: Heads, length: int, rows: int, device: str) -> None:
    k, v = cache(heads, length + rows + 30, device, poison_from=length + rows)
    q = queries(heads, rows, device)
    found = run_attention(q, k, v, length, rows)
    assert_close(found, attention_reference(q[:rows], k, v, length), rms=6e-3, worst=5e-2, what=f"length {length}, {rows} rows")


@pytest.mark.parametrize("length", [0, 5])
def test_attention_gives_the_same_bytes_however_its_rows_are_cut(length: int, device: str) -> None:
    """Keys that a later part of the prompt will write don't show."""
    import torch

    heads, rows = HEADS[0], QUERIES + 12
    k, v = cache(heads, length + rows + 10, device, poison_from=length + rows)
    q = queries(heads, rows, device)
    whole = run_attention(q, k, v, length, rows)
    for cut in (1, KEYS - length, KEYS + 1, QUERIES - 1, QUERIES, rows - 1):
        early = cache(heads, length + rows + 10, device, poison_from=length + cut)
        parts = [run_attention(q[:cut + 1].contiguous(), *early, length, cut),
                 run_attention(q[cut:].contiguous(), k, v, length + cut, rows - cut)]
        assert_same_bytes(torch.cat(parts), whole, f"cut at {cut}")


def test_what_does_not_fit_is_refused(device: str) -> None:
    import torch

    tensors = operands(CASES[0], 5, device)
    with pytest.raises(ContractError, match="out"):
        prefill_linear(Activation(tensors["x"], tensors["x_scale"]), weights_of(tensors),
                       torch.empty(5, 16, dtype=torch.bfloat16, device=device), rows=5, numerics=NUMERICS)
    with pytest.raises(ContractError, match="stride_xm"):
        run_linear({**tensors, "x": strided(tensors["x"].contiguous(), 8)}, 5)
    heads = HEADS[1]
    k, v = cache(heads, 40, device, poison_from=40)
    with pytest.raises(ContractError, match="heads"):
        run_attention(queries(Heads(3, 1, heads.dim), 5, device), k, v, 3, 5)
    with pytest.raises(ContractError, match="stride_v"):
        run_attention(queries(heads, 5, device), k, strided(v.contiguous(), 8), 3, 5)
