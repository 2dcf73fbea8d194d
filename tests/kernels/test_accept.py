"""Accept and reject against the rule written in plain Python, for any round; the drafted token and its script."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tune_kernels.kernels.accept import accept, draft_token
from tune_kernels.kernels.layout import (
    ENDS,
    FINISHED,
    HEADER,
    LEFT,
    LENGTH,
    RECORD,
    ROUND,
    ROWS,
    STARTS,
    STATE,
    STRIDE,
    TIP,
)
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import FixedSchedule

pytestmark = pytest.mark.interpreter
NUMERICS = load_recipe("fp8-v1").numerics
SCHEDULE = FixedSchedule(num_warps=1)
RING = 4
ROOM = 64  # tokens that the history has room for after the pending one
POISON = -77  # no token, no end, no mark
NO_END = -2
WIDTHS = [0, 1, 2, 4, 7, 15]  # drafted tokens of a round


@dataclass
class Round:
    """A round about to be judged. winners: K + 1 of them; left: tokens that may still be emitted."""

    winners: list[int]
    draft: list[int]
    ends: list[int] = field(default_factory=list)
    pending: int = 3
    length: int = 10
    left: int = 100
    number: int = 0
    finished: bool = False

    @property
    def accepted(self) -> int:
        """Drafted tokens before the first wrong one."""
        return next((i for i, token in enumerate(self.draft) if token != self.winners[i]), len(self.draft))

    @property
    def emitted(self) -> list[int]:
        """The emitted tokens: up to the recovery token, an end, the limit; none of a finished request."""
        if self.finished:
            return []
        kept = self.winners[:self.accepted + 1]
        end = next((i for i, token in enumerate(kept) if token in self.ends), len(kept))
        return kept[:min(end + 1, self.left)]

    @property
    def ended(self) -> bool:
        kept = self.winners[:self.accepted + 1]
        return self.finished or any(token in self.ends for token in kept) or len(self.emitted) >= self.left


def tensor(values: list[int], device: str) -> Any:
    import torch

    return torch.tensor(values, dtype=torch.int32, device=device)


def starts_of(before: int, length: int) -> list[int]:
    return [before, *(length - 1 + i for i in range(STARTS - 1))]


def judge(case: Round, device: str) -> dict[str, Any]:
    """Every tensor after the launch, poisoned wherever the kernel should not look."""
    state = [POISON] * STATE
    state[LENGTH], state[LEFT], state[ROUND], state[FINISHED] = case.length, case.left, case.number, int(case.finished)
    tensors = {
        "winners": tensor([*case.winners, *[POISON] * (ROWS - len(case.winners))], device),
        "row_tokens": tensor([case.pending, *case.draft, *[POISON] * (ROWS - 1 - len(case.draft))], device),
        "pair": tensor([POISON] * 4, device), "state": tensor(state, device),
        "starts": tensor([POISON] * (STARTS * STRIDE), device),
        "ends": tensor([*case.ends, *[NO_END] * (ENDS - len(case.ends))], device),
        "records": tensor([POISON] * (RING * RECORD), device).view(RING, RECORD),
        "history": tensor([POISON], device).expand(case.length + ROOM).contiguous()}
    now: Any = SimpleNamespace(**{name: tensors[name] for name in ("row_tokens", "pair", "state", "starts", "ends")})
    accept(tensors["winners"], now, tensors["records"], tensors["history"], draft_length=len(case.draft), schedule=SCHEDULE,
           numerics=NUMERICS)
    return tensors


def check(case: Round, device: str) -> None:
    """Each place that the kernel writes holds the rule's value, and every other place its old one."""
    after = judge(case, device)
    slot = case.number % RING
    record = after["records"][slot].tolist()
    assert record[0] == len(case.emitted)
    assert record[HEADER:HEADER + record[0]] == case.emitted
    assert record[1] == case.accepted
    assert record[2] == int(case.ended)
    others = [row for i, row in enumerate(after["records"].tolist()) if i != slot]
    assert all(value == POISON for row in others for value in row), "another round's record"
    assert record[HEADER + ROWS:] == [POISON] * (RECORD - HEADER - ROWS)
    state = after["state"].tolist()
    assert state[ROUND] == case.number + 1
    assert state[FINISHED] == int(case.ended)
    rows, starts = after["row_tokens"].tolist(), after["starts"].tolist()
    assert rows[1:] == [*case.draft, *[POISON] * (ROWS - 1 - len(case.draft))]
    if case.finished:
        assert (rows[0], state[LENGTH], state[LEFT], state[TIP]) == (case.pending, case.length, case.left, POISON)
        assert after["pair"].tolist() == [POISON] * 4
        assert starts == [POISON] * (STARTS * STRIDE)
        assert bool((after["history"] == POISON).all())
        return
    sequence = [case.pending, *case.winners[:case.accepted + 1]]
    tail = [*sequence[1:], *[POISON] * (ROOM - len(sequence))]
    assert after["history"][case.length + 1:].tolist() == tail
    assert bool((after["history"][:case.length + 1] == POISON).all())
    assert rows[0] == sequence[-1]
    assert after["pair"].tolist() == [*sequence[-2:], POISON, POISON]
    assert state[LENGTH] == case.length + case.accepted + 1
    assert state[TIP] == case.accepted
    assert state[LEFT] == case.left - len(case.emitted)
    assert starts[::STRIDE] == starts_of(case.length, state[LENGTH])
    assert [value for i, value in enumerate(starts) if i % STRIDE] == [POISON] * (STARTS * (STRIDE - 1))


