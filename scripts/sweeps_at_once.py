"""Three sweeps at once into one folder, again and again: none may fail, and all must end with the same verdicts (F15).

    python scripts/sweeps_at_once.py --times 200

Each time the folder is new, so all three compile, share and tidy at once. Prints one JSON line; exit 1 where a run failed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

AT_ONCE = 3
SPACE = '[[grid]]\nkernels = "merge"\nBLOCK_D = 64\nsplits = [1, 8]\nnum_warps = 4\n'


def once(folder: Path) -> list[str]:
    """What went wrong, a line each."""
    (folder / "space.toml").write_text(SPACE)
    command = [sys.executable, "-m", "tune_kernels.tuner", "--offline", "--kernel", "merge", "--target", "sm_90", "--jobs", "1",
               "--space", str(folder / "space.toml"), "--out", str(folder / "out"), "--json"]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(AT_ONCE)]
    ended = [run.communicate() for run in runs]
    wrong = [error.strip()[-300:] for run, (_, error) in zip(runs, ended) if run.returncode]
    if not wrong:
        accepted = {json.loads(out)["counts"]["accepted"] for out, _ in ended}
        left = [str(path) for path in (folder / "out" / "tmp").iterdir()]
        wrong += [f"verdicts differ: {accepted}"] * (len(accepted) > 1) + [f"left behind: {left}"] * bool(left)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=200)
    options = parser.parse_args()
    began, failures = time.monotonic(), []
    for number in range(options.times):
        with tempfile.TemporaryDirectory() as folder:
            failures += [f"{number}: {line}" for line in once(Path(folder))]
        if number % 10 == 9:
            print(f"{number + 1} of {options.times}, {len(failures)} failures", file=sys.stderr, flush=True)
    print(json.dumps({"times": options.times, "at_once": AT_ONCE, "failures": failures,
                      "seconds": round(time.monotonic() - began, 1)}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
