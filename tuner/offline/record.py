"""Records: the facts of one compilation, in the output folder under a digest of its inputs.

A record is written under a temporary name and renamed: a reader sees a whole record or none. A damaged record, or one with a
changed artefact, is ignored: its variant is compiled again.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...kernels import bundle
from ...shapes.fields import Count, Digest, parse_fields
from ...shapes.files import replace_text
from ..errors import ReportError, cannot_write

SCHEMA = "tune-kernels/record/3"
Stage = Literal["contract", "ttgir", "ptx", "cubin", "sass"]
Code = Literal["contract", "compile_error", "assembler_error", "timeout", "wrong_instruction", "early_access", "register_spill",
               "resource_limit", "not_inspectable"]


@dataclass(frozen=True)
class Reason:
    """A reason to reject a variant. lines: of TTGIR, PTX or the assembler's log."""

    code: Code
    detail: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """The facts in the cubin and its metadata. instructions: count by tensor-core family. Registers, spills and stack are per
    thread, shared_bytes and tmem_columns per block."""

    instructions: Mapping[str, Count]
    registers: Count
    stack_bytes: Count
    spill_store_bytes: Count
    spill_load_bytes: Count
    shared_bytes: Count
    tmem_columns: Count
    cubin_sha256: Digest


@dataclass(frozen=True)
class Record:
    """Facts of one compilation. stage: the last one reached. failures: the reasons why it stopped. lines: of TTGIR or PTX.
    early_accesses: see inspection.early_lines. facts: None before `sass`. early: for a variant that was compiled to the end all
    the same, the reasons to reject it early. artefact: its key in the bundle."""

    stage: Stage
    failures: tuple[Reason, ...] = ()
    dots: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    conversions: tuple[str, ...] = ()
    early_accesses: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    facts: Facts | None = None
    num_warps: Count = 0
    early: tuple[Reason, ...] = ()
    artefact: Digest | None = None
    compile_ms: float = 0.0


def record_path(folder: Path, record_key: str) -> Path:
    return folder / "records" / f"{record_key}.json"


def write_record(path: Path, record: Record) -> None:
    """Raises OutputError."""
    write_json(path, {"schema": SCHEMA, **dataclasses.asdict(record)})


def read_record(folder: Path, path: Path) -> Record | None:
    """The record at `path`, or None if it is missing, damaged or doesn't fit its artefact. folder: the artefact's bundle."""
    try:
        fields = parse_fields(path.read_bytes(), "JSON", str(path), ReportError)
        if fields.get("schema", str) != SCHEMA:
            return None
        record = fields.read(Record)
    except (OSError, ReportError):
        return None
    return record if whole(folder, record) else None


def whole(folder: Path, record: Record) -> bool:
    """Whether a record is complete and its artefact is undamaged and has the recorded cubin."""
    if record.stage == "sass" and (record.artefact is None or record.facts is None):
        return False
    if record.artefact is None:
        return True
    try:
        files = bundle.read(folder / "artefacts" / record.artefact)
    except bundle.BundleError:
        return False
    cubin = next((data for name, data in files.items() if name.endswith(".cubin")), b"")
    return record.facts is None or bundle.sha256(cubin) == record.facts.cubin_sha256


def write_json(path: Path, value: object, *, durable: bool = False) -> None:
    """As `write_text`, with sorted keys."""
    write_text(path, json.dumps(value, sort_keys=True), durable=durable)


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """As `replace_text`. Raises OutputError."""
    try:
        replace_text(path, text, durable=durable)
    except OSError as e:
        raise cannot_write(path, e) from None
