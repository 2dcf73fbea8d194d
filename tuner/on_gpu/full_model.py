"""The last part of the gate, over all kernels of a run, in the full model. It tries the fastest candidates together. If they
fail, it tries them one after another and keeps the incumbent of each that fails. Before a kernel's first promotion it also tries
whether another class makes the whole model faster."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from ...schedules.promoted import Checks
from ...schedules.recipe import Recipe
from ...schedules.schedule import Schedule
from ...shapes.errors import UserError
from .samples.gate import TOO_FEW, Agreement, GateResult, describe_slowdown, other_recipe
from .samples.ranking import Ranking
from .samples.recording import Contest
from .samples.timing import paired

REPEATS = 7  # pairs of old and new times in the full model
LEAST_PAIRS = 5  # minimum without throttling: an interval of fewer says little
SHARED_SHAPE = "a model with this shape runs the schedule in place, and was not asked: tune it with that model"
Tokens = Mapping[str, Sequence[Sequence[int]]]  # by mode: token ids of each prompt
Times = Mapping[str, Sequence[tuple[float, float]]]  # by mode: (old, new) us per token


class DecoderProbe(Protocol):
    """The full model under given schedules, by kernel; other kernels run under the decoder's own."""

    def tokens(self, schedules: Mapping[str, Schedule]) -> Tokens:
        """Tokens of each prompt of the prompt set, by mode (ar, sd, ssd). Raises UserError if the decoder can't run."""

    def time_step(self, old: Mapping[str, Schedule], new: Mapping[str, Schedule], repeats: int) -> Times:
        """(old, new) us per token by mode, measured in turns: `repeats` pairs without the throttled ones."""


def ask_decoder(probe: DecoderProbe, old: Mapping[str, Schedule], new: Mapping[str, Schedule], *, other_class: bool = False,
                repeats: int = REPEATS) -> Agreement:
    """Compares tokens, then times, up to the first failure.

    other_class: old and new may have other bits, and so other tokens: only AR, SD and SSD must agree with each other.
    """
    after = probe.tokens(new)
    modes, prompts = list(after), len(after["ar"])
    rights = [after["ar"]] if other_class or old == new else [probe.tokens(old)["ar"], after["ar"]]
    compared = [(mode, i, after[mode][i], right[i]) for right in rights for mode in modes for i in range(prompts)]
    wrong = [(mode, i, *found) for mode, i, tokens, right in compared if (found := first_difference(tokens, right))]
    checks = {"agreement": Checks(len(compared), len(compared) - len(wrong))}
    digest = hashlib.sha256(json.dumps([[list(t) for t in after[m]] for m in sorted(after)]).encode()).hexdigest()
    count = sum(len(tokens) for _, _, tokens, _ in compared)
    if wrong:
        mode, prompt, index, token, right_token = wrong[0]
        return Agreement(checks, prompts, count, digest, {},
                         f"{mode}, prompt {prompt}: token {index} is {token}, AR emits {right_token}")
    times = probe.time_step(old, new, repeats) if old != new else {}
    if few := [mode for mode, pairs in times.items() if len(pairs) < min(LEAST_PAIRS, repeats)]:
        return Agreement(checks, prompts, count, digest, {}, f"{few[0]}: {TOO_FEW} ({len(times[few[0]])} of {repeats})")
    ratios = {mode: paired(np.array([b / a for a, b in pairs])) for mode, pairs in times.items()}
    full = {mode: found for mode, found in ratios.items() if found}
    slower = [mode for mode, found in full.items() if not found.interval[1] <= 1]
    if full:
        checks["full_model"] = Checks(len(full), len(full) - len(slower))
    return Agreement(checks, prompts, count, digest, full,
                     describe_slowdown(slower[0], full[slower[0]].interval) if slower else None)


def first_difference(tokens: Sequence[int], right: Sequence[int]) -> tuple[int, int | None, int | None] | None:
    """(index, token, right token) of the first difference; a token past the end is None. None if there is no difference."""
    for i in range(max(len(tokens), len(right))):
        a, b = (s[i] if i < len(s) else None for s in (tokens, right))
        if a != b:
            return i, a, b
    return None


def choose(contests: Mapping[str, Contest], rankings: Mapping[str, Ranking], recipe: Recipe, probe: DecoderProbe | None,
           out_of_time: Callable[[], bool]) -> GateResult:
    """The candidates of a run that may be promoted. probe: None for a drafter's kernels, which change no token."""
    fastest = {k: r.winner for k, r in rankings.items() if r.winner is not None}
    if probe is None:
        return _without_decoder(contests, fastest, rankings)
    decoder = _Decoder(contests, probe)
    result = GateResult(dict(fastest), decoder.ask(fastest))
    if result.agreement.failure and not out_of_time():
        result = _one_by_one(decoder, fastest, rankings)
    for kernel, ranking in rankings.items():
        if out_of_time():
            break
        _other_classes(decoder, result, contests[kernel], ranking, recipe)
    return result


