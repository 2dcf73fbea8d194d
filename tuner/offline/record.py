"""Records: the facts of one compilation, kept in the output folder under the digest of all that determines them.

Written under another name and renamed, so that a reader sees a whole record or none. A record that is damaged, or whose
artefact isn't bit for bit what was written, doesn't count: its variant is compiled again.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

from ...kernels import bundle
from ...shapes.files import replace_text
from ..errors import OutputError

SCHEMA = "tune-kernels/record/2"
FACTS = {"instructions": dict, "registers": int, "stack_bytes": int, "spill_store_bytes": int, "spill_load_bytes": int,
         "shared_bytes": int, "tmem_columns": int, "cubin_sha256": str}


@dataclass(frozen=True)
class Record:
    """Facts of one compilation. stage: how far it went; failures: what stopped it (code, detail, lines); facts: those of
    FACTS, where the stage is `sass`; early_accesses: what it touches too soon (inspection.early_lines); early: what could have
    been said before the end, where it was compiled to the end."""

    stage: str
    failures: list[dict[str, Any]] = field(default_factory=list)
    dots: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    conversions: list[str] = field(default_factory=list)
    early_accesses: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 0
    early: list[dict[str, Any]] = field(default_factory=list)
    artefact: str | None = None
    compile_ms: float = 0.0


def record_path(folder: Path, record_key: str) -> Path:
    return folder / "records" / f"{record_key}.json"


def write_record(folder: Path, record_key: str, record: Record) -> None:
    write_json(record_path(folder, record_key), {"schema": SCHEMA, **dataclasses.asdict(record)})


def read_record(folder: Path, record_key: str) -> Record | None:
    """A record written before, or None where there is none that can be relied on."""
    try:
        table = json.loads(record_path(folder, record_key).read_bytes())
        if table.pop("schema") != SCHEMA:
            return None
        record = Record(**table)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return record if whole(folder, record) else None


def whole(folder: Path, record: Record) -> bool:
    """Whether a record has the fields it should, and its artefact is what the record speaks of."""
    for one in dataclasses.fields(Record):
        kind: Any = get_origin(one.type) or one.type
        if one.name not in ("artefact", "compile_ms") and not isinstance(getattr(record, one.name), kind):
            return False
    if record.stage == "sass" and not (record.artefact and all(isinstance(record.facts.get(n), k) for n, k in FACTS.items())):
        return False
    if record.artefact is None:
        return True
    try:
        files = bundle.read(folder / "artefacts" / record.artefact)
    except bundle.BundleError:
        return False
    cubin = next((data for name, data in files.items() if name.endswith(".cubin")), b"")
    return record.stage != "sass" or bundle.sha256(cubin) == record.facts["cubin_sha256"]


def write_json(path: Path, value: Any) -> None:
    """As `write_text`, with sorted keys."""
    write_text(path, json.dumps(value, sort_keys=True))


def write_text(path: Path, text: str) -> None:
    """Write and rename, so that a reader sees the old file or the new one. Raises OutputError."""
    try:
        replace_text(path, text)
    except OSError as e:
        raise cannot_write(path, e) from None


def cannot_write(path: Path, error: OSError) -> OutputError:
    return OutputError(f"{path}: {error.strerror or error}", expected="a folder that can be written, with room in it",
                       action="free some space or name another folder with --out; what is finished is kept")
