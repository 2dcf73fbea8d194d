"""The draft length of each round, from measured times and running acceptance: 0 is a round of AR.

    rate(K) = (1 + sum over i <= K of S_i) / seconds(K),    S_i = a_1 ... a_i

a_i is the share of rounds whose drafted token i was accepted, among those whose tokens before it were. Counts decay by DECAY
per round, and one imagined round is added to each position: of PRIOR for the first, of the position before for the others. A
length that was given up is tried again, and the price of that is bounded: (1 - DECAY) * PRIOR of AR's tokens.

seconds(K) are medians of the last measurements, read at the rows that a draft of at most K tokens has on average: an n-gram
look-up may find fewer. Lengths without a measurement lie on the line through those with one.

Pure: no clock, no device. Rounds on a device observe a calibration (`calibrate`) instead of single rounds.
"""

import itertools
import operator
import statistics
from collections import deque
from collections.abc import Mapping

AUTO = "auto"
MOST = 8  # tokens; beyond it acceptance adds next to nothing
DECAY = 0.98
PRIOR = 0.5
KEPT_TIMES = 7  # measurements per length: a median of them outlives three disturbed rounds
FIRST = (4, 0, 8, 2)  # lengths of the first rounds where no time is known: the line needs several
AGAIN = 16  # rounds before AR is measured a second time; then twice as many, and so on
SLOPE = 0.1  # of a drafted token's time in AR's, where only one length has been measured
CARRIED = 8.0  # rounds that the acceptance of earlier requests counts for in a new one


class DraftLength:
    """The policy of one drafter on one machine; kept from request to request. most: the longest draft allowed."""

    def __init__(self, most: int) -> None:
        self.most = min(most, MOST)
        self.tried = [0.0] * self.most  # rounds that reached a position, decayed
        self.kept = [0.0] * self.most  # of which: accepted
        self.asked = [0.0] * self.most  # rounds that asked for as many tokens, decayed
        self.found = [0.0] * self.most  # of which: the drafter had as many
        self.times: dict[int, deque[float]] = {}
        self.calibrated: dict[int, float] = {}
        self.since_ar, self.next_ar = 0, AGAIN

    def begin(self) -> None:
        """A new request: the acceptance of earlier ones is a guess."""
        for counts, of in ((self.kept, self.tried), (self.found, self.asked)):
            for i, total in enumerate(of):
                counts[i] *= min(1.0, CARRIED / total) if total else 0.0
        self.tried = [min(total, CARRIED) for total in self.tried]
        self.asked = [min(total, CARRIED) for total in self.asked]

    def calibrate(self, seconds: Mapping[int, float]) -> None:
        """Measured times of a round by its draft length; they stand in place of all others."""
        self.calibrated = dict(seconds)

    def observe(self, asked: int, drafted: int, accepted: int, seconds: float | None = None) -> None:
        """A finished round: the tokens asked for, drafted and accepted, and its time."""
        for counts in (self.tried, self.kept, self.asked, self.found):
            counts[:] = [count * DECAY for count in counts]
        for i in range(min(asked, self.most)):
            self.asked[i] += 1
            self.found[i] += drafted > i
            if accepted >= i:
                self.tried[i] += 1
                self.kept[i] += accepted > i
        if seconds is not None and (drafted or not asked):  # a look-up in vain is no measure of AR
            self.times.setdefault(drafted, deque(maxlen=KEPT_TIMES)).append(seconds)
        self.since_ar = 0 if not asked else self.since_ar + 1

    def next(self) -> int:
        """The draft length of the next round, 0 to `most`."""
        if not self.calibrated:
            for length in FIRST[len(self.times):]:
                if min(length, self.most) not in self.times:
                    return min(length, self.most)
            if self.since_ar >= self.next_ar:
                self.since_ar, self.next_ar = 0, 2 * self.next_ar
                return 0
        return max(range(self.most + 1), key=lambda length: (self.rate(length), -length))

    def acceptance(self) -> list[float]:
        """a_i of each position, 0..1."""
        found, before = list[float](), PRIOR
        for kept, tried in zip(self.kept, self.tried):
            before = (kept + before) / (tried + 1)
            found.append(before)
        return found

    def expected_tokens(self, length: int) -> float:
        """Tokens that a round of this draft length emits on average."""
        return 1 + sum(itertools.accumulate(self.acceptance()[:length], operator.mul))

    def expected_rows(self, length: int) -> float:
        """Drafted tokens that a round of this draft length has on average. A device verifies all rows, drafted or not."""
        if self.calibrated:
            return length
        return sum((self.found[i] + 1) / (self.asked[i] + 1) for i in range(length))

    def seconds(self, rows: float) -> float:
        """The time of a round of so many drafted tokens; 1 where nothing is known."""
        return on_the_line(self.known, rows)

    @property
    def known(self) -> dict[int, float]:
        """The measured times, by draft length."""
        return self.calibrated or {length: statistics.median(times) for length, times in self.times.items()}

    def rate(self, length: int) -> float:
        """Tokens per second of rounds of this draft length."""
        return self.expected_tokens(length) / self.seconds(self.expected_rows(length))


def on_the_line(known: Mapping[int, float], rows: float) -> float:
    """Seconds at `rows`: on the line between the known neighbours; outside them on that from the first to the last, which falls
    by SLOPE at most."""
    points = sorted(known.items()) or [(0, 1.0)]
    first, last = points[0], points[-1]
    below = max((p for p in points if p[0] <= rows), default=first)
    above = min((p for p in points if p[0] > rows), default=last)
    left, right = (below, above) if below[0] <= rows < above[0] else (first, last)
    if left == right:
        return first[1] * (1 + SLOPE * rows) / (1 + SLOPE * first[0])
    slope = max(right[1] - left[1], 0.0) / (right[0] - left[0])
    return max(below[1] + slope * (rows - below[0]), first[1] / (1 + SLOPE * first[0]))
