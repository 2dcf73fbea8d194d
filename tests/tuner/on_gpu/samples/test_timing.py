"""Conclusions from samples: intervals, dropped rounds, pairs, and the method's error rate."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tune_kernels.shapes.fields import Fields
from tune_kernels.tuner.errors import RecordingError
from tune_kernels.tuner.on_gpu.samples import recording
from tune_kernels.tuner.on_gpu.samples.calibration import calibrate, calibrate_on
from tune_kernels.tuner.on_gpu.samples.race import CONFIRM_ROUNDS, FINALISTS, fastest_first, finalists, survivors
from tune_kernels.tuner.on_gpu.samples.timing import (
    THROTTLED,
    Batch,
    State,
    StoredBatch,
    batch_of,
    clocks,
    distribution,
    interval,
    paired,
    ratios,
    round_order,
    stored_batch,
    verdict,
)

SAMPLES = st.lists(st.floats(0.5, 1000), min_size=1, max_size=20)


def batch(samples: dict[str, list[float]], states: list[State] | None = None, phase: str = "race") -> Batch:
    rounds = len(next(iter(samples.values())))
    return Batch(phase, 0, samples, states or [State()] * rounds)


def drifting(means: dict[str, float], rounds: int, noise: float = 0.005, seed: int = 0) -> Batch:
    """The GPU's clock wanders by 10%: far more than the differences between candidates."""
    random = np.random.default_rng(seed)
    drift = 1 + 0.1 * np.sin(np.arange(rounds) / 50)
    return batch({n: list(m * drift * random.lognormal(0, noise, rounds)) for n, m in means.items()})


@given(SAMPLES)
def test_the_interval_holds_the_median_and_is_the_same_each_time(samples: list[float]) -> None:
    found = interval(np.array(samples))
    assert min(samples) <= found[0] <= found[1] <= max(samples)
    assert found == interval(np.array(samples))


@given(SAMPLES, st.integers(0, 2**40))
def test_a_batch_survives_its_dict(samples: list[float], seed: int) -> None:
    made = Batch("race", seed, {"a": [round(t, 4) for t in samples]}, [State(1980, 3201, 40, 500.5, 4)] * len(samples))
    assert batch_of(stored_batch(made), "batch") == made


@pytest.mark.parametrize("samples", [[1.0], [1.0, -1.0], [1.0, 1e300], [1.0, True], ["1", 1.0], 5])
def test_a_damaged_batch_is_refused(samples: object) -> None:
    table = {**asdict(stored_batch(batch({"a": [1.0, 2.0]}))), "samples_us": {"a": samples}}
    with pytest.raises(RecordingError, match="a"):
        batch_of(Fields(table, "here", RecordingError).read(StoredBatch), "here")


def test_pairs_see_through_drift() -> None:
    """1% apart, while the clock wanders by 10%: only the pairs tell."""
    found = drifting({"a": 10.0, "b": 10.1}, CONFIRM_ROUNDS)
    a, b = distribution([found], "a"), distribution([found], "b")
    assert a and b and a.interval_us[1] > b.interval_us[0], "their intervals overlap"
    assert verdict(paired(ratios([found], "b", "a"))) == "slower"
    assert verdict(paired(ratios([found], "a", "b"))) == "faster"


def test_throttled_rounds_are_dropped_and_counted() -> None:
    hot = State(900, 3201, 90, 600.0, 0x40)
    found = batch({"a": [10.0, 99.0, 10.0], "b": [11.0, 11.0, 11.0]}, [State(1980), hot, State(1980)])
    times = distribution([found], "a")
    assert times and (times.samples, times.quantiles_us[-1]) == (2, 10.0)
    assert len(ratios([found], "a", "b")) == 2
    assert found.dropped == 1
    assert clocks([found]) == {"sm_mhz": 1980, "memory_mhz": 3201, "temperature_c": 90, "power_w": 600, "throttled_rounds": 1}


@pytest.mark.parametrize(("reasons", "dropped"), [(None, False), (0, False), (0x1, False), (0x4, False), (0x8, True),
                                                  (0x20, True), (0x44, True), (THROTTLED, True)])
