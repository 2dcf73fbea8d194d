"""The linear: against fp64, on strides that are all different and sizes with tails; rows alone and among others."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from helpers import assert_close, assert_same_bytes, strided
from tune_kernels.kernels.linear import linear, linear_grid, linear_reference
from tune_kernels.kernels.operation import ContractError
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import LinearSchedule
from tune_kernels.shapes.model import LinearShape

pytestmark = pytest.mark.interpreter
NUMERICS = load_recipe("fp8-v1").numerics
BASE = LinearSchedule(BLOCK_N=32, BLOCK_K=64, num_stages=2, num_warps=4)


@dataclass(frozen=True)
class Case:
    """N and K with and without tails; knobs that change the code path."""

    name: str
    N: int = 64
    K: int = 192
    fp8: bool = True
    bias: bool = False
    schedule: LinearSchedule = BASE


CASES = [
    Case("plain"),
    Case("one step", K=64),
    Case("K tail, as in a hidden size of 576", K=144),
    Case("N tail", N=80),
    Case("both tails", N=48, K=80),
    Case("split-K", schedule=replace(BASE, split_k=3)),
    Case("split-K that doesn't divide the steps", K=320, schedule=replace(BASE, split_k=3)),
    Case("split-K with both tails and bias", N=80, K=336, bias=True, schedule=replace(BASE, split_k=4)),
    Case("bias", bias=True),
    Case("persistent", N=144, schedule=replace(BASE, blocks_per_sm=1)),
    Case("persistent split-K", N=144, bias=True, schedule=replace(BASE, blocks_per_sm=1, split_k=2)),
    Case("8-row tile", schedule=replace(BASE, row_tile=8)),
    Case("activations as M", N=80, K=144, schedule=replace(BASE, orientation="activations_as_m")),
    Case("tma", K=144, schedule=replace(BASE, load="tma")),
    Case("tma, activations as M", N=80, schedule=replace(BASE, load="tma", orientation="activations_as_m")),
    Case("bf16", N=80, K=144, fp8=False),
    Case("bf16 split-K, bias", fp8=False, bias=True, schedule=replace(BASE, split_k=2)),
]


def operands(case: Case, rows: int, device: str, seed: int = 0) -> dict[str, Any]:
    """Random operands, NaN-poisoned between rows, scales of a wide exponent range."""
    import torch

    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, case.K, generator=gen)
    w = torch.randn(case.N, case.K, generator=gen)
    kind = torch.float8_e4m3fn if case.fp8 else torch.bfloat16
    found: dict[str, Any] = {"x": strided(x.to(device).to(kind), 16), "w": strided(w.to(device).to(kind), 48)}
    if case.fp8:
        found["x_scale"] = torch.exp2(torch.randint(-8, 4, (rows,), generator=gen).float()).to(device) * 1.1
        found["w_scale"] = torch.exp2(torch.randint(-8, 4, (case.N,), generator=gen).float()).to(device) * 1.3
    if case.bias:
        found["bias"] = torch.randn(case.N, generator=gen).to(device).bfloat16()
    return found


def run(case: Case, tensors: dict[str, Any]) -> Any:
    """y, with split-K partials summed in index order."""
    y = linear(**tensors, schedule=case.schedule, numerics=NUMERICS)
    if case.schedule.split_k == 1:
        return y
    total = y[0]
    for partial in y[1:]:
        total = total + partial
    return total


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_linear_equals_fp64(case: Case, device: str) -> None:
    tensors = operands(case, 5, device)
    found = run(case, tensors)
    expected = linear_reference(**tensors)
    assert_close(found, expected, rms=4e-3, worst=6e-2, what=case.name)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_rows_alone_and_among_others(case: Case, device: str) -> None:
    """Row r of 1 to 9 rows is, bit for bit, the row alone."""
    most = min(9, case.schedule.row_tile)
    tensors = operands(case, most, device)
    whole = run(case, tensors)
    for rows in range(1, most):
        part = {**tensors, "x": tensors["x"][:rows]}
        if "x_scale" in tensors:
            part["x_scale"] = tensors["x_scale"][:rows].clone()
        assert_same_bytes(run(case, part), whole[:rows], f"{case.name}, {rows} rows")
    last = {**tensors, "x": tensors["x"][most - 1:]}
    if "x_scale" in tensors:
        last["x_scale"] = tensors["x_scale"][most - 1:].clone()
    assert_same_bytes(run(case, last), whole[most - 1:], f"{case.name}, last row alone")


def test_partials_go_where_they_are_told_and_nowhere_else(device: str) -> None:
    """Poisoned output: every element inside is written, none outside (an output that is left over passes no test)."""
    import torch

    case = Case("split", N=80, K=336, schedule=replace(BASE, split_k=4))
    tensors = operands(case, 3, device)
    buffer = torch.full((4, 3, 112), float("nan"), device=device)
    linear(**tensors, schedule=case.schedule, numerics=NUMERICS, out=buffer[:, :, :80])
    assert not buffer[:, :, :80].isnan().any()
    assert buffer[:, :, 80:].isnan().all()


def test_same_run_twice(device: str) -> None:
    case = CASES[0]
    tensors = operands(case, 5, device)
    assert_same_bytes(run(case, tensors), run(case, tensors))


def test_grid_and_loads_leave_the_bits_alone(device: str) -> None:
    """Persistent or not, pointer or TMA: who computes a tile, and how weights arrive, changes nothing."""
    case = Case("grid", N=144, K=144)
    tensors = operands(case, 5, device)
    plain = run(case, tensors)
    for change in ({"blocks_per_sm": 1}, {"blocks_per_sm": 2}, {"load": "tma"}):
        assert_same_bytes(run(replace(case, schedule=replace(BASE, **change)), tensors), plain, str(change))


@pytest.mark.parametrize(("change", "message"), [
    ({"x_scale": None}, "scales"),
    ({"rows": 17}, "17 rows"),
    ({"split_k": 4}, "split_k 4 is more than the 3 steps"),
    ({"stride": 8}, "stride_xm"),
])
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str, device: str) -> None:
    """Rejected, never truncated."""
    case = Case("refused", schedule=replace(BASE, split_k=change.get("split_k", 1)))
    tensors = operands(case, change.get("rows", 5), device)
    if "x_scale" in change:
        tensors["x_scale"] = None
    if "stride" in change:
        tensors["x"] = strided(tensors["x"].contiguous(), change["stride"])
    with pytest.raises(ContractError, match=message):
        run(case, tensors)


def test_a_pointer_inside_a_tensor_is_refused(device: str) -> None:
    """Triton would make an artefact of its own for it, without a word."""
    tensors = operands(CASES[0], 5, device)
    tensors["x"] = tensors["x"][1:]
    tensors["x_scale"] = tensors["x_scale"][1:]
    with pytest.raises(ContractError, match="x_scale starts at"):
        run(CASES[0], tensors)


def test_grid_has_no_empty_block() -> None:
    shape = LinearShape(N=80, K=320)
    assert linear_grid(shape, BASE, 132) == (3,)
    assert linear_grid(shape, replace(BASE, split_k=3), 132) == (9,)
    assert linear_grid(shape, replace(BASE, split_k=3, blocks_per_sm=1), 4) == (4,)
