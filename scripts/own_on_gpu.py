"""Kernels of one's own on a GPU, all the way: checked, timed, promoted, replayed, reviewed, launched; faulty candidates refused.

    python scripts/own_on_gpu.py FILE.py[:NAME]... --bundle build/own --faulty FILE.py:NAME --out DIR/own.json

The bundle comes from `tune-kernels --offline --kernel ...` for this GPU and Triton. Beside OUT lie the runs' folders and, in
schedules/, the promoted rows. Exit code 1 where a candidate that is wrong passed, or a step failed.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import common

SECONDS = 170  # of one command at most
HARMLESS = "none"  # the fault of a candidate that has none, in tests/support/faulty_kernels.py


def command(*words: object) -> dict[str, Any]:
    """The JSON line of a tune-kernels command, its exit code, and the seconds it took."""
    return _ended("-m", "tune_kernels.tuner", *words)


def script(name: str, *words: object) -> dict[str, Any]:
    """As `command`, of a script."""
    return _ended(Path(__file__).with_name(name), *words)


def _ended(*words: object) -> dict[str, Any]:
    began = time.monotonic()
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=SECONDS)
    line = done.stdout.strip().splitlines()[-1:] or ["null"]
    said = json.loads(line[0]) if line[0].startswith("{") else {"output": (done.stdout + done.stderr)[-2000:]}
    return {"exit": done.returncode, "seconds": round(time.monotonic() - began, 1), **said,
            **({"errors": done.stderr[-2000:]} if done.returncode else {})}


def tuned_run(words: list[str], bundle: Path, folder: Path, budget: float) -> dict[str, Any]:
    """Tune, promote, replay, check."""
    named = [part for word in words for part in ("--kernel", word)]
    out, schedules = folder / "run", folder / "schedules"
    found = {"run": command("--on-gpu", *named, "--bundle", bundle, "--out", out, "--schedules", schedules, "--budget", budget,
                            "--promote", "--json")}
    found["replay"] = command("--on-gpu", "--replay", out, "--out", folder / "replayed", "--schedules", schedules, "--json")
    empty = folder / "empty"
    (empty / "recipes").mkdir(parents=True, exist_ok=True)
    found["check"] = command("diff", empty, schedules, "--check", "--json")
    return found


def refused(word: str, bundle: Path, folder: Path, budget: float) -> dict[str, Any]:
    """Why each fault of a faulty kernel was refused; "passed" for one that wasn't."""
    run = command("--on-gpu", "--kernel", word, "--bundle", bundle, "--out", folder / "faulty", "--schedules",
                  folder / "faulty-schedules", "--budget", budget, "--dry-run", "--json")
    report = json.loads((folder / "faulty" / "report.json").read_text())
    why: dict[str, list[str]] = {}
    for kernel in report["kernels"]:
        for place in kernel["places"]:
            fault = place["schedule"]["knobs"]["FAULT"]
            failed, late = place["status"] == "failed", "out of time" in place["why"]
            said = place["why"] if failed or late else "passed"
            why.setdefault(fault, []).append(f"{kernel['kernel']}: {said}")
    return {"run": run, "why": why}


def main() -> int:
    made = common.parser(__doc__)
    made.add_argument("kernels", nargs="+", metavar="FILE.py[:NAME]")
    made.add_argument("--bundle", type=Path, default=Path("build/own"))
    made.add_argument("--faulty", metavar="FILE.py:NAME")
    made.add_argument("--budget", type=float, default=75, help="seconds of the kernels; a third of it for the faulty one")
    given = made.parse_args()
    out = given.out or Path("build/own-on-gpu/own.json")
    folder = out.parent.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"tuned": tuned_run(given.kernels, given.bundle, folder, given.budget)}
    if given.faulty:
        record["refused"] = refused(given.faulty, given.bundle, folder, given.budget / 3)
    record["overhead"] = [script("tuned_overhead.py", word, "--bundle", given.bundle, "--schedules", folder / "schedules")
                          for word in given.kernels]
    common.publish(record, out)
    passed = [fault for fault, why in record.get("refused", {}).get("why", {}).items()
              if fault != HARMLESS and any(w.endswith("passed") for w in why)]
    steps = [name for name, step in record["tuned"].items() if step["exit"]]
    print(f"passed though faulty: {passed or 'none'}; steps that failed: {steps or 'none'}")
    return 1 if passed or steps else 0


if __name__ == "__main__":
    common.run(main)
