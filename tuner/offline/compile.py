"""Compiles one variant, stage by stage, without a GPU. Stops as soon as the verdict is certain, and keeps all facts so far.

    source → TTIR → TTGIR → (instruction family known) → LLVM IR → (shared memory, TMEM known) → PTX → cubin → facts

A record's name is a digest of its inputs: kernel source, shape, schedule, target, flags, toolchain, instruction rules. It is
written under a temporary name and renamed: a killed run keeps its finished work, and two runs in one folder at worst do the same
work twice. Variants with equal TTGIR and later options are assembled once (`intermediate/`), under a lock that its holder's death
releases.

A bad candidate becomes a record. A broken environment (a full disk, a missing assembler) raises.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...kernels import bundle, toolchain
from ...kernels.loading import Source
from ...kernels.operation import FAMILIES, Instructions, Launch
from ...schedules.recipe import Numerics
from ...schedules.schedule import Schedule
from ...shapes.fields import Table
from ...shapes.files import locked
from ...shapes.model import KernelShape
from ...shapes.target import Target, load_arch
from ..errors import AssemblerDied, cannot_write
from . import inspection
from .cubin import CubinFacts, Unreadable, read_cubin
from .own import in_a_worker
from .record import SCHEMA, Facts, Reason, Record, Stage, read_record, record_path, write_record

AUDIT_ONE_IN = 16  # one of so many early rejects is compiled to the end, to compare predicted and found faults
LOCK_SECONDS = 30.0  # the slowest compilation takes 1.3 s
# Options without effect after TTGIR; extern_libs are paths: their content is in the artefact's key.
DONE_BY_TTGIR = ("num_stages", "max_num_imprecise_acc_default", "extern_libs")


@dataclass(frozen=True)
class Task:
    """One compilation, as sent to a worker. wanted: of the artefact; key: the artefact's; record_key: the record's; folder: of
    the sweep; source: of a user's kernel."""

    kernel: str
    arch: str
    shape: KernelShape
    schedule: Schedule
    numerics: Numerics
    wanted: Instructions
    key: str
    record_key: str
    folder: str
    source: Source | None = None


# Compiling redirects stdout and stderr and sets global switches: threads of one process take turns.
ONE_AT_A_TIME = threading.Lock()


class Stop(Exception):
    """The verdict is certain: no further stage is needed."""

    def __init__(self, stage: Stage, reasons: list[Reason]) -> None:
        super().__init__(stage)
        self.stage = stage
        self.reasons = reasons


def launch_of(kernel: str, shape: KernelShape, schedule: Schedule, numerics: Numerics, source: Source | None = None) -> Launch:
    from ...kernels import registry

    return registry.operation(kernel, source).launch(shape, schedule, numerics)


def wanted_instructions(kernel: str, shape: KernelShape, arch: str, source: Source | None = None) -> Instructions:
    from ...kernels import registry

    operation = registry.operation(kernel, source)
    return dataclasses.replace(operation.instructions(shape, arch), early_reads=operation.early_reads)


def make_task(kernel: str, arch: str, shape: KernelShape, schedule: Schedule, numerics: Numerics, folder: Path,
              source: Source | None = None) -> Task:
    launch = launch_of(kernel, shape, schedule, numerics, source)
    key = bundle.artefact_key(launch, load_arch(arch).capability)
    wanted = wanted_instructions(kernel, shape, arch, source)
    own = (source.place, source.digest) if source else ()  # a file that changed its process's state fails for itself alone
    record_key = hashlib.sha256(json.dumps([SCHEMA, key, dataclasses.astuple(wanted), *own]).encode()).hexdigest()[:32]
    return Task(kernel, arch, shape, schedule, numerics, wanted, key, record_key, str(folder), source)


def audited(key: str) -> bool:
    """Whether an early reject is compiled to the end all the same: a fixed sample, the same in every run."""
    return int(key[:8], 16) % AUDIT_ONE_IN == 0


def compile_task(task: Task, *, to_the_end: bool = False) -> Record:
    """Compile one variant and write its record. Runs in a worker. to_the_end: even if it could be rejected early.

    Raises:
        OutputError: the folder can't be written. A candidate's own faults are in the record.
        AssemblerDied: the assembler was killed, which isn't the candidate's fault: nothing is recorded.
    """
    started = time.perf_counter()
    folder = Path(task.folder)
    target = load_arch(task.arch)
    with ONE_AT_A_TIME, in_a_worker() if task.source else contextlib.nullcontext():
        try:
            launch = launch_of(task.kernel, task.shape, task.schedule, task.numerics, task.source)
        except (Exception, SystemExit) as e:
            if task.source is None:
                raise
            return Record("contract", (Reason("compile_error", f"{type(e).__name__}: {e}"[:400]),))  # unlike when it was planned
        try:
            record = _Compilation(launch, target, task.wanted, task.key, folder, to_the_end).run()
        except OSError as e:
            raise cannot_write(folder, e) from None
    record = dataclasses.replace(record, compile_ms=round((time.perf_counter() - started) * 1e3, 1))
    write_record(record_path(folder, task.record_key), record)
    return record


