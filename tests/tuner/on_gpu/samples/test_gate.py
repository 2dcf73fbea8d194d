"""The gate's rules: classes of another recipe, conditions on tokens and times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tune_kernels.schedules.promoted import Checks
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import AttentionSchedule, HeadSchedule, LinearSchedule, MergeSchedule, Schedule
from tune_kernels.tuner.on_gpu.full_model import ask_decoder, first_difference
from tune_kernels.tuner.on_gpu.samples.gate import (
    Checked,
    Failure,
    GateResult,
    checked_of,
    describe_slowdown,
    other_recipe,
    stored_checked,
)

RECIPE = load_recipe("fp8-v1")
LINEAR = LinearSchedule(64, 128, 4, 4, split_k=4)
OLD: Mapping[str, Schedule] = {"down": LINEAR}
NEW: Mapping[str, Schedule] = {"down": replace(LINEAR, num_stages=6)}
TOKENS = st.lists(st.integers(0, 3), max_size=6)


@pytest.mark.parametrize(("schedule", "why"), [
    (LINEAR, None), (replace(LINEAR, split_k=2), None), (replace(LINEAR, row_tile=8), "row_tile 8"),
    (AttentionSchedule(RECIPE.kv_chunk, 64, 64, 2, 4), None), (AttentionSchedule(512, 64, 64, 2, 4), "chunk 512"),
    (MergeSchedule(64, 8, 4), None), (HeadSchedule(64, 64, 3, 4, row_tile=8), "row_tile 8"),
])
def test_what_the_recipe_fixes_makes_another_recipe(schedule: Schedule, why: str | None) -> None:
    """Row tile and KV chunk; how K is split shows in the class instead."""
    found = other_recipe(RECIPE, schedule)
    assert (found is None) == (why is None)
    assert why is None or (found and found.startswith(why))


@given(TOKENS, TOKENS)
def test_the_first_difference_is_the_first(a: list[int], b: list[int]) -> None:
    found = first_difference(a, b)
    assert (found is None) == (a == b)
    if found:
        assert a[:found[0]] == b[:found[0]]
        assert found[1] != found[2]


@dataclass
class Probe:
    """Tokens by number of stages, and how much slower the new is."""

    tokens_by_stages: Mapping[int, Mapping[str, Sequence[Sequence[int]]]]
    ratio: float = 0.99
    timed: list[int] = field(default_factory=list)

    def tokens(self, schedules: Mapping[str, Schedule]) -> Mapping[str, Sequence[Sequence[int]]]:
        return self.tokens_by_stages[schedules["down"].num_stages]  # type: ignore[union-attr]

    def time_step(self, old: Mapping[str, Schedule], new: Mapping[str, Schedule],
                  repeats: int) -> Mapping[str, Sequence[tuple[float, float]]]:
        self.timed.append(repeats)
        return {"ar": [(100.0 + i, (100.0 + i) * self.ratio) for i in range(repeats)]}


GOOD = {"ar": [[1, 2], [3, 4]], "sd": [[1, 2], [3, 4]], "ssd": [[1, 2], [3, 4]]}
LATE = {**GOOD, "ssd": [[1, 2], [3, 5]]}
MOVED = {mode: [[1, 2], [3, 9]] for mode in GOOD}


def test_equal_tokens_and_a_faster_step_pass() -> None:
    found = ask_decoder(Probe({4: GOOD, 6: GOOD}), OLD, NEW)
    assert found.failure is None
    assert (found.prompts, found.tokens_compared) == (2, 24)
    assert found.checks["agreement"].run == found.checks["agreement"].passed == 12
    assert found.full_model["ar"].ratio == pytest.approx(0.99)


@pytest.mark.parametrize(("after", "said"), [(LATE, "ssd, prompt 1: token 1 is 5, AR emits 4"),
                                             (MOVED, "ar, prompt 1: token 1 is 9, AR emits 4")])
def test_a_token_that_differs_is_named_and_nothing_is_timed(after: Mapping[str, Sequence[Sequence[int]]], said: str) -> None:
    probe = Probe({4: GOOD, 6: after})
    found = ask_decoder(probe, OLD, NEW)
    assert found.failure == said
    assert found.checks["agreement"].passed < found.checks["agreement"].run
    assert not probe.timed


@pytest.mark.parametrize("ratio", [1.0001, 1.2])
def test_a_slowdown_that_is_proven_is_called_so(ratio: float) -> None:
    """F30."""
    found = ask_decoder(Probe({4: GOOD, 6: GOOD}, ratio), OLD, NEW)
    assert found.failure and "proves a slowdown" in found.failure


def test_a_slowdown_that_isnt_excluded_fails() -> None:
    """F30: an interval around 1."""
    assert "doesn't exclude a slowdown" in describe_slowdown("ar", (0.99, 1.01))
    assert "proves a slowdown" in describe_slowdown("ar", (1.0001, 1.01))


def test_founding_another_class_compares_the_modes_alone() -> None:
    assert ask_decoder(Probe({4: GOOD, 6: MOVED}), OLD, NEW, other_class=True).failure is None
    assert ask_decoder(Probe({4: GOOD, 6: LATE}), OLD, NEW, other_class=True).failure is not None


def test_nothing_new_is_not_timed() -> None:
    probe = Probe({4: GOOD})
    assert ask_decoder(probe, OLD, OLD).failure is None
    assert not probe.timed


@given(st.dictionaries(st.text(max_size=4), st.builds(Checks, st.integers(5, 9), st.integers(0, 5))), st.none() | st.floats(0, 9),
       st.none() | st.text(max_size=4), st.none() | st.builds(Failure, st.text(max_size=4), st.text(max_size=4)))
def test_checks_survive_their_dict(checks: dict[str, Checks], error: float | None, numerics: str | None,
                                   failure: Failure | None) -> None:
    checked = Checked(checks, error, numerics, failure)
    assert checked_of(stored_checked(checked), "here") == checked


def test_a_full_model_that_throttles_decides_nothing() -> None:
    """F11: two of seven pairs left."""
    class Hot(Probe):
        def time_step(self, old: Mapping[str, Schedule], new: Mapping[str, Schedule],
                      repeats: int) -> Mapping[str, Sequence[tuple[float, float]]]:
            return {mode: pairs[:2] for mode, pairs in super().time_step(old, new, repeats).items()}

    found = ask_decoder(Hot({4: GOOD, 6: GOOD}), OLD, NEW)
    assert found.failure == "ar: throttling left too few pairs of the full model's times (2 of 7)"
    assert not found.full_model
    assert GateResult(rejected={"down": found.failure}).throttled("down")
