"""From what was recorded to who wins: a pure function, the same on a live run and on a replay."""

from collections.abc import Sequence
from dataclasses import dataclass

from ....schedules.promoted import Distribution, Paired
from ....schedules.recipe import Recipe
from ....schedules.schedule import Schedule
from .gate import other_recipe
from .recording import Contest
from .timing import Batch, distribution, paired, ratios, verdict

STATUSES = ("winner", "incumbent", "faster", "tie", "slower", "another class", "another recipe", "failed", "not timed")


@dataclass(frozen=True)
class Place:
    """One candidate's place. versus: its time over the incumbent's; confirmed: by fresh samples; why: why it isn't the winner."""

    name: str
    schedule: Schedule
    status: str
    why: str
    times: Distribution | None = None
    versus: Paired | None = None
    numerics_class: str | None = None
    confirmed: bool = False


@dataclass(frozen=True)
class Ranking:
    """One kernel's candidates, the winner first, then by their ratio to the incumbent.

    winner: a name, the incumbent's where nothing is faster beyond noise; None where no candidate is right. tied: faster ones that
    can't be told from the winner."""

    kernel: str
    places: tuple[Place, ...]
    winner: str | None
    base: str | None
    home_class: str | None
    tied: tuple[str, ...] = ()

    def place(self, name: str) -> Place:
        return next(p for p in self.places if p.name == name)


def rank(contest: Contest, recipe: Recipe) -> Ranking:
    """Fresh samples decide: only candidates that were confirmed can win, and those are compared by nothing else."""
    base, home = contest.base(), contest.home()
    if base is None:
        return Ranking(contest.kernel, tuple(_out(contest, n) for n in contest.entrants), None, None, home)
    confirmed = [b for b in contest.batches if b.phase == "confirm"]
    allowed = [n for n, group in contest.groups(recipe).items() if group == home and n != base]
    tried = [n for n in allowed if any(n in b.samples_us for b in confirmed)]
    found = {n: p for n in tried if (p := paired(ratios(confirmed, n, base), len(tried)))}
    faster = sorted((n for n in found if verdict(found[n]) == "faster"), key=lambda n: (found[n].ratio, n))
    winner, tied = _choose(contest, confirmed, faster) if faster else (base, ())
    places = [_place(contest, recipe, n, base, winner, home, confirmed, len(tried)) for n in contest.entrants]
    order = sorted(places, key=lambda p: (p.name != winner, p.times is None, p.versus.ratio if p.versus else 1.0, p.name))
    return Ranking(contest.kernel, tuple(order), winner, base, home, tied)


def _choose(contest: Contest, confirmed: Sequence[Batch], faster: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The fastest; of those that can't be told from it, the one that needs the least of the GPU, so that two runs agree."""
    first = faster[0]
    near = [n for n in faster if n == first or verdict(paired(ratios(confirmed, n, first))) == "tie"]

    def needs(name: str) -> tuple[int, int, str]:
        facts = contest.entrants[name].facts
        return facts.get("shared_bytes") or 0, facts.get("registers") or 0, name

    winner = min(near, key=needs)
    return winner, tuple(n for n in near if n != winner)


def _out(contest: Contest, name: str) -> Place:
    failure = contest.failure(name)
    why = f"{failure.stage}: {failure.detail}" if failure else "not checked: out of time"
    checked = contest.checked.get(name)
    return Place(name, contest.entrants[name].schedule, "failed" if failure else "not timed", why,
                 numerics_class=checked.numerics_class if checked else None)


def _place(contest: Contest, recipe: Recipe, name: str, base: str, winner: str, home: str | None, confirmed: Sequence[Batch],
           comparisons: int) -> Place:
    checked = contest.checked.get(name)
    if checked is None or contest.failure(name):
        return _out(contest, name)
    fresh = [b for b in confirmed if name in b.samples_us]
    batches = fresh or [b for b in contest.batches if name in b.samples_us]
    times = distribution(batches, name)
    versus = paired(ratios(batches, name, base), max(1, comparisons) if fresh else 1) if name != base else None
    said = verdict(versus)
    other = other_recipe(recipe, contest.entrants[name].schedule)
    if name == winner:
        status, why = ("incumbent", "nothing was faster beyond noise") if name == base else ("winner", "")
    elif name == base:
        status, why = "incumbent", "the winner is faster beyond noise"
    elif times is None:
        status, why = "not timed", "out of time"
    elif other:
        status, why = "another recipe", other
    elif checked.numerics_class != home:
        status, why = "another class", "its bits differ: promotable as a new recipe alone"
    elif said == "faster" and not fresh:
        status, why = "faster", "not among the last in the race"
    else:
        status = said
        why = {"faster": "the winner is faster, or as fast and needs less", "tie": "no faster than the incumbent beyond noise",
               "slower": "slower than the incumbent"}[said]
    return Place(name, contest.entrants[name].schedule, status, why, times, versus, checked.numerics_class, bool(fresh))
