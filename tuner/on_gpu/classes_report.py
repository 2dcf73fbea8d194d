"""The result of `verify --classes`, as JSON and in a terminal."""

import dataclasses
from typing import TYPE_CHECKING

from ...schedules.schedule import Schedule, knobs_of, schedule_id, schedule_to_dict
from ...shapes import fields
from ...shapes.model import dims_of, shape_to_dict
from ..offline.report import describe_schedule
from .classes import DIFFERS, SAME, ClassesReport, Effect, KernelClasses, sizes

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = "tune-kernels/classes/1"


def report_to_dict(report: ClassesReport) -> fields.Table:
    """As printed by `--json`."""
    return {
        "schema": SCHEMA, "model": report.model, "target": report.target, "recipe": report.recipe, "passed": report.passed,
        "machine": dataclasses.asdict(report.machine), "toolchain": dataclasses.asdict(report.toolchain),
        "calls": dataclasses.asdict(report.calls), "seconds": report.seconds, "skipped": dict(report.skipped),
        "kernels": [_kernel_to_dict(k) for k in report.kernels],
    }


def _kernel_to_dict(found: KernelClasses) -> fields.Table:
    return {
        "kernel": found.kernel, "shape": shape_to_dict(found.shape), "variants": len(found.classes), "origin": found.origin,
        "schedule": schedule_to_dict(found.schedule), "class": found.numerics_class,
        "classes": [{"class": s.numerics_class, "candidates": s.candidates, "knobs": dict(s.knobs)}
                    for s in sizes(found.classes)],
        "knobs": {knob: {"changes_bits": effect.says, "pair": [
            {"id": schedule_id(s), "schedule": schedule_to_dict(s), "class": found.classes[s]} for s in effect.pair or ()]}
            for knob, effect in found.effects.items()},
        "promoted": [{"schedule_id": c.row.schedule_id, "date": c.row.date, "triton": c.row.toolchain.triton,
                      "kernel_digest": c.row.kernel_digest, "class": c.row.numerics_class, "found": c.found, "verdict": c.verdict}
                     for c in found.promoted],
        "without_class": dict(found.without_class),
    }


def print_report(report: ClassesReport, console: "Console") -> None:
    """Prints a table per kernel, then the promoted classes. Text is never interpreted as markup."""
    from rich.table import Table
    from rich.text import Text

    for found in report.kernels:
        shape = ", ".join(f"{k} {v}" for k, v in dims_of(found.shape).items())
        table = Table(title=Text(
            f"{found.kernel} on {report.target}, recipe {report.recipe}: {shape}\n"
            f"{len(sizes(found.classes))} classes of {len(found.classes)} variants; {found.origin}: "
            f"{describe_schedule(knobs_of(found.schedule))}: class {(found.numerics_class or 'NOT COMPUTED')[:12]}"),
            title_justify="left")
        for name in ("knob", "changes bits", "for example"):
            table.add_column(name, no_wrap=name != "for example")
        for knob, effect in found.effects.items():
            table.add_row(Text(knob), effect.says, Text(_example(knob, effect, found)))
        console.print(table)
    for line in closing_lines(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _example(knob: str, effect: Effect, found: KernelClasses) -> str:
    """`4 and 7 give 1a2b3c4d and 5e6f7a8b: BLOCK_N 64, ...`, or an empty string."""
    if effect.pair is None:
        return ""
    a, b = effect.pair
    one, other = found.classes[a], found.classes[b]
    given = f"both give {one[:8]}" if one == other else f"give {one[:8]} and {other[:8]}"
    return f"{_value(a, knob)} and {_value(b, knob)} {given}: {_others(a, knob)}"


def _value(schedule: Schedule, knob: str) -> object:
    return getattr(schedule, knob)


def _others(schedule: Schedule, knob: str) -> str:
    return describe_schedule({k: v for k, v in knobs_of(schedule).items() if k != knob})


def closing_lines(report: ClassesReport) -> list[str]:
    """Lines on skipped kernels, variants without a class, and the comparison with promoted classes."""
    lines = [f"{kernel}: skipped: {why}" for kernel, why in report.skipped.items()]
    for found in report.kernels:
        lines += [f"{found.kernel}: {name} has no class: {why}" for name, why in found.without_class.items()]
        for c in found.promoted:
            here = f", here {(c.found or '')[:12]}" if c.verdict == DIFFERS else ""
            lines.append(f"{found.kernel}: promoted {c.row.schedule_id} ({c.row.date}, Triton {c.row.toolchain.triton}): class "
                         f"{c.row.numerics_class[:12]}{here}: {c.verdict}")
    compared = [c for found in report.kernels for c in found.promoted]
    met = sum(c.verdict == SAME for c in compared)
    lines.append(f"promoted classes: {met} of {len(compared)} met here" if compared else
                 "no promoted row of these kernels: nothing to compare with")
    if report.seconds is not None:
        lines.append(f"{report.seconds:.1f} s; calls of the compiler {report.calls.compiler}, of ptxas {report.calls.ptxas}")
    return lines
