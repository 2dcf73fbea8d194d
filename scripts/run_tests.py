#!/usr/bin/env python
"""Runs all tests: those that compile, those in Triton's interpreter (one process can't do both), and the tests of every other
Triton that `make test` has set up. As many processes as cores, one thread each. Prints one closing line."""

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error)")
CORES = len(os.sched_getaffinity(0))
# Tests that run in the environments of other Tritons, which have no torch.
OTHER_TOOLCHAINS = ["tests/tuner/offline/test_toolchains.py", "tests/kernels/test_toolchain.py",
                    "tests/tuner/review/test_shipped_rows.py", "tests/tuner/record/test_without_torch.py"]


@dataclass(frozen=True)
class Suite:
    """One pytest run. environment: variables beside this process's."""

    name: str
    python: Path
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, live: bool = True) -> dict[str, int]:
        """Its counts. The output comes as it is made, or whole at the end."""
        process = subprocess.Popen([str(self.python), "-m", "pytest", "-q", *self.arguments], cwd=ROOT, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   env={"OMP_NUM_THREADS": "1", **os.environ, **self.environment})
        assert process.stdout
        lines, last = [f"== {self.name}\n"], ""
        if live:
            print(lines.pop(), end="", flush=True)
        for line in process.stdout:
            lines.append(line)
            if live:
                print(lines.pop(), end="", flush=True)
            last = line if COUNTS.search(line) else last
        counts = {kind: int(n) for n, kind in COUNTS.findall(last)}
        if process.wait() != 0 and not counts.get("failed"):
            counts["failed"] = counts.get("error", 0) or 1
        print("".join(lines), end="", flush=True)
        return counts


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    here = Path(sys.executable)
    spread = ["-n", str(CORES), "--dist", "worksteal"]
    runs = [Suite("compiling", here, [*spread, "-m", "not interpreter"]).run(),
            Suite("interpreting", here, [*spread, "-m", "interpreter"], {"TRITON_INTERPRET": "1"}).run()]
    others = [Suite(ready.parent.name.removeprefix(".venv-"), ready.parent / "bin" / "python", OTHER_TOOLCHAINS)
              for ready in sorted(ROOT.glob(".venv-triton-*/ready"))]
    with ThreadPoolExecutor(CORES) as pool:
        runs += pool.map(lambda suite: suite.run(live=False), others)
    total = {kind: sum(r.get(kind, 0) for r in runs) for kind in ("passed", "failed", "skipped")}
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
