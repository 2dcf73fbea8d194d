"""The certified head: winners and values are the plain head's on every kind of row, and its bounds hold against fp64. A bound
that is too small changes a winner."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from helpers import assert_same_bytes
from tune_kernels.kernels import certified_head as module
from tune_kernels.kernels.certified_head import CertifiedScratch, certified_head, new_certified_scratch
from tune_kernels.kernels.layout import ROWS, Activation, Weights
from tune_kernels.kernels.lm_head import HeadScratch, lm_head, lm_head_logits, new_scratch
from tune_kernels.kernels.operation import ContractError
from tune_kernels.kernels.screen import ScreenWeights, screen_weights
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import HeadSchedule, ScreenSchedule

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.interpreter
NUMERICS = load_recipe("fp8-v1").numerics
PLAIN = HeadSchedule(BLOCK_N=64, BLOCK_K=32, num_stages=2, num_warps=4)
SCREEN = ScreenSchedule(BLOCK_N=64, BLOCK_K=32, num_stages=2, num_warps=4)
PRODUCTS = ("int8", "bf16")


@pytest.fixture(autouse=True)
def small_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several regions in a small head, the last one cut."""
    monkeypatch.setattr(module, "REGION", 256)


@dataclass(frozen=True)
class Ran:
    """Tokens and scratch of both heads over the same rows."""

    tokens: "torch.Tensor"
    plain_tokens: "torch.Tensor"
    scratch: CertifiedScratch
    plain: HeadScratch

    @property
    def rescored(self) -> int:
        return int(self.scratch.counts[:-1].sum())

    @property
    def unbounded(self) -> int:
        return int(self.scratch.counts[-1])


def run(x: "torch.Tensor", w: "torch.Tensor", product: str = "int8", limit: int | None = None,
        screen: ScreenWeights | None = None, scratch: CertifiedScratch | None = None) -> Ran:
    """Both heads, each on its own scratch. screen: of w, if not the true one."""
    schedule = replace(SCREEN, product=product)
    out = scratch or new_certified_scratch(len(w), w.shape[1], w.device)
    plain = new_scratch(len(w), PLAIN, w.device)
    given, weights = Activation(x[None]), Weights(w)
    found = certified_head(given, weights, screen or screen_weights(w, product), schedule=schedule, head=PLAIN, numerics=NUMERICS,
                           limit=limit, scratch=out)
    return Ran(found, lm_head(given, weights, schedule=PLAIN, numerics=NUMERICS, limit=limit, scratch=plain), out, plain)


def assert_equal(ran: Ran, rows: int) -> None:
    assert_same_bytes(ran.tokens, ran.plain_tokens)
    assert_same_bytes(ran.scratch.winners.best[:rows].amax(1), ran.plain.best[:rows].amax(1))


def drawn(seed: int, *size: int, device: str = "cpu") -> "torch.Tensor":
    import torch

    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(device)


def odd_head(device: str, N: int = 560, K: int = 48) -> "torch.Tensor":
    """A head with equal rows, zeros, subnormals, outliers, unlike norms and steps of one grid."""
    import torch

    w = drawn(1, N, K, device=device)
    w[100:140] = w[300:340]
    w[200:210] = 0
    w[210:220] *= 2.0**-130
    w[220:230, 5] = 30
    w[230:240] *= 2.0**-60
    w[240:250] *= 1 + 2**-7
    w[250:300] = (w[250:300] * 20).round().clamp(-127, 127) / 32
    w[450:] = torch.exp2(4 * w[450:]) * w[450:].sign()
    return w.bfloat16()