class _Decoder:
    """Tries named candidates in the full model in place of the incumbents."""

    def __init__(self, contests: Mapping[str, Contest], probe: DecoderProbe) -> None:
        self.contests, self.probe = contests, probe
        self.incumbents = self._schedules({k: c.incumbent for k, c in contests.items()})

    def _schedules(self, names: Mapping[str, str]) -> dict[str, Schedule]:
        return {k: self.contests[k].entrants[n].schedule for k, n in names.items() if n in self.contests[k].entrants}

    def ask(self, names: Mapping[str, str], other_class: bool = False, old: Mapping[str, str] | None = None) -> Agreement:
        """The agreement of `names` with `old`, or with the incumbents. A decoder that can't run is a failure in it."""
        before = self.incumbents | self._schedules(old or {})
        try:
            return ask_decoder(self.probe, before, before | self._schedules(names), other_class=other_class)
        except UserError as e:
            return Agreement(failure=e.found)

    def difference(self, kernel: str, name: str) -> str:
        """The first token that a candidate of another class would change, in words."""
        new = self.incumbents | self._schedules({kernel: name})
        try:
            before, after = self.probe.tokens(self.incumbents)["ar"], self.probe.tokens(new)["ar"]
        except UserError as e:
            return e.found
        for prompt, (right, tokens) in enumerate(zip(before, after)):
            if found := first_difference(tokens, right):
                return f"prompt {prompt}: token {found[0]} would be {found[1]} instead of {found[2]}"
        return f"no token of {sum(map(len, before))} over {len(before)} prompts would differ"


def _without_decoder(contests: Mapping[str, Contest], fastest: Mapping[str, str], rankings: Mapping[str, Ranking]) -> GateResult:
    """The result for a drafter's kernels. Look-up goes by shape: an incumbent whose row has a decoder's evidence also serves that
    decoder's model, where a schedule that is faster alone may be slower. So it stays."""
    result = GateResult(dict(fastest))
    for kernel, name in fastest.items():
        base = rankings[kernel].base
        if contests[kernel].shared and base is not None and name != base:
            result.accepted[kernel], result.rejected[kernel] = base, SHARED_SHAPE
    return result


def _one_by_one(decoder: _Decoder, fastest: Mapping[str, str], rankings: Mapping[str, Ranking]) -> GateResult:
    """Tries each change on top of those that passed, largest gain first. A kernel whose change fails keeps its incumbent."""
    result = GateResult({k: rankings[k].base or n for k, n in fastest.items()})
    changes = {k: n for k, n in fastest.items() if n != result.accepted[k]}
    for kernel in sorted(changes, key=lambda k: _ratio(rankings[k], changes[k])):
        found = decoder.ask({**result.accepted, kernel: changes[kernel]}, old=result.accepted)
        result.measured[kernel] = dict(found.full_model)
        if found.failure:
            result.rejected[kernel] = found.failure
        else:
            result.accepted[kernel] = changes[kernel]
    result.agreement = decoder.ask(result.accepted)
    if result.agreement.failure and (kept := changes.keys() - result.rejected.keys()):
        result.rejected |= {k: f"together: {result.agreement.failure}" for k in kept}
        result.accepted |= {k: rankings[k].base or fastest[k] for k in kept}
        result.agreement = decoder.ask(result.accepted)
    if result.agreement.failure:
        result.rejected |= {k: result.rejected.get(k, f"together: {result.agreement.failure}") for k in result.accepted}
        result.accepted = {}
    return result


def _ratio(ranking: Ranking, name: str) -> float:
    """A candidate's time over the incumbent's."""
    versus = ranking.place(name).versus
    return versus.ratio if versus else 1.0


def _other_classes(decoder: _Decoder, result: GateResult, contest: Contest, ranking: Ranking, recipe: Recipe) -> None:
    """Accepts a faster candidate of another class if it may found the class and the full model is faster; else reports it."""
    kernel = contest.name
    faster = [p for p in ranking.places
              if p.confirmed and p.status in ("another class", "another recipe") and p.says == "faster"]
    for place in faster:
        founding = contest.founded is None and not other_recipe(recipe, place.schedule)
        if founding and kernel in result.accepted:
            found = decoder.ask({**result.accepted, kernel: place.name}, other_class=True, old=result.accepted)
            if not found.failure and found.full_model and all(p.interval[1] < 1 for p in found.full_model.values()):
                result.accepted[kernel], result.agreement = place.name, found
                result.measured[kernel] = dict(found.full_model)
                return
    if faster:
        result.would_differ[kernel] = f"{faster[0].name} ({faster[0].why}): {decoder.difference(kernel, faster[0].name)}"
