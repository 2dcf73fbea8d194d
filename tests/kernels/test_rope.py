"""RoPE and append: against fp64 and, bit for bit, against the `torch` backend's rotation; the written places."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
from helpers import assert_close, assert_same_bytes, strided
from tune_kernels.kernels.operation import ContractError
from tune_kernels.kernels.rope import HeadNorms, rope_append, rope_reference
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import FixedSchedule
from tune_kernels.shapes.model import ModelShape

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.interpreter
NUMERICS = load_recipe("fp8-v1").numerics
SCHEDULE = FixedSchedule(num_warps=1)
ROOM, MOST = 22, 19  # rows of the buffers, and of a launch at the most: a prompt's, two programs of 8 and a part of one


@dataclass(frozen=True)
class Case:
    heads: int
    kv: int
    dim: int
    split_k: int
    qk_norm: bool = False


NORMED = [Case(6, 2, 16, 3, True), Case(4, 1, 64, 1, True)]
CASES = [Case(6, 2, 16, 1), Case(6, 2, 16, 3), Case(3, 3, 32, 2), Case(4, 1, 64, 1), *NORMED]


def tables(case: Case, device: str) -> "tuple[torch.Tensor, torch.Tensor]":
    """Cosines and sines as the decoder makes them."""
    import torch
    from tune_kernels.decoder.checkpoint.rope import rope_table

    shape = ModelShape("tables", "qwen2", 64, 64, 1, case.heads, case.kv, case.dim, 64, 1e4, 1e-6, True, False, 256, "tests")
    return rope_table(shape, shape.max_position, torch.device(device))


def partials(case: Case, device: str) -> "torch.Tensor":
    """[split_k, ROOM, N], NaN past MOST rows and between the rows."""
    import torch

    gen = torch.Generator().manual_seed(case.dim)
    values = torch.randn(case.split_k, ROOM, (case.heads + 2 * case.kv) * case.dim, generator=gen).to(device)
    values[:, MOST:] = float("nan")
    return strided(values.bfloat16() if case.split_k == 1 else values, 32)


def summed(case: Case, qkv: "torch.Tensor") -> "torch.Tensor":
    """[MOST, heads, dim] bf16: partials in index order."""
    total = qkv[0, :MOST].float()
    for partial in qkv[1:, :MOST]:
        total = total + partial
    return total.bfloat16().reshape(MOST, -1, case.dim)


def norms(case: Case, device: str) -> HeadNorms | None:
    """Weights of 0.5 to 1.5, other ones for k."""
    import torch

    gen = torch.Generator().manual_seed(7)
    weights = [(torch.rand(case.dim, generator=gen) + 0.5).bfloat16().to(device) for _ in range(2)]
    return HeadNorms(weights[0], weights[1], 1e-3) if case.qk_norm else None


def run(case: Case, qkv: "torch.Tensor", length: int, rows: int,
        device: str) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """q, k_cache and v_cache, poisoned before; no two strides of the caches are equal."""
    import torch

    slots = length + ROOM
    q = torch.full((ROOM, case.heads, case.dim), float("nan"), dtype=torch.bfloat16, device=device)
    k = torch.full((case.kv, slots, case.dim + 16), float("nan"), dtype=torch.bfloat16, device=device)
    v = torch.full((slots, case.kv, case.dim + 32), float("nan"), dtype=torch.bfloat16, device=device)
    k, v = k[:, :, :case.dim].transpose(0, 1), v[:, :, :case.dim]
    rope_append(qkv, tables(case, device), torch.tensor([length], dtype=torch.int32, device=device), rows=rows, q=q, cache=(k, v),
                schedule=SCHEDULE, numerics=NUMERICS, norms=norms(case, device))
    return q, k, v


@pytest.mark.parametrize("case", NORMED, ids=str)
def test_heads_are_normed_before_the_rotation(case: Case, device: str) -> None:
    """Against fp64, with the weights of q for q's heads and k's for k's, within three roundings of a pair's length; values
    are not normed."""
    import torch

    qkv, length, given = partials(case, device), 5, norms(case, device)
    assert given is not None
    q, k, v = run(case, qkv, length, MOST, device)
    y = summed(case, qkv).double()
    normed = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + given.eps)
    cos, sin = (table[length:length + MOST] for table in tables(case, device))
    for found, heads, weight in ((q[:MOST], normed[:, :case.heads], given.q),
                                 (k[length:length + MOST], normed[:, case.heads:case.heads + case.kv], given.k)):
        expected = heads * weight.double()
        reach = torch.hypot(*expected.chunk(2, -1)).repeat(1, 1, 2)
        error = (found.double() - rope_reference(expected, cos, sin)).abs() / reach
        assert error.max() <= 3.01 * 2**-8
    assert_same_bytes(v[length:length + MOST], y[:, case.heads + case.kv:].bfloat16(), "values are as they came")


@pytest.mark.parametrize("case", [case for case in CASES if not case.qk_norm], ids=str)
@pytest.mark.parametrize("length", [0, 1, 230])
def test_rotation_equals_fp64_and_the_torch_backend(case: Case, length: int, device: str) -> None:
    import torch
    from tune_kernels.decoder.checkpoint.rope import frequencies
    from tune_kernels.decoder.on_torch.ops import rotate

    qkv = partials(case, device)
    q, k, v = run(case, qkv, length, MOST, device)
    y = summed(case, qkv)
    cos, sin = (table[length:length + MOST] for table in tables(case, device))
    turned = y[:, :case.heads + case.kv]
    here = slice(length, length + MOST)
    found = torch.cat([q[:MOST], k[here]], 1)
    assert_same_bytes(found, rotate(turned.float(), cos, sin).bfloat16(), "rotation in fp32, rounded once")
    assert_close(found, rope_reference(turned, cos, sin), rms=3e-3, worst=2e-2)
    shape = ModelShape("angles", "qwen2", 64, 64, 1, case.heads, case.kv, case.dim, 64, 1e4, 1e-6, True, False, 256, "tests")
    angle = torch.arange(length, length + MOST).double()[:, None] * frequencies(shape)[0].double()
    assert_close(found, rope_reference(turned, angle.cos().to(device), angle.sin().to(device)), rms=3e-3, worst=2e-2)
    assert_same_bytes(v[here], y[:, case.heads + case.kv:], "values are as they came")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_else_is_written(case: Case, device: str) -> None:
    """Slots before and after the rows, and rows past them, keep their poison. No two strides are equal."""
    qkv = partials(case, device)
    for length, rows in ((0, 1), (5, 3), (5, MOST)):
        q, k, v = run(case, qkv, length, rows, device)
        assert not q[:rows].isnan().any() and q[rows:].isnan().all()
        for cache in (k, v):
            assert cache[:length].isnan().all() and cache[length + rows:].isnan().all()
            assert not cache[length:length + rows].isnan().any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_alone_and_among_others(case: Case, device: str) -> None:
    """Row r at position length + r is, bit for bit, that row alone at its position."""
    qkv = partials(case, device)
    q, k, v = run(case, qkv, 7, MOST, device)
    for rows in (1, 2, 5, 16, 17, MOST - 1):
        some_q, some_k, some_v = run(case, qkv, 7, rows, device)
        assert_same_bytes(some_q[:rows], q[:rows], f"{rows} rows")
        for some, whole in ((some_k, k), (some_v, v)):
            assert_same_bytes(some[7:7 + rows], whole[7:7 + rows], f"{rows} rows")
    for r in range(MOST):
        one_q, one_k, one_v = run(case, qkv.roll(-r, 1), 7 + r, 1, device)
        assert_same_bytes(one_q[0], q[r], f"row {r} alone")
        assert_same_bytes(one_k[7 + r], k[7 + r], f"row {r} alone")
        assert_same_bytes(one_v[7 + r], v[7 + r], f"row {r} alone")


def test_what_does_not_fit_is_refused(device: str) -> None:
    case = CASES[0]
    qkv = partials(case, device)
    with pytest.raises(ContractError, match="qkv is"):
        run(replace(case, heads=case.heads + case.kv), qkv, 0, 1, device)
    with pytest.raises(ContractError, match="stride_pm"):
        run(case, strided(qkv.contiguous(), 8), 0, 1, device)
