"""One decision per kernel: the schedule in place, the proposed one, its time alone and in the full model, and the outcome."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ....schedules.promoted import Distribution, Paired
from ....schedules.schedule import Schedule
from ....shapes.own import OwnShape
from .gate import NOT_EXCLUDED, PROVES, TOO_FEW, GateResult
from .ranking import Ranking
from .recording import Contest, Recording

GAIN, UNCHANGED, REFUSED = "gain", "unchanged", "refused"
THROTTLED, UNDECIDED, NOT_ASKED, SKIPPED = "throttled", "undecided", "not asked", "skipped"
OUTCOMES = (GAIN, REFUSED, THROTTLED, UNDECIDED, NOT_ASKED, SKIPPED, UNCHANGED)  # in display order


@dataclass(frozen=True)
class Decision:
    """The decision on one kernel. outcome: one of OUTCOMES. now: the schedule in place. proposed: another schedule that is faster
    alone, or None. times_now, times: of the two. alone: time of proposed over now. full_model: intervals of time by mode, new
    over old, of this change or, if `together`, of all accepted changes."""

    kernel: str
    outcome: str
    why: str
    now: Schedule | None = None
    origin: str = ""
    proposed: Schedule | None = None
    times_now: Distribution | None = None
    times: Distribution | None = None
    alone: Paired | None = None
    full_model: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    together: bool = False

    def describe_full_model(self) -> str:
        """`ar +5.3% to +5.5%: proves a slowdown`, or an empty string."""
        parts = [f"{mode} {100 * (low - 1):+.1f}% to {100 * (high - 1):+.1f}%" +
                 (f": {PROVES}" if low > 1 else f": {NOT_EXCLUDED}" if high > 1 else "")
                 for mode, (low, high) in self.full_model.items()]
        return "; ".join(parts) + (", with all gains in place" if self.together and parts else "")


def decide(recording: Recording, rankings: Mapping[str, Ranking], promotable: frozenset[str],
           skipped: Mapping[str, str]) -> tuple[Decision, ...]:
    """The decisions of a run, in display order. promotable: kernels with a row that may be written."""
    made = [_decision(recording.contests[kernel], ranking, recording.gate, kernel in promotable)
            for kernel, ranking in rankings.items()]
    made += [Decision(kernel, SKIPPED, why) for kernel, why in skipped.items()]
    return tuple(sorted(made, key=lambda d: OUTCOMES.index(d.outcome)))


def _decision(contest: Contest, ranking: Ranking, gate: GateResult | None, promotable: bool) -> Decision:
    kernel, incumbent = contest.name, contest.incumbent
    chosen = gate.accepted.get(kernel, "") if gate else ""
    rejected = gate is not None and (kernel in gate.rejected or not chosen)
    proposed = ranking.winner if rejected or not chosen else chosen
    outcome, why = _outcome(contest, ranking, gate, promotable)
    if outcome in (THROTTLED, UNDECIDED) or proposed == incumbent:
        proposed = None
    now = ranking.place(incumbent)
    place = ranking.place(proposed) if proposed else None
    full, together = _full_model(kernel, gate) if gate and proposed else ({}, False)
    return Decision(kernel, outcome, why, now.schedule, contest.origin, place.schedule if place else None, now.times,
                    place.times if place else None, place.versus if place else None, full, together)


def _outcome(contest: Contest, ranking: Ranking, gate: GateResult | None, promotable: bool) -> tuple[str, str]:
    """(outcome, why)."""
    kernel, incumbent = contest.name, contest.incumbent
    if contest.throttled or (gate and gate.throttled(kernel)):
        return THROTTLED, f"{TOO_FEW if contest.finished else 'throttling left too few rounds'}: the next run times it again"
    if not contest.finished:
        return UNDECIDED, "out of time: the next run continues"
    if ranking.winner is None:
        return UNDECIDED, "no candidate is correct"
    if gate is None:
        return NOT_ASKED, "the full model was not asked"
    if kernel in gate.rejected:
        slowdown = gate.slowdown(kernel)
        if slowdown is None:
            return REFUSED, gate.rejected[kernel]
        return REFUSED, "slower in the full model" if slowdown[1][0] > 1 else "perhaps slower in the full model"
    chosen = gate.accepted.get(kernel)
    if chosen is None:
        return NOT_ASKED, "the full model was not asked about it"
    if chosen == incumbent:
        return UNCHANGED, ranking.place(incumbent).why
    if not promotable:
        return NOT_ASKED, "the full model was asked about another schedule"
    if not gate.agreement.prompts:
        own = isinstance(contest.shape, OwnShape)
        return GAIN, "faster; no decoder was asked" if own else "faster alone; a drafter's kernel changes no token"
    return GAIN, "faster alone; same tokens, " + ("full model not slower" if gate.measured.get(kernel, gate.agreement.full_model)
                                                  else "and no timed step runs it")


def _full_model(kernel: str, gate: GateResult) -> tuple[dict[str, tuple[float, float]], bool]:
    """(intervals by mode, whether they are of all accepted changes together)."""
    if kernel in gate.measured:
        return {mode: p.interval for mode, p in gate.measured[kernel].items()}, False
    if slowdown := gate.slowdown(kernel):
        return dict([slowdown]), False
    if kernel in gate.rejected:
        return {}, False
    return {mode: p.interval for mode, p in gate.agreement.full_model.items()}, True
