"""The state of a promoted row's evidence (present, its own, and of the current kernel sources) and of its output bits."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ...schedules.promoted import Checks, PromotedSchedule
from ...schedules.recipe import OWN
from .kernel_sources import Unreadable, digests

INSTALLED = Path(__file__).parents[2] / "kernels"

PRESENT, STALE, UNKNOWN = "present", "stale", "unknown"
SAME_CLASS, OTHER_CLASS, NOT_COMPARABLE = "same class", "another class", "not comparable"


@dataclass(frozen=True)
class EvidenceState:
    """state: EDITED, MISSING, FAILED, STALE, UNKNOWN or PRESENT; the first that applies. why: each that applies, with its reason.
    random: on random weights, which suffices for speed and bits but proves nothing about a real model: marked wherever it is
    shown.
    """

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
    """The comparison of a pair's numerics classes. new_recipe: whether the recipes differ, as another class requires."""

    verdict: str
    old_class: str | None
    new_class: str | None
    new_recipe: bool = False
    why: str = ""


@dataclass(frozen=True)
class Kernels:
    """The kernel sources that promoted rows are checked against. name: in words. digests: by kernel. problem: the reason why they
    can't be read, or an empty string."""

    name: str
    digests: Mapping[str, str]
    problem: str = ""


def kernels_from(texts: Mapping[str, str], name: str) -> Kernels:
    """From the texts of kernels/*.py by module name."""
    try:
        return Kernels(name, digests(texts))
    except Unreadable as e:
        return Kernels(name, {}, str(e))


def kernels_in(folder: Path, name: str) -> Kernels:
    """From a folder of sources on disk."""
    try:
        return kernels_from({path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}, name)
    except (OSError, ValueError) as e:
        return Kernels(name, {}, str(e))


@cache
def installed_kernels() -> Kernels:
    """The kernels of this installation."""
    return kernels_in(INSTALLED, "the kernels installed here")


def evidence_of(row: PromotedSchedule | None, kernels: Kernels) -> EvidenceState | None:
    """The state of a row's evidence; None without a promoted row."""
    if row is None:
        return None
    evidence = row.evidence
    why = (*((problem.state, problem.text) for problem in row.problems()), *stale_reasons(row, kernels))
    state = why[0][0] if why else PRESENT
    return EvidenceState(state, why, evidence.checks, evidence.prompts, evidence.tokens_compared, evidence.weights,
                         evidence.random_weights, row.date)


def stale_reasons(row: PromotedSchedule, kernels: Kernels) -> list[tuple[str, str]]:
    """(state, reason) if the row's evidence isn't of these kernels, or if that is unknown; else empty."""
    if row.recipe == OWN.name:
        return []  # its source is with its user; look-up compares the digest of the function that is launched
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
    """The comparison of two rows' bits; None without promoted rows. Classes of two SKUs aren't comparable."""
    if old is None and new is None:
        return None
    if old is None or new is None:
        return Bits(NOT_COMPARABLE, old.numerics_class if old else None, new.numerics_class if new else None, why="one side only")
    classes = old.numerics_class, new.numerics_class
    if old.target != new.target:
        return Bits(NOT_COMPARABLE, *classes, old.recipe != new.recipe, "other SKU")
    return Bits(SAME_CLASS if classes[0] == classes[1] else OTHER_CLASS, *classes, old.recipe != new.recipe)
