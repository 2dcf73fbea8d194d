"""`verify --promote`: evidence from a real model for the promoted rows in use, in place of evidence from random weights.

Random weights prove speed and bits. The checks of `verify` prove that the logits of a real model are right. They become evidence
of the rows: checks by kind, tokens, weights and date. Times and bits don't depend on the weights and stay, those of the full
model included.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ...schedules import store
from ...schedules.promoted import Checks, PromotedSchedule
from ...schedules.store import PromotedFile
from ..backend import BackendNotes
from ..checkpoint.loader import RANDOM
from ..errors import RequestError
from ..selection import PROMOTED
from .check import KINDS
from .evidence import Evidence

NEEDED = ("agreement", "reference")  # kinds of checks that must run


def require_evidence(weights: str, kinds: Sequence[str]) -> None:
    """Called before anything is loaded. Raises RequestError if these weights or kinds of checks don't suffice as evidence."""
    if weights.startswith(RANDOM):
        raise RequestError(f"--promote with weights {weights}: they prove no more than tune-kernels --on-gpu has",
                           expected="a model's files", action="name them with --weights PATH")
    missing = [kind for kind in NEEDED if kind not in kinds]
    if missing:
        raise RequestError(f"--promote without the {' and the '.join(missing)} check", expected=f"both {' and '.join(NEEDED)}",
                           action=" ".join(f"--kind {kind}" for kind in dict.fromkeys((*kinds, *NEEDED))))


def require_promoted(notes: BackendNotes) -> tuple[PromotedSchedule, ...]:
    """The promoted rows that a model runs under. Raises RequestError if a kernel runs under none."""
    if not notes.schedules:
        raise RequestError(f"--promote on the {notes.name} backend: no promoted schedules are in use",
                           expected="the triton backend, on a GPU, under a recipe that has schedules",
                           action="--backend triton --recipe fp8-v1")
    others = [row["kernel"] for row in notes.schedules if row["origin"] != PROMOTED]
    if others:
        raise RequestError(f"--promote with schedules in use that aren't promoted: {', '.join(others)}",
                           expected="a promoted schedule for every kernel",
                           action="tune-kernels --on-gpu --promote first, then verify without --allow-untuned")
    return notes.promoted


def upgraded(row: PromotedSchedule, evidence: Evidence, date: str) -> PromotedSchedule:
    """The row with the checks of `verify` in its evidence. Kinds of an earlier `verify` that weren't run again stay if the
    weights are the same."""
    old, counts = row.evidence, evidence.counts()
    same = (old.weights, old.weights_fingerprint) == (evidence.weights, evidence.fingerprint)
    kept = {kind: checks for kind, checks in old.checks.items() if same or kind not in KINDS}
    new = {kind: Checks(found["run"], found["passed"]) for kind, found in counts.items() if found["run"]}
    proven = replace(old, checks={**kept, **new}, prompts=evidence.prompts, tokens_compared=evidence.tokens_compared,
                     tokens_sha256=evidence.tokens_hash, weights=evidence.weights, weights_fingerprint=evidence.fingerprint)
    return replace(row, evidence=proven, date=date).sealed()


def upgrade(evidence: Evidence, schedules: Path | None) -> list[Path]:
    """Writes the rows in use, with their new evidence, to the first folder of the search path. Returns the files.

    Raises:
        RequestError: a check failed, or a needed kind wasn't run.
        ScheduleError: the folder can't be written, or a row has been replaced since it was loaded.
    """
    counts = evidence.counts()
    failed = sum(found["run"] - found["passed"] for found in counts.values())
    unproven = [kind for kind in NEEDED if not counts[kind]["run"]]
    if failed or unproven:
        raise RequestError(f"--promote after {failed} failed checks" if failed else f"--promote without {', '.join(unproven)}",
                           expected="every check passed, agreement and reference among them")
    by_model: defaultdict[str, list[PromotedSchedule]] = defaultdict(list)
    for row in evidence.in_use:
        by_model[row.model].append(row)
    folder, date = store.search_path(schedules)[0], datetime.now(UTC).date().isoformat()
    return [store.promote(folder, PromotedFile(rows[0].target, model, rows[0].recipe,
                                               tuple(upgraded(row, evidence, date) for row in rows)), instead_of=rows)
            for model, rows in by_model.items()]
