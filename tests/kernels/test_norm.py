"""The norm: residual in exact bits, RMSNorm against fp64, two-term quantisation against the `torch` backend's; rows alone and
among others."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from helpers import assert_close, assert_same_bytes, strided
from tune_kernels.kernels.layout import LO_FACTOR, Activation
from tune_kernels.kernels.norm import DraftEntry, Residual, draft_norm, norm, norm_reference, quantise_reference
from tune_kernels.kernels.operation import ContractError
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import FixedSchedule

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.interpreter
NUMERICS = load_recipe("fp8-v1").numerics
SCHEDULE = FixedSchedule(num_warps=4)
EPS = 1e-6
ROOM, MOST, VOCABULARY = 12, 9, 11  # rows of the buffers, of a launch at the most, and of the embedding
TOKENS = [3, 0, 10, -1, 3, 7, 1, 10, 5]  # -1 stands for no token, and reads row 0


@dataclass(frozen=True)
class Case:
    """H with and without a tail; the kind of input, the start of x, the kind of output."""

    name: str
    H: int = 64
    split_k: int = 0
    embeds: bool = False
    quantised: bool = True
    feature: bool = False


CASES = [
    Case("norm alone"),
    Case("bf16 out", quantised=False),
    Case("tail", H=144),
    Case("embedding", embeds=True),
    Case("embedding, tail, bf16 out", H=48, embeds=True, quantised=False),
    Case("bf16 linear", split_k=1),
    Case("partials", split_k=3),
    Case("partials, tail, feature", H=80, split_k=4, feature=True),
    Case("bf16 linear, feature, bf16 out", split_k=1, quantised=False, feature=True),
]


def inputs(case: Case, device: str, seed: int = 0) -> "dict[str, torch.Tensor]":
    """MOST rows of a wide range of magnitudes, NaN in every row past them and between the rows of partials."""
    import torch

    gen = torch.Generator().manual_seed(seed)

    def rows(*size: int) -> Any:
        values = torch.randn(*size, case.H, generator=gen) * torch.exp2(torch.randint(-9, 9, (size[-1], 1), generator=gen))
        values[..., MOST:, :] = float("nan")
        return values.to(device)

    found: dict[str, torch.Tensor] = {"x": rows(ROOM).bfloat16(),
                                      "weight": torch.randn(case.H, generator=gen).to(device).bfloat16()}
    if case.embeds:
        found["tokens"] = torch.tensor(TOKENS, dtype=torch.int32, device=device)
        found["embedding"] = torch.randn(VOCABULARY, case.H, generator=gen).to(device).bfloat16()
    if case.split_k:
        part = rows(case.split_k, ROOM)
        found["part"] = strided(part.bfloat16() if case.split_k == 1 else part, 16)
    return found


def run(case: Case, tensors: dict[str, Any], rows: int) -> dict[str, Any]:
    """Every output, poisoned before the launch."""
    import torch

    x = tensors["x"].clone()
    if case.embeds:
        x.fill_(float("nan"))
    nan = torch.full((2 if case.quantised else 1, ROOM, case.H), float("nan"), device=x.device)
    found = {"x": x, "out": nan.to(torch.float8_e4m3fn if case.quantised else torch.bfloat16)}
    if case.quantised:
        found["scale"] = torch.full((ROOM,), float("nan"), device=x.device)
    if case.feature:
        found["feature"] = torch.full((ROOM, 3 * case.H), float("nan"), device=x.device).bfloat16()[:, case.H:2 * case.H]
    given = {name: tensors[name] for name in ("tokens", "embedding", "part") if name in tensors}
    norm(Residual(x, **given), tensors["weight"], EPS, Activation(found["out"], found.get("scale")), rows=rows,
         feature=found.get("feature"), schedule=SCHEDULE, numerics=NUMERICS)
    return found


def residual(tensors: dict[str, Any]) -> Any:
    """The new x, in fp32 steps: [MOST, H] bf16."""
    x = tensors["x"][:MOST]
    if "tokens" in tensors:
        x = tensors["embedding"][tensors["tokens"].clamp(min=0).long()]
    if "part" not in tensors:
        return x
    y = tensors["part"][0, :MOST].float()
    for partial in tensors["part"][1:, :MOST]:
        y = y + partial
    return (x.float() + y.bfloat16().float()).bfloat16()


def value(terms: "torch.Tensor", scale: "torch.Tensor") -> "torch.Tensor":
    """The value of two terms, in fp64."""
    return (terms[0].double() + terms[1].double() / LO_FACTOR) * scale.double()[:, None]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_norm_equals_fp64_and_the_residual_its_bits(case: Case, device: str) -> None:
    tensors = inputs(case, device)
    found = run(case, tensors, MOST)
    expected = residual(tensors)
    assert_same_bytes(found["x"][:MOST], expected, "residual")
    if case.feature:
        assert_same_bytes(found["feature"][:MOST], expected, "feature")
    h = value(found["out"][:, :MOST], found["scale"][:MOST]) if case.quantised else found["out"][0, :MOST]
    for r in range(MOST):
        assert_close(h[r], norm_reference(expected, tensors["weight"], EPS)[r], rms=4e-3, worst=3e-2, what=f"row {r}")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_rows_past_the_last_one_are_left_alone(case: Case, device: str) -> None:
    """Their NaN neither spreads nor is overwritten."""
    for rows in (1, 5):
        tensors = inputs(case, device)
        found = run(case, tensors, rows)
        for name, tensor in found.items():
            by_row = (tensor.transpose(0, 1) if name == "out" else tensor).float()
            assert not by_row[:rows].isnan().any(), f"{name} of {rows} rows"
            if name == "x" and not case.embeds:
                assert_same_bytes(tensor[rows:], tensors["x"][rows:], f"residual past {rows} rows")
            else:
                assert by_row[rows:].isnan().all(), f"{name} past {rows} rows"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_rows_alone_and_among_others(case: Case, device: str) -> None:
    """Row r of 1 to 9 rows is, bit for bit, that row alone."""
    tensors = inputs(case, device)
    whole = run(case, tensors, MOST)
    for rows in range(1, MOST):
        part = run(case, tensors, rows)
        for name, tensor in part.items():
            taken, full = (t[:, :rows] if name == "out" else t[:rows] for t in (tensor, whole[name]))
            assert_same_bytes(taken, full, f"{name}, {rows} rows")
    alone = {name: tensor if name in ("weight", "embedding") else tensor.roll(1 - MOST, -2 if tensor.dim() > 1 else 0)
             for name, tensor in tensors.items()}
    last = run(case, alone, 1)
    for name, tensor in last.items():
        by_row, full = (t.transpose(0, 1) if name == "out" else t for t in (tensor, whole[name]))
        assert_same_bytes(by_row[:1], full[MOST - 1:MOST], f"{name}, last row alone")


@pytest.mark.parametrize("H", [48, 64, 144])
def test_two_terms_are_the_bf16_output(H: int, device: str) -> None:
    """Byte for byte the result of the `torch` backend's `split`. The scale comes from the unrounded maximum: a row may have
    the scale beside it where rounding crosses a power of two, and stands for the same values then."""
    import torch
    from tune_kernels.decoder.on_torch.linear import split

    quantised = Case("terms", H=H, split_k=2)
    tensors = inputs(quantised, device)
    found = run(quantised, tensors, MOST)
    h = run(replace(quantised, quantised=False), tensors, MOST)["out"][0, :MOST]
    hi, lo, scale = split(h)
    reference = quantise_reference(h)
    terms, theirs = reference.values, reference.scale
    assert_same_bytes(torch.stack([hi, lo]), terms, "the reference is `split`")
    assert_same_bytes(scale[:, 0], theirs, "its scale")
    ratio = found["scale"][:MOST] / scale[:, 0]
    assert all(r in (0.5, 1.0, 2.0) for r in ratio.tolist())
    same = ratio == 1.0
    assert same.sum() > MOST // 2
    assert_same_bytes(found["out"][:, :MOST][:, same], terms[:, same], "terms")
    large = h.abs() >= h.abs().amax(-1, keepdim=True) * 2.0**-12
    assert torch.equal(value(found["out"][:, :MOST], found["scale"][:MOST])[large], h.double()[large])


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("row", [0, 4, 8])
def test_the_row_to_read_may_come_from_the_device(row: int, quantised: bool, device: str) -> None:
    """Its residual and its norm go to row 0."""
    import torch

    case = Case("one row", split_k=3, quantised=quantised)
    tensors = inputs(case, device)
    whole = run(case, tensors, MOST)
    x = tensors["x"].clone()
    out = torch.full_like(whole["out"], float("nan"))
    scale = torch.full((ROOM,), float("nan"), device=device) if quantised else None
    read = torch.tensor([row], dtype=torch.int32, device=device)
    norm(Residual(x, tensors["part"], row=read), tensors["weight"], EPS, Activation(out, scale), rows=1, schedule=SCHEDULE,
         numerics=NUMERICS)
    assert_same_bytes(x[0], whole["x"][row])
    assert_same_bytes(x[1:], tensors["x"][1:], "the other rows")
    assert_same_bytes(out[:, 0], whole["out"][:, row])
    if scale is not None:
        assert_same_bytes(scale[:1], whole["scale"][row:row + 1])


def test_rows_of_zeros_and_of_extremes(device: str) -> None:
    """A row of zeros stays zeros; the largest and the smallest rows are neither infinite nor NaN."""
    import torch

    x = torch.zeros(3, 64, device=device)
    x[1], x[2] = 1e30, 1e-36
    weight = torch.ones(64, dtype=torch.bfloat16, device=device)
    out = torch.empty(2, 3, 64, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(3, device=device)
    norm(Residual(x.bfloat16()), weight, EPS, Activation(out, scale), rows=3, schedule=SCHEDULE, numerics=NUMERICS)
    assert not value(out, scale).isnan().any()
    assert (value(out, scale)[0] == 0).all()
    norm(Residual(x[:1].bfloat16().fill_(2.0)), weight, EPS, Activation(out, scale), rows=1, schedule=SCHEDULE, numerics=NUMERICS)
    assert (value(out, scale)[0] == 1).all()


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("normed_residual", [True, False])
@pytest.mark.parametrize("H", [64, 80])
def test_draft_norm(H: int, normed_residual: bool, quantised: bool, device: str) -> None:
    """Two norms side by side under one scale; each half is the norm's own; rows alone and among others; the residual may
    overwrite the feature."""
    import torch

    gen = torch.Generator().manual_seed(H)
    embedding = torch.randn(VOCABULARY, H, generator=gen).to(device).bfloat16()
    feature = (torch.randn(ROOM, H, generator=gen) * 3).to(device).bfloat16()
    feature[MOST:] = float("nan")
    weights = [torch.randn(H, generator=gen).to(device).bfloat16() for _ in range(2)]
    tokens = torch.tensor(TOKENS, dtype=torch.int32, device=device)
    embedded = embedding[tokens.clamp(min=0).long()]

    def launch(first: int, rows: int, in_place: bool = False) -> tuple[Any, Any, Any]:
        source = torch.cat([feature[first:], feature[:first]]).contiguous()
        x = source if in_place else torch.full_like(feature, float("nan"))
        out = torch.full((2 if quantised else 1, ROOM, 2 * H), float("nan"), device=device)
        out = out.to(torch.float8_e4m3fn if quantised else torch.bfloat16)
        scale = torch.full((ROOM,), float("nan"), device=device) if quantised else None
        draft_norm(DraftEntry(embedding, *weights, EPS, normed_residual), tokens[first:first + rows].clone(), source, x,
                   Activation(out, scale), rows=rows, schedule=SCHEDULE, numerics=NUMERICS)
        return x, out, scale

    x, out, scale = launch(0, MOST)
    h = value(out[:, :MOST], scale[:MOST]) if quantised else out[0, :MOST].double()
    halves = [norm_reference(embedded, weights[0], EPS), norm_reference(feature[:MOST], weights[1], EPS)]
    assert_close(h, torch.cat(halves, -1), rms=4e-3, worst=3e-2)
    assert_close(x[:MOST], halves[1] if normed_residual else feature[:MOST], rms=4e-3 if normed_residual else 0, worst=3e-2)
    assert x[MOST:].isnan().all() and out[:, MOST:].float().isnan().all()
    for first, rows in ((0, 1), (0, 4), (5, 1), (8, 1), (3, 6)):
        for in_place in (False, True):
            some_x, some, some_scale = launch(first, rows, in_place)
            assert_same_bytes(some_x[:rows], x[first:first + rows], "residual")
            assert_same_bytes(some[:, :rows], out[:, first:first + rows], "out")
            if quantised:
                assert_same_bytes(some_scale[:rows], scale[first:first + rows], "scale")


def test_what_does_not_fit_is_refused(device: str) -> None:
    import torch

    case = Case("refused", split_k=2)
    tensors = inputs(case, device)
    out = torch.empty(2, ROOM, case.H, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(ROOM, device=device)
    tokens = torch.zeros(ROOM, dtype=torch.int32, device=device)
    x = tensors["x"]
    for source, rows, message in ((Residual(x, tokens=tokens), 1, "embedding is missing"),
                                  (Residual(x, row=tokens[:1]), 2, "2 rows"),
                                  (Residual(x, tensors["part"][:, :, 2:]), 1, "part is")):
        with pytest.raises(ContractError, match=message):
            norm(source, tensors["weight"], EPS, Activation(out, scale), rows=rows, schedule=SCHEDULE, numerics=NUMERICS)
