"""The recording: which kernels a program compiled, and how it launched them. Made from the events of its processes."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...shapes.fields import Count, Fields, parse_fields
from ..errors import RecordError

SCHEMA = "tune-kernels/recording/1"
ASSEMBLER_ERROR = re.compile(r"\berror\s+: (.*)")  # of ptxas
MOST_LINE_BYTES = 1 << 24  # of one event


@dataclass(frozen=True)
class RecordedKernel:
    """One compiled specialisation.

    function: qualified name in its module; file, line: of its source. tuned, heuristics: arguments that an autotuner or
    heuristics set; reached: the module's variable of that name is the function, or it under these two. signature: argument and
    Triton's type, in order. constants: path to an argument, [3] or [2, 0] inside a tuple, and its value. divisible: indices of
    the arguments that divide by 16. outputs: arguments that its code writes to, None where its PTX can't be read.
    """

    hash: str
    name: str
    function: str
    module: str
    file: str
    line: Count
    tuned: tuple[str, ...]
    heuristics: tuple[str, ...]
    reached: bool
    options: Mapping[str, object]
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[tuple[Count, ...], object], ...]
    divisible: tuple[Count, ...]
    outputs: tuple[str, ...] | None = None

    @property
    def source(self) -> str:
        """module:function."""
        return f"{self.module}:{self.function}"


@dataclass(frozen=True)
class Launch:
    """Launches that are alike. kernel: its hash; arguments: per argument a number, a text, null, or a tensor's dtype, shape and
    strides; trial: of a tuner or a benchmark; reads: those of the recording's reads that their process made before the first."""

    kernel: str
    grid: tuple[int, int, int]
    arguments: tuple[object, ...]
    trial: bool
    reads: tuple[Count, ...]
    count: Count


@dataclass(frozen=True)
class Failure:
    """A kernel that could not be compiled. error: the exception's name."""

    function: str
    module: str
    file: str
    line: Count
    error: str
    message: str
    signature: tuple[tuple[str, str], ...]
    trial: bool


def summary_of(message: str) -> str:
    """The line of a compiler's message that says why: the assembler's first error, or else the last line."""
    if (found := ASSEMBLER_ERROR.search(message)) is not None:
        return found.group(1).strip()
    lines = [line.strip() for line in message.splitlines() if line.strip(" ^")]
    return lines[-1][:200] if lines else "no message"


@dataclass(frozen=True)
class Tuning:
    """The configs of an autotuned kernel, and how many of them were compiled."""

    function: str
    module: str
    total: Count
    kept: Count


@dataclass(frozen=True)
class Read:
    """A place that reads back values of tensors that kernels were given. origins: a kernel's hash and the argument's index."""

    operation: str
    where: str
    origins: tuple[tuple[str, Count], ...]


@dataclass(frozen=True)
class Process:
    """One process of the program. triton: the version that it imported, or None."""

    executable: str
    arguments: tuple[str, ...]
    triton: str | None = None


@dataclass(frozen=True)
class Recording:
    """All of a program's processes. target: of a GPU that was played, or None for the real one; code: the program's exit code."""

    command: tuple[str, ...]
    target: str | None
    code: int
    processes: tuple[Process, ...]
    kernels: tuple[RecordedKernel, ...]
    launches: tuple[Launch, ...]
    failures: tuple[Failure, ...]
    tunings: tuple[Tuning, ...]
    reads: tuple[Read, ...]

    def launched_after_reads(self) -> dict[str, list[str]]:
        """Kernels that were launched only after the program read back an output of another launch: hash → the places."""
        outputs = {kernel.hash: {index for index, (name, _) in enumerate(kernel.signature)
                                 if kernel.outputs is None or name in kernel.outputs} for kernel in self.kernels}
        told = [any(index in outputs.get(kernel, ()) for kernel, index in read.origins) for read in self.reads]
        first: dict[str, tuple[int, ...]] = {}
        for launch in self.launches:
            first[launch.kernel] = min(launch.reads, first.get(launch.kernel, launch.reads), key=len)
        return {kernel: [f"{self.reads[i].where} ({self.reads[i].operation})" for i in reads if told[i]]
                for kernel, reads in first.items() if any(told[i] for i in reads)}


@dataclass
class _Found:
    """What one process has told so far."""

    processes: list[Process] = field(default_factory=list)
    kernels: dict[str, RecordedKernel] = field(default_factory=dict)
    launches: dict[int, Launch] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    tunings: list[Tuning] = field(default_factory=list)
    reads: dict[int, Read] = field(default_factory=dict)

    def take(self, event: Fields) -> None:
        kind = event.get("event", str)
        if kind == "process":
            self.processes.append(event.read(Process))
        elif kind == "triton":
            self.processes = [replace(process, triton=event.get("version", str)) for process in self.processes]
        elif kind == "kernel":
            kernel = event.read(RecordedKernel)
            self.kernels.setdefault(kernel.hash, kernel)
        elif kind == "launch":
            number, reads = event.get("number", int), event.get("reads", int)
            self.launches[number] = event.read(Launch, count=0, reads=tuple(range(reads)))
        elif kind == "count":
            number = event.get("number", int)
            self.launches[number] = replace(self.launches[number], count=event.get("count", int))
        elif kind == "failed":
            self.failures.append(event.read(Failure))
        elif kind == "configs":
            self.tunings.append(event.read(Tuning))
        elif kind == "read":
            number, read = event.get("number", int), event.read(Read)
            before = self.reads[number].origins if number in self.reads else ()
            self.reads[number] = replace(read, origins=tuple(sorted({*before, *read.origins})))
        else:
            raise event.fail("event", f"is {kind!r}")


def read_events(folder: Path, command: tuple[str, ...], target: str | None, code: int) -> Recording:
    """Raises RecordError for an event that isn't one."""
    processes = [_of_process(path) for path in sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)]
    reads: list[Read] = []
    launches: list[Launch] = []
    for process in processes:
        launches += [replace(launch, reads=tuple(len(reads) + i for i in launch.reads)) for launch in process.launches.values()]
        reads += [process.reads[number] for number in sorted(process.reads)]
    kernels = {kernel.hash: kernel for process in processes for kernel in process.kernels.values()}
    return Recording(command, target, code, tuple(p for one in processes for p in one.processes), tuple(kernels.values()),
                     _merged(launches), tuple(f for one in processes for f in one.failures),
                     tuple(dict.fromkeys(t for one in processes for t in one.tunings)), tuple(reads))


def _of_process(path: Path) -> _Found:
    found = _Found()
    for number, line in enumerate(_lines(path)):
        found.take(parse_fields(line, "JSON", f"{path}:{number + 1}", RecordError))
    return found


def _lines(path: Path) -> Iterator[bytes]:
    """Whole lines: a process that was killed leaves half of its last one."""
    with open(path, "rb") as file:
        while (line := file.readline(MOST_LINE_BYTES)).endswith(b"\n"):
            yield line


def _merged(launches: list[Launch]) -> tuple[Launch, ...]:
    """Those of several processes that are alike are one."""
    found: dict[tuple[str, tuple[int, int, int], bool, str], Launch] = {}
    for launch in launches:
        key = (launch.kernel, launch.grid, launch.trial, repr(launch.arguments))
        old = found.get(key)
        found[key] = launch if old is None else replace(old, count=old.count + launch.count,
                                                        reads=min(old.reads, launch.reads, key=len))
    return tuple(found.values())
