"""Checks this machine: toolchain, targets, GPU."""

import importlib.util
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass

from ...kernels import toolchain
from ...schedules.recipe import load_recipe
from ...shapes.errors import UserError
from ...shapes.fields import Table
from ...shapes.target import ARCHES, load_arch
from ..pool import default_jobs


@dataclass(frozen=True)
class Finding:
    """One finding. ok: None if the thing is absent, which isn't a fault."""

    what: str
    ok: bool | None
    found: str


def examine(recipe: str = "fp8-v1") -> list[Finding]:
    """All findings on this machine. Faults are findings, never exceptions."""
    numerics = load_recipe(recipe).numerics
    findings = [Finding("python", True, platform.python_version())]
    targets = [load_arch(a) for a in ARCHES]
    try:
        findings.append(Finding("triton", True, toolchain.check([], numerics)))
        tool = toolchain.nvdisasm_path()
        findings.append(Finding("nvdisasm", True, f"{toolchain.release(tool)} ({tool})"))
    except UserError as e:
        return [*findings, Finding("triton", False, str(e))]
    for target in targets:
        try:
            toolchain.check_assembler(target)
            toolchain.check_numerics(target, numerics)
            findings.append(Finding(f"offline for {target.arch}", True, toolchain.ptxas_path(target.capability)))
        except UserError as e:
            findings.append(Finding(f"offline for {target.arch}", False, str(e)))
    findings.append(Finding("workers", True, f"{default_jobs()} of {os.cpu_count()} cores"))
    torch = importlib.util.find_spec("torch")
    findings.append(Finding("torch", None if torch is None else True, _torch_version() if torch else
                            "not installed: offline work doesn't need it, launching kernels does"))
    return [*findings, _gpu()]


def _torch_version() -> str:
    from importlib.metadata import version

    return version("torch")


def _gpu() -> Finding:
    tool = shutil.which("nvidia-smi")
    nothing = Finding("gpu", None, "none: offline work doesn't need one; timing and promotion do")
    if tool is None:
        return nothing
    try:
        done = subprocess.run([tool, "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True,
                              text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return nothing
    names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return Finding("gpu", True, "; ".join(names)) if done.returncode == 0 and names else nothing


def versions() -> str:
    """One line: the version of this package, and the toolchain that compiles. A tool that is missing is named, never an error."""
    from importlib.metadata import version

    found = [f"Python {platform.python_version()}"]
    try:
        found.append(f"Triton {version('triton')}")
        assemblers = {arch: toolchain.release(toolchain.ptxas_path(load_arch(arch).capability)) for arch in ARCHES}
        found.append("ptxas " + ", ".join(f"{release} for {arch}" for arch, release in assemblers.items()))
    except (UserError, ImportError) as e:
        found.append(f"no toolchain: {e}".splitlines()[0])
    if importlib.util.find_spec("torch"):
        found.append(f"torch {_torch_version()}")
    return f"tune-kernels {version('tune-kernels')} ({'; '.join(found)})"


def as_json(findings: list[Finding]) -> list[Table]:
    return [{"what": f.what, "ok": f.ok, "found": f.found} for f in findings]
