"""The linear: against fp64, on strides that are all different and sizes with tails; rows alone and among others; one term or
two, with and without SwiGLU, weights preloaded or not."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import oracles
import pytest
from helpers import assert_close, assert_same_bytes, strided
from tune_kernels.kernels.activation import segments, swiglu
from tune_kernels.kernels.layout import Activation, Weights
from tune_kernels.kernels.linear import interleave, linear, linear_contract, linear_grid, linear_reference
from tune_kernels.kernels.norm import quantise_reference
from tune_kernels.kernels.operation import ContractError
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import FixedSchedule, LinearSchedule
from tune_kernels.shapes.model import LinearShape

if TYPE_CHECKING:
    import torch

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
    terms: int = 1
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
    Case("two terms", terms=2),
    Case("two terms, both tails, bias", N=80, K=144, bias=True, terms=2),
    Case("two terms, split-K", K=320, terms=2, schedule=replace(BASE, split_k=3)),
    Case("two terms, 8-row tile", terms=2, schedule=replace(BASE, row_tile=8)),
    Case("two terms, activations as M", N=80, K=144, terms=2, schedule=replace(BASE, orientation="activations_as_m")),
    Case("two terms, tma, persistent", N=144, terms=2, schedule=replace(BASE, load="tma", blocks_per_sm=1)),
    Case("preload", K=256, terms=2, schedule=replace(BASE, preload=True)),
    Case("preload, tails, split-K, bias", N=80, K=240, bias=True, terms=2, schedule=replace(BASE, preload=True, split_k=2)),
    Case("preload, activations as M", K=128, schedule=replace(BASE, preload=True, orientation="activations_as_m")),
    Case("preload, bf16", K=128, fp8=False, schedule=replace(BASE, preload=True)),
    Case("bf16", N=80, K=144, fp8=False),
    Case("bf16 split-K, bias", fp8=False, bias=True, schedule=replace(BASE, split_k=2)),
]


def operands(case: Case, rows: int, device: str, seed: int = 0) -> tuple[Activation, Weights]:
    """Random operands, NaN-poisoned between rows, scales of a wide exponent range."""
    import torch

    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, case.K, generator=gen)
    w = torch.randn(case.N, case.K, generator=gen)
    kind = torch.float8_e4m3fn if case.fp8 else torch.bfloat16
    values = quantise_reference(x.to(device).bfloat16()).values if case.terms == 2 else x[None].to(device).to(kind)
    scale = w_scale = bias = None
    if case.fp8:
        scale = torch.exp2(torch.randint(-8, 4, (rows,), generator=gen).float()).to(device) * 1.1
        w_scale = torch.exp2(torch.randint(-8, 4, (case.N,), generator=gen).float()).to(device) * 1.3
    if case.bias:
        bias = torch.randn(case.N, generator=gen).to(device).bfloat16()
    return Activation(strided(values, 16), scale), Weights(strided(w.to(device).to(kind), 48), w_scale, bias)


def some_rows(x: Activation, rows: slice) -> Activation:
    """Some of the rows; scales start on 16 bytes."""
    return Activation(x.values[:, rows], None if x.scale is None else x.scale[rows].clone())


def run(case: Case, x: Activation, w: Weights) -> Any:
    """y, with split-K partials summed in index order."""
    y = linear(x, w, schedule=case.schedule, numerics=NUMERICS)
    if case.schedule.split_k == 1:
        return y
    total = y[0]
    for partial in y[1:]:
        total = total + partial
    return total


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_linear_equals_fp64(case: Case, device: str) -> None:
    x, w = operands(case, 5, device)
    assert_close(run(case, x, w), linear_reference(x, w), rms=4e-3, worst=6e-2, what=case.name)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_rows_alone_and_among_others(case: Case, device: str) -> None:
    """Row r of 1 to 9 rows is, bit for bit, the row alone."""
    most = min(9, case.schedule.row_tile)
    x, w = operands(case, most, device)
    whole = run(case, x, w)
    for rows in range(1, most):
        assert_same_bytes(run(case, some_rows(x, slice(rows)), w), whole[:rows], f"{case.name}, {rows} rows")
    last = some_rows(x, slice(most - 1, most))
    assert_same_bytes(run(case, last, w), whole[most - 1:], f"{case.name}, last row alone")


def test_partials_go_where_they_are_told_and_nowhere_else(device: str) -> None:
    """Poisoned output: every element inside is written, none outside (an output that is left over passes no test)."""
    import torch

    case = Case("split", N=80, K=336, schedule=replace(BASE, split_k=4))
    x, w = operands(case, 3, device)
    buffer = torch.full((4, 3, 112), float("nan"), device=device)
    linear(x, w, schedule=case.schedule, numerics=NUMERICS, out=buffer[:, :, :80])
    assert not buffer[:, :, :80].isnan().any()
    assert buffer[:, :, 80:].isnan().all()


def test_same_run_twice(device: str) -> None:
    case = CASES[0]
    x, w = operands(case, 5, device)
    assert_same_bytes(run(case, x, w), run(case, x, w))


def test_grid_and_loads_leave_the_bits_alone(device: str) -> None:
    """Persistent or not, pointer or TMA: who computes a tile, and how weights arrive, changes nothing."""
    case = Case("grid", N=144, K=144)
    x, w = operands(case, 5, device)
    plain = run(case, x, w)
    for change in ({"blocks_per_sm": 1}, {"blocks_per_sm": 2}, {"load": "tma"}):
        assert_same_bytes(run(replace(case, schedule=replace(BASE, **change)), x, w), plain, str(change))


@pytest.mark.parametrize("change", [{}, {"N": 80}, {"K": 240}, {"bias": True}, {"terms": 1}, {"fp8": False, "terms": 1}], ids=str)
@pytest.mark.parametrize("split_k", [1, 2])
def test_preloaded_weights_leave_the_bits_alone(split_k: int, change: dict[str, Any], device: str) -> None:
    """The same chain of products, whether a split's weights came at once or step by step."""
    case = Case("preload", **{"K": 128 * split_k, "terms": 2, **change}, schedule=replace(BASE, BLOCK_K=128, split_k=split_k))
    x, w = operands(case, 5, device)
    preloaded = replace(case, schedule=replace(case.schedule, preload=True))
    assert_same_bytes(run(preloaded, x, w), run(case, x, w))


