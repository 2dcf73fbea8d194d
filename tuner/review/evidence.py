"""The proofs of a promoted row: whether its evidence is there, is its own, and is of the kernels that it is judged by; and
whether its output bits are still those of its recipe."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ...schedules.promoted import Checks, PromotedSchedule
from .kernel_sources import Unreadable, digests

INSTALLED = Path(__file__).parents[2] / "kernels"

PRESENT, STALE, UNKNOWN = "present", "stale", "unknown"
SAME_CLASS, OTHER_CLASS, NOT_COMPARABLE = "same class", "another class", "not comparable"


@dataclass(frozen=True)
class EvidenceState:
    """state: the first that holds, of EDITED, MISSING, FAILED, STALE or UNKNOWN, PRESENT; why: each that holds, with its reason.
    random: on random weights, which is enough for speed and bits and says nothing of a real model: marked wherever it is
    shown."""

    state: str
    why: tuple[tuple[str, str], ...]
    checks: Mapping[str, Checks]
    prompts: int
    tokens_compared: int
    weights: str
    random: bool
    date: str


@dataclass(frozen=True)
class Bits:
    """The numerics classes of a pair, compared. new_recipe: the pair's recipes differ, as another class needs."""

    verdict: str
    old_class: str | None
    new_class: str | None
    new_recipe: bool = False
    why: str = ""


@dataclass(frozen=True)
class Kernels:
    """The kernels that promoted rows are judged by. name: in words; digests: of their sources, by kernel; problem: why they can't
    be read, and so nothing can be judged."""

    name: str
    digests: Mapping[str, str]
    problem: str = ""


def kernels_from(texts: Mapping[str, str], name: str) -> Kernels:
    """texts: kernels/*.py by module name."""
    try:
        return Kernels(name, digests(texts))
    except Unreadable as e:
        return Kernels(name, {}, str(e))


def kernels_in(folder: Path, name: str) -> Kernels:
    """Of a folder of sources on disk."""
    try:
        return kernels_from({path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}, name)
    except (OSError, ValueError) as e:
        return Kernels(name, {}, str(e))


@cache
def installed_kernels() -> Kernels:
    """Of this installation."""
    return kernels_in(INSTALLED, "the kernels installed here")


def evidence_of(row: PromotedSchedule | None, kernels: Kernels) -> EvidenceState | None:
    """None if there is no promoted row on this side."""
    if row is None:
        return None
    evidence = row.evidence
    why = (*((problem.state, problem.text) for problem in row.problems()), *stale_reasons(row, kernels))
    state = why[0][0] if why else PRESENT
    return EvidenceState(state, why, evidence.checks, evidence.prompts, evidence.tokens_compared, evidence.weights,
                         evidence.random_weights, row.date)


def stale_reasons(row: PromotedSchedule, kernels: Kernels) -> list[tuple[str, str]]:
    """(state, reason) where the row's evidence isn't of these kernels, or nobody can tell."""
    if kernels.problem:
        return [(UNKNOWN, f"{kernels.name} can't be read without running them ({kernels.problem}): check them out and run "
                 "tune-kernels diff there")]
    digest = kernels.digests.get(row.kernel)
    if digest is None:
        return [(STALE, f"kernel_digest is {row.kernel_digest}, but there is no kernel {row.kernel} among {kernels.name}")]
    if digest != row.kernel_digest:
        return [(STALE, f"kernel_digest is {row.kernel_digest}, but the kernel's source is {digest} in {kernels.name}: changed "
                 "since it was measured")]
    return []


def bits_of(old: PromotedSchedule | None, new: PromotedSchedule | None) -> Bits | None:
    """None if there is nothing promoted on either side. Classes are of one target: two SKUs' don't compare."""
    if old is None and new is None:
        return None
    if old is None or new is None:
        return Bits(NOT_COMPARABLE, old.numerics_class if old else None, new.numerics_class if new else None, why="one side only")
    classes = old.numerics_class, new.numerics_class
    if old.target != new.target:
        return Bits(NOT_COMPARABLE, *classes, old.recipe != new.recipe, "other SKU")
    return Bits(SAME_CLASS if classes[0] == classes[1] else OTHER_CLASS, *classes, old.recipe != new.recipe)
