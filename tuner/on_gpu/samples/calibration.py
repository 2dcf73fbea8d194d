"""The limits of the timing method: false wins of a candidate against itself, and the smallest difference that it resolves.

Two sources. A recorded batch of one candidate under two names, cut into comparisons with the rounds of a confirmation. Or the
confirmations of any run, each candidate's even rounds against its odd ones: half as many pairs. A slowdown is planted by
stretching one side's samples: a recording suffices."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .race import CONFIRM_ROUNDS
from .timing import Batch, paired, verdict

PLANTED = 0.03
SURE = 0.95  # share of comparisons that must find a difference for it to count as resolved
STEP, MOST = 0.0005, 0.2  # the differences that are tried


@dataclass(frozen=True)
class Calibration:
    """Results over all comparisons. false_wins: comparisons of equals that claim a difference. found: comparisons that find a
    planted slowdown of PLANTED. resolved: the smallest slowdown that SURE of them find, None if it exceeds MOST. noise: standard
    deviation of a pair's ratio."""

    comparisons: int
    rounds: int
    false_wins: int
    found: int
    resolved: float | None
    noise: float

    def ok(self) -> bool:
        """Whether at least 100 comparisons have at most 5% false wins and find the planted slowdown in at least 95%."""
        return (self.comparisons >= 100 and self.false_wins <= 0.05 * self.comparisons
                and self.found >= SURE * self.comparisons)


@dataclass(frozen=True)
class _Window:
    """One comparison of equals. ratios: [pairs]. at_once: comparisons that share the error."""

    ratios: np.ndarray
    at_once: int


def calibrate(batches: Sequence[Batch], one: str, other: str, rounds: int = CONFIRM_ROUNDS) -> Calibration:
    """Calibrates on batches with one candidate under the names `one` and `other`. rounds: per comparison."""
    return _judged([_Window(w, 1) for batch in batches for w in _windows(batch, one, other, rounds)], rounds)


def calibrate_on(batches: Sequence[Batch], rounds: int = CONFIRM_ROUNDS, shared: bool = True) -> Calibration:
    """Calibrates on confirmations: each candidate's even rounds against its odd ones. rounds: per comparison. shared: as in the
    confirmation, the error is shared among its comparisons."""
    return _judged([_Window(w, max(1, len(batch.samples_us) - 1) if shared else 1) for batch in batches
                    for name in batch.samples_us for w in _halves(batch.kept(name), rounds)], rounds // 2)


def resolution_of(confirmed: Sequence[Batch]) -> float | None:
    """The smallest difference that a run's confirmations resolve, as a share of the time; None if they resolve none. Uses all
    rounds without throttling."""
    windows = [_Window(w, max(1, len(batch.samples_us) - 1)) for batch in confirmed for name in batch.samples_us
               for w in _halves(batch.kept(name), len(batch.states) - batch.dropped)]
    return _resolved(windows)


def _judged(windows: Sequence[_Window], rounds: int) -> Calibration:
    equal = [verdict(paired(w.ratios, w.at_once)) for w in windows]
    noise = float(np.median([np.std(w.ratios) for w in windows])) if windows else 0.0
    found = sum(needed <= PLANTED for needed in _needed(windows))
    return Calibration(len(windows), rounds, sum(v != "tie" for v in equal), found, _resolved(windows), round(noise, 5))


def _needed(windows: Sequence[_Window]) -> list[float]:
    """Per comparison, the slowdown that moves its interval above 1: stretched samples stretch the interval."""
    return [1 / p.interval[0] - 1 for w in windows if (p := paired(w.ratios, w.at_once))]


def _resolved(windows: Sequence[_Window]) -> float | None:
    """The smallest multiple of STEP below MOST that SURE of the comparisons find."""
    needed = sorted(_needed(windows))
    if not needed:
        return None
    steps = max(1, math.floor(needed[math.ceil(SURE * len(needed)) - 1] / STEP) + 1)
    return round(steps * STEP, 4) if steps * STEP < MOST else None


def _windows(batch: Batch, one: str, other: str, rounds: int) -> list[np.ndarray]:
    """Ratios [rounds] of each comparison, in order of time."""
    found = batch.kept(one) / batch.kept(other)
    return [found[i:i + rounds] for i in range(0, len(found) - rounds + 1, rounds)]


def _halves(samples: np.ndarray, rounds: int) -> list[np.ndarray]:
    """Ratios [rounds / 2] of neighbouring rounds per comparison. The later round is numerator in every other pair: drift
    cancels."""
    pairs = samples[:len(samples) // 2 * 2].reshape(-1, 2)
    found = pairs[:, 0] / pairs[:, 1]
    found[1::2] = 1 / found[1::2]
    half = rounds // 2
    return [found[i:i + half] for i in range(0, len(found) - half + 1, half)] if half else []
