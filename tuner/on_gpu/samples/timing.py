"""A timing is a distribution: batches of samples, what is dropped of them, and what may be said of a difference.

A batch times several candidates in turns: each round takes one sample of each, in an order shuffled by the batch's seed. So
whatever drifts, drifts for all, and two candidates are compared by the ratio of their times in the same round. Rounds in
which the GPU says that it was slowed by heat or by its power supply are dropped. Intervals are of the median, by bootstrap.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....schedules.promoted import Distribution, Paired

CONFIDENCE = 0.95
RESAMPLES = 1000
QUANTILES = 21  # kept of a distribution, to draw it
# Reasons of NVML that drop a round: hardware slowdown (0x8), heat by software (0x20) and hardware (0x40), power brake (0x80).
# The software's power cap (0x4) is recorded only: it is how a GPU works under load, and both of a pair share it.
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
STATE_FIELDS = ("sm_mhz", "memory_mhz", "temperature_c", "power_w", "throttle_reasons")


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
    """Rounds of samples. samples_us: by candidate, one a round; states: one a round; phase: race, confirm, calibrate."""

    phase: str
    seed: int
    samples_us: Mapping[str, Sequence[float]]
    states: Sequence[State]

    def kept(self, name: str) -> np.ndarray:
        """[rounds kept] samples in us."""
        return np.array([t for t, state in zip(self.samples_us[name], self.states) if not state.throttled])

    @property
    def dropped(self) -> int:
        return sum(state.throttled for state in self.states)


def round_order(names: Sequence[str], seed: int, index: int) -> list[str]:
    """The order of one round: the same for the same seed."""
    order = list(names)
    random.Random(f"{seed}/{index}").shuffle(order)
    return order


def interval(samples: np.ndarray, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Bootstrap interval of the median. The resampling has a fixed seed: the same samples give the same interval."""
    picks = np.random.Generator(np.random.PCG64(len(samples))).integers(0, len(samples), (RESAMPLES, len(samples)))
    medians = np.median(samples[picks], axis=1)
    low, high = np.quantile(medians, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def distribution(batches: Iterable[Batch], name: str) -> Distribution | None:
    """Times of one candidate over batches; None where no sample was kept."""
    parts = [b.kept(name) for b in batches if name in b.samples_us]
    samples = np.concatenate(parts) if parts else np.array([])
    if not len(samples):
        return None
    quantiles = np.quantile(samples, np.linspace(0, 1, QUANTILES))
    return Distribution(_short(np.median(samples)), _pair(interval(samples)), len(samples), tuple(_short(q) for q in quantiles))


def ratios(batches: Iterable[Batch], name: str, base: str) -> np.ndarray:
    """[rounds] time of `name` over that of `base` in the same round."""
    parts = [b.kept(name) / b.kept(base) for b in batches if name in b.samples_us and base in b.samples_us]
    return np.concatenate(parts) if parts else np.array([])


def paired(found: np.ndarray, comparisons: int = 1) -> Paired | None:
    """The median ratio with its interval; None where there is no pair. comparisons: how many are made at once; the error
    is shared among them (Bonferroni)."""
    if not len(found):
        return None
    return Paired(_short(np.median(found)), _pair(interval(found, 1 - (1 - CONFIDENCE) / comparisons)), len(found))


def verdict(difference: Paired | None) -> str:
    """faster, slower, or tie: a difference is claimed only where its interval excludes none."""
    if difference is None:
        return "not timed"
    low, high = difference.interval
    return "faster" if high < 1 else "slower" if low > 1 else "tie"


def clocks(batches: Iterable[Batch]) -> dict[str, float]:
    """Medians of what was recorded of the GPU, and how many rounds were dropped."""
    states = [s for b in batches for s in b.states]
    found = {name: [getattr(s, name) for s in states if getattr(s, name) is not None] for name in STATE_FIELDS[:-1]}
    return {**{name: float(np.median(seen)) for name, seen in found.items() if seen},
            "throttled_rounds": float(sum(s.throttled for s in states))}


def _short(value: Any) -> float:
    """Five digits: more is noise, and makes files long."""
    return float(f"{float(value):.5g}")


def _pair(found: tuple[float, float]) -> tuple[float, float]:
    return _short(found[0]), _short(found[1])


def batch_to_dict(batch: Batch) -> dict[str, Any]:
    return {"phase": batch.phase, "seed": batch.seed,
            "samples_us": {name: [round(t, 4) for t in times] for name, times in batch.samples_us.items()},
            "states": [[getattr(s, f) for f in STATE_FIELDS] for s in batch.states]}


def batch_from_dict(table: Mapping[str, Any]) -> Batch:
    """Raises KeyError, TypeError or ValueError where the table isn't a batch."""
    states = [State(*values) for values in table["states"]]
    samples = {str(name): [float(t) for t in times] for name, times in table["samples_us"].items()}
    for name, times in samples.items():
        if len(times) != len(states) or not all(0 < t < float("inf") for t in times):
            raise ValueError(f"{name}: {len(times)} samples in {len(states)} rounds, each a positive time")
    return Batch(str(table["phase"]), int(table["seed"]), samples, states)
