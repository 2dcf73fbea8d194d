"""The toolchain: Triton, and the assembler and disassembler in its wheel. Asked once, before a sweep starts."""

import os
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..schedules.recipe import Numerics
from ..shapes.errors import UserError
from ..shapes.target import Target

SUPPORTED_TRITON = ("3.6", "3.7", "3.8", "3.9")
# They change what is compiled, and no key holds them.
REFUSED_VARIABLES = ("DISABLE_LLVM_OPT", "DISABLE_PTXAS_OPT", "LLVM_PASS_PLUGIN_PATH", "TRITON_DEFAULT_BACKEND",
                     "TRITON_ENABLE_ASAN", "TRITON_INTERPRET", "TRITON_KERNEL_OVERRIDE", "TRITON_OVERRIDE_ARCH")
ELF_ARCH_OFFSET = 0x31  # the byte of e_flags that holds the architecture in the ELF of CUDA 12.8 and later


class ToolchainError(UserError):
    """A compiler that is missing, too old for a target, or has other numerics than the recipe pins."""

    exit_code = 1


@dataclass(frozen=True)
class Toolchain:
    """triton: version; ptxas: target → release; nvdisasm: release; flags: what reaches the output bits."""

    triton: str
    ptxas: dict[str, str]
    nvdisasm: str
    flags: dict[str, Any]


def _release(tool: str) -> str:
    """`13.1` from the tool's --version. Raises ToolchainError where it doesn't run."""
    try:
        text = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
        return text.split("release ")[1].split(",")[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as e:
        raise ToolchainError(f"{tool} doesn't run: {e}", expected="the tools of Triton's wheel",
                             action="reinstall Triton: pip install --force-reinstall triton") from None


def _knob_path(name: str) -> str:
    from triton import knobs

    try:
        return str(getattr(knobs.nvidia, name).path)
    except RuntimeError as e:
        raise ToolchainError(f"{name} not found: {e}", expected="the tools of Triton's wheel",
                             action="reinstall Triton: pip install --force-reinstall triton") from None


def ptxas_path(target: Target) -> str:
    """The assembler that Triton uses for a target."""
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        return str(get_ptxas(target.capability).path)
    except RuntimeError as e:
        raise ToolchainError(f"no assembler for {target.arch}: {e}", expected="ptxas in Triton's wheel",
                             action="reinstall Triton: pip install --force-reinstall triton") from None


def read_toolchain(targets: list[Target], numerics: Numerics) -> Toolchain:
    """What compiles here, after checking that it can compile for every target and with the recipe's numerics.

    Raises:
        ToolchainError: Triton missing or of an untested version, an assembler too old for a target, other numerics.
    """
    try:
        import triton
    except ImportError as e:
        raise ToolchainError(f"Triton can't be imported: {e}", expected="Triton 3.6 to 3.9",
                             action="pip install 'triton>=3.6,<3.10'") from None
    if ".".join(triton.__version__.split(".")[:2]) not in SUPPORTED_TRITON:
        raise ToolchainError(f"Triton {triton.__version__}", expected="Triton 3.6 to 3.9",
                             action="pip install 'triton>=3.6,<3.10'")
    if refused := [name for name in REFUSED_VARIABLES if os.environ.get(name)]:
        raise ToolchainError(f"{', '.join(refused)} set in the environment", expected="the compiler as it comes",
                             action=f"unset {' '.join(refused)}")
    for target in targets:
        check_assembler(target)
        check_numerics(target, numerics)
    flags = {"enable_fp_fusion": numerics.enable_fp_fusion, "promote_every": numerics.promote_every,
             "max_num_imprecise_acc": {t.arch: numerics.max_num_imprecise_acc.get(t.arch) for t in targets}}
    return Toolchain(triton.__version__, {t.arch: _release(ptxas_path(t)) for t in targets},
                     _release(_knob_path("nvdisasm")), flags)


def check_assembler(target: Target) -> None:
    """Assemble an empty kernel. Raises ToolchainError where the assembler doesn't know the target."""
    ptxas = ptxas_path(target)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "empty.ptx"
        version = "8.8" if target.capability >= 103 else "8.6" if target.capability >= 100 else "8.0"
        source.write_text(f".version {version}\n.target {target.arch}a\n.address_size 64\n.visible .entry e()\n{{ ret; }}\n")
        try:
            done = subprocess.run([ptxas, f"--gpu-name={target.arch}a", str(source), "-o", str(source) + ".o"],
                                  capture_output=True, text=True)
            failed, said = done.returncode != 0, done.stderr.strip()[:300]
        except OSError as e:
            failed, said = True, str(e)
    if failed:
        raise ToolchainError(f"{ptxas} can't assemble for {target.arch}: {said}",
                             expected=f"an assembler that knows {target.arch}a",
                             action="install Triton 3.6 or newer, or unset TRITON_PTXAS_PATH and "
                                    "TRITON_PTXAS_BLACKWELL_PATH; or leave this target out with --target")


def check_numerics(target: Target, numerics: Numerics) -> None:
    """Raises ToolchainError where Triton accumulates FP8 products otherwise than the recipe pins, if it pins anything."""
    from .bundle import default_options

    found = default_options(target.capability).max_num_imprecise_acc_default
    pinned = numerics.max_num_imprecise_acc.get(target.arch)
    if pinned is not None and found != pinned:
        raise ToolchainError(f"this Triton's max_num_imprecise_acc on {target.arch} is {found}",
                             expected=f"{pinned}, which the recipe pins",
                             action="use a tested Triton, or make a new recipe version for this one")


@cache
def nvdisasm_path() -> str:
    return _knob_path("nvdisasm")


def disassemble(cubin: bytes) -> str:
    """SASS text of a cubin.

    The nvdisasm of CUDA 12.8 (Triton 3.6) prints nothing for sm_103; relabelled as sm_100, the same bytes read the same.

    Raises:
        ToolchainError: nothing came out, which must never read as 'no spills, no fallback'.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        for data in (cubin, _relabelled(cubin)):
            path.write_bytes(data)
            done = subprocess.run([nvdisasm_path(), "-c", str(path)], capture_output=True, text=True)
            if done.returncode == 0 and "EXIT" in done.stdout:
                return done.stdout
    raise ToolchainError(f"nvdisasm printed no instructions: {done.stderr.strip()[:300]}",
                         expected="a disassembler that knows the cubin's architecture",
                         action="install a newer Triton, whose wheel has a newer nvdisasm")


def _relabelled(cubin: bytes) -> bytes:
    changed = bytearray(cubin)
    if len(changed) > ELF_ARCH_OFFSET and changed[ELF_ARCH_OFFSET] == 103:
        changed[ELF_ARCH_OFFSET] = 100
    return bytes(changed)
