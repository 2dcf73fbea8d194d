"""The head: argmax and logits are one computation; ties go to the lowest id; ids beyond a limit and rows of NaN never win."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from helpers import assert_close, assert_same_bytes, strided
from tune_kernels.kernels import lm_head as module
from tune_kernels.kernels.layout import Activation, Weights
from tune_kernels.kernels.lm_head import lm_head_reference, new_scratch
from tune_kernels.kernels.operation import ContractError
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import HeadSchedule

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.interpreter
NUMERICS = load_recipe("fp8-v1").numerics
BASE = HeadSchedule(BLOCK_N=32, BLOCK_K=32, num_stages=2, num_warps=4)


@dataclass(frozen=True)
class Case:
    """terms: e4m3 numbers a value, 0 for bf16."""

    N: int
    K: int
    schedule: HeadSchedule = BASE
    terms: int = 0


CASES = [Case(128, 64), Case(100, 64), Case(1000, 48), Case(96, 80), Case(128, 64, replace(BASE, row_tile=8)),
         Case(100, 64, terms=1), Case(96, 80, terms=2), Case(128, 64, replace(BASE, row_tile=8), terms=2)]


def operands(case: Case, rows: int, device: str) -> "tuple[torch.Tensor, torch.Tensor]":
    import torch

    gen = torch.Generator().manual_seed(case.N + case.K)
    x = torch.randn(rows, case.K, generator=gen).bfloat16().to(device)
    w = torch.randn(case.N, case.K, generator=gen).bfloat16().to(device)
    return strided(x, 16), strided(w, 32)


def given(case: Case, rows: int, device: str) -> tuple[Activation, Weights]:
    import torch

    x, w = operands(case, rows, device)
    if not case.terms:
        return Activation(x[None]), Weights(w)
    gen = torch.Generator().manual_seed(case.N)
    terms = torch.randn(case.terms, rows, case.K, generator=gen).to(device).to(torch.float8_e4m3fn)
    scale, w_scale = (torch.rand(n, generator=gen).to(device) + 0.5 for n in (rows, case.N))
    return Activation(terms, scale), Weights(w.to(torch.float8_e4m3fn), w_scale)


def some(x: Activation, part: slice) -> Activation:
    """Some of the rows; scales start on 16 bytes."""
    return Activation(x.values[:, part], x.scale[part].clone() if x.scale is not None else None)


def lm_head(x: "torch.Tensor", w: "torch.Tensor", **more: Any) -> "torch.Tensor":
    """The argmax; x and w also as plain tensors."""
    return module.lm_head(activation(x), weights(w), numerics=NUMERICS, **more)


def lm_head_logits(x: "torch.Tensor", w: "torch.Tensor", **more: Any) -> "torch.Tensor":
    return module.lm_head_logits(activation(x), weights(w), numerics=NUMERICS, **more)


def activation(x: "torch.Tensor") -> Activation:
    return x if isinstance(x, Activation) else Activation(x[None])


def weights(w: "torch.Tensor") -> Weights:
    return w if isinstance(w, Weights) else Weights(w)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_equal_fp64_and_argmax_is_theirs(case: Case, device: str) -> None:
    x, w = given(case, 5, device)
    logits = lm_head_logits(x, w, schedule=case.schedule)
    narrow = case.terms > 0  # Hopper's FP8 accumulator
    assert_close(logits, lm_head_reference(x, w), rms=1e-3 if narrow else 1e-5, worst=1e-2 if narrow else 1e-4)
    token = lm_head(x, w, schedule=case.schedule)
    assert_same_bytes(token.long(), logits.argmax(1))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_alone_and_among_others(case: Case, device: str) -> None:
    most = min(9, case.schedule.row_tile)
    x, w = given(case, most, device)
    whole = lm_head_logits(x, w, schedule=case.schedule)
    tokens = lm_head(x, w, schedule=case.schedule)
    for first, rows in [(0, 1), (0, 2), (0, most - 1), (most - 1, 1), (3, 4)]:
        part = some(x, slice(first, first + rows))
        assert_same_bytes(lm_head_logits(part, w, schedule=case.schedule), whole[first:first + rows])
        assert_same_bytes(lm_head(part, w, schedule=case.schedule), tokens[first:first + rows])


@pytest.mark.parametrize(("first", "second"), [(0, 1), (3, 31), (31, 32), (5, 70), (63, 64), (40, 99)])
def test_a_tie_goes_to_the_lowest_id(first: int, second: int, device: str) -> None:
    """An exact tie between two logits, inside a block, at its edge and across blocks."""
    import torch

    w = torch.zeros(100, 64, dtype=torch.bfloat16, device=device)
    w[first] = w[second] = 1.0
    x = torch.ones(3, 64, dtype=torch.bfloat16, device=device)
    token = lm_head(x, w, schedule=BASE)
    logits = lm_head_logits(x, w, schedule=BASE)
    assert token.tolist() == [first] * 3 == logits.argmax(1).tolist()


def test_minus_zero_ties_with_zero_and_nan_never_wins(device: str) -> None:
    import torch

    x = torch.zeros(1, 64, dtype=torch.bfloat16, device=device)
    x[0, 0] = 1.0
    w = torch.full((64, 64), -1.0, dtype=torch.bfloat16, device=device)
    w[7, 0], w[50, 0] = -0.0, 0.0
    w[:, 1:] = 0.0
    assert lm_head(x, w, schedule=BASE).tolist() == [7]
    w[3, 0] = float("nan")
    assert lm_head(x, w, schedule=BASE).tolist() == [7]


@pytest.mark.parametrize("limit", [1, 31, 32, 33, 64, 99, 100])
def test_ids_from_the_limit_on_never_win(limit: int, device: str) -> None:
    """Whatever their logits: inside a block, at its edge, and where whole blocks are beyond."""
    import torch

    x, w = operands(Case(100, 64), 5, device)
    w[limit:] = torch.where(torch.arange(64, device=device) % 2 == 0, 3e4, float("nan")).bfloat16()
    logits = lm_head_logits(x, w, schedule=BASE)
    found = lm_head(x, w, schedule=BASE, limit=limit)
    assert_same_bytes(found.long(), logits[:, :limit].argmax(1))


def test_rows_may_stand_for_other_ids(device: str) -> None:
    """As the head of a drafter with a vocabulary of its own: the winner's id comes out, a tie goes to the lowest row."""
    import torch

    x, w = operands(Case(100, 64), 5, device)
    ids = (torch.arange(100, device=device) * 7 + 3).to(torch.int32)
    plain = lm_head(x, w, schedule=BASE)
    assert_same_bytes(lm_head(x, w, schedule=BASE, ids=ids), ids[plain.long()])
    limited = lm_head(x, w, schedule=BASE, limit=40)
    assert_same_bytes(lm_head(x, w, schedule=BASE, limit=40, ids=ids), ids[limited.long()])
    w[33] = w[70] = w[plain[0].long()].clone()
    tied = lm_head(x, w, schedule=BASE, ids=ids)
    assert tied[0] == ids[min(33, int(plain[0]))]


