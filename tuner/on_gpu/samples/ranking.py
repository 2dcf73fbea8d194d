"""From samples to the fastest candidate: a pure function, the same in a live run and in a replay.

A candidate counts as faster or slower if each confirming worker process finds it so beyond noise, and if the difference exceeds
both the resolution of the run's confirmations and the effect of the processes. Everything else is a tie.

The placement of buffers and code shifts all times of a process: the same artefact was 5% slower in the next process. The effect's
size shows in the differences of each candidate's ratio between the processes. The standard error of a mean over processes is
pooled over the contest; a claim must exceed SURE_ERRORS times that error."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ....schedules.promoted import Distribution, Paired
from ....schedules.recipe import Recipe
from ....schedules.schedule import Schedule
from .calibration import resolution_of
from .gate import other_recipe
from .recording import Contest, Recording
from .timing import CONFIRM, Batch, distribution, paired, ratios, verdict

FASTEST = "fastest"  # a status; the full model decides on the promotion
STATUSES = (FASTEST, "incumbent", "faster", "tie", "slower", "another class", "another recipe", "failed", "not timed")
# Multiples of the standard error, by the number of candidates that it is pooled over. Among equals, at most 5% of contests then
# have a winner, for any effect of the processes (simulated: scripts/throttled_wins.py).
SURE_ERRORS = {1: 6.4, 2: 4.2}
SAME_BITS_NEEDED = "its bits differ: it could be promoted in a new recipe only"


@dataclass(frozen=True)
class Rule:
    """The conditions of a claim. processes: number that must agree. resolution, between: differences up to these shares of the
    time are ties, for the run's resolution (None: it resolves nothing) and for the effect of the processes."""

    processes: int
    resolution: float | None
    between: float = 0.0


@dataclass(frozen=True)
class Claim:
    """The verdict on a candidate against the incumbent. says: faster, slower, tie or not timed. why: the reason of the latter
    two."""

    says: str
    why: str = ""
    versus: Paired | None = None


@dataclass(frozen=True)
class Place:
    """One candidate's place. versus: its time over the incumbent's. confirmed: with fresh samples."""

    name: str
    schedule: Schedule
    status: str
    why: str
    times: Distribution | None = None
    versus: Paired | None = None
    numerics_class: str | None = None
    confirmed: bool = False
    says: str = "not timed"


@dataclass(frozen=True)
class Ranking:
    """One kernel's candidates: the winner, then by ratio to the incumbent.

    winner: a name, the incumbent's if nothing is faster; None if no candidate is correct or confirmed. tied: faster candidates
    that can't be distinguished from the winner."""

    kernel: str
    places: tuple[Place, ...]
    winner: str | None
    base: str | None
    home_class: str | None
    rule: Rule
    tied: tuple[str, ...] = ()

    def place(self, name: str) -> Place:
        return next(p for p in self.places if p.name == name)


def rank_all(recording: Recording, recipe: Recipe) -> dict[str, Ranking]:
    """The ranking of every contest of a run, under the rule of the recording's version."""
    confirmed = [b for c in recording.contests.values() for listed in c.confirmations().values() for b in listed]
    rule = Rule(recording.processes, resolution_of(confirmed) if recording.processes > 1 else 0.0)
    return {kernel: rank(contest, recipe, rule) for kernel, contest in recording.contests.items()}


def rank(contest: Contest, recipe: Recipe, rule: Rule) -> Ranking:
    """The ranking of one contest. Only confirmed candidates can win, and only their fresh samples count."""
    base, home = contest.base(), contest.home()
    if base is None:
        return Ranking(contest.name, tuple(_out(contest, n) for n in contest.entrants), None, None, home, rule)
    confirmed = contest.confirmations()
    allowed = [n for n, group in contest.groups(recipe).items() if group == home and n != base]
    tried = [n for n in allowed if any(n in b.samples_us for listed in confirmed.values() for b in listed)]
    rule = replace(rule, between=between_processes(confirmed, tried, base))
    claims = {n: claim(confirmed, n, base, rule, len(tried)) for n in tried}
    faster = sorted((n for n in tried if claims[n].says == "faster"), key=lambda n: (_ratio(claims[n].versus), n))
    winner: str | None = base if contest.finished else None
    tied: tuple[str, ...] = ()
    if faster:
        winner, tied = _choose(contest, [b for listed in confirmed.values() for b in listed], faster, rule)
    places = [_place(contest, recipe, n, base, winner, len(tried), rule) for n in contest.entrants]
    order = sorted(places, key=lambda p: (p.name != winner, p.times is None, _ratio(p.versus), p.name))
    return Ranking(contest.name, tuple(order), winner, base, home, rule, tied)


