"""From artefact to verdict: accepted, or rejected with reasons from a fixed list and the deciding lines.

The record of a compilation (`record.Record`) holds facts alone. The policy is applied here, each time a report is made: another
spill limit needs no compiling.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...kernels.operation import Instructions
from ...schedules.schedule import LinearSchedule, Schedule
from ...shapes.target import Target
from .cubin import CubinFacts
from .early_access import before_wait
from .record import Facts, Reason, Record, Stage

FP8_FAMILIES = ("QGMMA", "UTCQMMA", "QMMA")
_DOT = re.compile(r"(?:^|= |\s)(ttng\.warp_group_dot|ttng\.tc_gen5_mma|ttng\.tc_gen5_mma_scaled|tt\.dot|tt\.dot_scaled) ")
_ELEMENT = re.compile(r"(?:memdesc|tensor)<(?:\d+x)+(\w+)")
_PTX_MMA = re.compile(r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)\b")
_WARNING = re.compile(r"\bC75\d\d\b|warning", re.IGNORECASE)


@dataclass(frozen=True)
class Verdict:
    """The verdict on one variant. lines: the deciding ones. facts, blocks_per_sm: None before the stage `sass`."""

    accepted: bool
    stage: Stage
    reasons: tuple[Reason, ...] = ()
    warnings: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    facts: Facts | None = None
    blocks_per_sm: int | None = None


def dots_of(ttgir: str) -> list[tuple[str, str]]:
    """(instruction family, line) of each distinct dot in TTGIR, which precedes the slow half of the compilation."""
    found: dict[tuple[str, ...], tuple[str, str]] = {}
    for line in ttgir.splitlines():
        match = _DOT.search(line)
        if not match:
            continue
        types = _ELEMENT.findall(line)[:2]
        family = _family(match.group(1), types)
        found.setdefault((family, *types), (family, _short(line)))
    return list(found.values())


def _family(op: str, types: list[str]) -> str:
    fp8 = len(types) == 2 and all(t.startswith("f8") for t in types)
    if op == "ttng.warp_group_dot":
        return "QGMMA" if fp8 else "IGMMA" if "i8" in types else "HGMMA"
    if op == "ttng.tc_gen5_mma":
        return "UTCQMMA" if fp8 else "UTCHMMA"
    return ("IMMA" if "i8" in types else "HMMA") if op == "tt.dot" else op


def _short(line: str, limit: int = 240) -> str:
    line = re.sub(r"\s+", " ", re.sub(r" loc\(.*$", "", line)).strip()
    return line if len(line) <= limit else line[:limit] + " ..."


def ptx_lines(ptx: str, forbidden: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(first line of each tensor-core instruction, first line with each `forbidden` text)."""
    shown: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for line in ptx.splitlines():
        if (match := _PTX_MMA.search(line)) is not None:
            shown.setdefault(line[match.start():].split(" ")[0], _short(line))
        for text in forbidden:
            if text in line:
                wrong.setdefault(text, _short(line))
    return tuple(shown.values()), tuple(wrong.values())


def log_lines(log: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[int, int] | None]:
    """From `ptxas -v`: (lines on stack and registers, warnings, (spill store, spill load) bytes or None)."""
    used, warnings, spills = [], [], None
    for line in log.splitlines():
        if (match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)) is not None:
            spills = (int(match.group(1)), int(match.group(2)))
            used.append(line.strip())
        elif "Used " in line and "registers" in line:
            used.append(line.split(":", 1)[-1].strip())
        elif _WARNING.search(line):
            warnings.append(re.sub(r"^.*?(?=\(C75|warning)", "", line.strip(), flags=re.IGNORECASE))
    return tuple(used), tuple(warnings), spills


def instruction_reasons(found: Collection[str], wanted: Instructions, lines: tuple[str, ...]) -> list[Reason]:
    """wrong_instruction if a required family is missing or a forbidden one is present."""
    missing = [f for f in wanted.required if f not in found]
    wrong = [f for f in wanted.forbidden if f in found]
    if not missing and not wrong:
        return []
    expected = " and ".join(wanted.required) or "no tensor-core instruction"
    return [Reason("wrong_instruction", f"expected {expected}, found {', '.join(found) or 'no tensor-core instruction'}",
                   lines)]


def conversion_reasons(lines: Sequence[str], wanted: Instructions, families: Collection[str]) -> list[Reason]:
    """wrong_instruction if there are forbidden conversions. lines: of PTX, by either rule of `wanted`; families: of products."""
    forbidden = tuple(line for line in lines if not any(text in line for text in wanted.fallback_ptx)
                      or any(text in line for text in wanted.forbidden_ptx))
    if forbidden:
        return [Reason("wrong_instruction", "e4m3 is converted to f16 before the product", forbidden)]
    return fallback_reasons(lines, families)


