"""What the method of timing can tell: false wins of a candidate against itself, and the smallest difference it resolves.

From a recorded batch of one candidate under two names, cut into comparisons of as many rounds as a confirmation has; or from the
confirmations of any run, each candidate's even rounds against its odd ones, which is half as many pairs, and a round apart. A
slowdown is planted by stretching one name's samples, so a recording is enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....schedules.promoted import Paired
from .race import CONFIRM_ROUNDS
from .timing import Batch, paired, verdict

PLANTED = 0.03
SURE = 0.95  # share of comparisons in which a difference must be found to count as resolved
STEP, MOST = 0.0005, 0.2  # of the differences that are tried
Window = tuple[np.ndarray, int]  # the ratios of one comparison, and how many are made at once


@dataclass(frozen=True)
class Calibration:
    """false_wins: comparisons of equals in which a difference was claimed; found: those with PLANTED in which the slowdown was;
    resolved: the smallest slowdown found in SURE of them, None where none of up to MOST is."""

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


def calibrate(batches: Sequence[Batch], one: str, other: str, rounds: int = CONFIRM_ROUNDS) -> Calibration:
    """The same candidate as `one` and `other` in every batch."""
    return _judged([(w, 1) for batch in batches for w in _windows(batch, one, other, rounds)], rounds)


def calibrate_on(batches: Sequence[Batch], rounds: int = CONFIRM_ROUNDS, shared: bool = True) -> Calibration:
    """Every candidate of these confirmations against itself, round against round; a comparison takes `rounds` rounds. shared: the
    error is shared among as many comparisons as the confirmation made, as it was there."""
    return _judged([(w, max(1, len(batch.samples_us) - 1) if shared else 1) for batch in batches for name in batch.samples_us
                    for w in _halves(batch.kept(name), rounds)], rounds // 2)


def _judged(windows: Sequence[Window], rounds: int) -> Calibration:
    equal = [verdict(paired(ratios, at_once)) for ratios, at_once in windows]
    tried = [round(STEP * i, 4) for i in range(1, round(MOST / STEP))]
    resolved = next((s for s in tried if windows and _found(windows, s) >= SURE * len(windows)), None)
    noise = float(np.median([np.std(ratios) for ratios, _ in windows])) if windows else 0.0
    return Calibration(len(windows), rounds, sum(v != "tie" for v in equal), _found(windows, PLANTED), resolved, round(noise, 5))


def _windows(batch: Batch, one: str, other: str, rounds: int) -> list[np.ndarray]:
    """[rounds] ratios of each comparison, one after another in time."""
    found = batch.kept(one) / batch.kept(other)
    return [found[i:i + rounds] for i in range(0, len(found) - rounds + 1, rounds)]


def _halves(samples: np.ndarray, rounds: int) -> list[np.ndarray]:
    """[rounds / 2] ratios of neighbouring rounds a comparison, the later one on top in every other pair: a drift cancels."""
    pairs = samples[:len(samples) // 2 * 2].reshape(-1, 2)
    found = pairs[:, 0] / pairs[:, 1]
    found[1::2] = 1 / found[1::2]
    half = rounds // 2
    return [found[i:i + half] for i in range(0, len(found) - half + 1, half)]


def _found(windows: Sequence[Window], slowdown: float) -> int:
    return sum(_stretched(ratios, slowdown, at_once).interval[0] > 1 for ratios, at_once in windows)


def _stretched(ratios: np.ndarray, slowdown: float, at_once: int) -> Paired:
    found = paired(ratios * (1 + slowdown), at_once)
    assert found is not None
    return found
