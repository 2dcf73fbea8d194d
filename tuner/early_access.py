"""What a kernel touches before it waits for the kernel in front of it, read from its PTX.

Under programmatic dependent launch a kernel runs beside the one before it until it waits (`griddepcontrol.wait`). What it reads
earlier must be what no kernel in front writes: weights, say. A compiler may move a load over the wait (Triton's pipeliner lifts
loads of a loop over one in inline assembly, and nothing says so); such a kernel is right alone, and wrong in a chain now and
then.

The control flow is followed from the entry to every wait, so what is reached only after one doesn't count, wherever it stands in
the file. An address belongs to the parameters that it is computed from. Shared memory and registers are the block's own.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

WAIT = "griddepcontrol.wait"
_ENTRY = re.compile(r"\.entry\s+(\S+?)\s*\((.*?)\)", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+(.*?)\s*(\w+_param_\d+)")
_LABEL = re.compile(r"^\s*([$\w]+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+([$\w]+)")
_END = re.compile(r"^\s*(?:ret|exit|trap)\b")
_GUARD = re.compile(r"^\s*(?:@!?%?\w+\s+)?")  # the predicate of an instruction
_PIECES = re.compile(r"^[\w.:]+\s+\{")  # of one value that goes into several registers
_NAME = re.compile(r"%\w+|\w+_param_\d+")
_GLOBAL = re.compile(  # what may touch global memory
    r"\b(ld|st)\.(?!param|shared|local|const)|cp\.async\.(?!commit|wait|mbarrier)|cp\.reduce|\bred\.|\batom\.|\bprefetch")
SHOWN = 160  # characters of a line


@dataclass(frozen=True)
class Access:
    """One argument that is touched before the wait. name: None where the address comes from no argument."""

    name: str | None
    writes: bool
    line: str


def before_wait(ptx: str, pointers: Sequence[str]) -> list[Access] | None:
    """The first access to each argument that may come before a wait, or None where the kernel never waits.

    pointers: its arguments that are pointers or tensor descriptors, in order; Triton's own scratch pointers come after them.
    """
    if WAIT not in ptx:
        return None
    match = _ENTRY.search(ptx)
    assert match is not None, "no entry"
    named = [name for kind, name in _PARAMETER.findall(match.group(2)) if ".ptr" in kind or ".b8" in kind]
    arguments = dict(zip(named, pointers))
    lines = ptx[match.end():].splitlines()
    origins = _Origins(lines)
    found: dict[tuple[str | None, bool], Access] = {}
    for at in _reached(lines):
        line = lines[at]
        if not (access := _GLOBAL.search(line)):
            continue
        writes = access.group(0).startswith(("st", "red", "atom", "cp.reduce")) or "global.shared" in line
        for address in _addresses(line):
            for name in [arguments.get(p) for p in origins.of(address) if p in named] or [None]:
                found.setdefault((name, writes), Access(name, writes, re.sub(r"\s+", " ", line).strip()[:SHOWN]))
    return list(found.values())


def _addresses(line: str) -> list[str]:
    """The registers in brackets that hold global addresses: the second brackets of a copy from global to shared memory, the first
    of anything else."""
    brackets = re.findall(r"\[([^\]]*)\]", line)
    if "cp.async" in line and "global.shared" not in line:
        brackets = brackets[1:]
    return re.findall(r"%\w+", brackets[0])[:1] if brackets else []


def _reached(lines: list[str]) -> list[int]:
    """Lines that may run before a wait."""
    labels: dict[str, list[int]] = {}
    for at, line in enumerate(lines):
        if label := _LABEL.match(line):
            labels.setdefault(label.group(1), []).append(at)
    seen: set[int] = set()
    waiting = [0]
    while waiting:
        at = waiting.pop()
        while at < len(lines) and at not in seen:
            seen.add(at)
            line = lines[at]
            if WAIT in line:
                break
            if branch := _BRANCH.search(line):
                waiting.append(_target(labels[branch.group(1)], at))
                if not line.lstrip().startswith("@"):
                    break
            if _END.match(line):
                break
            at += 1
    return sorted(seen)


def _target(places: list[int], at: int) -> int:
    """Where a branch of line `at` leads. Inline assembly uses the name of its own loop again and again: the one before."""
    return places[0] if len(places) == 1 else max((place for place in places if place <= at), default=places[0])


class _Origins:
    """Which parameters each register is computed from."""

    def __init__(self, lines: list[str]) -> None:
        self.sources: dict[str, set[str]] = {}
        for line in lines:
            text = _GUARD.sub("", line, count=1)
            if _GLOBAL.match(text) or text.startswith(("ld.shared", "wgmma", "tcgen05", "mma", "bar", "//", "}", "{")):
                continue  # what comes from memory is a value, no address
            into, _, rest = text.partition("}" if _PIECES.match(text) else ",")
            for name in _NAME.findall(into):
                self.sources.setdefault(name, set()).update(_NAME.findall(rest))

    def of(self, register: str) -> list[str]:
        """In order of their names."""
        seen, waiting = set[str](), [register]
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += self.sources.get(name, ())
        return sorted(name for name in seen if "_param_" in name)
