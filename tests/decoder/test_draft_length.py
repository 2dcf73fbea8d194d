"""draft_length="auto": the policy's numbers, and whole requests simulated from recorded acceptances and given times."""

import random
from collections import deque
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tune_kernels.decoder.draft_length import FIRST, MOST, DraftLength, on_the_line

LAG = 2  # rounds launched before the first one's record is read, as on a device
TOKENS = 1500
# Seconds of a round by its draft length, over AR's: n-gram look-up on a GPU, where it costs little and where it costs much; an
# EAGLE-3 drafter; a CPU, whose time grows with the rows; a small model as drafter.
TIMES: dict[str, dict[int, float]] = {
    "look-up": {0: 1.0, **{k: 1.03 + 0.006 * k for k in range(1, 9)}},
    "dear look-up": {0: 1.0, **{k: 1.25 + 0.01 * k for k in range(1, 9)}},
    "eagle3": {0: 1.0, **{k: 1.1 + 0.07 * k for k in range(1, 9)}},
    "cpu": {k: 1 + 0.12 * k for k in range(9)},
    "small model": {0: 1.0, **{k: 1.05 + 0.3 * k for k in range(1, 9)}},
}


def recorded(acceptance: float, seed: int) -> list[int]:
    """For each place in a sequence: the right tokens of a draft that begins there."""
    draw = random.Random(seed)
    found = []
    for _ in range(TOKENS + 10):
        right = 0
        while right < MOST and draw.random() < acceptance:
            right += 1
        found.append(right)
    return found


def speed(right: list[int], times: Mapping[int, float], fixed: int | None = None, calibrated: bool = True) -> float:
    """Tokens per second of a request, with a fixed draft length or the policy's."""
    policy, seconds, tokens = DraftLength(MOST), 0.0, 0
    if calibrated:
        policy.calibrate(times)
    unread: deque[tuple[int, int, int, float | None]] = deque()
    while tokens < TOKENS:
        length = policy.next() if fixed is None else fixed
        accepted = min(length, right[tokens])
        seconds, tokens = seconds + times[length], tokens + accepted + 1
        unread.append((length, length, accepted, None if calibrated else times[length]))
        if len(unread) == (LAG if calibrated else 1):
            policy.observe(*unread.popleft())
    return tokens / seconds


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("calibrated", [True, False], ids=["calibrated", "timed by rounds"])
def test_text_that_cannot_be_drafted_costs_at_most_three_percent(times: str, calibrated: bool) -> None:
    right = [0] * (TOKENS + 10)
    assert speed(right, TIMES[times], calibrated=calibrated) >= 0.97 * speed(right, TIMES[times], fixed=0)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("acceptance", [0.1, 0.3, 0.5, 0.7])
def test_near_the_best_fixed_length(times: str, acceptance: float) -> None:
    """On average over four texts: the best length is known after a text, and differs from text to text."""
    shares = []
    for seed in range(4):
        right = recorded(acceptance, seed)
        shares.append(speed(right, TIMES[times]) / max(speed(right, TIMES[times], fixed=k) for k in range(MOST + 1)))
    assert sum(shares) / len(shares) >= 0.97


@pytest.mark.parametrize("times", TIMES)
def test_text_that_changes_beats_every_fixed_length(times: str) -> None:
    """Half of it can be drafted and half can't: no fixed length is right for both."""
    easy, hard = recorded(0.9, 1), recorded(0.0, 2)
    right = [(easy if at // 300 % 2 else hard)[at] for at in range(TOKENS + 10)]
    assert speed(right, TIMES[times]) > max(speed(right, TIMES[times], fixed=k) for k in range(MOST + 1))


rounds = st.lists(st.tuples(st.integers(0, MOST), st.integers(0, MOST), st.integers(0, MOST), st.floats(1e-4, 10)), max_size=80)


@given(st.integers(1, 15), rounds, st.booleans())
@settings(deadline=None)
def test_any_rounds(most: int, observed: list[tuple[int, int, int, float]], new_requests: bool) -> None:
    """Lengths stay in range, acceptance stays a share, rates stay positive, whatever was observed."""
    policy = DraftLength(most)
    for asked, drafted, accepted, seconds in observed:
        if new_requests:
            policy.begin()
        length = min(asked, policy.most)
        found = min(drafted, length)
        policy.observe(length, found, min(accepted, found), seconds)
        assert 0 <= policy.next() <= min(most, MOST)
        assert all(0 <= share <= 1 for share in policy.acceptance())
        assert all(policy.rate(k) > 0 for k in range(policy.most + 1))
        assert [policy.expected_tokens(k) for k in range(policy.most + 1)] == sorted(
            policy.expected_tokens(k) for k in range(policy.most + 1))


def test_the_first_rounds_measure_several_lengths() -> None:
    policy, taken = DraftLength(MOST), list[int]()
    for _ in FIRST:
        taken.append(policy.next())
        policy.observe(taken[-1], taken[-1], 0, 1.0)
    assert taken == list(FIRST)


def test_a_look_up_in_vain_is_no_measure_of_ar() -> None:
    policy = DraftLength(MOST)
    policy.observe(4, 0, 0, 3.0)
    assert policy.known == {}
    policy.observe(0, 0, 0, 1.0)
    policy.observe(4, 3, 1, 2.0)
    assert policy.known == {0: 1.0, 3: 2.0}


def test_one_disturbed_round_changes_no_time() -> None:
    policy = DraftLength(MOST)
    for seconds in (1.0, 50.0, 1.0):
        policy.observe(2, 2, 2, seconds)
    assert policy.seconds(2) == 1.0


@pytest.mark.parametrize(("known", "rows", "seconds"), [
    ({}, 0, 1.0), ({0: 1.0, 4: 3.0}, 2, 2.0), ({0: 1.0, 4: 3.0}, 8, 5.0), ({0: 1.0, 1: 2.0, 4: 5.0}, 1, 2.0),
    ({2: 2.0, 4: 3.0}, 0, 2.0 / 1.2), ({0: 1.0, 4: 2.0}, 4, 2.0), ({0: 2.0}, 5, 3.0)])
def test_times_between_and_beyond_the_measured_ones(known: dict[int, float], rows: float, seconds: float) -> None:
    assert on_the_line(known, rows) == pytest.approx(seconds)
