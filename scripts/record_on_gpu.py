#!/usr/bin/env python
"""On a GPU: a program's real launches, and the same program recorded for the same GPU as if it weren't there, compared.

    python scripts/record_on_gpu.py --out record.json        # about 40 s

Compares the kernels (function, types, compiled-in values, options but the tuner's) and the launches with their counts, and checks
that the program computes the right thing while it is recorded. Exit code 1 where something differs.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

PROGRAM = common.ROOT / "scripts" / "record_program.py"
LARGEST_ERRORS = {"add": 0.0, "scale": 0.0, "product": 0.25}  # exact; bf16 results of size up to 40


def recorded(folder: Path, target: str | None) -> tuple[dict[str, Any], dict[str, float], float]:
    """The recording, the errors that the program prints, the seconds that it took."""
    began = time.monotonic()
    chosen = ["--target", target] if target else []
    done = subprocess.run([sys.executable, "-m", "tune_kernels.tuner", "record", *chosen, "--out", str(folder), "--json", "--",
                           sys.executable, str(PROGRAM)], capture_output=True, text=True)
    seconds = time.monotonic() - began
    lines = [line for line in done.stderr.splitlines() if line.startswith('{"add"')]
    if done.returncode != 0 or not lines:
        sys.exit(f"record ended with exit code {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return json.loads((folder / "recording.json").read_text()), json.loads(lines[-1]), seconds


def kernels_of(recording: dict[str, Any]) -> list[str]:
    """Each compiled kernel as text."""
    fields = ("function", "signature", "constants", "divisible", "outputs", "options")
    return sorted(json.dumps([one[name] for name in fields], sort_keys=True) for one in recording["kernels"])


def launches_of(recording: dict[str, Any]) -> list[str]:
    """Each launch outside tuning, but those of a tuned function: another config may win on the real GPU."""
    kernels = {one["hash"]: one for one in recording["kernels"]}
    return sorted(json.dumps([kernels[one["kernel"]]["function"], one["grid"], one["arguments"], one["count"]])
                  for one in recording["launches"] if not one["trial"] and not kernels[one["kernel"]]["tuned"])


def main() -> int:
    options = common.parser(__doc__).parse_args()
    import torch

    capability = torch.cuda.get_device_capability()
    arch = f"sm_{capability[0] * 10 + capability[1]}"
    with tempfile.TemporaryDirectory() as folder:
        real, errors, real_s = recorded(Path(folder) / "real", None)
        played, _, played_s = recorded(Path(folder) / "played", arch)
    wrong = {name: error for name, error in errors.items() if error > LARGEST_ERRORS[name]}
    same = {"kernels": kernels_of(real) == kernels_of(played), "launches": launches_of(real) == launches_of(played)}
    tuned = [one["count"] for one in real["launches"] if one["trial"]]
    common.publish({"gpu": torch.cuda.get_device_name(), "arch": arch, "triton": real["processes"][0]["triton"], "real": True,
                    "same": same, "kernels": len(real["kernels"]), "launches": sum(one["count"] for one in real["launches"]),
                    "trials": sum(tuned), "errors": errors, "wrong": wrong, "real_s": real_s, "played_s": played_s}, options.out)
    return 0 if all(same.values()) and not wrong and sum(tuned) > len(tuned) else 1


if __name__ == "__main__":
    common.run(main)