def fallback_reasons(lines: Sequence[str], families: Collection[str]) -> list[Reason]:
    """wrong_instruction if FP8 is converted to f16 (lines of PTX) and no matrix product runs in FP8."""
    if not lines or not families or set(families) & set(FP8_FAMILIES):
        return []
    return [Reason("wrong_instruction", f"FP8 is converted to f16, and {', '.join(families)} multiplies it", tuple(lines))]


def early_lines(ptx: str, pointers: Sequence[str], allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Forbidden memory accesses before the dependency wait, one line each. pointers: the kernel's arguments; allowed: those that
    it may read early.

    Raises:
        Unreadable: PTX that can't be analysed.
    """
    accesses = before_wait(ptx, pointers)
    if accesses is None:
        return ("no griddepcontrol.wait",)
    return tuple(f"{a.name or 'an address of unknown origin'} {'written' if a.writes else 'read'}: {a.line}" for a in accesses
                 if a.writes or a.name not in allowed)


def early_reasons(lines: tuple[str, ...]) -> list[Reason]:
    """early_access, if there are such lines."""
    if not lines:
        return []
    return [Reason("early_access", "memory is accessed before the dependency wait: the preceding kernel may still write it",
                   lines)]


def spill_reasons(facts: Facts | CubinFacts, limit: int, lines: tuple[str, ...] = ()) -> list[Reason]:
    """register_spill if a thread spills more than `limit` bytes. lines: of the assembler's log."""
    if max(facts.spill_store_bytes, facts.spill_load_bytes) <= limit:
        return []
    return [Reason("register_spill", f"{facts.spill_store_bytes:,} B of spill stores, {facts.spill_load_bytes:,} B of loads, "
                                     f"{facts.stack_bytes:,} B of stack; limit {limit:,} B", lines)]


def resource_reasons(shared_bytes: int, tmem_columns: int, target: Target) -> list[Reason]:
    """resource_limit: bytes of shared memory per block and TMEM columns, which the compiler doesn't check offline."""
    reasons = []
    if shared_bytes > target.shared_bytes_per_block:
        reasons.append(Reason("resource_limit", f"{shared_bytes:,} B of shared memory per block; {target.arch} has "
                                                f"{target.shared_bytes_per_block:,} B"))
    if tmem_columns > target.tmem_columns:
        reasons.append(Reason("resource_limit", f"{tmem_columns} TMEM columns; {target.arch} has {target.tmem_columns}"))
    return reasons


def blocks_per_sm(registers: int, shared_bytes: int, tmem_columns: int, num_warps: int, target: Target) -> tuple[int, str]:
    """(blocks that fit on one SM, the limiting resource). registers: per thread, allocated per warp in units of 256."""
    by_warp = -(-registers * 32 // 256) * 256
    limits = {
        "warps": target.max_warps_per_sm // num_warps,
        "blocks": target.max_blocks_per_sm,
        "registers": target.registers_per_sm // (by_warp * num_warps) if by_warp else target.max_blocks_per_sm,
        "shared memory": target.shared_bytes_per_sm // (shared_bytes + target.shared_bytes_reserved_per_block),
    }
    if tmem_columns:
        limits["TMEM"] = target.tmem_columns // tmem_columns
    limit = min(limits, key=lambda name: limits[name])
    return limits[limit], limit


def verdict_on(record: Record, wanted: Instructions, schedule: Schedule, target: Target, max_spill_bytes: int = 0) -> Verdict:
    """The verdict on one record under a policy."""
    reasons, facts = list(record.failures), record.facts
    if facts is None:
        return Verdict(False, record.stage, tuple(reasons), record.warnings, record.lines)
    reasons += instruction_reasons(facts.instructions, wanted, record.lines)
    reasons += conversion_reasons(record.conversions, wanted, facts.instructions)
    reasons += early_reasons(record.early_accesses)
    reasons += resource_reasons(facts.shared_bytes, facts.tmem_columns, target)
    reasons += spill_reasons(facts, max_spill_bytes, tuple(line for line in record.log if "spill" in line))
    fit, limit = blocks_per_sm(facts.registers, facts.shared_bytes, facts.tmem_columns, record.num_warps, target)
    asked = schedule.blocks_per_sm if isinstance(schedule, LinearSchedule) else 0
    if asked > fit and not any(r.code == "resource_limit" for r in reasons):
        reasons.append(Reason("resource_limit", f"blocks_per_sm is {asked}, but {limit} allows {fit} per SM"))
    return Verdict(not reasons, record.stage, tuple(reasons), record.warnings, record.lines, facts, fit)
