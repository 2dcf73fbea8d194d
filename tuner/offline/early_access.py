"""Memory accesses before a kernel's dependency wait, found in its PTX.

Under programmatic dependent launch a kernel overlaps with its predecessor until it waits (`griddepcontrol.wait`). Before the wait
it may only read memory that no predecessor writes, such as weights. A compiler may silently move a load above the wait: Triton's
pipeliner lifts loads of a loop over one in inline assembly. Such a kernel is correct alone and sometimes wrong in a chain.

The analysis follows the control flow from the entry to every wait. Each instruction with a memory operand counts, except those of
another space than the global one. An address belongs to the parameters that it is computed from. A call or computed branch isn't
followed: it counts as a write to an unknown address. Unreadable text is an error.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .cubin import Unreadable

WAIT = "griddepcontrol.wait"
_ENTRY = re.compile(r"\.entry\s+\S+?\s*\((.*?)\)[^{]*\{", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+(.*?)\s*(\w+_param_\d+)")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|^\s*\.(?:loc|file)\b[^\n]*", re.DOTALL | re.MULTILINE)
_PIECE = re.compile(r"\s*(?:([$\w]+):(?!:)|([{}])|([^;{}][^;]*)?;)")  # a label, a block's edge, a statement
_STATEMENT = re.compile(r"(?:@(!?[%\w]+)\s+)?(\S+)\s*(.*)", re.DOTALL)
_NAME = re.compile(r"[%$A-Za-z_][\w$.]*")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_OTHER_SPACES = ("shared", "param", "local", "const")
_NO_MEMORY = ("tcgen05", "wgmma", "mma", "mbarrier", "ldmatrix", "stmatrix")  # access only shared and tensor memory
_READS = ("ld", "ldu", "prefetch", "prefetchu")
SHOWN = 160  # characters of an instruction in a report's line


@dataclass(frozen=True)
class Access:
    """One argument that is accessed before the wait. name: None if the address comes from no argument."""

    name: str | None
    writes: bool
    line: str


@dataclass(frozen=True)
class _Statement:
    """One instruction. blocks: its enclosing blocks, outermost first."""

    guard: str | None
    opcode: str
    operands: str
    blocks: tuple[int, ...]

    @property
    def parts(self) -> list[str]:
        """The opcode and its modifiers: cp.async.cg.shared.global → cp, async, cg, shared, global."""
        return self.opcode.split(".")

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", f"{f'@{self.guard} ' if self.guard else ''}{self.opcode} {self.operands}").strip()[:SHOWN]


def before_wait(ptx: str, pointers: Sequence[str]) -> list[Access] | None:
    """The first read and the first write of each argument that may come before a wait; None if the kernel never waits.

    pointers: names of its pointers and tensor descriptors, in order. Triton's own scratch pointers follow them in PTX.

    Raises:
        Unreadable: no entry, an entry without end, a branch to nowhere, or fewer parameters than arguments.
    """
    statements, labels, arguments = _entry(ptx, pointers)
    if not any(s.opcode.startswith(WAIT) for s in statements):
        return None
    origins = _Origins(statements, set(arguments))
    found: dict[tuple[str | None, bool], Access] = {}
    for statement in _reached(statements, labels):
        for address, writes in _accesses(statement):
            for parameter in origins.of(address) or [""]:
                name = arguments.get(parameter)
                found.setdefault((name, writes), Access(name, writes, statement.text))
    return list(found.values())


def written(ptx: str, pointers: Sequence[str]) -> list[str]:
    """The arguments that a kernel may write to, in their order. pointers: as for `before_wait`. Raises Unreadable."""
    statements, _, arguments = _entry(ptx, pointers)
    origins = _Origins(statements, set(arguments))
    found = {arguments[parameter] for statement in statements for address, writes in _accesses(statement) if writes
             for parameter in origins.of(address)}
    return [name for name in dict.fromkeys(pointers) if name in found]


def _entry(ptx: str, pointers: Sequence[str]) -> "tuple[list[_Statement], Labels, dict[str, str | None]]":
    """The entry's statements and labels, and each parameter that is a pointer, by its argument's name; None for Triton's own.
    Raises Unreadable."""
    match = _ENTRY.search(ptx)
    if match is None:
        raise Unreadable("PTX without an entry")
    named = [name for kind, name in _PARAMETER.findall(match.group(1)) if ".ptr" in kind or ".b8" in kind]
    if len(named) < len(pointers):
        raise Unreadable(f"PTX with {len(named)} pointers among its parameters; the kernel has {len(pointers)}")
    statements, labels = _read(ptx[match.end():])
    return statements, labels, dict(itertools.zip_longest(named, pointers))


Labels = dict[str, list[tuple[tuple[int, ...], int]]]  # by label: its enclosing blocks, and the statement after it


def _read(body: str) -> tuple[list[_Statement], Labels]:
    """The entry's statements and labels."""
    text = _COMMENT.sub("", body)
    statements: list[_Statement] = []
    labels: Labels = {}
    blocks: tuple[int, ...] = (0,)
    opened = at = 0
    while blocks and (piece := _PIECE.match(text, at)) is not None:
        label, edge, words = piece.groups()
        at = piece.end()
        if label:
            labels.setdefault(label, []).append((blocks, len(statements)))
        elif edge == "{":
            opened += 1
            blocks = (*blocks, opened)
        elif edge == "}":
            blocks = blocks[:-1]
        elif words and (parts := _STATEMENT.match(words.strip())) and not parts.group(2).startswith("."):
            statements.append(_Statement(parts.group(1), parts.group(2), parts.group(3), blocks))
    if blocks:
        raise Unreadable("PTX that ends within its entry")
    return statements, labels


