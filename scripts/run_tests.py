#!/usr/bin/env python
"""Runs all tests: those that compile, those in Triton's interpreter (one process can't do both), and the sweep of every
other Triton that `make test` has set up. Prints one closing line."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error)")


def run(name: str, python: Path, arguments: list[str], **environment: str) -> dict[str, int]:
    """One pytest run; its counts, and its output as it comes."""
    print(f"== {name}", flush=True)
    process = subprocess.Popen([str(python), "-m", "pytest", "-q", *arguments], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment})
    assert process.stdout
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line if COUNTS.search(line) else last
    counts = {kind: int(n) for n, kind in COUNTS.findall(last)}
    if process.wait() != 0 and not counts.get("failed"):
        counts["failed"] = counts.get("error", 0) or 1
    return counts


def main() -> int:
    here = Path(sys.executable)
    runs = [run("compiling", here, ["-m", "not interpreter"]),
            run("interpreting", here, ["-m", "interpreter"], TRITON_INTERPRET="1")]
    for ready in sorted(ROOT.glob(".venv-triton-*/ready")):
        runs.append(run(ready.parent.name.removeprefix(".venv-"), ready.parent / "bin" / "python",
                        ["tests/tuner/offline/test_toolchains.py"]))
    total = {kind: sum(r.get(kind, 0) for r in runs) for kind in ("passed", "failed", "skipped")}
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
