"""The race: which of many candidates is fastest, in as few samples as will tell.

Successive halving on intervals. Every rung times all that are left in turns, twice as often as the rung before; then those
whose interval lies wholly above the best's go, and of the rest the slower half. Candidates race within their group: another
numerics class never pushes out the one that may be promoted, and of each other class the best is kept to show its
gain. The last in the race are confirmed with fresh samples, which alone decide: a lucky sample doesn't win.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from .timing import RACE, Batch, paired, ratios

RUNGS = (8, 16, 32)  # rounds
FINALISTS = 4  # of the home group
CONFIRM_ROUNDS = 96

Timed = Callable[[str, Sequence[str], int], Batch | None]  # (phase, names, rounds) → batch of those that lived


def race(groups: Mapping[str, str], home: str, base: str, timed: Timed, out_of_time: Callable[[], bool],
         done: Sequence[Batch] = ()) -> list[Batch]:
    """Rungs until the finalists are left, or throttling spoils one.

    Args:
        groups: group by name of each candidate; home: the group that a winner must be of.
        base: the candidate that is in every batch, to compare across batches.
        out_of_time: asked between rungs.
        done: rungs that an earlier run measured.
    """
    batches: list[Batch] = []
    alive = [name for name in groups if name != base]
    for index, rounds in enumerate(RUNGS):
        if settled(alive, groups, home) or (index >= len(done) and out_of_time()):
            break
        batch = done[index] if index < len(done) else timed(RACE, [base, *alive], rounds)
        if batch is None:
            break
        batches.append(batch)
        if not batch.enough:
            break
        alive = [name for group in dict.fromkeys(groups[n] for n in alive)
                 for name in survivors(batches, [n for n in alive if groups[n] == group and n in batch.samples_us], base,
                                       FINALISTS if group == home else 1)]
    return batches


def settled(alive: Sequence[str], groups: Mapping[str, str], home: str) -> bool:
    """Whether no rung could put anybody out."""
    counts = {group: sum(groups[n] == group for n in alive) for group in {groups[n] for n in alive}}
    return all(n <= (FINALISTS if group == home else 1) for group, n in counts.items())


def survivors(batches: Sequence[Batch], names: Sequence[str], base: str, keep: int) -> list[str]:
    """The faster half, without those that are slower than the best beyond noise, but at least `keep`. Fastest first."""
    found = {name: p for name in names if (p := paired(ratios(batches, name, base)))}
    order = sorted(found, key=lambda name: (found[name].ratio, name))
    if len(order) <= keep:
        return order
    limit = found[order[0]].interval[1]
    near = [name for name in order if found[name].interval[0] <= limit]
    return order[:max(keep, min(len(near), math.ceil(len(order) / 2)))]


def fastest_first(batches: Sequence[Batch], names: Sequence[str], base: str) -> list[str]:
    """By the ratio to the base over all batches; those that were never timed come last."""
    found = {n: p.ratio for n in names if (p := paired(ratios(batches, n, base)))}
    return sorted(names, key=lambda n: (n not in found, found.get(n, 0.0), n))


def finalists(order: Sequence[str], groups: Mapping[str, str], home: str) -> list[str]:
    """Who is confirmed, of candidates in order: the best of the home group, and the best of each other group."""
    places = {group: [n for n in order if groups.get(n) == group] for group in dict.fromkeys([home, *groups.values()])}
    return [n for group, names in places.items() for n in names[:FINALISTS if group == home else 1]]
