#!/usr/bin/env python
"""Other people's Triton kernels, compiled and judged for GPUs that aren't there. Makes docs/foreign-kernels.md.

    python scripts/foreign_kernels.py                # fetch, record what is not recorded yet, write the record and the page
    python scripts/foreign_kernels.py --page-only    # the page again, from docs/evidence/foreign-kernels.json

The packages come from the package index, without their dependencies, into build/foreign; nothing of them is copied. Their own
functions (foreign_calls.toml) are called on CPU tensors under `tune-kernels record`, one process at a time.
"""

import base64
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import common
from foreign_program import CALLS, calls_of
from tune_kernels.shapes.target import ARCHES
from tune_kernels.tuner.record.recording import summary_of

HERE = common.ROOT / "build" / "foreign"
RECORD, PAGE = common.ROOT / "docs" / "evidence" / "foreign-kernels.json", common.ROOT / "docs" / "foreign-kernels.md"
SCHEMA = "tune-kernels/foreign-kernels/1"
MAX_CONFIGS = 2  # of an autotuned kernel, per tuning
AT_ONCE = 20  # calls of one recording: what a run that is interrupted loses

NAMED = ("triton", "torch", "python", "max_configs")  # fields of the record that the page's text shows
TEXT = """# Kernels that nobody here wrote

{kernels} kernels of {packages}, compiled for {targets} on a machine
without a GPU. The packages' own functions were called on CPU tensors under [`tune-kernels record`](record.md), with no
change to a package, and the code was read by the rules of `inspect`.

Triton {triton}, torch {torch}, Python {python}. Each call ran in a process of its own. Of an autotuned kernel the first
{max_configs} configs of a tuning were compiled. Nothing was executed or timed. `scripts/foreign_kernels.py` makes this page from
[its record](evidence/foreign-kernels.json).

{totals}

Where a cell has slashes, it is {slashed}. Registers and spilled bytes (per thread) and shared memory (per block) are the
most of all specialisations. A dash: no tensor-core instruction, or nothing compiled.

| package | kernel | compiled | instructions | registers | spills B | shared B | verdict |
|---|---|---|---|---|---|---|---|"""

Record = dict[str, Any]


def fetched(package: str, pinned: str) -> Path:
    """The folder to put on PYTHONPATH."""
    place = HERE / "packages" / f"{package}-{pinned}"
    if not place.is_dir():
        files = HERE / "files"
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(files),
                        f"{package}=={pinned}"], check=True)
        stem = package.replace("-", "_")
        [file] = [path for path in files.iterdir() if path.name.startswith((f"{stem}-{pinned}", f"{package}-{pinned}"))]
        unpacked = place.with_name(f".{place.name}")
        if file.suffix == ".whl":
            zipfile.ZipFile(file).extractall(unpacked)
            unpacked.rename(place)
        else:
            with tarfile.open(file) as archive:
                archive.extractall(unpacked, filter="data")
            [inner] = unpacked.iterdir()
            inner.rename(place)
            unpacked.rmdir()
    return place


def recorded(package: str, pinned: str, target: str, chunk: int) -> Path | None:
    """The folder of a recording of AT_ONCE calls, made if it isn't there; None if the recording failed."""
    out = HERE / "recordings" / f"{package}-{pinned}-{target}-{chunk}"
    outcomes = out / "outcomes.jsonl"
    if not (out / "recording.json").is_file():
        out.mkdir(parents=True, exist_ok=True)
        paths = [str(fetched(package, pinned)), *filter(None, [os.environ.get("PYTHONPATH")])]
        generated = out / "generated"  # flag-gems keeps the configs that it has chosen: none of an earlier run may count
        shutil.rmtree(generated, ignore_errors=True)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "GEMS_VENDOR": "nvidia",
               "FLAGGEMS_CACHE_DIR": str(generated)}
        program = [sys.executable, str(CALLS.with_name("foreign_program.py")), package, str(outcomes),
                   str(chunk * AT_ONCE), str((chunk + 1) * AT_ONCE)]
        command = ["nice", "-n", "1", sys.executable, "-m", "tune_kernels.tuner", "record", "--target", target, "--out", str(out),
                   "--max-configs", str(MAX_CONFIGS), "--json", "--", *program]
        done = subprocess.run(command, env=env, stdout=subprocess.DEVNULL)
        print(f"{package} {target}, calls {chunk * AT_ONCE + 1} on: exit code {done.returncode}", file=sys.stderr, flush=True)
    return out if (out / "recording.json").is_file() and outcomes.is_file() else None