def _reached(statements: list[_Statement], labels: Labels) -> Iterator[_Statement]:
    """Statements that may run before a wait, in file order."""
    seen: set[int] = set()
    waiting = [0]
    while waiting:
        at = waiting.pop()
        while at < len(statements) and at not in seen:
            seen.add(at)
            statement = statements[at]
            family, always = statement.parts[0], statement.guard is None
            if family == "bra":
                waiting.append(_target(statement, labels))
            if always and (family in ("bra", "brx", "ret", "exit", "trap") or statement.opcode.startswith(WAIT)):
                break
            at += 1
    return (statements[at] for at in sorted(seen))


def _target(branch: _Statement, labels: Labels) -> int:
    """The statement that a branch leads to: at its label in the innermost enclosing block that has one. Raises Unreadable."""
    around = [(blocks, at) for blocks, at in labels.get(branch.operands.strip(), ()) if branch.blocks[:len(blocks)] == blocks]
    if not around:
        raise Unreadable(f"PTX with a branch to nowhere: {branch.text}")
    return max(around, key=lambda place: len(place[0]))[1]


def _accesses(statement: _Statement) -> list[tuple[str, bool]]:
    """(register of the address, whether it writes) of each access to global memory; the register is "" if it is unknown."""
    parts, brackets = statement.parts, _BRACKETS.findall(statement.operands)
    if parts[0] in ("call", "brx"):
        return [("", True)]
    spaces = [space for part in parts[1:] for space in ("global", *_OTHER_SPACES) if part.split("::")[0] == space]
    if not brackets or parts[0] in _NO_MEMORY or (spaces and "global" not in spaces):
        return []
    from_global = parts[0] == "cp" and spaces[-1:] == ["global"]
    address = brackets[1] if from_global and len(brackets) > 1 else brackets[0]
    name = _NAME.search(address)
    return [(name.group(0) if name else "", not (from_global or parts[0] in _READS))]


class _Origins:
    """Finds the parameters that a register is computed from."""

    def __init__(self, statements: list[_Statement], parameters: set[str]) -> None:
        self.parameters = parameters
        self.sources: dict[str, set[str]] = {}
        for statement in statements:
            if statement.parts[0] in _NO_MEMORY or ("[" in statement.operands and "param" not in statement.parts):
                continue  # a value from memory isn't an address
            into, _, rest = statement.operands.partition("}" if statement.operands.startswith("{") else ",")
            for name in _NAME.findall(into):
                self.sources.setdefault(name, set()).update(_NAME.findall(rest))

    def of(self, register: str) -> list[str]:
        """The parameters of a register, sorted by name."""
        seen, waiting = set[str](), [register]
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += self.sources.get(name, ())
        return sorted(seen & self.parameters)
