"""`--check`: the reasons against merging a change, each with its row.

A promoted row of the new side needs complete evidence of its own, for the current kernel sources. It must use the required
tensor-core instruction, not spill, and not be slower beyond noise than the row it replaces. Other output bits need another
recipe. In offline reports, an accepted variant must stay accepted.
"""

from dataclasses import replace

from ...schedules.promoted import EDITED, FAILED, MISSING, PromotedSchedule
from ...shapes.errors import ShapeError
from ...shapes.target import load_sku
from ..offline.inspection import instruction_reasons
from . import evidence
from .compare import ACCEPTED, PROMOTED, Diff, Finding, RowDiff
from .evidence import EvidenceState
from .times import SLOWER, verdict_of
from .words import change_of, row_name

CODES = {
    "edited": "changed by hand since it was measured", "no_evidence": "without evidence", "check_failed": "with a failed check",
    "stale": "with stale evidence", "not_judged": "of kernels that can't be read", "misplaced": "in a file that isn't looked up",
    "other_bits": "with other bits in the same recipe", "slower": "slower beyond noise", "spills": "spilling registers",
    "falls_back": "without the required instruction", "unknown_sku": "of an unknown GPU",
    "rejected": "accepted before and rejected now",
}
OF_STATE = {EDITED: "edited", MISSING: "no_evidence", FAILED: "check_failed", evidence.STALE: "stale",
            evidence.UNKNOWN: "not_judged"}
OF_REASON = {"wrong_instruction": "falls_back", "register_spill": "spills"}  # a report's reject codes; others are `rejected`


def checked(diff: Diff) -> Diff:
    """The difference with its findings. Rows with findings come first."""
    rows = [replace(row, findings=tuple(_findings(row, diff.kind))) for row in diff.rows]
    rows.sort(key=lambda row: not row.findings)
    return replace(diff, rows=tuple(rows), findings=tuple(f for row in rows for f in row.findings))


def _findings(row: RowDiff, kind: str) -> list[Finding]:
    if row.new is None:
        return []
    found = _of_promoted(row, row.new.promoted) if kind == PROMOTED and row.new.promoted else _of_variant(row)
    found += [("misplaced", row.new.misplaced)] if row.new.misplaced else []
    return [Finding(code, row.id, row_name(row), detail) for code, detail in found]


def _of_promoted(row: RowDiff, new: PromotedSchedule) -> list[tuple[str, str]]:
    found = _evidence(row.evidence) if row.evidence else []
    found += _artefact(new)
    if row.bits and row.bits.verdict == evidence.OTHER_CLASS and not row.bits.new_recipe:
        found.append(("other_bits", f"numerics_class {_short(row.bits.old_class)} became {_short(row.bits.new_class)} in recipe "
                      f"{new.recipe}: another class needs another recipe"))
    if row.status != "unchanged":
        found += _slower(row, new)
    return found


def _evidence(state: EvidenceState) -> list[tuple[str, str]]:
    return [(OF_STATE[name], why) for name, why in state.why]


def _artefact(new: PromotedSchedule) -> list[tuple[str, str]]:
    from ...kernels import registry

    found = []
    spilled = new.artefact.spill_store_bytes, new.artefact.spill_load_bytes
    if any(spilled):
        found.append(("spills", f"{spilled[0]:,} B of spill stores, {spilled[1]:,} B of loads"))
    try:
        arch = load_sku(new.target).arch
    except ShapeError as e:
        return [*found, ("unknown_sku", e.found)]
    if registry.known(new.kernel):
        wanted = registry.operation(new.kernel).instructions(new.shape, arch)
        found += [("falls_back", r.detail) for r in instruction_reasons(list(new.artefact.instructions), wanted, ())]
    return found


def _slower(row: RowDiff, new: PromotedSchedule) -> list[tuple[str, str]]:
    found = []
    time = row.time
    if time and time.verdict == SLOWER and time.ratio and time.interval:
        found.append(("slower", f"the kernel's time {change_of(time.ratio, time.interval)} ({time.basis})"))
    for mode, paired in sorted(new.evidence.full_model.items()):
        if verdict_of(paired.interval) == SLOWER:
            found.append(("slower", f"the whole {mode} step's time {change_of(paired.ratio, paired.interval)}"))
    return found


def _of_variant(row: RowDiff) -> list[tuple[str, str]]:
    if row.old is None or row.new is None:
        return []
    if row.old.facts.verdict != ACCEPTED or not row.new.facts.rejected:
        return []
    return [(OF_REASON.get(code, "rejected"), f"accepted before, rejected now: {code}") for code in row.new.facts.reasons or ()]


def _short(digest: str | None) -> str:
    return (digest or "none")[:12]
