"""One variant in full: its schedule, the verdict, the lines that decided, and the SASS."""

import gzip
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...kernels import bundle, registry
from ...kernels.toolchain import check_switches, disassemble
from ...schedules.recipe import load_recipe
from ...schedules.schedule import schedule_from_dict
from ...shapes.model import shape_from_dict
from ..errors import ReportError
from . import compile as compilation
from .report import Report, describe_schedule

DECIDES = re.compile(r"\b(HMMA|HGMMA|QGMMA|UTCHMMA|UTCQMMA|STL|LDL)\b")


@dataclass(frozen=True)
class Code:
    """Machine code of one variant. compiled_now: it wasn't in the bundle, and was made for this look."""

    sass: str
    ptx: str
    compiled_now: bool
    counts: dict[str, int]


def code_of(report: Report, variant: dict[str, Any], out: Path) -> Code:
    """The variant's code: from the bundle, or compiled now, to the end, where it was rejected before there was any.

    Raises:
        BundleError: the artefact is damaged. ReportError: the report is, or it can't be compiled to the end either.
        ToolchainError: nothing here can disassemble it.
    """
    try:
        return _code_of(report, variant, out)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
        raise _damaged(variant, e) from None


def _damaged(variant: dict[str, Any], error: Exception) -> ReportError:
    return ReportError(f"variant {variant['id']}: the report's entry can't be read: {type(error).__name__}: {error}",
                       expected="an entry that tune-kernels --offline wrote",
                       action="run tune-kernels --offline again: finished work is kept")


def _code_of(report: Report, variant: dict[str, Any], out: Path) -> Code:
    if variant.get("artefact"):
        return _read(out, variant["artefact"], compiled_now=False)
    kernel = variant["kernel"]
    schedule = schedule_from_dict(registry.operation(kernel).schedule_type, variant["schedule"], variant["id"])
    shape = shape_from_dict(variant["shape"], variant["id"], ReportError)
    if problem := registry.operation(kernel).contract(shape, schedule):
        raise ReportError(f"{variant['id']} can't be compiled: {problem}", expected="a schedule that fits the shape")
    check_switches()
    with tempfile.TemporaryDirectory() as folder:
        numerics = load_recipe(report.get("recipe", "fp8-v1")).numerics
        task = compilation.make_task(kernel, variant["target"], shape, schedule, numerics, Path(folder))
        record = compilation.compile_task(task, to_the_end=True)
        if record.artefact is None:
            raise ReportError(f"{variant['id']} doesn't compile to the end: {record.failures[0]['detail']}")
        return _read(Path(folder), record.artefact, compiled_now=True)


def _read(folder: Path, key: str, compiled_now: bool) -> Code:
    files = bundle.read(folder / "artefacts" / key)
    sass = disassemble(_cubin(files))
    return Code(sass, gzip.decompress(files["kernel.ptx.gz"]).decode(), compiled_now, instruction_counts(sass))


def sass_of(folder: Path, key: str) -> str:
    """The machine code of one artefact of a bundle. Raises BundleError, ToolchainError."""
    return disassemble(_cubin(bundle.read(folder / "artefacts" / key)))


def _cubin(files: dict[str, bytes]) -> bytes:
    return next(data for name, data in files.items() if name.endswith(".cubin"))


def instruction_counts(sass: str) -> dict[str, int]:
    """How often each instruction that a verdict turns on occurs."""
    counts: dict[str, int] = {}
    for match in DECIDES.finditer(sass):
        counts[match.group(1)] = counts.get(match.group(1), 0) + 1
    return counts


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


def describe(variant: dict[str, Any], code: Code | None, problem: str) -> list[str]:
    """What a terminal shows of a variant, but for the whole of its code. Raises ReportError for a damaged entry."""
    try:
        return list(_describe(variant, code, problem))
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise _damaged(variant, e) from None


def _describe(variant: dict[str, Any], code: Code | None, problem: str) -> Iterator[str]:
    yield f"{variant['id']}  {variant['kernel']} on {variant['target']}: {variant['verdict']} at {variant['stage']}"
    yield f"  shape     {', '.join(f'{k} {v}' for k, v in variant['shape'].items())}"
    yield f"  schedule  {describe_schedule(variant['schedule'])}"
    for reason in variant["reasons"]:
        yield f"  {reason['code']}: {reason['detail']}"
    for warning in variant["warnings"]:
        yield f"  warning: {warning}"
    if variant.get("registers") is not None:
        yield (f"  {variant['registers']} registers, {variant['spill_store_bytes']} B spill stores, "
               f"{variant['spill_load_bytes']} B spill loads, {variant['stack_bytes']} B stack, "
               f"{variant['shared_bytes']:,} B shared, {variant['tmem_columns']} TMEM columns, "
               f"{variant['blocks_per_sm']} blocks an SM")
    yield "lines that decided:"
    for line in dict.fromkeys([*(x for r in variant["reasons"] for x in r["lines"]), *variant.get("lines", [])]):
        yield f"  {line}"
    if code is None:
        yield f"no code: {problem}"
        return
    when = f" (compiled now, to the end: it was rejected at {variant['stage']})" if code.compiled_now else ""
    counts = ", ".join(f"{n} {name}" for name, n in code.counts.items()) or "no tensor-core instruction, no spill"
    yield f"SASS{when}: {counts}"
    for line in deciding_lines(code.sass):
        yield f"  {line}"
