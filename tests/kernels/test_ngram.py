"""n-gram look-up on the device against the drafter's rule in Python, for any sequence and any draft length."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tune_kernels.decoder.drafters.ngram import NGramDrafter
from tune_kernels.kernels import ngram
from tune_kernels.kernels.layout import LENGTH, ROWS, STATE
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import FixedSchedule

pytestmark = pytest.mark.interpreter
NUMERICS = load_recipe("fp8-v1").numerics
POISON = -77
ROOM = 64  # tokens that may stand after the sequence
sequences = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def drafted(tokens: list[int], length: int, device: str) -> list[int]:
    """All rows after the launch; what follows the sequence repeats it, so that a look beyond its end would match."""
    import torch

    def ints(values: list[int]) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=device)

    state = [POISON] * STATE
    state[LENGTH] = len(tokens) - 1
    now: Any = SimpleNamespace(row_tokens=ints([POISON] * ROWS), state=ints(state))
    history = ints(tokens + (tokens * ROOM)[:ROOM])
    ngram.ngram_draft(history, now, draft_length=length, schedule=FixedSchedule(num_warps=8), numerics=NUMERICS)
    rows: list[int] = now.row_tokens.tolist()
    return rows


def check(tokens: list[int], length: int, device: str) -> None:
    right = NGramDrafter().draft(tokens, length)
    assert drafted(tokens, length, device) == [POISON, *right, *[-1] * (length - len(right)), *[POISON] * (ROWS - 1 - length)]


@pytest.mark.parametrize("block", [8, 2048])
def test_the_drafts_are_those_of_python(block: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block or several, matches across their edges; sequences of one, two and three tokens."""
    monkeypatch.setattr(ngram, "BLOCK", block)

    @given(sequences, st.integers(1, ROWS - 1))
    @example([1], 4)
    @example([1, 1], 4)
    @example([1, 2, 1], 3)
    @example([0, 0, 0, 0, 0, 0, 0, 0, 0], 15)
    @example([1, 2, 3, 0, 2, 3, 1, 3, 0, 1, 2, 3], 4)
    @settings(max_examples=60, deadline=None)
    def holds(tokens: list[int], length: int) -> None:
        check(tokens, length, device)

    holds()


def test_a_long_sequence(device: str) -> None:
    """The only match is in the first block of several."""
    tokens = [5, 6, 7, 8, 9, *range(100, 100 + 2 * ngram.BLOCK), 5, 6, 7]
    check(tokens, 6, device)
    assert drafted(tokens, 3, device)[1:4] == [8, 9, 100]
