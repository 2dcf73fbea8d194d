"""Regressions against a baseline: the JSON of an earlier `tune-kernels inspect --format json`.

Kernels pair by name and architecture. One name may have many specialisations: the worst of each side is compared. Worse means a
new reject reason, more spilled bytes, fewer blocks per SM, or a lost tensor-core family.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...shapes.fields import Count, read_fields
from ..errors import ReportError
from .judge import Inspected

SCHEMA = "tune-kernels/inspect/1"


@dataclass(frozen=True)
class Worst:
    """The worst values over all kernels of one name and architecture. codes: of all their reasons. families: those that all
    have."""

    name: str
    arch: str
    kernels: Count
    codes: tuple[str, ...]
    families: tuple[str, ...]
    spill_bytes: Count
    registers: Count
    blocks_per_sm: Count | None = None


def worst_of(found: Iterable[Inspected]) -> list[Worst]:
    """One value per name and architecture, sorted."""
    groups: dict[tuple[str, str], list[Inspected]] = {}
    for one in found:
        groups.setdefault((one.name, one.arch or ""), []).append(one)
    return [_worst(name, arch, group) for (name, arch), group in sorted(groups.items())]


def _worst(name: str, arch: str, group: list[Inspected]) -> Worst:
    blocks = [one.blocks_per_sm for one in group if one.blocks_per_sm is not None]
    families = set.intersection(*(set(one.instructions or ()) for one in group))
    return Worst(name, arch, len(group), tuple(sorted({r.code for one in group for r in one.reasons})), tuple(sorted(families)),
                 max(max(one.spill_store_bytes or 0, one.spill_load_bytes or 0) for one in group),
                 max(one.registers or 0 for one in group), min(blocks, default=None))


def read_baseline(path: Path) -> dict[tuple[str, str], Worst]:
    """The worst values by (name, architecture). Raises ReportError if the file isn't a baseline."""
    fields = read_fields(path, ReportError)
    if (schema := fields.get("schema", str)) != SCHEMA:
        raise fields.fail("schema", f"is {schema!r}", expected=SCHEMA, action="write it with tune-kernels inspect --format json")
    return {(one.name, one.arch): one for one in (inner.read(Worst) for inner in fields.items("worst"))}


def regressions(before: Mapping[tuple[str, str], Worst], now: list[Worst]) -> list[str]:
    """One line per regression. A new kernel counts as one if it is rejected."""
    lines = []
    for one in now:
        old, title = before.get((one.name, one.arch)), f"{one.name} {one.arch}".strip()
        if gained := [code for code in one.codes if old is None or code not in old.codes]:
            lines.append(f"{title}: {', '.join(gained)}{'' if old else ' (not in the baseline)'}")
        if old is None:
            continue
        if one.spill_bytes > old.spill_bytes:
            lines.append(f"{title}: spilled bytes {old.spill_bytes:,} → {one.spill_bytes:,}")
        if lost := [family for family in old.families if family not in one.families]:
            lines.append(f"{title}: {', '.join(lost)} lost")
        if old.blocks_per_sm is not None and one.blocks_per_sm is not None and one.blocks_per_sm < old.blocks_per_sm:
            lines.append(f"{title}: blocks per SM {old.blocks_per_sm} → {one.blocks_per_sm}")
    return lines
