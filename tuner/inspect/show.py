"""The inspected kernels as a table for a terminal, Markdown for a pull request, HTML for a browser, JSON for a program."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..page import render_page
from .baseline import SCHEMA, worst_of
from .judge import Inspected

HEAD = ("kernel", "target", "instructions", "registers", "spills B", "shared B", "blocks/SM", "verdict")
TEXT_WIDTH = 120


@dataclass(frozen=True)
class Inspection:
    """One run. worse: the lines of baseline.regressions, None without a baseline."""

    kernels: tuple[Inspected, ...]
    worse: tuple[str, ...] | None = None

    @property
    def failed(self) -> bool:
        """Whether a kernel got worse than in the baseline, or without a baseline, whether one is rejected."""
        return bool(self.worse) if self.worse is not None else any(one.reasons for one in self.kernels)

    @property
    def closing(self) -> str:
        """The closing line."""
        rejected = sum(bool(one.reasons) for one in self.kernels)
        line = f"{len(self.kernels)} kernels: {len(self.kernels) - rejected} accepted, {rejected} rejected"
        return line if self.worse is None else f"{line}; {len(self.worse) or 'nothing'} worse than the baseline"


def row(one: Inspected) -> tuple[str, ...]:
    """The cells of HEAD; empty for unknown values."""
    instructions = ", ".join(f"{name} {count}" for name, count in (one.instructions or {}).items())
    spilled = None if one.spill_store_bytes is None else f"{one.spill_store_bytes} / {one.spill_load_bytes}"
    cells = (one.name, one.arch, instructions, one.registers, spilled, one.shared_bytes, one.blocks_per_sm, one.verdict)
    return tuple("" if cell is None else str(cell) for cell in cells)


def print_text(inspection: Inspection, console: Console) -> None:
    """A table, then each reason with its lines."""
    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(HEAD):
        table.add_column(name, justify="right" if 3 <= index <= 6 else "left", overflow="fold")
    for one in inspection.kernels:
        table.add_row(*(Text(cell) for cell in row(one)), style="red" if one.reasons else None)
    console.print(table)
    for one in inspection.kernels:
        for reason in one.reasons:
            console.print(Text(f"\n{one.name}  {one.where}\n  {reason.code}: {reason.detail}"), soft_wrap=True)
            for line in reason.lines:
                console.print(Text(f"    {line}"), soft_wrap=True)
    for line in inspection.worse or ():
        console.print(Text(f"worse: {line}"), soft_wrap=True)
    console.print(Text(inspection.closing))


def as_text(inspection: Inspection) -> str:
    """As printed to a terminal of TEXT_WIDTH columns, without colours."""
    console = Console(width=TEXT_WIDTH, color_system=None, force_terminal=False)
    with console.capture() as capture:
        print_text(inspection, console)
    return capture.get()


def as_markdown(inspection: Inspection) -> str:
    """A table and the reasons, with artefacts' text in code spans."""
    def code(text: str) -> str:
        return "`" + text.replace("`", "'").replace("|", "\\|").replace("\n", " ") + "`" if text else ""

    lines = [f"**{inspection.closing}**", "", "| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(map(code, row(one))) + " |" for one in inspection.kernels]
    lines.append("")
    lines += [f"- {code(one.name)} {reason.code}: {code(reason.detail)}" for one in inspection.kernels for reason in one.reasons]
    lines += [f"- worse: {code(line)}" for line in inspection.worse or ()]
    return "\n".join(lines) + "\n"


def as_html(inspection: Inspection) -> str:
    """One file that works from disk."""
    rows = [row(one) for one in inspection.kernels]
    return render_page("inspect.html", None, ["inspect.css"], [], inspection=inspection, head=HEAD, rows=rows)


def as_json(inspection: Inspection, indent: int | None = 1) -> str:
    """Everything, for programs and for a later --baseline."""
    kernels = [{**dataclasses.asdict(one), "verdict": one.verdict} for one in inspection.kernels]
    worst = [dataclasses.asdict(one) for one in worst_of(inspection.kernels)]
    value = {"schema": SCHEMA, "kernels": kernels, "worst": worst, "worse": inspection.worse}
    return json.dumps(value, indent=indent, sort_keys=True) + "\n"


def render(inspection: Inspection, form: str) -> str:
    """form: text, markdown, html, json, or line for JSON in one line."""
    forms = {"text": as_text, "markdown": as_markdown, "html": as_html, "json": as_json}
    return as_json(inspection, None) if form == "line" else forms[form](inspection)


def ordered(found: Sequence[Inspected]) -> tuple[Inspected, ...]:
    """Rejected ones first, then by name."""
    return tuple(sorted(found, key=lambda one: (not one.reasons, one.name, one.arch or "", one.where)))
