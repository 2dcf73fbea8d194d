"""Timings as distributions: batches of samples, dropped rounds, and verdicts on differences.

A batch times several candidates in turns. Each round takes one sample of each, in an order shuffled by the batch's seed. Drift is
equal within a round: two candidates are compared by the ratio of their times in the same round. Rounds in which the GPU reports
throttling by heat or power supply are dropped. Intervals are bootstrap intervals of the median.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Annotated

import numpy as np

from ....schedules.promoted import Distribution, Paired
from ....shapes.fields import Count, Rule
from ...errors import RecordingError
from .machine import NOT_RECORDED

CONFIDENCE = 0.95
RESAMPLES = 1000
QUANTILES = 21  # stored per distribution, for drawings
# NVML's throttle reasons that drop a round: hardware slowdown 0x8, heat by software 0x20 and hardware 0x40, power brake 0x80.
# The software power cap (0x4) is only recorded: it is normal under load, and both sides of a pair share it.
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
KEPT_SHARE = 0.5  # minimum share of a batch's rounds: calibration covers half a confirmation, nothing shorter
RACE, CONFIRM = "race", "confirm"  # phases of a batch
Time = Annotated[float, Rule("a time in us, from 1e-3 to 1e9", lambda us: 1e-3 <= us <= 1e9)]


@dataclass(frozen=True)
class State:
    """The GPU at the end of a round. None: not recorded."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttle_reasons: int | None = None

    @property
    def throttled(self) -> bool:
        return bool((self.throttle_reasons or 0) & THROTTLED)


@dataclass(frozen=True)
class Batch:
    """Rounds of samples. phase: RACE, CONFIRM or calibrate. samples_us: [rounds] by candidate. states: [rounds]. process: the
    worker process's name, empty if not recorded."""

    phase: str
    seed: int
    samples_us: dict[str, list[float]]
    states: list[State]
    process: str = ""

    def kept(self, name: str) -> np.ndarray:
        """Samples [kept rounds] of a candidate, in us."""
        return np.array([t for t, state in zip(self.samples_us[name], self.states) if not state.throttled])

    @property
    def dropped(self) -> int:
        """Number of throttled rounds."""
        return sum(state.throttled for state in self.states)

    @property
    def enough(self) -> bool:
        """Whether at least KEPT_SHARE of the rounds are kept: fewer decide nothing."""
        return len(self.states) - self.dropped >= KEPT_SHARE * len(self.states)


def round_order(names: Sequence[str], seed: int, index: int) -> list[str]:
    """The order of one round: a function of seed and index."""
    order = list(names)
    random.Random(f"{seed}/{index}").shuffle(order)
    return order


def interval(samples: np.ndarray, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Bootstrap interval of the median. The resampling is deterministic: equal samples give equal intervals."""
    picks = np.random.Generator(np.random.PCG64(len(samples))).integers(0, len(samples), (RESAMPLES, len(samples)))
    medians = np.median(samples[picks], axis=1)
    low, high = np.quantile(medians, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def distribution(batches: Iterable[Batch], name: str) -> Distribution | None:
    """Times of one candidate over batches; None if no sample was kept."""
    parts = [b.kept(name) for b in batches if name in b.samples_us]
    samples = np.concatenate(parts) if parts else np.array([])
    if not len(samples):
        return None
    quantiles = np.quantile(samples, np.linspace(0, 1, QUANTILES))
    return Distribution(_short(np.median(samples)), _pair(interval(samples)), len(samples), tuple(_short(q) for q in quantiles))


def ratios(batches: Iterable[Batch], name: str, base: str) -> np.ndarray:
    """Ratios [rounds] of the times of `name` and `base` in the same round."""
    parts = [b.kept(name) / b.kept(base) for b in batches if name in b.samples_us and base in b.samples_us]
    return np.concatenate(parts) if parts else np.array([])


def paired(found: np.ndarray, comparisons: int = 1) -> Paired | None:
    """The median of ratios [pairs] with its interval; None without pairs. comparisons: number that share the error
    (Bonferroni)."""
    if not len(found):
        return None
    return Paired(_short(np.median(found)), _pair(interval(found, 1 - (1 - CONFIDENCE) / comparisons)), len(found))


def verdict(difference: Paired | None) -> str:
    """faster or slower if the interval excludes 1, else tie; not timed without a difference."""
    if difference is None:
        return "not timed"
    low, high = difference.interval
    return "faster" if high < 1 else "slower" if low > 1 else "tie"


def clocks(batches: Iterable[Batch]) -> dict[str, float]:
    """Medians of the GPU's states, and the number of throttled rounds. Values that weren't recorded are absent."""
    states = [s for b in batches for s in b.states]
    seen: dict[str, list[float | None]] = {
        "sm_mhz": [s.sm_mhz for s in states], "memory_mhz": [s.memory_mhz for s in states],
        "temperature_c": [s.temperature_c for s in states], "power_w": [s.power_w for s in states]}
    found = {name: [v for v in values if v is not None] for name, values in seen.items()}
    medians = {name: float(np.median(values)) for name, values in found.items() if values}
    flagged = [s for s in states if s.throttle_reasons is not None]
    return medians | ({"throttled_rounds": float(sum(s.throttled for s in flagged))} if flagged else {})


def describe_dropped(batches: Sequence[Batch]) -> str:
    """`3 of 96 rounds dropped for throttling`, or `96 rounds, throttling not recorded`."""
    states = [s for b in batches for s in b.states]
    if all(s.throttle_reasons is None for s in states):
        return f"{len(states)} rounds, throttling {NOT_RECORDED}"
    return f"{sum(s.throttled for s in states)} of {len(states)} rounds dropped for throttling"


def _short(value: float) -> float:
    """Rounded to five digits: more are noise."""
    return float(f"{float(value):.5g}")


def _pair(found: tuple[float, float]) -> tuple[float, float]:
    return _short(found[0]), _short(found[1])


@dataclass(frozen=True)
class StoredBatch:
    """A batch as in the file. states: the values of a State, in its order."""

    phase: str
    seed: int
    samples_us: Mapping[str, tuple[Time, ...]]
    states: tuple[tuple[Count | None, Count | None, Count | None, float | None, Count | None], ...]
    process: str = ""


def stored_batch(batch: Batch) -> StoredBatch:
    """For the file, with samples rounded to 0.1 ns."""
    samples = {name: tuple(round(t, 4) for t in times) for name, times in batch.samples_us.items()}
    return StoredBatch(batch.phase, batch.seed, samples, tuple(astuple(s) for s in batch.states), batch.process)


def batch_of(stored: StoredBatch, where: str) -> Batch:
    """From the file. Raises RecordingError if a candidate hasn't one sample per round."""
    for name, times in stored.samples_us.items():
        if len(times) != len(stored.states):
            raise RecordingError(f"{where}: {name}: {len(times)} samples of {len(stored.states)} rounds",
                                 expected="one per round")
    return Batch(stored.phase, stored.seed, {name: list(times) for name, times in stored.samples_us.items()},
                 [State(*values) for values in stored.states], stored.process)