class _Compilation:
    """One run through the stages. record: the facts so far. module, options, metadata, stages: Triton's values."""

    def __init__(self, launch: Launch, target: Target, wanted: Instructions, key: str, folder: Path,
                 to_the_end: bool = False) -> None:
        self.launch, self.target, self.wanted, self.key, self.folder = launch, target, wanted, key, folder
        self.to_the_end = to_the_end or audited(key)
        self.record = Record("contract")

    def run(self) -> Record:
        from triton import knobs

        with _captured_stderr() as self.printed, knobs.compilation.scope():
            # Line information would put the checkout's path into the cubin: equal kernels would differ.
            knobs.compilation.disable_line_info = True
            try:
                self._front()
                self._back()
            except Stop as stop:
                return replace(self.record, stage=stop.stage, failures=tuple(stop.reasons))
        return self.record

    @contextlib.contextmanager
    def _compiler(self) -> Iterator[None]:
        """Wraps Triton's stages alone: any error they raise is the candidate's verdict."""
        try:
            yield
        except (OSError, MemoryError):
            raise
        except (Exception, SystemExit) as e:
            if (killed := re.search(r"`ptxas` failed with error code -(\d+)", str(e))) is not None:
                raise AssemblerDied(int(killed.group(1))) from None
            code: Literal["assembler_error", "compile_error"]
            code = "assembler_error" if type(e).__name__ == "PTXASError" else "compile_error"
            raise Stop(self.record.stage, [Reason(code, *_error_text(e, self.printed()))]) from None

    def _early(self, stage: Stage, reasons: list[Reason]) -> None:
        """Stop with these reasons, or only note them if this variant is compiled to the end."""
        if not reasons:
            return
        if not self.to_the_end:
            raise Stop(stage, reasons)
        self.record = replace(self.record, early=(*self.record.early, *reasons))

    def _front(self) -> None:
        """To TTGIR: the instruction family is known."""
        from triton._C.libtriton import ir

        capability = self.target.capability
        backend = toolchain.backend_of(capability)
        self.options = bundle.compiler_options(self.launch, capability)
        source = bundle.source_of(self.launch)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        self.metadata: Table = {"target": backend.target, **self.options.__dict__}
        self.stages: dict[str, Callable[..., toolchain.TritonValue]] = {}
        backend.add_stages(self.stages, self.options, source.language)
        with self._compiler():
            module = source.make_ir(backend.target, self.options, backend.get_codegen_implementation(self.options),
                                    backend.get_module_map(), context)
            for name in ("ttir", "ttgir"):
                module = self.stages[name](module, self.metadata)
        self.context = context  # owns the module
        self.module = module
        self.ttgir = str(module)
        dots = inspection.dots_of(self.ttgir)
        self.record = replace(self.record, stage="ttgir", dots=tuple(family for family, _ in dots),
                              lines=tuple(line for _, line in dots))
        self._early("ttgir", inspection.instruction_reasons(self.record.dots, self.wanted, self.record.lines))

    def _intermediate_key(self) -> str:
        """Digest of all inputs of the later stages."""
        text = re.sub(r"^#loc.*$|loc\(.*?\)\)?$", "", self.ttgir, flags=re.MULTILINE)
        chosen = {k: str(v) for k, v in self.options.__dict__.items() if k not in DONE_BY_TTGIR}
        parts = [SCHEMA, self.launch.kernel.__name__, text, chosen, toolchain.identity(self.target.capability),
                 dataclasses.astuple(self.wanted), self.to_the_end, str(self.metadata.get("tensordesc_meta"))]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def _back(self) -> None:
        """From TTGIR to the facts of the cubin, or the record of a variant with equal TTGIR."""
        place = self.folder / "intermediate" / f"{self._intermediate_key()}.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        locks = self.folder / "locks"
        locks.mkdir(exist_ok=True)
        with _locked_for_a_while(locks / place.name[:3]):  # 4,096 locks for all keys: a lock file can't be deleted safely
            if self._reuse(place):
                return
            self._assemble()
            write_record(place, self.record)

    def _reuse(self, place: Path) -> bool:
        """Use the record of equal code, if it exists and is whole."""
        known = read_record(self.folder, place)
        if known is None or known.artefact is None:
            return False
        if known.artefact != self.key:
            bundle.link(self.folder, self.key, known.artefact)
        self.record = replace(known, artefact=self.key)
        return True

    def _assemble(self) -> None:
        ptx = self._to_ptx()
        with self._compiler():
            cubin, log = _with_log(self.stages["cubin"], ptx, self.metadata)
        used, warnings, spills = inspection.log_lines(log)
        bundle.save(self.folder, self.key, self.metadata["name"], self.metadata, ptx, cubin)
        self.record = replace(self.record, stage="cubin", log=used, warnings=warnings, num_warps=self.metadata["num_warps"],
                              artefact=self.key)
        try:
            read = read_cubin(cubin)
        except Unreadable as e:
            raise Stop("cubin", [Reason("not_inspectable", str(e))]) from None
        if problem := _contradiction(read, spills, self.target):
            raise Stop("cubin", [Reason("not_inspectable", problem, self.record.log)])
        shared, tmem = self._memory()
        facts = Facts(read.instructions, read.registers, read.stack_bytes, read.spill_store_bytes, read.spill_load_bytes, shared,
                      tmem, bundle.sha256(cubin))
        self.record = replace(self.record, stage="sass", facts=facts)

    def _to_ptx(self) -> str:
        with self._compiler():
            module = self.stages["llir"](self.module, self.metadata)
        self._early("ttgir", inspection.resource_reasons(*self._memory(), self.target))
        with self._compiler():
            ptx: str = self.stages["ptx"](module, self.metadata)
        shown, conversions = inspection.ptx_lines(ptx, self.wanted.forbidden_ptx + self.wanted.fallback_ptx)
        self.record = replace(self.record, stage="ptx", lines=shown or self.record.lines, conversions=conversions)
        if self.launch.options.get("launch_pdl"):
            try:
                found = inspection.early_lines(ptx, self.launch.pointers(), self.wanted.early_reads)
            except Unreadable as e:
                raise Stop("ptx", [Reason("not_inspectable", str(e))]) from None
            self.record = replace(self.record, early_accesses=found)
        families = self.record.dots if set(self.record.dots) <= set(FAMILIES) else ()  # others get theirs in later stages
        self._early("ptx", inspection.conversion_reasons(conversions, self.wanted, families)
                    + inspection.early_reasons(self.record.early_accesses))
        return ptx

    def _memory(self) -> tuple[int, int]:
        """(bytes of shared memory per block, TMEM columns), known once there is LLVM IR."""
        return self.metadata["shared"] or 0, self.metadata.get("tmem_size") or 0


