"""From a run's winners to rows of `schedules/`, with what was measured and proven of each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...schedules import store
from ...schedules.promoted import Artefact, Checks, Evidence, Previous, PromotedSchedule, PromotedTiming, Recorded
from ...schedules.schedule import schedule_id
from ...schedules.store import PromotedFile
from .full_model import Said
from .samples.ranking import Ranking
from .samples.recording import Contest, Recording
from .samples.timing import clocks, distribution, paired, ratios

COUNTS = ("registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes", "shared_bytes", "tmem_columns", "blocks_per_sm")


def promoted_file(recording: Recording, rankings: Mapping[str, Ranking], said: Said, date: str) -> PromotedFile:
    """The rows that a run may promote: winners, and at a first promotion the incumbents that stayed, whether nothing was faster
    or the full model refused what was.

    A name that the gate accepted and that no longer wins (a replay under another rule) is left out: its evidence isn't there.
    """
    rows = []
    for kernel, name in said.accepted.items():
        contest, ranking = recording.contests[kernel], rankings[kernel]
        place = ranking.place(name)
        rightful = name == ranking.winner or place.status == "another class" or (name == ranking.base and kernel in said.rejected)
        if rightful and place.times is not None and not (name == contest.incumbent and contest.origin == "promoted"):
            rows.append(_row(recording, contest, name, said, date))
    return PromotedFile(recording.target, recording.model, recording.recipe, tuple(rows))


def _row(recording: Recording, contest: Contest, name: str, said: Said, date: str) -> PromotedSchedule:
    entrant = contest.entrants[name]
    mine = schedule_id(entrant.schedule)
    checked = contest.checked[name]
    checks = {kind: Checks(*counts) for kind, counts in checked.checks.items()} | dict(said.agreement.checks)
    agreement = said.agreement
    evidence = Evidence(mine, checks, agreement.prompts, agreement.tokens_compared, agreement.tokens_sha256,
                        recording.weights, recording.weights_fingerprint, agreement.full_model)
    return PromotedSchedule(
        recording.target, recording.model, recording.recipe, contest.kernel, contest.shape, entrant.schedule, mine,
        contest.kernel_digest, recording.toolchain, Recorded(recording.machine.driver, recording.machine.cuda),
        _artefact(entrant.facts), checked.numerics_class or "", _timing(recording, contest, name, mine), evidence, date).sealed()


def _artefact(facts: Mapping[str, Any]) -> Artefact:
    return Artefact(tuple(facts.get("instructions") or ()), cubin_sha256=str(facts.get("cubin_sha256") or ""),
                    **{n: int(facts.get(n) or 0) for n in COUNTS})


def _timing(recording: Recording, contest: Contest, name: str, mine: str) -> PromotedTiming:
    confirmed = [b for b in contest.batches if b.phase == "confirm" and name in b.samples_us]
    batches = confirmed or [b for b in contest.batches if name in b.samples_us]
    times = distribution(batches, name)
    assert times is not None
    previous = None
    before = contest.incumbent
    if before != name and (then := distribution(batches, before)) and (change := paired(ratios(batches, name, before))):
        schedule = contest.entrants[before].schedule
        previous = Previous(schedule, schedule_id(schedule), then, change)
    return PromotedTiming(mine, times, previous, recording.machine.driver, clocks(batches))


def merged(folder: Path, new: PromotedFile) -> tuple[PromotedFile | None, PromotedFile]:
    """(what is there, what would be there): for a dry run. Raises ScheduleError."""
    path = folder / new.name
    old = store.read(path) if path.exists() else None
    return old, store.with_rows(old, new)
