"""One variant in full: its schedule, the verdict, the lines that decided, and the SASS."""

import gzip
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..kernels import bundle, registry
from ..schedules.recipe import load_recipe
from ..schedules.schedule import schedule_from_dict
from ..shapes.model import AttentionShape, HeadShape, KernelShape, LinearShape, MergeShape
from . import compile as compilation
from .errors import ReportError
from .report import Report
from .toolchain import disassemble

SHAPES: tuple[type[KernelShape], ...] = (LinearShape, HeadShape, AttentionShape, MergeShape)
DECIDES = re.compile(r"\b(HMMA|HGMMA|QGMMA|UTCHMMA|UTCQMMA|STL|LDL)\b")


@dataclass(frozen=True)
class Code:
    """Machine code of one variant. compiled_now: it wasn't in the bundle, and was made for this look."""

    sass: str
    ptx: str
    compiled_now: bool
    counts: dict[str, int]


def shape_from_dict(table: dict[str, Any]) -> KernelShape:
    """The shape in a report's variant. Raises ReportError where it isn't one."""
    for kind in SHAPES:
        if set(table) == set(kind.__dataclass_fields__):
            return kind(**table)
    raise ReportError(f"unknown shape {table!r}", expected="a report of this version of tune-kernels")


def code_of(report: Report, variant: dict[str, Any], out: Path) -> Code:
    """The variant's code: from the bundle, or compiled now, to the end, where it was rejected before there was any.

    Raises:
        BundleError: the artefact is damaged. ReportError: it can't be compiled to the end either.
        ToolchainError: nothing here can disassemble it.
    """
    if variant.get("artefact"):
        return _read(out, variant["artefact"], compiled_now=False)
    kernel = variant["kernel"]
    schedule = schedule_from_dict(registry.operation(kernel).schedule_type, variant["schedule"], variant["id"])
    shape = shape_from_dict(variant["shape"])
    if problem := registry.operation(kernel).contract(shape, schedule):
        raise ReportError(f"{variant['id']} can't be compiled: {problem}", expected="a schedule that fits the shape")
    with tempfile.TemporaryDirectory() as folder:
        numerics = load_recipe(report.get("recipe", "fp8-v1")).numerics
        task = compilation.make_task(kernel, variant["target"], shape, schedule, numerics, Path(folder))
        record = compilation.compile_task(task, to_the_end=True)
        if record.artefact is None:
            raise ReportError(f"{variant['id']} doesn't compile to the end: {record.failures[0]['detail']}")
        return _read(Path(folder), record.artefact, compiled_now=True)


def _read(folder: Path, key: str, compiled_now: bool) -> Code:
    files = bundle.read(folder / "artefacts" / key)
    cubin = next(data for name, data in files.items() if name.endswith(".cubin"))
    sass = disassemble(cubin)
    counts: dict[str, int] = {}
    for match in DECIDES.finditer(sass):
        counts[match.group(1)] = counts.get(match.group(1), 0) + 1
    return Code(sass, gzip.decompress(files["kernel.ptx.gz"]).decode(), compiled_now, counts)


def deciding_lines(sass: str, each: int = 3) -> list[str]:
    """The first few SASS lines of each instruction that a verdict turns on."""
    shown: dict[str, int] = {}
    lines = []
    for line in sass.splitlines():
        if (match := DECIDES.search(line)) is not None:
            name = match.group(1)
            shown[name] = shown.get(name, 0) + 1
            if shown[name] <= each:
                lines.append(re.sub(r"\s+", " ", line).strip())
    return lines