@pytest.mark.parametrize("rows", [16, 32, 112])
def test_interleave_puts_gates_and_ups_in_turns_of_8(rows: int) -> None:
    """Row by row: the rule that the kernels read by."""
    import torch

    w = torch.arange(rows * 3).reshape(rows, 3)
    found = interleave(w)
    for i in range(rows // 2):
        assert torch.equal(found[i // 8 * 16 + i % 8], w[i]), f"gate {i}"
        assert torch.equal(found[i // 8 * 16 + 8 + i % 8], w[rows // 2 + i]), f"up {i}"


GATED = [
    Case("two terms", N=64, terms=2),
    Case("N tail", N=80, terms=2),
    Case("both tails", N=112, K=144, terms=2),
    Case("bias", N=96, bias=True, terms=2),
    Case("one term", N=96),
    Case("bf16", N=80, K=144, fp8=False),
    Case("8-row tile", N=80, terms=2, schedule=replace(BASE, row_tile=8)),
    Case("narrow blocks", N=80, terms=2, schedule=replace(BASE, BLOCK_N=16)),
    Case("persistent", N=144, terms=2, schedule=replace(BASE, blocks_per_sm=1)),
    Case("tma", N=80, terms=2, schedule=replace(BASE, load="tma")),
    Case("preload", N=80, K=128, terms=2, schedule=replace(BASE, preload=True)),
]


def run_gated(case: Case, x: Activation, w: Weights, device: str) -> "tuple[torch.Tensor, torch.Tensor]":
    """act, with poison past its columns that must stay, and the largest magnitude of each tile of it."""
    import torch

    rows, room = x.values.shape[1], 16
    act = torch.full((rows, case.N // 2 + 16 + case.N // 2 % 16), float("nan"), dtype=torch.bfloat16, device=device)
    tiles = -(-case.N // case.schedule.BLOCK_N)
    amax = torch.full((room, tiles), float("nan"), device=device) if case.fp8 else None
    linear(x, w, schedule=case.schedule, numerics=NUMERICS, out=act[:, :case.N // 2], swiglu=True, amax=amax)
    assert act[:, case.N // 2:].isnan().all()
    assert amax is None or amax[rows:].isnan().all()
    return act[:, :case.N // 2], None if amax is None else amax[:rows]


@pytest.mark.parametrize("case", GATED, ids=lambda c: c.name)
def test_swiglu_as_epilogue(case: Case, device: str) -> None:
    """Against the oracle of both, a loop in fp64; the bytes of the linear and then the SwiGLU kernel; maxima are those of act;
    rows alone and among others."""
    import torch

    most = min(9, case.schedule.row_tile)
    x, w = operands(case, most, device)
    if x.scale is not None and w.scale is not None:  # gates then lie where silu bends
        x, w = replace(x, scale=torch.full_like(x.scale, 0.375)), replace(w, scale=torch.full_like(w.scale, 0.375))
    act, amax = run_gated(case, x, w, device)
    y = run(case, x, w)
    parts = (None if t is None else t.float().double().cpu().numpy() for t in (x.values, w.w, x.scale, w.scale, w.bias))
    assert_close(act, torch.from_numpy(oracles.swiglu(oracles.linear(*parts))), rms=6e-3, worst=1e-1, what=case.name)
    alone = torch.full((most, case.N // 2), float("nan"), dtype=torch.bfloat16, device=device)
    maxima = y.new_empty(most, segments(case.N // 2), dtype=torch.float32)
    swiglu(y, alone, maxima, rows=most, schedule=FixedSchedule(num_warps=8), numerics=NUMERICS)
    assert_same_bytes(act, alone, "the kernel of its own")
    if amax is not None:
        half = case.schedule.BLOCK_N // 2
        for tile in range(amax.shape[1]):
            assert_same_bytes(amax[:, tile], act[:, tile * half:(tile + 1) * half].float().abs().amax(-1), f"tile {tile}")
    for some in (*(slice(rows) for rows in range(1, most)), slice(most - 1, most)):
        part, top = run_gated(case, some_rows(x, some), w, device)
        assert_same_bytes(part, act[some], f"{case.name}, {some}")
        if top is not None and amax is not None:
            assert_same_bytes(top, amax[some], f"{case.name}, maxima of {some}")


@pytest.mark.parametrize(("shape", "schedule", "message"), [
    (LinearShape(64, 192), replace(BASE, preload=True), "3 steps in 1 splits"),
    (LinearShape(64, 256), replace(BASE, preload=True, split_k=3), "4 steps in 3 splits"),
    (LinearShape(512, 512), replace(BASE, preload=True, BLOCK_N=512), "65,536 values"),
    (LinearShape(64, 128), replace(BASE, preload=True, load="tma"), "load pointer"),
    (LinearShape(64, 128), replace(BASE, preload=True, blocks_per_sm=1), "blocks_per_sm 0"),
    (LinearShape(64, 128, swiglu=True), replace(BASE, split_k=2), "split_k 1 and weights_as_m"),
    (LinearShape(64, 128, swiglu=True), replace(BASE, orientation="activations_as_m"), "split_k 1 and weights_as_m"),
    (LinearShape(72, 128, swiglu=True), BASE, "N 72 isn't a multiple of 16"),
])
def test_the_contract_refuses(shape: LinearShape, schedule: LinearSchedule, message: str) -> None:
    found = linear_contract(shape, schedule)
    assert found is not None and message in found


@pytest.mark.parametrize(("split_k", "size", "dtype"), [
    (2, (2, 5, 64), "bfloat16"), (2, (5, 64), "float32"), (1, (5, 64), "float32"), (1, (6, 64), "bfloat16")])
def test_an_output_of_another_kind_is_refused(split_k: int, size: tuple[int, ...], dtype: str, device: str) -> None:
    """Partials would land in it where it has no room for them."""
    import torch

    x, w = operands(CASES[0], 5, device)
    with pytest.raises(ContractError, match="out is"):
        linear(x, w, schedule=replace(BASE, split_k=split_k), numerics=NUMERICS,
               out=torch.empty(size, dtype=getattr(torch, dtype), device=device))


@pytest.mark.parametrize(("change", "message"), [
    ("amax without swiglu", "amax is given"), ("swiglu without amax", "amax is missing"), ("terms of bf16", "x is"),
    ("three terms", "3 terms"), ("second term on the first", "x is")])
def test_terms_and_maxima_that_do_not_fit_are_refused(change: str, message: str, device: str) -> None:
    import torch

    x, w = operands(Case("refused", terms=2), 5, device)
    more: dict[str, Any] = {}
    if change == "amax without swiglu":
        more["amax"] = torch.empty(16, 2, device=device)
    elif change == "swiglu without amax":
        more["swiglu"] = True
    elif change == "terms of bf16":
        x = replace(x, values=x.values.float().bfloat16())
    elif change == "three terms":
        x = replace(x, values=torch.cat([x.values.view(torch.uint8)] * 2)[:3].view(torch.float8_e4m3fn))
    else:
        x = replace(x, values=x.values[:1].expand(2, -1, -1))
    with pytest.raises(ContractError, match=message):
        linear(x, w, schedule=BASE, numerics=NUMERICS, **more)


@pytest.mark.parametrize(("change", "message"), [
    ({"x_scale": None}, "x_scale is missing"),
    ({"rows": 17}, "17 rows"),
    ({"split_k": 4}, "split_k 4 is more than the 3 steps"),
    ({"stride": 8}, "stride_xm"),
])
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str, device: str) -> None:
    """Rejected, never truncated."""
    case = Case("refused", schedule=replace(BASE, split_k=change.get("split_k", 1)))
    x, w = operands(case, change.get("rows", 5), device)
    if "x_scale" in change:
        x = replace(x, scale=None)
    if "stride" in change:
        x = replace(x, values=strided(x.values.contiguous(), change["stride"]))
    with pytest.raises(ContractError, match=message):
        run(case, x, w)


def test_a_pointer_inside_a_tensor_is_refused(device: str) -> None:
    """Triton would make an artefact of its own for it, without a word."""
    x, w = operands(CASES[0], 5, device)
    assert x.scale is not None
    with pytest.raises(ContractError, match=r"x_scale is .* 4 bytes past"):
        run(CASES[0], Activation(x.values[:, 1:], x.scale[1:]), w)


def test_grid_has_no_empty_block() -> None:
    shape = LinearShape(N=80, K=320)
    assert linear_grid(shape, BASE, 132) == (3,)
    assert linear_grid(shape, replace(BASE, split_k=3), 132) == (9,)
    assert linear_grid(shape, replace(BASE, split_k=3, blocks_per_sm=1), 4) == (4,)
