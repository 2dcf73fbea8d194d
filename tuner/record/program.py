"""Runs a program with the recorder inside it, through the environment alone: the program and its packages stay as they are."""

import dataclasses
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ...shapes.target import Target
from ..errors import RecordError, cannot_write
from .child.settings import VARIABLE, Gpu, Settings

CHILD = Path(__file__).parent / "child"  # first on the program's PYTHONPATH; Python imports its sitecustomize
CACHE, EVENTS = "cache", "events"  # folders of a recording
MEMORY_BYTES = 80 << 30  # of the GPU that is played: that of an H100, the least of the listed ones
NOT_FOUND = (126, 127)  # a shell's exit codes


@dataclass(frozen=True)
class Plan:
    """One recording. command: the program and its arguments; out: the folder to fill; target: the GPU to play, or None for the
    real one; max_configs: compiled per tuning of an autotuned kernel."""

    command: tuple[str, ...]
    out: Path
    target: Target | None
    max_configs: int


def played(target: Target) -> Gpu:
    """The GPU as the program sees it."""
    return Gpu(target.gpus[0], target.capability, target.sms, MEMORY_BYTES, target.shared_bytes_per_block,
               target.shared_bytes_per_sm, target.registers_per_sm, target.max_warps_per_sm, target.l2_bytes)


def run_program(plan: Plan, quiet: bool) -> int:
    """Runs it to its end and returns its exit code; a signal's is negative. quiet: its output goes to stderr.

    Raises:
        RecordError: no such program. OutputError: the folder can't be written.
    """
    program = shutil.which(plan.command[0])
    if program is None:
        raise RecordError(f"no program {plan.command[0]!r}", expected="a program on PATH, or the path of one",
                          action="tune-kernels record --target sm_103 -- python script.py")
    events = plan.out / EVENTS
    try:
        for folder in (events, plan.out / CACHE):
            folder.mkdir(parents=True, exist_ok=True)
        for old in events.glob("*.jsonl"):
            old.unlink()
    except OSError as e:
        raise cannot_write(plan.out, e) from None
    try:
        return subprocess.run([program, *plan.command[1:]], env=environment(plan), check=False,
                              stdout=2 if quiet else None).returncode
    except OSError as e:
        raise RecordError(f"{program}: {e.strerror or e}", expected="a program that can be started") from None


def environment(plan: Plan) -> dict[str, str]:
    """This process's, with the recorder on PYTHONPATH and Triton's cache in the folder. A played GPU hides a real one."""
    settings = Settings(str((plan.out / EVENTS).resolve()), plan.max_configs, played(plan.target) if plan.target else None)
    path = os.pathsep.join(filter(None, [str(CHILD), os.environ.get("PYTHONPATH")]))
    made = {**os.environ, "PYTHONPATH": path, VARIABLE: json.dumps(dataclasses.asdict(settings)),
            "TRITON_CACHE_DIR": str((plan.out / CACHE).resolve())}
    made.pop("TRITON_INTERPRET", None)
    if plan.target is not None:
        made["CUDA_VISIBLE_DEVICES"] = ""
    return made