def test_the_power_cap_alone_drops_nothing(reasons: int | None, dropped: bool) -> None:
    assert State(throttle_reasons=reasons).throttled is dropped


def test_nothing_kept_is_not_timed() -> None:
    found = batch({"a": [1.0], "b": [1.0]}, [State(throttle_reasons=0x40)])
    assert distribution([found], "a") is None
    assert verdict(paired(ratios([found], "a", "b"))) == "not timed"
    assert distribution([found], "absent") is None


@given(st.lists(st.text(max_size=4), unique=True, max_size=8), st.integers(), st.integers(0, 99))
def test_the_order_of_a_round_is_a_shuffle_that_its_seed_gives(names: list[str], seed: int, index: int) -> None:
    order = round_order(names, seed, index)
    assert sorted(order) == sorted(names)
    assert order == round_order(names, seed, index)


def test_more_comparisons_make_wider_intervals() -> None:
    found = ratios([drifting({"a": 10.0, "b": 10.0}, CONFIRM_ROUNDS)], "a", "b")
    one, four = paired(found), paired(found, 4)
    assert one and four
    assert four.interval[0] <= one.interval[0] <= one.interval[1] <= four.interval[1]


def test_the_method_is_right_about_equals_and_about_a_planted_slowdown() -> None:
    """On made-up noise: at most 5% false wins, and a slowdown of 3% found in at least 95%."""
    found = calibrate([drifting({"one": 10.0, "same": 10.0}, 120 * CONFIRM_ROUNDS, noise=0.01)], "one", "same")
    assert found.ok(), found
    assert found.comparisons == 120
    assert found.resolved and found.resolved < 0.01


def test_recorded_runs_on_an_h200_are_right_about_equals_and_about_a_planted_slowdown() -> None:
    """Each finalist of four runs against itself, judged as the run judged it."""
    runs = sorted((Path(__file__).parents[3] / "data" / "recordings").glob("*.json"))
    found = calibrate_on([b for run in runs for c in recording.load(run).contests.values() for b in c.batches
                          if b.phase == "confirm"])
    assert found.ok(), found
    assert found.resolved and found.resolved < 0.015, found


def test_a_method_that_is_biased_is_found_out() -> None:
    found = calibrate([drifting({"one": 10.0, "same": 10.1}, 100 * CONFIRM_ROUNDS)], "one", "same")
    assert not found.ok()
    assert found.false_wins > 90


def test_survivors_are_the_faster_half_and_never_too_few() -> None:
    means = {"base": 10.0, **{f"c{i}": 10 + i for i in range(12)}}
    found = [drifting(means, 16)]
    names = [n for n in means if n != "base"]
    assert survivors(found, names, "base", 4) == [f"c{i}" for i in range(4)], "those that are slower beyond noise are out"
    close = [drifting({"base": 10.0, **{f"c{i}": 10.0 for i in range(12)}}, 16)]
    assert len(survivors(close, names, "base", 4)) == 6
    assert len(survivors(close, names[:3], "base", 4)) == 3


def test_finalists_are_of_the_home_group_and_one_of_each_other() -> None:
    means = {"base": 10.0, **{f"h{i}": 11.0 + i for i in range(9)}, "x0": 5.0, "x1": 6.0, "y0": 30.0}
    groups = {n: "home" if n[0] in "bh" else n[0] for n in means}
    order = fastest_first([drifting(means, 16)], [n for n in means if n != "base"], "base")
    assert order[:2] == ["x0", "x1"]
    assert finalists(order, groups, "home") == [f"h{i}" for i in range(FINALISTS)] + ["x0", "y0"]


def test_two_runs_agree_on_the_winner_or_call_it_a_tie() -> None:
    means = {"base": 10.0, **{f"c{i}": 9.8 + 0.1 * i for i in range(6)}}
    winners = {fastest_first([drifting(means, CONFIRM_ROUNDS, seed=s)], list(means), "base")[0] for s in range(10)}
    assert winners == {"c0"}
