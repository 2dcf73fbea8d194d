#!/usr/bin/env python
"""Runs three sweeps at once into one folder, again and again: none may fail, and all must end with the same verdicts (F15).

    python scripts/sweeps_at_once.py [--times 200] [--seed 0] [--out FILE.json]

Each round has a new folder, in which all three compile, share and clean up. The seed determines the delay of each start. Prints
one JSON line. Exit 1 if a run fails.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common import parser, publish, run

AT_ONCE = 3
LATEST_S = 1.0  # of the starts: a sweep of this space takes about that
SPACE = '[[grid]]\nkernels = "merge"\nBLOCK_D = 64\nsplits = [1, 8]\nnum_warps = 4\n'


def once(folder: Path, late: Sequence[float]) -> list[str]:
    """The faults of one round, one line each. late: seconds before each sweep starts, after the one before it."""
    (folder / "space.toml").write_text(SPACE)
    command = [sys.executable, "-m", "tune_kernels.tuner", "--offline", "--kernel", "merge", "--target", "sm_90", "--jobs", "1",
               "--space", str(folder / "space.toml"), "--out", str(folder / "out"), "--json"]
    sweeps = []
    for seconds in late:
        time.sleep(seconds)
        sweeps.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    ended = [sweep.communicate() for sweep in sweeps]
    wrong = [error.strip()[-300:] for sweep, (_, error) in zip(sweeps, ended) if sweep.returncode]
    if not wrong:
        accepted = {json.loads(out)["counts"]["accepted"] for out, _ in ended}
        left = [str(path) for path in (folder / "out" / "tmp").iterdir()]
        wrong += [f"verdicts differ: {accepted}"] * (len(accepted) > 1) + [f"left behind: {left}"] * bool(left)
    return wrong


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--times", type=int, default=200, help="number of rounds")
    options.add_argument("--seed", type=int, default=0, help="of the starts")
    given = options.parse_args()
    began, failures, draw = time.monotonic(), [], random.Random(given.seed)
    for number in range(given.times):
        with tempfile.TemporaryDirectory() as folder:
            late = [0.0, *(draw.choice([0.0, draw.uniform(0, LATEST_S)]) for _ in range(AT_ONCE - 1))]
            failures += [f"{number}: {line}" for line in once(Path(folder), late)]
        if number % 10 == 9:
            print(f"{number + 1} of {given.times}, {len(failures)} failures", file=sys.stderr, flush=True)
    publish({"seed": given.seed, "counts": {"times": given.times, "failures": len(failures)}, "faults": failures,
             "seconds": round(time.monotonic() - began, 1)}, given.out)
    return 1 if failures else 0


if __name__ == "__main__":
    run(main)
