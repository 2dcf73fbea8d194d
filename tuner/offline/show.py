"""One variant in full: schedule, verdict, deciding lines, SASS."""

import contextlib
import gzip
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...kernels import bundle, registry
from ...kernels.loading import Source
from ...kernels.toolchain import check_switches, disassemble
from ...schedules.recipe import OWN, load_recipe
from ...schedules.schedule import knobs_of
from ...shapes.model import dims_of
from .. import pool
from ..errors import ReportError
from . import compile as compilation
from .own import in_a_worker
from .plan import Workers
from .record import Record
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
    source = report.sources.get(variant.kernel)
    if source is None and not registry.known(variant.kernel):
        raise ReportError(f"{variant.id}: unknown kernel {variant.kernel!r}", expected="a report of this version")
    check_switches()
    with tempfile.TemporaryDirectory() as name:
        folder, wanted = Path(name), (variant, report.recipe, source, Path(name))
        if source is None:
            record: Record | pool.Died = _compiled(wanted)
        else:  # the user's code runs in a worker
            [(_, record)] = Workers(None, 1, pool.CPU_SECONDS, folder).run(_compiled, [wanted])
        if isinstance(record, pool.Died):
            raise ReportError(f"{variant.id} doesn't compile to the end: {record.detail}")
        if record.artefact is None:
            raise ReportError(f"{variant.id} doesn't compile to the end: {record.failures[0].detail}")
        return _read(folder, record.artefact, compiled_now=True)


def _compiled(wanted: tuple[Variant, str, Source | None, Path]) -> Record:
    """The record of a variant under a recipe, compiled to the end. Raises ReportError."""
    variant, recipe, source, folder = wanted
    numerics = OWN.numerics if source else load_recipe(recipe).numerics
    with in_a_worker() if source else contextlib.nullcontext():
        if problem := registry.operation(variant.kernel, source).contract(variant.shape, variant.schedule):
            raise ReportError(f"{variant.id} can't be compiled: {problem}", expected="a schedule that fits the shape")
        task = compilation.make_task(variant.kernel, variant.target, variant.shape, variant.schedule, numerics, folder, source)
    return compilation.compile_task(task, to_the_end=True)


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
    yield f"  shape     {', '.join(f'{k} {v}' for k, v in dims_of(variant.shape).items())}"
    yield f"  schedule  {describe_schedule(knobs_of(variant.schedule))}"
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
