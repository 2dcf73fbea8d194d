"""The change of a kernel's time: faster, slower, tie, or not comparable.

If the new row was timed against the old one in the same rounds, that paired comparison decides. Otherwise the medians of separate
runs are compared, if SKU, driver and clocks are equal. A difference is claimed only if the interval of the ratio excludes 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ...schedules.promoted import Distribution, PromotedSchedule

FASTER, SLOWER, TIE, NOT_COMPARABLE, SAME = "faster", "slower", "tie", "not comparable", "same"
PAIRED, SEPARATE, AGAINST_PREVIOUS = "paired", "separate runs", "against the schedule before it"
CLOCK_TOLERANCE = 0.01  # a kernel's time changes at most as its clocks do: below 1% that is within a timing's noise


@dataclass(frozen=True)
class TimeChange:
    """old, new: the distributions. ratio: new over old, with its 95% interval; None if not comparable. basis: the kind of
    comparison. why: the reason why they aren't comparable."""

    verdict: str
    old: Distribution | None
    new: Distribution | None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    basis: str = ""
    why: str = ""


def verdict_of(interval: tuple[float, float]) -> str:
    low, high = interval
    return FASTER if high < 1 else SLOWER if low > 1 else TIE


def time_change(old: PromotedSchedule | None, new: PromotedSchedule | None) -> TimeChange | None:
    """The change of time; None if nothing was timed, as in an offline report. An added row is compared with the schedule that it
    was timed against, which its timing contains."""
    if new is None:
        return TimeChange(NOT_COMPARABLE, old.timing.times, None, why="removed") if old else None
    before = new.timing.previous
    if old is not None and old.timing.times == new.timing.times and old.target == new.target:
        return TimeChange(SAME, old.timing.times, new.timing.times)
    if before is not None and (old is None or _is_before(old, new)):
        basis = PAIRED if old else AGAINST_PREVIOUS
        return TimeChange(verdict_of(before.paired.interval), before.times, new.timing.times, before.paired.ratio,
                          before.paired.interval, basis)
    if old is None:
        return TimeChange(NOT_COMPARABLE, None, new.timing.times, why="nothing to compare it with")
    was, now = old.timing.times, new.timing.times
    if why := _not_comparable(old, new):
        return TimeChange(NOT_COMPARABLE, was, now, why=why)
    interval = (now.interval_us[0] / was.interval_us[1], now.interval_us[1] / was.interval_us[0])
    return TimeChange(verdict_of(interval), was, now, now.median_us / was.median_us, interval, SEPARATE)


def _is_before(old: PromotedSchedule, new: PromotedSchedule) -> bool:
    """Whether the new row was timed against the old one, on the same kind of GPU."""
    before = new.timing.previous
    return before is not None and before.schedule_id == old.schedule_id and old.target == new.target


def _not_comparable(old: PromotedSchedule, new: PromotedSchedule) -> str:
    """The reason why two separate runs can't be compared, or an empty string."""
    if old.target != new.target:
        return "other SKU"
    if old.timing.driver != new.timing.driver:
        return f"other driver: {old.timing.driver}, {new.timing.driver}"
    return _other_clocks(old.timing.clocks, new.timing.clocks)


def _other_clocks(old: Mapping[str, float], new: Mapping[str, float]) -> str:
    for name in sorted(n for n in {*old, *new} if n.endswith("_mhz")):
        was, now = old.get(name), new.get(name)
        if was is None or now is None or abs(now - was) > CLOCK_TOLERANCE * max(now, was):
            return f"other clocks: {name} {_shown(was)}, {_shown(now)}"
    return ""


def _shown(clock: float | None) -> str:
    return "not recorded" if clock is None else f"{clock:g}"
