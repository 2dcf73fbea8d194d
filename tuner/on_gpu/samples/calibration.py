"""The limits of the method of timing: false wins of a candidate against itself, and the smallest difference it resolves.

From a recorded batch of one candidate under two names, cut into comparisons of as many rounds as a confirmation has; or from the
confirmations of any run, each candidate's even rounds against its odd ones, which is half as many pairs, and a round apart. A
slowdown is planted by stretching one name's samples, so a recording is enough.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .race import CONFIRM_ROUNDS
from .timing import Batch, paired, verdict

PLANTED = 0.03
SURE = 0.95  # share of comparisons in which a difference must be found to count as resolved
STEP, MOST = 0.0005, 0.2  # of the differences that are tried


@dataclass(frozen=True)
class Calibration:
    """false_wins: comparisons of equals in which a difference was claimed; found: those with PLANTED in which the slowdown was;
    resolved: the smallest slowdown found in SURE of them, None if none of up to MOST is; noise: standard deviation of a
    pair's ratio."""

    comparisons: int
    rounds: int
    false_wins: int
    found: int
    resolved: float | None
    noise: float

    def ok(self) -> bool:
        """At most 5% false wins, the planted slowdown found in at least 95%, of at least 100 comparisons."""
        return (self.comparisons >= 100 and self.false_wins <= 0.05 * self.comparisons
                and self.found >= SURE * self.comparisons)


@dataclass(frozen=True)
class _Window:
    """One comparison of equals. ratios: [pairs]; at_once: comparisons that share the error."""

    ratios: np.ndarray
    at_once: int


def calibrate(batches: Sequence[Batch], one: str, other: str, rounds: int = CONFIRM_ROUNDS) -> Calibration:
    """The same candidate as `one` and `other` in every batch."""
    return _judged([_Window(w, 1) for batch in batches for w in _windows(batch, one, other, rounds)], rounds)


def calibrate_on(batches: Sequence[Batch], rounds: int = CONFIRM_ROUNDS, shared: bool = True) -> Calibration:
    """Every candidate of these confirmations against itself, round against round; a comparison takes `rounds` rounds. shared: the
    error is shared among as many comparisons as the confirmation made, as it was there."""
    return _judged([_Window(w, max(1, len(batch.samples_us) - 1) if shared else 1) for batch in batches
                    for name in batch.samples_us for w in _halves(batch.kept(name), rounds)], rounds // 2)


def resolution_of(confirmed: Sequence[Batch]) -> float | None:
    """The smallest difference that a run's confirmations resolve, as a share of the time, from all the rounds that each has left;
    None if they resolve none."""
    windows = [_Window(w, max(1, len(batch.samples_us) - 1)) for batch in confirmed for name in batch.samples_us
               for w in _halves(batch.kept(name), len(batch.states) - batch.dropped)]
    return _resolved(windows)


def _judged(windows: Sequence[_Window], rounds: int) -> Calibration:
    equal = [verdict(paired(w.ratios, w.at_once)) for w in windows]
    noise = float(np.median([np.std(w.ratios) for w in windows])) if windows else 0.0
    found = sum(needed <= PLANTED for needed in _needed(windows))
    return Calibration(len(windows), rounds, sum(v != "tie" for v in equal), found, _resolved(windows), round(noise, 5))


def _needed(windows: Sequence[_Window]) -> list[float]:
    """For each comparison the slowdown that takes its interval above 1: stretched samples stretch the interval."""
    return [1 / p.interval[0] - 1 for w in windows if (p := paired(w.ratios, w.at_once))]


def _resolved(windows: Sequence[_Window]) -> float | None:
    """The smallest multiple of STEP below MOST that SURE of the comparisons find."""
    needed = sorted(_needed(windows))
    if not needed:
        return None
    steps = max(1, math.floor(needed[math.ceil(SURE * len(needed)) - 1] / STEP) + 1)
    return round(steps * STEP, 4) if steps * STEP < MOST else None


def _windows(batch: Batch, one: str, other: str, rounds: int) -> list[np.ndarray]:
    """[rounds] ratios of each comparison, one after another in time."""
    found = batch.kept(one) / batch.kept(other)
    return [found[i:i + rounds] for i in range(0, len(found) - rounds + 1, rounds)]


def _halves(samples: np.ndarray, rounds: int) -> list[np.ndarray]:
    """[rounds / 2] ratios of neighbouring rounds in each comparison, the later one on top in every other pair: drift cancels."""
    pairs = samples[:len(samples) // 2 * 2].reshape(-1, 2)
    found = pairs[:, 0] / pairs[:, 1]
    found[1::2] = 1 / found[1::2]
    half = rounds // 2
    return [found[i:i + half] for i in range(0, len(found) - half + 1, half)] if half else []
