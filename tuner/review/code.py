"""The changed lines on instructions and spills: from the report, and from the SASS of available artefacts.

A report's artefacts are in its folder. A promoted row has its cubin's digest: a bundle (`--bundle`) with that cubin has its code.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...kernels.toolchain import ToolchainError
from ...shapes.errors import UserError
from ..offline.report import read_report
from .compare import Code, Collection, Diff, Entry, RowDiff, changes

DECISIVE = ("verdict", "reasons", "instructions", "spill_store_bytes", "spill_load_bytes")
MOST_DISASSEMBLED = 12  # sides of rows, in row order: each takes 0.1 to 0.4 s


@dataclass(frozen=True)
class Place:
    """One artefact: its bundle and its key there."""

    bundle: Path
    key: str


def with_code(diff: Diff, old: Collection, new: Collection, bundles: Sequence[Path] = ()) -> Diff:
    """The difference with `code` in each row whose instructions, spills or verdict changed. bundles: folders with artefacts of
    promoted rows. Raises ReportError for an unreadable bundle."""
    known = {sha: place for bundle in bundles for sha, place in _by_cubin(bundle)}
    left = MOST_DISASSEMBLED
    rows = []
    for row in diff.rows:
        sides = [_place(row.old, old, known), _place(row.new, new, known)]
        wanted = row.status == "changed" and (_decided(row) or bool(known and _cubin(row.old) != _cubin(row.new)))
        if wanted:
            affordable = sum(p is not None for p in sides) <= left
            left -= sum(p is not None for p in sides) if affordable else 0
            code = _code(row, sides if affordable else [None, None])
            row = replace(row, code=code if code != Code() else None)
        rows.append(row)
    return replace(diff, rows=tuple(rows))


def _decided(row: RowDiff) -> bool:
    return any(c.name in DECISIVE for c in row.facts)


def _cubin(entry: Entry | None) -> str | None:
    return entry.facts.cubin_sha256 if entry else None


def _by_cubin(bundle: Path) -> Iterator[tuple[str, Place]]:
    for variant in read_report(bundle).variants:
        if variant.facts and variant.artefact:
            yield variant.facts.cubin_sha256, Place(bundle if bundle.is_dir() else bundle.parent, variant.artefact)


def _place(entry: Entry | None, side: Collection, known: Mapping[str, Place]) -> Place | None:
    if entry is None:
        return None
    if entry.artefact and side.bundle:
        place = Place(side.bundle, entry.artefact)
        return place if (place.bundle / "artefacts" / place.key).is_dir() else None
    return known.get(_cubin(entry) or "")


def _code(row: RowDiff, places: Sequence[Place | None]) -> Code:
    notes: list[str] = []
    sass = [_sass(place, notes) if place else None for place in places]
    both = all(text is not None for text in sass)
    counts = changes(*(_counts(text) for text in sass)) if both else ()
    shown = {c.name for c in counts} if both else None
    lines = [[*(entry.lines if entry and _decided(row) else ()), *_deciding(text, shown)]
             for entry, text in zip((row.old, row.new), sass)]
    old, new = ([line for line in mine if line not in others] for mine, others in (lines, lines[::-1]))
    return Code(counts, tuple(old), tuple(new), tuple(notes))


def _sass(place: Place, notes: list[str]) -> str | None:
    from ..offline.show import sass_of

    try:
        return sass_of(place.bundle, place.key)
    except ToolchainError:  # its message names a temporary file
        notes.append(f"the disassembler here can't read artefact {place.key}")
    except UserError as e:
        notes.append(e.found)
    return None


def _counts(sass: str | None) -> dict[str, int]:
    from ..offline.show import instruction_counts

    return instruction_counts(sass or "")


def _deciding(sass: str | None, opcodes: set[str] | None) -> list[str]:
    """The deciding SASS lines. opcodes: the changed ones; None, for all of them, if the other side is unknown."""
    from ..offline.show import DECIDES, deciding_lines

    found = []
    for line in deciding_lines(sass or ""):
        match = DECIDES.search(line)
        if match and (opcodes is None or match.group(1) in opcodes):
            found.append(re.sub(r"^/\*[0-9a-f]+\*/ ", "", line))
    return list(dict.fromkeys(found))