def hidden(kind: str, w: "torch.Tensor", rows: int) -> "torch.Tensor":
    """Rows [rows, K] of one kind."""
    import torch

    K, device = w.shape[1], str(w.device)
    x = drawn(7, rows, K, device=device)
    made: dict[str, Callable[[], torch.Tensor]] = {
        "normal": lambda: x, "outlier": lambda: x * torch.where(torch.arange(K, device=device) == 5, 3000.0, 1.0),
        "one value": lambda: x * (torch.arange(K, device=device) == torch.arange(rows, device=device)[:, None] % K),
        "two ids": lambda: w[torch.arange(rows) * 17 % 200].float() + w[torch.arange(rows) * 31 % 200].float(),
        "equal ids": lambda: w[100 + torch.arange(rows)].float(), "cancelling": lambda: cancelling(x),
        "every size": lambda: x * torch.exp2(20 * drawn(8, rows, K, device=device)),
        "small": lambda: x * 2.0**-75, "below the scale": lambda: x * 2.0**-88, "subnormal": lambda: x * 2.0**-130,
        "large": lambda: x * 2.0**90, "overflowing": lambda: x * 2.0**124, "zeros": lambda: x * 0,
        "minus zeros": lambda: -(x * 0), "nan": lambda: spoiled(x, float("nan")), "inf": lambda: spoiled(x, float("inf")),
        "-inf": lambda: spoiled(x, float("-inf")), "all nan": lambda: x * float("nan"),
        "of both": lambda: spoiled(spoiled(x, float("inf"), 3), float("-inf"))}
    return made[kind]().bfloat16()


KINDS = ("normal", "outlier", "one value", "two ids", "equal ids", "cancelling", "every size", "small", "below the scale",
         "subnormal", "large", "overflowing", "zeros", "minus zeros", "nan", "inf", "-inf", "all nan", "of both")
IN_FULL = ("below the scale", "subnormal", "overflowing", "zeros", "minus zeros", "nan", "inf", "-inf", "all nan", "of both")


def cancelling(x: "torch.Tensor") -> "torch.Tensor":
    x = x.clone()
    x[:, 1::2] = -x[:, ::2] * (1 + 2**-7)
    return x


def spoiled(x: "torch.Tensor", value: float, at: int = 11) -> "torch.Tensor":
    x = x.clone()
    x[::2, at] = value
    return x


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("kind", KINDS)
def test_winners_and_values_are_the_plain_heads(kind: str, product: str, device: str) -> None:
    w = odd_head(device)
    ran = run(hidden(kind, w, 5), w, product, limit=550)
    assert_equal(ran, 5)
    assert ran.unbounded == int(kind in IN_FULL), "a row that can't be bounded is counted, and no other"


@pytest.mark.parametrize(("rows", "product"), [*((rows, "int8") for rows in range(1, ROWS + 1)), (3, "bf16"), (ROWS, "bf16")])
def test_every_number_of_rows(rows: int, product: str, device: str) -> None:
    """Also where K and N leave tails: 48 of two steps of 32, 600 of three regions."""
    w = drawn(2, 600, 48, device=device).bfloat16()
    assert_equal(run(drawn(rows, rows, 48, device=device).bfloat16(), w, product), rows)


def test_a_row_depends_on_its_own_data(device: str) -> None:
    """Alone, or beside rows that are read in full."""
    w = odd_head(device)
    import torch

    x = torch.cat([hidden(kind, w, 3) for kind in ("normal", "nan", "zeros", "outlier")])
    together = run(x, w)
    assert_equal(together, len(x))
    for row in range(len(x)):
        alone = run(x[row:row + 1].clone(), w)
        assert_same_bytes(alone.tokens, together.tokens[row:row + 1])
        assert_same_bytes(alone.scratch.winners.best[:1].amax(1), together.scratch.winners.best[row:row + 1].amax(1))


def test_few_ids_are_computed_again(device: str) -> None:
    """The certificate is of use: rows of a head that isn't odd leave a handful."""
    w = drawn(3, 1100, 144, device=device).bfloat16()
    ran = run(drawn(4, 5, 144, device=device).bfloat16(), w)
    assert 5 <= ran.rescored <= 25
    assert ran.unbounded == 0


def test_counts_add_up_over_launches(device: str) -> None:
    w = drawn(3, 600, 48, device=device).bfloat16()
    scratch = new_certified_scratch(600, 48, w.device)
    x = hidden("zeros", w, 2)
    for launches in (1, 2):
        ran = run(x, w, scratch=scratch)
        assert (ran.rescored, ran.unbounded) == (600 * launches, launches)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in IN_FULL])
def test_bounds_hold_against_fp64_and_the_plain_head(kind: str, product: str, device: str) -> None:
    """Upper bounds are above each logit, the greatest lower bound is below the greatest; neither is infinite."""
    w = odd_head(device)
    x = hidden(kind, w, 5)
    ran = run(x, w, product)
    exact = x.double() @ w.double().T
    plain = lm_head_logits(Activation(x[None]), Weights(w), schedule=PLAIN, numerics=NUMERICS).double()
    upper, greatest = ran.scratch.upper[:5].double(), ran.scratch.greatest[:5].double()
    assert upper.isfinite().all()
    assert greatest.isfinite().all()
    for logits in (exact, plain):
        assert (upper >= logits).all()
        assert (greatest <= logits.amax(1)).all()


