"""Reads a cubin in-process: opcodes, local loads and stores in bytes, registers, stack. Takes about 1 ms, and doesn't depend on
the architectures that a disassembler supports.

An instruction is 16 bytes; its opcode is the low 9 bits. The table is empirical: `tests/tuner/offline/test_cubin.py` compares its
counts with nvdisasm's. Anything unknown raises `Unreadable`, which becomes the verdict `not_inspectable`: an unknown instruction
never passes as 'no spills, no fallback'.
"""

import io
import struct
from dataclasses import dataclass, field

import numpy as np
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

# Bits 9 to 11 are the operand form, so that 0x9f0 and 0xdf0 are both HGMMA.
TENSOR_OPCODES = {0x037: "IMMA", 0x03C: "HMMA", 0x03F: "DMMA", 0x07A: "QMMA", 0x1F0: "HGMMA", 0x1F1: "IGMMA", 0x1F3: "QGMMA"}
ARCHES = (80, 86, 87, 89, 90, 100, 103, 120)  # architectures with this instruction format
UTC_MMA = 0x1EA  # of UTCHMMA and UTCQMMA; bits 72 and 73 distinguish them
UTC_KINDS = {0: "UTCHMMA", 3: "UTCQMMA"}
STORE_LOCAL, LOAD_LOCAL, EXIT = 0x187, 0x183, 0x14D
LOCAL_WIDTH = np.array([1, 1, 2, 2, 4, 8, 16, 0])  # bytes, by bits 73 to 75; 7 is unknown
# .nv.info attributes: EIATTR_REGCOUNT and EIATTR_FRAME_SIZE
REGISTERS, FRAME_SIZE = 0x2F, 0x11


class Unreadable(Exception):
    """A cubin or PTX that can't be analysed."""


@dataclass(frozen=True)
class CubinFacts:
    """The facts in one kernel's cubin. instructions: count by tensor-core family. Bytes are per thread, of static code."""

    arch: int
    instructions: dict[str, int] = field(default_factory=dict)
    registers: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    code_instructions: int = 0


def read_cubin(cubin: bytes) -> CubinFacts:
    """The facts of a cubin with one kernel. Raises Unreadable as read_kernels, and for another number of kernels."""
    kernels = read_kernels(cubin)
    if len(kernels) != 1:
        raise Unreadable(f"{len(kernels)} code sections; expected one kernel")
    return next(iter(kernels.values()))


def read_kernels(cubin: bytes) -> dict[str, CubinFacts]:
    """Facts by kernel in a cubin, in file order. Raises Unreadable for an unknown file, section or tensor-core instruction."""
    try:
        elf = ELFFile(io.BytesIO(cubin))
        arch = _arch(elf.header.e_flags)
        sections = list(elf.iter_sections())
        code = {s.name.removeprefix(".text."): s.data() for s in sections if s.name.startswith(".text.")}
        symbols = [symbol.name for table in sections if isinstance(table, SymbolTableSection) for symbol in table.iter_symbols()]
        attributes = _attributes(next((s.data() for s in sections if s.name == ".nv.info"), b""))
    except (ELFError, ValueError, KeyError, AttributeError, struct.error, UnicodeDecodeError, OverflowError) as e:
        raise Unreadable(f"not a readable ELF file: {e}") from None
    of = {symbols[index]: found for index, found in attributes.items() if index < len(symbols)}
    return {name: _facts(arch, text, of.get(name, {})) for name, text in code.items()}


def _facts(arch: int, code: bytes, attributes: dict[int, int]) -> CubinFacts:
    """Facts of one kernel. attributes: value by number."""
    if REGISTERS not in attributes:
        raise Unreadable("no register count")
    low, high = _words(code)
    opcode = low & 0x1FF
    if not (opcode == EXIT).any():
        raise Unreadable("no EXIT instruction: the opcode table doesn't fit this architecture")
    counts = {name: int((opcode == code).sum()) for code, name in TENSOR_OPCODES.items()}
    kinds = (high[opcode == UTC_MMA] >> 8) & 3
    if unknown := set(kinds.tolist()) - set(UTC_KINDS):
        raise Unreadable(f"tcgen05.mma of unknown kind {sorted(unknown)}")
    counts |= {name: int((kinds == kind).sum()) for kind, name in UTC_KINDS.items()}
    return CubinFacts(
        arch=arch, instructions={name: n for name, n in counts.items() if n}, registers=attributes[REGISTERS],
        stack_bytes=attributes.get(FRAME_SIZE, 0), spill_store_bytes=_local_bytes(opcode, high, STORE_LOCAL),
        spill_load_bytes=_local_bytes(opcode, high, LOAD_LOCAL), code_instructions=len(opcode))


def _arch(e_flags: int) -> int:
    """The architecture, such as 103: the second byte of the ELF flags since the tools of CUDA 12.8, the lowest byte before."""
    for arch in ((e_flags >> 8) & 0xFF, e_flags & 0xFF):
        if arch in ARCHES:
            return arch
    raise Unreadable(f"unknown architecture in ELF flags {e_flags:#x}")


def _words(code: bytes) -> tuple[np.ndarray, np.ndarray]:
    if not code or len(code) % 16:
        raise Unreadable(f"{len(code)} bytes of code are not 16-byte instructions")
    words = np.frombuffer(code, "<u8")
    return words[::2], words[1::2]


def _local_bytes(opcode: np.ndarray, high: np.ndarray, which: int) -> int:
    sizes = ((high[opcode == which] >> np.uint64(9)) & np.uint64(7)).astype(int)
    if (sizes == 7).any():
        raise Unreadable("a local load or store of unknown width")
    return int(LOCAL_WIDTH[sizes].sum())


def _attributes(info: bytes) -> dict[int, dict[int, int]]:
    """Value by symbol and attribute, from .nv.info, whose entries have a header (format, attribute, size) of 4 bytes."""
    found: dict[int, dict[int, int]] = {}
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = info[at], info[at + 1], struct.unpack_from("<H", info, at + 2)[0]
        at += 4
        if form == 4:  # a sized value: (symbol, number) if it belongs to a kernel
            if size == 8 and at + 8 <= len(info):
                symbol, value = struct.unpack_from("<II", info, at)
                found.setdefault(symbol, {})[attribute] = value
            at += size
    return found
