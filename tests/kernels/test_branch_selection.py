"""The look-up of a round's outcome among prepared branches, against the same in plain Python."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tune_kernels.kernels.branch_selection import select_branch
from tune_kernels.kernels.layout import COUNT, DRAFT, HIT, MADE, RECORD, ROUND, ROWS, STATE, TABLE, TIP, TOKEN
from tune_kernels.kernels.operation import ContractError
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import FixedSchedule

pytestmark = pytest.mark.interpreter
NUMERICS = load_recipe("fp8-v1").numerics
SCHEDULE = FixedSchedule(num_warps=1)
RING = 4
POISON = -77  # in places that nobody may write
Column = tuple[int, int, int, list[int]]  # accepted count, recovery token, round, drafted tokens


def served(columns: list[Column], outcome: tuple[int, int], number: int, width: int, device: str,
           hits: list[int] | None = None) -> tuple[int, list[int]]:
    """(hit, row tokens) after round `number` ended in `outcome`; all that must not change is checked."""
    import torch

    table = torch.full((TABLE, ROWS), -1, dtype=torch.int32)
    for b, (count, token, made, draft) in enumerate(columns):
        table[COUNT, b], table[TOKEN, b], table[MADE, b] = count, token, made
        table[DRAFT:DRAFT + width, b] = torch.tensor(draft[:width])
    state, rows = torch.full((STATE,), POISON, dtype=torch.int32), torch.full((ROWS,), POISON, dtype=torch.int32)
    state[TIP], state[ROUND], rows[0] = outcome[0], number + 1, outcome[1]
    records = torch.full((RING, RECORD), POISON, dtype=torch.int32)
    moved = [t.to(device) for t in (table, rows, state, records)]
    now: Any = SimpleNamespace(row_tokens=moved[1], state=moved[2])
    script = None if hits is None else torch.tensor(hits, dtype=torch.int32, device=device)
    select_branch(moved[0], now, moved[3], draft_length=width, schedule=SCHEDULE, numerics=NUMERICS, hits=script)
    assert torch.equal(moved[0].cpu(), table) and torch.equal(moved[2].cpu(), state)
    found = moved[3].cpu()
    hit = int(found[number % RING, HIT])
    found[number % RING, HIT] = POISON
    assert bool((found == POISON).all())
    after: list[int] = moved[1].tolist()
    assert after[0] == outcome[1] and after[width + 1:] == [POISON] * (ROWS - width - 1)
    return hit, after[1:width + 1]


def expected(columns: list[Column], outcome: tuple[int, int], number: int, width: int) -> tuple[int, list[int]]:
    draft = next((d for count, token, made, d in columns if (count, token) == outcome and made == number), None)
    return (0, [POISON] * width) if draft is None else (1, draft[:width])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_table(data: Any, device: str) -> None:
    """Full tables and empty ones, the outcome among them or not, columns of this round and of others: the first match serves."""
    width, number = data.draw(st.sampled_from([1, 4, 15])), data.draw(st.integers(0, 9))
    token, draft = st.integers(0, 3), st.lists(st.integers(0, 99), min_size=15, max_size=15)
    columns = data.draw(st.lists(st.tuples(st.integers(0, 2), token, st.integers(number - 1, number), draft), max_size=ROWS))
    outcome = data.draw(st.tuples(st.integers(0, 2), token))
    assert served(columns, outcome, number, width, device) == expected(columns, outcome, number, width)


def test_a_branch_of_another_round_is_never_served(device: str) -> None:
    """The same outcome, prepared one round before or after."""
    for made in (4, 6):
        assert served([(2, 9, made, [7] * 15)], (2, 9), 5, 4, device) == (0, [POISON] * 4)
    assert served([(2, 9, 4, [7] * 15), (2, 9, 5, [8] * 15)], (2, 9), 5, 4, device) == (1, [8] * 4)


def test_a_column_without_a_branch_serves_nothing(device: str) -> None:
    """Not even the -1 of a row of NaN."""
    assert served([], (0, -1), 0, 2, device) == (0, [POISON] * 2)


def test_a_script_has_the_word_on_hits(device: str) -> None:
    """Repeated from its start; the tokens are somebody else's to overwrite."""
    for number, hit in enumerate([1, 0, 0, 1, 0]):
        assert served([(0, 5, number, [6] * 15)], (0, 5), number, 1, device, [1, 0, 0]) == (hit, [6])
        assert served([], (0, 5), number, 1, device, [1, 0, 0]) == (hit, [POISON])


def test_wrong_arguments(device: str) -> None:
    import torch

    now: Any = SimpleNamespace(row_tokens=torch.zeros(ROWS, dtype=torch.int32, device=device),
                               state=torch.zeros(STATE, dtype=torch.int32, device=device))
    for rows, width, message in ((ROWS + 1, 1, "table is"), (ROWS, 0, "0 draft tokens"), (ROWS, ROWS, "16 draft tokens")):
        table = torch.zeros(TABLE, rows, dtype=torch.int32, device=device)
        with pytest.raises(ContractError, match=message):
            select_branch(table, now, torch.zeros(RING, RECORD, dtype=torch.int32, device=device), draft_length=width,
                          schedule=SCHEDULE, numerics=NUMERICS)
