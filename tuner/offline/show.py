"""One variant in full: schedule, verdict, deciding lines, SASS."""

import gzip
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...kernels import bundle, registry
from ...kernels.toolchain import check_switches, disassemble
from ...schedules.recipe import load_recipe
from ..errors import ReportError
from . import compile as compilation
from .report import Report, Variant, describe_schedule

DECIDES = re.compile(r"\b(HMMA|HGMMA|QGMMA|UTCHMMA|UTCQMMA|STL|LDL)\b")


@dataclass(frozen=True)
class Code:
    """Machine code of one variant. compiled_now: compiled for this call, because the bundle has none. counts: of deciding
    instructions."""

    sass: str
    ptx: str
    compiled_now: bool
    counts: dict[str, int]


def code_of(report: Report, variant: Variant, out: Path) -> Code:
    """The variant's code from the bundle in `out`. A variant without code is compiled to the end now.

    Raises:
        BundleError: the artefact is damaged. ReportError: the variant can't be compiled to the end.
        ToolchainError: a switch of the compiler is set, or there is no disassembler for it.
    """
    if variant.artefact:
        return _read(out, variant.artefact, compiled_now=False)
    if not registry.known(variant.kernel):
        raise ReportError(f"{variant.id}: unknown kernel {variant.kernel!r}", expected="a report of this version")
    if problem := registry.operation(variant.kernel).contract(variant.shape, variant.schedule):
        raise ReportError(f"{variant.id} can't be compiled: {problem}", expected="a schedule that fits the shape")
    check_switches()
    with tempfile.TemporaryDirectory() as folder:
        numerics = load_recipe(report.recipe).numerics
        task = compilation.make_task(variant.kernel, variant.target, variant.shape, variant.schedule, numerics, Path(folder))
        record = compilation.compile_task(task, to_the_end=True)
        if record.artefact is None:
            raise ReportError(f"{variant.id} doesn't compile to the end: {record.failures[0].detail}")
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
    """Count by instruction, of those that decide verdicts."""
    counts: dict[str, int] = {}
    for match in DECIDES.finditer(sass):
        counts[match.group(1)] = counts.get(match.group(1), 0) + 1
    return counts


def deciding_lines(sass: str, each: int = 3) -> list[str]:
    """The first `each` SASS lines of each instruction that decides verdicts."""
    shown: dict[str, int] = {}
    lines = []
    for line in sass.splitlines():
        if (match := DECIDES.search(line)) is not None:
            name = match.group(1)
            shown[name] = shown.get(name, 0) + 1
            if shown[name] <= each:
                lines.append(re.sub(r"\s+", " ", line).strip())
    return lines


def describe(variant: Variant, code: Code | None, problem: str) -> Iterator[str]:
    """The lines that a terminal shows, without the whole code. problem: the reason why there is no code."""
    yield f"{variant.id}  {variant.kernel} on {variant.target}: {variant.verdict} at {variant.stage}"
    yield f"  shape     {', '.join(f'{k} {v}' for k, v in vars(variant.shape).items())}"
    yield f"  schedule  {describe_schedule(vars(variant.schedule))}"
    for reason in variant.reasons:
        yield f"  {reason.code}: {reason.detail}"
    for warning in variant.warnings:
        yield f"  warning: {warning}"
    if (facts := variant.facts) is not None:
        yield (f"  {facts.registers} registers, {facts.spill_store_bytes} B spill stores, {facts.spill_load_bytes} B spill "
               f"loads, {facts.stack_bytes} B stack, {facts.shared_bytes:,} B shared, {facts.tmem_columns} TMEM columns, "
               f"{facts.blocks_per_sm} blocks per SM")
    if lines := dict.fromkeys([*(line for reason in variant.reasons for line in reason.lines), *variant.lines]):
        yield "deciding lines:"
        yield from (f"  {line}" for line in lines)
    if code is None:
        yield f"no code: {problem}"
        return
    when = f" (compiled now, to the end: it was rejected at {variant.stage})" if code.compiled_now else ""
    counts = ", ".join(f"{n} {name}" for name, n in code.counts.items()) or "no tensor-core instruction, no spill"
    yield f"SASS{when}: {counts}"
    yield from (f"  {line}" for line in deciding_lines(code.sass))