def test_an_id_without_a_bound_is_computed_again(device: str) -> None:
    """A row of w with NaN, and one that overflows."""
    w = drawn(5, 300, 48, device=device).bfloat16()
    w[17, 3], w[40] = float("nan"), 3e38
    ran = run(drawn(6, 3, 48, device=device).bfloat16(), w)
    assert_equal(ran, 3)
    assert (ran.scratch.upper[:3, [17, 40]] == float("inf")).all()


def rounded_against(K: int = 64) -> "tuple[torch.Tensor, torch.Tensor]":
    """(x, w): x lies along the rounding error of w[40], so that its screened logit is too small by all that the bound allows;
    w[3] is rounded exactly, and its logit is below w[40]'s by 3 to 8% of that error."""

    w_40 = drawn(11, K).bfloat16()
    screen = screen_weights(w_40[None])
    x = (w_40.double() - screen.q[0] * screen.scale.double()).float()
    x = (x / x.norm()).bfloat16()
    error, top = float(x.double() @ (w_40.double() - screen.q[0] * screen.scale.double())), float(x.double() @ w_40.double())
    for seed in range(10_000):
        whole = (drawn(seed, K) * 40).round().clamp(-126, 126)
        whole[0] = 127
        rival = (whole * 2.0**-7).bfloat16()
        if top - 0.08 * error < float(x.double() @ rival.double()) < top - 0.03 * error:
            w = -rival.repeat(64, 1)
            w[40], w[3] = w_40, rival
            return x[None], w
    raise AssertionError("no such rival")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_a_bound_that_is_too_small_changes_a_winner(share: float, device: str) -> None:
    """Mutants of the weights' bound: the full one finds the winner."""
    x, w = (t.to(device) for t in rounded_against())
    ran = run(x, w)
    assert_equal(ran, 1)
    assert ran.tokens.tolist() == [40]
    true = screen_weights(w)
    mutant = run(x, w, screen=replace(true, error=true.error * share))
    assert mutant.tokens.tolist() == [3] != mutant.plain_tokens.tolist()


def test_without_the_rounding_of_x_a_winner_changes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant of x's bound: beside an outlier the other values round to nothing."""
    import torch

    x = torch.full((1, 64), 0.4)
    x[0, 0] = 2.0**14
    w = torch.zeros(64, 64)
    w[40, 1:] = 1  # 25, of digits that are 0
    w[3, 0] = 2.0**-10  # 16 of the outlier
    x, w = x.bfloat16().to(device), w.bfloat16().to(device)
    launched = module.screen_launch

    def without(*given: Any) -> Any:
        launch = launched(*given)
        arguments = launch.arguments

        def mutated(operands: Any) -> dict[str, object]:
            operands["norms_ptr"].tensor[2] = 0
            return arguments(operands)

        object.__setattr__(launch, "arguments", mutated)
        return launch

    assert run(x, w).tokens.tolist() == [40]
    monkeypatch.setattr(module, "screen_launch", without)
    mutant = run(x, w)
    assert mutant.tokens.tolist() == [3] != mutant.plain_tokens.tolist()


def test_what_does_not_fit_is_refused(device: str) -> None:
    w = drawn(3, 128, 48, device=device).bfloat16()
    x, screen = Activation(drawn(4, 1, 2, 48, device=device).bfloat16()), screen_weights(w)

    def head(x: Activation = x, bias: "torch.Tensor | None" = None, schedule: ScreenSchedule = SCREEN,
             plain: HeadSchedule = PLAIN) -> None:
        certified_head(x, Weights(w, bias=bias), screen, schedule=schedule, head=plain, numerics=NUMERICS)

    head()
    for refused in (lambda: head(schedule=replace(SCREEN, BLOCK_K=48)), lambda: head(plain=replace(PLAIN, row_tile=8)),
                    lambda: head(x=Activation(x.values.float())), lambda: head(bias=w[:, 0]),
                    lambda: head(x=Activation(drawn(4, 1, 17, 48, device=device).bfloat16()))):
        with pytest.raises(ContractError):
            refused()