@pytest.mark.parametrize("width", WIDTHS)
def test_every_accepted_count(width: int, device: str) -> None:
    winners = list(range(20, 21 + width))
    for accepted in range(width + 1):
        draft = [*winners[:accepted], *(token + 40 for token in winners[accepted:width])]
        case = Round(winners, draft, number=accepted)
        assert case.accepted == accepted and case.emitted == winners[:accepted + 1]
        check(case, device)


@pytest.mark.parametrize("at", range(5))
def test_an_end_at_each_place(at: int, device: str) -> None:
    """An accepted end stops there; one that is rejected, or past the recovery token, doesn't."""
    winners = [20, 21, 22, 23, 24]
    for accepted in range(5):
        draft = [*winners[:accepted], *[40] * (4 - accepted)]
        case = Round(winners, draft, ends=[50, winners[at]])
        assert case.ended == (at <= accepted)
        check(case, device)
        check(Round(winners, draft, ends=[40]), device)  # the draft's own, rejected


def test_the_limit_at_each_place(device: str) -> None:
    """The limit, alone and with an end before, at and after it."""
    winners = [20, 21, 22, 23, 24]
    for left in range(1, 7):
        check(Round(winners, winners[:4], left=left), device)
        for at in range(5):
            check(Round(winners, winners[:4], left=left, ends=[winners[at]]), device)


def test_padding_and_marks_are_neither_ends_nor_drafts(device: str) -> None:
    """-1, the winner of a row of NaN, ends nothing, though rows past the draft read as -1 and the list of ends is padded; a
    drafted -1 that is the winner is taken, for the host to see."""
    check(Round([-1, 21], [40]), device)
    check(Round([-1, -1, 22], [-1, 40]), device)
    check(Round([20, 21], [20], ends=list(range(100, 100 + ENDS))), device)
    check(Round([20, 100 + ENDS - 1], [20], ends=list(range(100, 100 + ENDS))), device)


def test_a_finished_request_moves_no_more(device: str) -> None:
    """Rounds that are under way when it ends leave records of nothing and count on."""
    for number in (1, RING, 7 * RING + 3):
        check(Round([20, 21], [20], finished=True, number=number, left=0), device)


TOKEN = st.integers(0, 3)  # few, so that drafts are right, ends are hit and ids repeat


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    width = draw(st.sampled_from(WIDTHS))
    winners = draw(st.lists(TOKEN, min_size=width + 1, max_size=width + 1))
    right = draw(st.integers(0, width))
    draft = [*winners[:right], *draw(st.lists(TOKEN, min_size=width - right, max_size=width - right))]
    return Round(winners, draft, ends=draw(st.lists(st.integers(0, 6), max_size=4)), pending=draw(TOKEN),
                 length=draw(st.integers(0, 2**20)), left=draw(st.integers(1, 20)), number=draw(st.integers(0, 3 * RING)),
                 finished=draw(st.booleans()))


@settings(max_examples=100, deadline=None)
@given(case=rounds())
def test_any_round(case: Round, device: str) -> None:
    check(case, device)


@dataclass(frozen=True)
class Script:
    """A recorded sequence, and how many drafted tokens of each round are right."""

    reference: list[int]
    accepted: list[int]


def drafted(token: int, step: int, device: str, script: Script | None = None, length: int = 0, number: int = 0) -> list[int]:
    state = [POISON] * STATE
    state[LENGTH], state[ROUND] = length, number
    rows = tensor([POISON] * ROWS, device)
    given = {"reference": tensor(script.reference, device), "accepted": tensor(script.accepted, device)} if script else {}
    now: Any = SimpleNamespace(row_tokens=rows, state=tensor(state, device))
    draft_token(tensor([token], device), now, step=step, schedule=SCHEDULE, numerics=NUMERICS, **given)
    return rows.tolist()


@pytest.mark.parametrize("step", [0, 1, 14])
def test_a_drafted_token_becomes_its_row(step: int, device: str) -> None:
    expected = [POISON] * ROWS
    expected[1 + step] = 42
    assert drafted(42, step, device) == expected


def test_a_script_stands_for_the_drafter(device: str) -> None:
    """The token after the pending one and `step` more while the round's script says right, then another one; rounds beyond the
    script begin it again, places beyond the record repeat its last token."""
    script = Script([7, 8, 0, 9, 0, 5], [2, 0, 1])
    for number in range(7):
        right = script.accepted[number % len(script.accepted)]
        for step in range(3):
            for length in range(6):
                at = min(length + 1 + step, len(script.reference) - 1)
                row = drafted(42, step, device, script, length, number)
                token = row.pop(1 + step)
                assert row == [POISON] * (ROWS - 1)
                assert (token == script.reference[at]) == (step < right), (number, step, length)
                assert token in (script.reference[at], 0, 1)
