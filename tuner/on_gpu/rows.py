"""From a run's decisions to rows of `schedules/`, with times and evidence."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...schedules import store
from ...schedules.promoted import Evidence, Previous, PromotedSchedule, PromotedTiming, Recorded
from ...schedules.recipe import OWN
from ...schedules.schedule import schedule_id
from ...schedules.store import PromotedFile
from .samples.gate import GateResult
from .samples.ranking import Ranking, timed_batches
from .samples.recording import Contest, Recording
from .samples.timing import clocks, distribution, paired, ratios


@dataclass(frozen=True)
class Promotable:
    """Rows that may be promoted, each to the file of its model and recipe, or of its kernel."""

    rows: tuple[PromotedSchedule, ...]

    def files(self) -> list[PromotedFile]:
        """The rows by file."""
        found: dict[tuple[str, str, str], list[PromotedSchedule]] = {}
        for row in self.rows:
            found.setdefault((row.target, row.model, row.recipe), []).append(row)
        return [PromotedFile(*place, rows=tuple(rows)) for place, rows in found.items()]


def promotable(recording: Recording, rankings: Mapping[str, Ranking], gate: GateResult, date: str) -> Promotable:
    """The rows that a run may promote: gains, and incumbents that stay and have no row yet.

    A candidate that the gate accepted but that no longer wins (in a replay under another rule) has no evidence: no row. date: of
    the promotion, YYYY-MM-DD.
    """
    rows = []
    for kernel, name in gate.accepted.items():
        contest, ranking = recording.contests[kernel], rankings[kernel]
        place = ranking.place(name)
        rightful = name == ranking.winner or place.status == "another class" or (name == ranking.base and kernel in gate.rejected)
        if rightful and place.times is not None and not (name == contest.incumbent and contest.origin == "promoted"):
            rows.append(_row(recording, contest, name, gate, date))
    return Promotable(tuple(rows))


def _row(recording: Recording, contest: Contest, name: str, gate: GateResult, date: str) -> PromotedSchedule:
    entrant, checked, agreement = contest.entrants[name], contest.checked[name], gate.agreement
    mine = schedule_id(entrant.schedule)
    evidence = Evidence(mine, {**checked.checks, **agreement.checks}, agreement.prompts, agreement.tokens_compared,
                        agreement.tokens_sha256, recording.weights, recording.weights_fingerprint, agreement.full_model)
    return PromotedSchedule(
        recording.target, contest.kernel if recording.recipe == OWN.name else recording.model, recording.recipe, contest.kernel,
        contest.shape, entrant.schedule, mine,
        contest.kernel_digest, recording.toolchain, Recorded(recording.machine.driver, recording.machine.cuda), entrant.artefact,
        checked.numerics_class or "", _timing(recording, contest, name, mine), evidence, date).sealed()


def _timing(recording: Recording, contest: Contest, name: str, mine: str) -> PromotedTiming:
    batches, _ = timed_batches(contest, name)
    times = distribution(batches, name)
    assert times is not None
    previous = None
    before = contest.incumbent
    if before != name and (then := distribution(batches, before)) and (change := paired(ratios(batches, name, before))):
        schedule = contest.entrants[before].schedule
        previous = Previous(schedule, schedule_id(schedule), then, change)
    return PromotedTiming(mine, times, previous, recording.machine.driver, clocks(batches))


def merged(folder: Path, new: PromotedFile) -> tuple[PromotedFile | None, PromotedFile]:
    """(the present file or None, the file after the promotion). Writes nothing. Raises ScheduleError."""
    path = folder / new.name
    old = store.read(path) if path.exists() else None
    return old, store.with_rows(old, new)