@pytest.mark.parametrize("mapped", [False, True])
def test_a_row_of_nan_gives_minus_one(mapped: bool, device: str) -> None:
    """And its neighbours are as without it."""
    import torch

    x, w = operands(Case(100, 64), 5, device)
    ids = torch.arange(100, device=device, dtype=torch.int32) if mapped else None
    expected = lm_head(x, w, schedule=BASE, ids=ids).clone()
    x[2] = float("nan")
    expected[2] = -1
    assert_same_bytes(lm_head(x, w, schedule=BASE, ids=ids), expected)


def test_scratch_is_written_and_no_more_of_it_than_there_are_rows(device: str) -> None:
    """A fixed address for graphs; its old contents don't show."""
    x, w = operands(Case(100, 64), 5, device)
    expected = lm_head(x, w, schedule=BASE)
    scratch = new_scratch(100, BASE, x.device)
    scratch.best.fill_(float("inf"))
    scratch.ids.fill_(77)
    scratch.tokens.fill_(-77)
    for rows in (5, 1, 3):
        found = lm_head(x[:rows], w, schedule=BASE, scratch=scratch)
        assert found.data_ptr() == scratch.tokens.data_ptr()
        assert_same_bytes(found, expected[:rows], f"{rows} rows")
    assert (scratch.tokens[5:] == -77).all()


def test_more_blocks_than_one_reduction_tile(device: str) -> None:
    import torch

    w = torch.zeros(16 * 300, 16, dtype=torch.bfloat16, device=device)
    w[4500] = w[4790] = 2.0
    x = torch.ones(2, 16, dtype=torch.bfloat16, device=device)
    small = HeadSchedule(BLOCK_N=16, BLOCK_K=16, num_stages=2, num_warps=4)
    assert lm_head(x, w, schedule=small).tolist() == [4500, 4500]


def test_wrong_operands_are_refused(device: str) -> None:
    import torch

    x, w = operands(CASES[0], 5, device)
    with pytest.raises(ContractError, match="bfloat16"):
        lm_head(x.float(), w, schedule=BASE)
    with pytest.raises(ContractError, match="x_scale is missing"):
        lm_head(*(t.to(torch.float8_e4m3fn) for t in (x, w)), schedule=BASE)
    with pytest.raises(ContractError, match="a bias"):
        lm_head(x, Weights(w, bias=w[:, 0]), schedule=BASE)
    with pytest.raises(ContractError, match="17 rows"):
        lm_head(operands(CASES[0], 17, device)[0], w, schedule=BASE)
