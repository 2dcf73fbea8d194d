"""From an artefact to its report: families of tensor-core instructions, spills, resources, faults.

Faults are spills, FP8 operands that are converted to f16 without any FP8 instruction, and memory accesses before the dependency
wait under programmatic dependent launch. `Demands` adds the user's own. An unreadable cubin is `not_inspectable`, never accepted.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...kernels.operation import FALLBACK_PTX, Instructions
from ...kernels.toolchain import ptxas_path
from ...shapes.errors import ShapeError
from ...shapes.target import load_arch
from ..offline.cubin import CubinFacts, Unreadable, read_kernels
from ..offline.inspection import (
    blocks_per_sm,
    early_lines,
    early_reasons,
    fallback_reasons,
    instruction_reasons,
    ptx_lines,
    resource_reasons,
    spill_reasons,
)
from ..offline.record import Reason
from .find import Artefact

_TARGET = re.compile(r"^\.target\s+sm_(\d+)", re.MULTILINE)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)", re.DOTALL)
_POINTERS = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.\w+\s+\.ptr\b|\.param\s+\.align\s+\d+\s+\.b8\b")


@dataclass(frozen=True)
class Demands:
    """The user's demands. required, forbidden: instruction families. reads_early: arguments that may be read before the
    dependency wait. max_spill_bytes: per thread, of stores or loads."""

    required: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    reads_early: tuple[str, ...] = ()
    max_spill_bytes: int = 0


@dataclass(frozen=True)
class Inspected:
    """One inspected kernel. Spills and stack are bytes per thread, shared memory is bytes per block; None: not in this artefact.

    instructions: count by tensor-core family. conversions: PTX lines that convert FP8 to f16. reasons: empty if accepted.
    """

    name: str
    where: str
    arch: str | None = None
    instructions: dict[str, int] | None = None
    conversions: tuple[str, ...] = ()
    registers: int | None = None
    spill_store_bytes: int | None = None
    spill_load_bytes: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int | None = None
    blocks_per_sm: int | None = None
    reasons: tuple[Reason, ...] = ()

    @property
    def verdict(self) -> str:
        return "rejected" if self.reasons else "accepted"


def inspect(artefact: Artefact, demands: Demands) -> Iterator[Inspected]:
    """Every kernel of one artefact. PTX without a cubin is assembled by the ptxas of Triton's wheel."""
    name = Path(artefact.where).name.split(".")[0]
    if artefact.problem is not None:
        yield _unreadable(name, artefact.where, artefact.problem)
        return
    try:
        cubin = artefact.cubin if artefact.cubin is not None else _assembled(artefact.ptx or "")
        kernels = read_kernels(cubin)
    except Unreadable as e:
        yield _unreadable(name, artefact.where, str(e))
        return
    if not kernels and not artefact.embedded:  # a linker leaves empty cubins in a fat binary
        yield _unreadable(name, artefact.where, "a cubin without code")
    for kernel, facts in kernels.items():
        yield _judged(kernel, facts, artefact, demands)


def _unreadable(name: str, where: str, problem: str) -> Inspected:
    return Inspected(name, where, reasons=(Reason("not_inspectable", problem),))


def _judged(name: str, facts: CubinFacts, artefact: Artefact, demands: Demands) -> Inspected:
    metadata, ptx = artefact.metadata, artefact.ptx
    if ptx is not None and not re.search(rf"\.entry\s+{re.escape(name)}\s*\(", ptx):
        ptx = None  # another kernel's
    lines, conversions = ptx_lines(ptx or "", FALLBACK_PTX)
    reasons = instruction_reasons(facts.instructions, Instructions(demands.required, demands.forbidden), lines)
    reasons += fallback_reasons(conversions, facts.instructions)
    reasons += spill_reasons(facts, demands.max_spill_bytes)
    fit = None
    try:
        target = load_arch(f"sm_{facts.arch}")
    except ShapeError:
        target = None  # an unlisted architecture: occupancy is unknown
    if target and metadata:
        reasons += resource_reasons(metadata.shared_bytes, metadata.tmem_columns, target)
        fit = blocks_per_sm(facts.registers, metadata.shared_bytes, metadata.tmem_columns, metadata.num_warps, target)[0]
    if metadata and metadata.launch_pdl:
        reasons += _early(ptx, artefact.pointers, demands.reads_early)
    return Inspected(
        name, artefact.where, f"sm_{facts.arch}", facts.instructions, conversions, facts.registers,
        facts.spill_store_bytes, facts.spill_load_bytes, facts.stack_bytes, metadata.shared_bytes if metadata else None, fit,
        tuple(reasons))


def _early(ptx: str | None, pointers: tuple[str, ...], allowed: tuple[str, ...]) -> list[Reason]:
    """Memory accesses before the dependency wait. Without names from TTIR, arguments are numbered."""
    if ptx is None:
        return [Reason("not_inspectable", "uses programmatic dependent launch, but there is no PTX to analyse")]
    entry = _ENTRY.search(ptx)
    count = len(_POINTERS.findall(entry.group(2))) if entry else 0
    names = (*pointers, *(f"pointer {i}" for i in range(len(pointers), count)))
    try:
        lines = early_lines(ptx, names, allowed)
    except Unreadable as e:
        return [Reason("not_inspectable", str(e))]
    return [Reason(reason.code, f"{reason.detail}; --reads-early NAME declares an argument that no predecessor writes", lines)
            for reason in early_reasons(lines)]


def _assembled(ptx: str) -> bytes:
    """The cubin of PTX, for its own target. Raises Unreadable with the assembler's message."""
    target = _TARGET.search(ptx)
    if target is None:
        raise Unreadable("PTX without a .target line")
    line = ptx[target.start():].split("\n", 1)[0]
    arch = re.findall(r"sm_\w+", line)[0]
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        done = subprocess.run([ptxas_path(int(target.group(1))), f"--gpu-name={arch}", str(source), "-o", str(out)],
                              capture_output=True, text=True, errors="replace")
        if done.returncode != 0 or not out.is_file():
            raise Unreadable(f"ptxas can't assemble it: {done.stderr.strip()[:300]}")
        return out.read_bytes()