def gathered(packages: dict[str, Record]) -> Record:
    """The record: one entry per kernel function, and one per call that was refused."""
    kernels: dict[tuple[str, str], Record] = {}
    refused: dict[tuple[str, str], Record] = {}
    calls: dict[str, int] = defaultdict(int)
    for package, table in packages.items():
        count = len(calls_of(package))
        for chunk in range(-(-count // AT_ONCE)):
            folders = {arch: recorded(package, table["version"], arch, chunk) for arch in sorted(ARCHES, key=_number)}
            for arch, folder in folders.items():
                if folder is not None:
                    _add(package, arch, folder, kernels, refused)
            calls[package] += min(AT_ONCE, count - chunk * AT_ONCE) if all(folders.values()) else 0
    return {"schema": SCHEMA, "triton": version("triton"), "torch": version("torch").split("+")[0],
            "python": platform.python_version(), "packages": {name: table["version"] for name, table in packages.items()},
            "max_configs": MAX_CONFIGS, "calls": dict(calls), "kernels": [kernels[key] for key in sorted(kernels)],
            "refused": [refused[key] for key in sorted(refused)]}


def _add(package: str, arch: str, folder: Path, kernels: dict[tuple[str, str], Record],
         refused: dict[tuple[str, str], Record]) -> None:
    """One recording's kernels and refused calls."""
    recording = json.loads((folder / "recording.json").read_text())
    judged: dict[str, list[Record]] = defaultdict(list)
    for one in json.loads((folder / "inspection.json").read_text())["kernels"]:
        judged[Path(one["where"]).parent.name].append(one)
    after = set(recording["after_reads"])
    for kernel in recording["kernels"]:
        entry = _entry(package, kernel, arch, kernels)
        for one in judged[base64.b32encode(bytes.fromhex(kernel["hash"])).decode().rstrip("=")]:
            _count(entry, one, kernel, kernel["hash"] in after)
    for failure in recording["failures"]:
        entry = _entry(package, failure, arch, kernels)
        entry["not_compiled"].setdefault(failure["error"], summary_of(failure["message"]))
    for line in (folder / "outcomes.jsonl").read_text().splitlines():
        told = json.loads(line)
        if told["outcome"] != "ok":
            entry = refused.setdefault((package, told["call"]), {"package": package, "call": told["call"], "targets": {}})
            entry["targets"][arch] = re.sub(r"/\S*/|_gen_module_\w+", "", told["outcome"])


def _entry(package: str, kernel: Record, arch: str, kernels: dict[tuple[str, str], Record]) -> Record:
    """Of one function and target. A module that a package generated has no name of its own."""
    function = kernel["function"]
    found = kernels.setdefault((package, function), {"package": package, "kernel": function, "targets": {}})
    entry: Record = found["targets"].setdefault(arch, {
        "compiled": 0, "rejected": {}, "instructions": {}, "registers": 0, "spill_bytes": 0, "shared_bytes": 0, "pdl": 0,
        "conversions": 0, "after_reads": 0, "not_compiled": {}})
    return entry


def _count(entry: Record, one: Record, kernel: Record, after_reads: bool) -> None:
    """One compiled specialisation."""
    entry["compiled"] += 1
    for reason in one["reasons"]:
        entry["rejected"][reason["code"]] = entry["rejected"].get(reason["code"], 0) + 1
    for family in one["instructions"] or {}:
        entry["instructions"][family] = entry["instructions"].get(family, 0) + 1
    entry["registers"] = max(entry["registers"], one["registers"] or 0)
    entry["spill_bytes"] = max(entry["spill_bytes"], one["spill_store_bytes"] or 0, one["spill_load_bytes"] or 0)
    entry["shared_bytes"] = max(entry["shared_bytes"], one["shared_bytes"] or 0)
    entry["pdl"] += bool(kernel["options"].get("launch_pdl"))
    entry["conversions"] += bool(one["conversions"])
    entry["after_reads"] += after_reads


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_"))


def page(record: Record) -> str:
    """docs/foreign-kernels.md."""
    kernels = record["kernels"]
    arches = sorted({arch for one in kernels for arch in one["targets"]}, key=_number)
    packages = ", ".join(f"{name} {number}" for name, number in record["packages"].items())
    lines = [TEXT.format(kernels=len(kernels), packages=packages, targets=", ".join(arches), slashed=" / ".join(arches),
                         totals="\n".join(_totals(record, arches)), **{name: record[name] for name in NAMED}),
             *(_row(one, arches) for one in kernels), "", *_refused(record)]
    return "\n".join(lines) + "\n"


def _totals(record: Record, arches: list[str]) -> list[str]:
    """A table of counts."""
    kernels = record["kernels"]

    def having(code: str) -> int:
        return sum(any(target["rejected"].get(code) for target in one["targets"].values()) for one in kernels)

    everywhere = sum(all(one["targets"].get(arch, {}).get("compiled") for arch in arches) for one in kernels)
    pdl = sum(any(target["pdl"] for target in one["targets"].values()) for one in kernels)
    after = sum(any(target["after_reads"] for target in one["targets"].values()) for one in kernels)
    return ["| | kernels |", "|---|---|", f"| compiled for every target | {everywhere} |",
            f"| not compiled for some target | {len(kernels) - everywhere} |",
            f"| FP8 converted to f16 where no FP8 instruction runs | {having('wrong_instruction')} |",
            f"| registers spilled, some specialisation | {having('register_spill')} |",
            f"| more shared memory or TMEM than the target has | {having('resource_limit')} |",
            f"| code that could not be read | {having('not_inspectable')} |",
            f"| launched with programmatic dependent launch | {pdl} |",
            f"| of these, memory touched before the dependency wait | {having('early_access')} |",
            f"| launched only after the program read back a kernel's output | {after} |", "",
            f"{sum(record['calls'].values())} calls were made; {len(record['refused'])} of them raised an error for some target."]


def _row(one: Record, arches: list[str]) -> str:
    targets = [one["targets"].get(arch) for arch in arches]

    def slashed(cells: list[str]) -> str:
        return cells[0] if len(set(cells)) == 1 else " / ".join(cells)

    def numbers(name: str) -> str:
        return slashed([f"{target[name]:,}" if target and target["compiled"] else "-" for target in targets])

    families = slashed(["+".join(sorted(target["instructions"])) or "-" if target else "-" for target in targets])
    verdicts: dict[str, list[str]] = defaultdict(list)
    for arch, target in zip(arches, targets):
        verdicts[_verdict(target)].append(arch)
    alone = len(verdicts) == 1
    verdict = "; ".join(words if alone else f"{', '.join(found)}: {words}" for words, found in verdicts.items())
    cells = [one["package"], f"`{one['kernel']}`", numbers("compiled"), families, numbers("registers"), numbers("spill_bytes"),
             numbers("shared_bytes"), verdict]
    return f"| {' | '.join(cells)} |"


def _verdict(target: Record | None) -> str:
    """On one target: accepted, or what some of its specialisations are rejected for."""
    if target is None:
        return "not launched"
    words = [f"{code} in {count} of {target['compiled']}" for code, count in sorted(target["rejected"].items())]
    some = "accepted, but some config " if target["compiled"] and not words else "some config " if target["compiled"] else ""
    words += [f"{some}not compiled: {error}" for error in sorted(target["not_compiled"])]
    return ", ".join(words) or "accepted"


def _refused(record: Record) -> list[str]:
    """The calls that raised an error, and what kernels could not be compiled for."""
    lines = ["## Refused", "",
             "Calls that raised an error under the played GPU, with its first line: a package's own refusal, the",
             "compiler's error, an operation that torch has for CUDA alone, or an argument that our call gets wrong.", "",
             "| package | call | targets | error |", "|---|---|---|---|"]
    for one in record["refused"]:
        by_error: dict[str, list[str]] = defaultdict(list)
        for arch, error in one["targets"].items():
            by_error[error].append(arch)
        start = f"| {one['package']} | `{one['call']}` |"
        lines += [f"{start} {', '.join(sorted(found, key=_number))} | {_plain(error)} |" for error, found in by_error.items()]
    lines += ["", "| package | kernel not compiled | target | error |", "|---|---|---|---|"]
    lines += [f"| {one['package']} | `{one['kernel']}` | {arch} | {_plain(f'{error}: {message}')} |"
              for one in record["kernels"] for arch in sorted(one["targets"], key=_number)
              for error, message in one["targets"][arch]["not_compiled"].items()]
    return lines


def _plain(text: str) -> str:
    return "`" + re.sub(r"[`\n]", " ", text).replace("|", "\\|")[:200].strip() + "`"


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--page-only", action="store_true", help="write the page from the record")
    options = parser.parse_args()
    if not options.page_only:
        record = gathered(tomllib.loads(CALLS.read_text()))
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    record = json.loads(RECORD.read_text())
    PAGE.write_text(page(record))
    kernels, refused = record["kernels"], record["refused"]
    compiled = sum(any(target["compiled"] for target in one["targets"].values()) for one in kernels)
    common.publish({"kernels": len(kernels), "compiled": compiled, "refused_calls": len(refused)}, options.out)
    return 0


if __name__ == "__main__":
    common.run(main)
