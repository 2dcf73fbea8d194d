"""The race: finds the fastest of many candidates with few samples.

Successive halving on intervals. Each rung times the remaining candidates in turns, with twice the rounds of the rung before. Then
it drops those whose interval lies wholly above the best's, and the slower half of the rest. Candidates race within their group, a
numerics class: another class never displaces a candidate that may be promoted. The best of each other class is kept, to show its
gain. Finalists are confirmed with fresh samples, which alone decide: a lucky sample doesn't win.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from .timing import RACE, Batch, paired, ratios

RUNGS = (8, 16, 32)  # rounds per rung
FINALISTS = 4  # of the home group
CONFIRM_ROUNDS = 96

Timed = Callable[[str, Sequence[str], int], Batch | None]  # (phase, names, rounds) → batch of the survivors


def race(groups: Mapping[str, str], home: str, base: str, timed: Timed, out_of_time: Callable[[], bool],
         done: Sequence[Batch] = ()) -> list[Batch]:
    """The rungs' batches, until only finalists are left or throttling spoils a rung.

    Args:
        groups: group by candidate. home: the group that a winner must belong to.
        base: the candidate in every batch, for comparisons across batches.
        out_of_time: checked between rungs.
        done: rungs of an earlier run.
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
    """Whether another rung would drop no candidate."""
    counts = {group: sum(groups[n] == group for n in alive) for group in {groups[n] for n in alive}}
    return all(n <= (FINALISTS if group == home else 1) for group, n in counts.items())


def survivors(batches: Sequence[Batch], names: Sequence[str], base: str, keep: int) -> list[str]:
    """The faster half without those slower than the best beyond noise, at least `keep`; fastest first."""
    found = {name: p for name in names if (p := paired(ratios(batches, name, base)))}
    order = sorted(found, key=lambda name: (found[name].ratio, name))
    if len(order) <= keep:
        return order
    limit = found[order[0]].interval[1]
    near = [name for name in order if found[name].interval[0] <= limit]
    return order[:max(keep, min(len(near), math.ceil(len(order) / 2)))]


def fastest_first(batches: Sequence[Batch], names: Sequence[str], base: str) -> list[str]:
    """Names by their ratio to the base over all batches; untimed ones last."""
    found = {n: p.ratio for n in names if (p := paired(ratios(batches, n, base)))}
    return sorted(names, key=lambda n: (n not in found, found.get(n, 0.0), n))


def finalists(order: Sequence[str], groups: Mapping[str, str], home: str) -> list[str]:
    """The candidates to confirm: the first FINALISTS of the home group in this order, and the first of each other group."""
    places = {group: [n for n in order if groups.get(n) == group] for group in dict.fromkeys([home, *groups.values()])}
    return [n for group, names in places.items() for n in names[:FINALISTS if group == home else 1]]
