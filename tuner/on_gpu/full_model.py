"""The last part of the gate, over all kernels of a run: winners together in the full model, one after another where together they
fail, incumbents where a winner fails, and, where the recipe isn't founded yet, whether another class makes the whole model
faster."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...schedules.recipe import Recipe
from ...schedules.schedule import Schedule
from ...shapes.errors import UserError
from .samples.gate import Agreement, DecoderProbe, agreement_from_dict, ask_decoder, first_difference, other_recipe
from .samples.ranking import Ranking
from .samples.recording import Contest
from .samples.timing import verdict

NOT_ASKED = Agreement({}, 0, 0, None, {})


@dataclass
class Said:
    """accepted: by kernel the winner's name, or the incumbent's where the winner is rejected; agreement: of all of them together;
    rejected and would_differ: why, by kernel."""

    accepted: dict[str, str] = field(default_factory=dict)
    agreement: Agreement = NOT_ASKED
    rejected: dict[str, str] = field(default_factory=dict)
    would_differ: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def said_from_dict(table: Mapping[str, Any]) -> Said:
    """Raises KeyError or TypeError where it isn't one."""
    return Said(dict(table["accepted"]), agreement_from_dict(table["agreement"]), dict(table["rejected"]),
                dict(table["would_differ"]))


def judge(contests: Mapping[str, Contest], rankings: Mapping[str, Ranking], recipe: Recipe, probe: DecoderProbe | None,
          out_of_time: Callable[[], bool]) -> Said:
    """What may be promoted of a run's winners. probe None: kernels that no token depends on, such as a drafter's."""
    winners = {k: r.winner for k, r in rankings.items() if r.winner is not None}
    if probe is None:
        return _unasked(contests, winners, rankings)
    ask = _Asked(contests, probe)
    said = Said(dict(winners), ask(winners))
    if said.agreement.failure and not out_of_time():
        said = _one_by_one(ask, winners, rankings)
    for kernel, ranking in rankings.items():
        if out_of_time():
            break
        _other_classes(ask, said, contests[kernel], ranking, recipe)
    return said


class _Asked:
    """Asks the decoder about named candidates in place of the incumbents."""

    def __init__(self, contests: Mapping[str, Contest], probe: DecoderProbe) -> None:
        self.contests, self.probe = contests, probe
        self.incumbents = self.schedules({k: c.incumbent for k, c in contests.items()})

    def schedules(self, names: Mapping[str, str]) -> dict[str, Schedule]:
        return {k: self.contests[k].entrants[n].schedule for k, n in names.items() if n in self.contests[k].entrants}

    def __call__(self, names: Mapping[str, str], other_class: bool = False, old: Mapping[str, str] | None = None) -> Agreement:
        before = self.incumbents | self.schedules(old or {})
        try:
            return ask_decoder(self.probe, before, before | self.schedules(names), other_class=other_class)
        except UserError as e:
            return dataclasses.replace(NOT_ASKED, failure=e.found)

    def difference(self, kernel: str, name: str) -> str:
        """The first token that another class would change."""
        new = self.incumbents | self.schedules({kernel: name})
        try:
            before, after = self.probe.tokens(self.incumbents)["ar"], self.probe.tokens(new)["ar"]
        except UserError as e:
            return e.found
        for prompt, (right, tokens) in enumerate(zip(before, after)):
            if found := first_difference(tokens, right):
                return f"prompt {prompt}: token {found[0]} would be {found[1]} instead of {found[2]}"
        return f"no token of {sum(map(len, before))} over {len(before)} prompts would differ"


def _unasked(contests: Mapping[str, Contest], winners: Mapping[str, str], rankings: Mapping[str, Ranking]) -> Said:
    """A drafter's winners. A row that a model's decoder was checked with is that model's too, as look-up goes by shape: faster
    alone may be slower there."""
    said = Said(dict(winners))
    for kernel, name in winners.items():
        base = rankings[kernel].base
        if contests[kernel].shared and base is not None and name != base:
            said.accepted[kernel] = base
            said.rejected[kernel] = "a model with this shape runs what is in place, and was not asked: tune it with that model"
    return said


def _one_by_one(ask: _Asked, winners: Mapping[str, str], rankings: Mapping[str, Ranking]) -> Said:
    """Each change on top of those that passed before it, the largest gain first; where one fails, the kernel's incumbent."""
    said = Said({k: rankings[k].base or n for k, n in winners.items()})
    changes = {k: n for k, n in winners.items() if n != said.accepted[k]}
    for kernel in sorted(changes, key=lambda k: _ratio(rankings[k], changes[k])):
        found = ask({**said.accepted, kernel: changes[kernel]}, old=said.accepted)
        if found.failure:
            said.rejected[kernel] = found.failure
        else:
            said.accepted[kernel] = changes[kernel]
    said.agreement = ask(said.accepted)
    if said.agreement.failure and (kept := changes.keys() - said.rejected.keys()):
        said.rejected |= {k: f"together: {said.agreement.failure}" for k in kept}
        said.accepted |= {k: rankings[k].base or winners[k] for k in kept}
        said.agreement = ask(said.accepted)
    if said.agreement.failure:
        said.rejected |= {k: said.rejected.get(k, f"together: {said.agreement.failure}") for k in said.accepted}
        said.accepted = {}
    return said


def _ratio(ranking: Ranking, name: str) -> float:
    """A candidate's time over the incumbent's."""
    versus = ranking.place(name).versus
    return versus.ratio if versus else 1.0


def _other_classes(ask: _Asked, said: Said, contest: Contest, ranking: Ranking, recipe: Recipe) -> None:
    """A faster candidate of another class: taken where it may found the recipe and the full model is faster, else shown."""
    kernel = contest.kernel
    faster = [p for p in ranking.places
              if p.confirmed and p.status in ("another class", "another recipe") and verdict(p.versus) == "faster"]
    for place in faster:
        founding = contest.founded is None and not other_recipe(recipe, place.schedule)
        if founding and kernel in said.accepted:
            found = ask({**said.accepted, kernel: place.name}, other_class=True, old=said.accepted)
            if not found.failure and found.full_model and all(p.interval[1] < 1 for p in found.full_model.values()):
                said.accepted[kernel], said.agreement = place.name, found
                return
    if faster:
        said.would_differ[kernel] = f"{faster[0].name} ({faster[0].why}): {ask.difference(kernel, faster[0].name)}"
