"""What the method of timing can tell: false wins of a candidate against itself, and the smallest difference it resolves.

From one recorded batch of one candidate under two names, cut into comparisons of as many rounds as a confirmation has. A
slowdown is planted by stretching one name's samples, so a recording is enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..schedules.promoted import Paired
from .race import CONFIRM_ROUNDS
from .timing import Batch, paired, verdict

PLANTED = 0.03
SURE = 0.95  # share of comparisons in which a difference must be found to count as resolved
STEP, MOST = 0.0005, 0.2  # of the differences that are tried


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
    windows = [w for batch in batches for w in _windows(batch, one, other, rounds)]
    equal = [verdict(paired(w)) for w in windows]
    tried = [round(STEP * i, 4) for i in range(1, round(MOST / STEP))]
    resolved = next((s for s in tried if windows and _found(windows, s) >= SURE * len(windows)), None)
    noise = float(np.median([np.std(w) for w in windows])) if windows else 0.0
    return Calibration(len(windows), rounds, sum(v != "tie" for v in equal), _found(windows, PLANTED), resolved, round(noise, 5))


def _windows(batch: Batch, one: str, other: str, rounds: int) -> list[np.ndarray]:
    """[rounds] ratios of each comparison, one after another in time."""
    found = batch.kept(one) / batch.kept(other)
    return [found[i:i + rounds] for i in range(0, len(found) - rounds + 1, rounds)]


def _found(windows: Sequence[np.ndarray], slowdown: float) -> int:
    return sum(_stretched(w, slowdown).interval[0] > 1 for w in windows)


def _stretched(window: np.ndarray, slowdown: float) -> Paired:
    found = paired(window * (1 + slowdown))
    assert found is not None
    return found