def _contradiction(facts: CubinFacts, spills: tuple[int, int] | None, target: Target) -> str | None:
    """The contradiction between cubin, target and ptxas log, or None. If two readings differ, neither is trusted."""
    if facts.arch != target.capability:
        return f"the cubin is for sm_{facts.arch}; expected {target.arch}"
    if spills is None:
        return "the log of ptxas -v has no line on spills"
    if spills != (facts.spill_store_bytes, facts.spill_load_bytes):
        return (f"ptxas -v says {spills[0]} B of spill stores and {spills[1]} B of loads, the code has "
                f"{facts.spill_store_bytes} B and {facts.spill_load_bytes} B")
    return None


def _with_log(stage: Callable[[str, Table], bytes], ptx: str, metadata: Table) -> tuple[bytes, str]:
    """Assemble, and keep the `ptxas -v` log, which Triton otherwise discards."""
    from triton import knobs

    out = io.StringIO()
    with contextlib.redirect_stdout(out), knobs.nvidia.scope():
        knobs.nvidia.dump_ptxas_log = True
        return stage(ptx, metadata), out.getvalue()


@contextlib.contextmanager
def _locked_for_a_while(path: Path) -> Iterator[None]:
    """Hold the lock, or continue without it if a live process holds it for longer than any compilation takes: at worst the same
    work is done twice. Raises OSError if the file system has no locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(TimeoutError):
            stack.enter_context(locked(path, longest_s=LOCK_SECONDS))
        yield


@contextlib.contextmanager
def _captured_stderr() -> Iterator[Callable[[], str]]:
    """Captures file descriptor 2, which native code prints to. Yields a function that returns the text so far."""
    with tempfile.TemporaryFile() as sink:
        saved = os.dup(2)
        os.dup2(sink.fileno(), 2)

        def printed() -> str:
            sink.seek(0)
            return sink.read().decode(errors="replace")

        try:
            yield printed
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def _error_text(error: BaseException, printed: str) -> tuple[str, tuple[str, ...]]:
    """(detail, lines) of a compiler error: the first line that names an error, and up to 6 such lines."""
    lines = [line.strip() for line in f"{error}\n{printed}".splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Repro command")]
    telling = [line for line in lines if re.search(r"fatal|error\s*:|Error[:(]", line)] or lines or [type(error).__name__]
    return telling[0][:400], tuple(line[:240] for line in telling[:6])
