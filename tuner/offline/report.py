"""The offline report: one JSON value, read and written here alone, and what a terminal shows of it."""

import dataclasses
import json
import shlex
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...schedules.schedule import KINDS
from ...shapes.fields import nearest, no_constant
from ..errors import ReportError

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = "tune-kernels/offline-report/1"
FAMILY = "tune-kernels/offline-report/"
FIELDS = {"schema": str, "toolchain": dict, "model": str, "targets": list, "space": str, "seconds": (int, float),
          "counts": dict, "variants": list}
VARIANT_FIELDS = {"id": str, "kernel": str, "kernel_digest": str, "target": str, "shape": dict, "schedule": dict,
                  "verdict": str, "stage": str, "reasons": list, "warnings": list}
REASON_FIELDS = {"code": str, "detail": str, "lines": list}
# Facts of the artefact: null in a variant that was rejected before they were known.
FACT_FIELDS = ("registers", "spill_store_bytes", "spill_load_bytes", "stack_bytes", "shared_bytes", "tmem_columns",
               "blocks_per_sm", "cubin_sha256")

Report = dict[str, Any]


def read_report(path: Path) -> Report:
    """A report from its file, or the folder it lies in.

    Raises:
        ReportError: no report there; not JSON; another or a newer schema; fields missing or of the wrong kind.
    """
    path = path / "report.json" if path.is_dir() else path
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ReportError(f"no report at {path}", expected="report.json, as tune-kernels --offline writes it",
                          action="run tune-kernels --offline, or name its folder with --out") from None
    except OSError as e:
        raise ReportError(f"{path}: {e.strerror}", expected="a readable report.json") from None
    try:
        table = json.loads(data, parse_constant=no_constant)
    except (ValueError, RecursionError) as e:
        raise ReportError(f"{path}: not valid JSON: {e}", expected="a whole report.json",
                          action="run tune-kernels --offline again: finished work is kept") from None
    return check_report(table, str(path))


def check_report(table: Any, path: str) -> Report:
    """A report from the JSON value of its file, wherever that came from. path: what errors name.

    Raises:
        ReportError: another or a newer schema; fields missing or of the wrong kind.
    """
    schema = table.get("schema") if isinstance(table, dict) else None
    if schema != SCHEMA:
        newer = isinstance(schema, str) and schema.startswith(FAMILY)
        raise ReportError(f"{path}: schema {schema!r}", expected=repr(SCHEMA),
                          action="update tune-kernels: this report is another version's" if newer else
                                 "name the folder or report.json of tune-kernels --offline")
    _check(table, FIELDS, path)
    for i, variant in enumerate(table["variants"]):
        if not isinstance(variant, dict):
            raise ReportError(f"{path}: variant {i} is a {type(variant).__name__}", expected="an object")
        _check(variant, VARIANT_FIELDS, f"{path}: variant {i}")
        for reason in variant["reasons"]:
            _check(reason if isinstance(reason, dict) else {}, REASON_FIELDS, f"{path}: variant {i}: reason")
    found: Report = table
    return found


def _check(table: Mapping[str, Any], fields: Mapping[str, Any], where: str) -> None:
    for name, kind in fields.items():
        if not isinstance(table.get(name), kind):
            found = f"is a {type(table[name]).__name__}" if name in table else "is missing"
            raise ReportError(f"{where}: {name} {found}", expected="a report that tune-kernels --offline wrote")


def find_variant(report: Report, variant_id: str) -> dict[str, Any]:
    """The variant whose id is, or begins with, `variant_id`. Raises ReportError where none or several are."""
    found: list[dict[str, Any]] = [v for v in report["variants"] if v["id"].startswith(variant_id)]
    if variant_id and len(found) == 1:
        return found[0]
    ids = [v["id"] for v in report["variants"]]
    if len(found) > 1:
        raise ReportError(f"{len(found)} variants begin with {variant_id!r}", expected="more of the id",
                          action=f"for example {', '.join(v['id'] for v in found[:3])}")
    raise ReportError(f"no variant {variant_id!r} in this report{nearest(variant_id, ids)}",
                      expected="an id of report.json or report.html", action="run the sweep that has it, or name its "
                      "folder with --out")


def describe_schedule(schedule: Mapping[str, Any]) -> str:
    """`BLOCK_N 64, BLOCK_K 128, ...` in the order of the design, knobs at their plain defaults left out."""
    order = ("chunk", "TILE", "BLOCK_N", "BLOCK_K", "BLOCK_D", "splits", "num_stages", "num_warps", "split_k")
    plain = _plain_knobs()
    names = sorted(schedule, key=lambda k: order.index(k) if k in order else len(order))
    return ", ".join(f"{k} {schedule[k]}" for k in names if k not in plain or plain[k] != schedule[k])


@cache
def _plain_knobs() -> dict[str, Any]:
    return {f.name: f.default for kind in KINDS for f in dataclasses.fields(kind)}


def rejection_counts(variants: list[dict[str, Any]]) -> Counter[str]:
    """Variants by reason. One that has several reasons counts under its first."""
    return Counter(v["reasons"][0]["code"] for v in variants if v["reasons"])


def print_summary(report: Report, console: "Console", out: Path) -> None:
    """A table a target: a row a kernel; then what to do next."""
    from rich.table import Table

    for target in report["targets"]:
        mine = [v for v in report["variants"] if v["target"] == target]
        codes = sorted(rejection_counts(mine))
        table = Table(title=f"{report['model']} on {target}, Triton {report['toolchain']['triton']}",
                      title_justify="left")
        for name in ("kernel", "variants", "accepted", *codes):  # spaces let a narrow terminal wrap a heading
            first = name == "kernel"
            table.add_column(name.replace("_", " "), justify="left" if first else "right", no_wrap=first)
        for kernel in dict.fromkeys(v["kernel"] for v in mine):
            rows = [v for v in mine if v["kernel"] == kernel]
            counts = rejection_counts(rows)
            table.add_row(kernel, str(len(rows)), str(sum(v["verdict"] == "accepted" for v in rows)),
                          *(str(counts[c] or "") for c in codes))
        console.print(table)
    counts, audit = report["counts"], report["audit"]
    example = next((v for v in report["variants"] if v["verdict"] != "accepted" and v["reasons"]), None)
    lines = [
        f"{counts['variants']} variants: {counts['accepted']} accepted ({counts['accepted_cubins']} distinct artefacts), "
        f"{counts['rejected']} rejected, {counts['contract']} against a kernel's contract; {counts['cached']} known before, in "
        f"{report['seconds']:.1f} s",
        f"audit: {audit['sampled']} early rejects compiled to the end, {len(audit['disagreed'])} of them would have been "
        "accepted",
        "next:",
        f"  open {out / 'report.html'}",
        *([f"  tune-kernels show {example['id']} --out {shlex.quote(str(out))}    why one was rejected"] if example else []),
        f"  take {out} to a GPU machine with Triton {report['toolchain']['triton']}: accepted kernels launch there without "
        "compiling",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