def claim(confirmed: Mapping[str, Sequence[Batch]], name: str, base: str, rule: Rule, comparisons: int) -> Claim:
    """The verdict of several processes' confirmations. comparisons: number that share the error."""
    each = [p for listed in confirmed.values() if (p := paired(ratios(listed, name, base), comparisons))]
    versus = paired(ratios([b for listed in confirmed.values() for b in listed], name, base), comparisons)
    if versus is None:
        return Claim("not timed", "no confirmation has enough rounds left")
    verdicts = {verdict(p) for p in each}
    if len(verdicts) > 1 or verdicts == {"tie"}:
        disagree = {"faster", "slower"} <= verdicts
        return Claim("tie", "one process finds it faster and another slower" if disagree else
                     "no difference beyond noise in each process", versus)
    if rule.resolution is None or abs(versus.ratio - 1) <= rule.resolution:
        resolved = "nothing" if rule.resolution is None else f"{100 * rule.resolution:.2f}%"
        return Claim("tie", f"below the resolution of this run: {resolved}", versus)
    if abs(versus.ratio - 1) <= rule.between:
        return Claim("tie", f"the processes differ too much: their effect may be {100 * rule.between:.1f}%", versus)
    if len(each) < rule.processes:
        return Claim("tie", f"confirmed in {len(each)} of {rule.processes} processes", versus)
    return Claim(verdicts.pop(), "", versus)


def between_processes(confirmed: Mapping[str, Sequence[Batch]], names: Iterable[str], base: str) -> float:
    """The largest difference from the incumbent, as a share, that the processes' effect may cause; 0 if one process confirmed."""
    each = [[float(np.median(r)) for listed in confirmed.values() if len(r := ratios(listed, name, base))] for name in names]
    spread = [(np.var(found, ddof=1), len(found)) for found in each if len(found) > 1]
    if not spread:
        return 0.0
    error = np.sqrt(np.mean([variance / processes for variance, processes in spread]))
    return float(SURE_ERRORS[min(len(spread), max(SURE_ERRORS))] * error)


def timed_batches(contest: Contest, name: str) -> tuple[list[Batch], bool]:
    """(the batches of a candidate's time, whether they are confirmations)."""
    usable = [b for b in contest.batches if name in b.samples_us and b.enough]
    fresh = [b for b in usable if b.phase == CONFIRM]
    return fresh or usable, bool(fresh)


def _choose(contest: Contest, confirmed: Sequence[Batch], faster: Sequence[str], rule: Rule) -> tuple[str, tuple[str, ...]]:
    """(winner, tied). Of the fastest and its equals, the winner is the one with the least shared memory and registers: two runs
    then choose the same."""
    first = faster[0]

    def as_fast(name: str) -> bool:
        found = paired(ratios(confirmed, name, first))
        return found is None or verdict(found) == "tie" or abs(found.ratio - 1) <= (rule.resolution or 0.0)

    def needs(name: str) -> tuple[int, int, str]:
        artefact = contest.entrants[name].artefact
        return artefact.shared_bytes, artefact.registers, name

    near = [n for n in faster if n == first or as_fast(n)]
    winner = min(near, key=needs)
    return winner, tuple(n for n in near if n != winner)


def _ratio(versus: Paired | None) -> float:
    return versus.ratio if versus else 1.0


def _out(contest: Contest, name: str) -> Place:
    failure = contest.failure(name)
    why = f"{failure.stage}: {failure.detail}" if failure else "not checked: out of time"
    checked = contest.checked.get(name)
    return Place(name, contest.entrants[name].schedule, "failed" if failure else "not timed", why,
                 numerics_class=checked.numerics_class if checked else None)


def _place(contest: Contest, recipe: Recipe, name: str, base: str, winner: str | None, comparisons: int, rule: Rule) -> Place:
    checked = contest.checked.get(name)
    if checked is None or contest.failure(name):
        return _out(contest, name)
    batches, fresh = timed_batches(contest, name)
    times = distribution(batches, name)
    if fresh and name != base:
        found = claim(contest.confirmations(), name, base, rule, max(1, comparisons))
    else:
        versus = paired(ratios(batches, name, base)) if name != base else None
        found = Claim(verdict(versus), "", versus)
    status, why = _status(contest, name, base, winner, found, fresh)
    if name != base and times is None:
        status, why = "not timed", "throttled" if contest.throttled else "out of time"
    elif name not in (base, winner) and (other := other_recipe(recipe, contest.entrants[name].schedule)):
        status, why = "another recipe", other
    elif name not in (base, winner) and not contest.any_class and checked.numerics_class != contest.home():
        status, why = "another class", SAME_BITS_NEEDED
    return Place(name, contest.entrants[name].schedule, status, why, times, found.versus, checked.numerics_class, fresh,
                 found.says)


def _status(contest: Contest, name: str, base: str, winner: str | None, found: Claim, fresh: bool) -> tuple[str, str]:
    """(status, why) of a timed candidate of the home class."""
    if name == base:
        if winner is None:
            return "incumbent", "nothing is confirmed: " + ("throttled" if contest.throttled else "out of time")
        return "incumbent", "nothing was faster beyond noise" if name == winner else "the fastest is faster beyond noise"
    if name == winner:
        return FASTEST, ""
    if found.says == "faster" and not fresh:
        return "faster", "not among the finalists"
    why = {"faster": "the fastest is faster, or as fast with less shared memory or registers",
           "tie": "no faster than the incumbent beyond noise",
           "slower": "slower than the incumbent", "not timed": "not timed"}[found.says]
    return found.says, found.why or why
