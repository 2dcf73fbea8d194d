"""What is proven of a promoted row: whether its evidence is there, is its own, and is of the kernels that are here; and
whether its output bits are still those of its recipe."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from ...schedules.promoted import Checks, PromotedSchedule

PRESENT, STALE = "present", "stale"
SAME_CLASS, OTHER_CLASS, NOT_COMPARABLE = "same class", "another class", "not comparable"


@dataclass(frozen=True)
class EvidenceState:
    """state: the worst that holds, of EDITED, MISSING, FAILED, STALE, PRESENT; why: each state that holds, with its reason.
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
    """The numerics classes of a pair, and what became of them. new_recipe: the pair's recipes differ, as another class needs."""

    verdict: str
    old_class: str | None
    new_class: str | None
    new_recipe: bool = False
    why: str = ""


@cache
def current_digest(kernel: str) -> str | None:
    """The digest of a kernel's source as it is in this installation, None where there is no kernel of that name."""
    from ...kernels import registry
    from ...kernels.bundle import kernel_digest

    return kernel_digest(registry.operation(kernel).kernel) if registry.known(kernel) else None


def evidence_of(row: PromotedSchedule | None) -> EvidenceState | None:
    """None where there is no promoted row on this side."""
    if row is None:
        return None
    evidence = row.evidence
    why = (*((problem.state, problem.text) for problem in row.problems()), *((STALE, reason) for reason in stale_reasons(row)))
    state = why[0][0] if why else PRESENT
    return EvidenceState(state, why, evidence.checks, evidence.prompts, evidence.tokens_compared, evidence.weights,
                         evidence.random_weights, row.date)


def stale_reasons(row: PromotedSchedule) -> list[str]:
    digest = current_digest(row.kernel)
    if digest is None:
        return [f"kernel_digest is {row.kernel_digest}, but there is no kernel {row.kernel} any more"]
    if digest != row.kernel_digest:
        return [f"kernel_digest is {row.kernel_digest}, but the kernel's source is now {digest}: changed since it was measured"]
    return []


def bits_of(old: PromotedSchedule | None, new: PromotedSchedule | None) -> Bits | None:
    """None where there is nothing promoted on either side. Classes are of one target: two SKUs' don't compare."""
    if old is None and new is None:
        return None
    if old is None or new is None:
        return Bits(NOT_COMPARABLE, old.numerics_class if old else None, new.numerics_class if new else None, why="one side only")
    classes = old.numerics_class, new.numerics_class
    if old.target != new.target:
        return Bits(NOT_COMPARABLE, *classes, old.recipe != new.recipe, "other SKU")
    return Bits(SAME_CLASS if classes[0] == classes[1] else OTHER_CLASS, *classes, old.recipe != new.recipe)
