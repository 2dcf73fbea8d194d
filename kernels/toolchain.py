"""The installed toolchain: Triton, the assembler and disassembler of its wheel, and the switches that change its code.

A result depends on its toolchain. So its key has `identity`: Triton's version, a digest of the assembler, and every set switch.
The list of switches is Triton's: the environment variables that its native code names for its cache, and the knobs of
`triton.knobs`. `check` refuses them all, because promoted schedules are looked up by Triton, ptxas and the recipe's flags alone.
"""

import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..schedules.promoted import Toolchain
from ..schedules.recipe import Numerics
from ..shapes.errors import UserError
from ..shapes.target import Target

SUPPORTED_TRITON = ("3.6", "3.7", "3.8", "3.9")
INSTALL = "pip install 'triton>=3.6,<3.10'"
REINSTALL = "reinstall Triton: pip install --force-reinstall triton"
# Groups of triton.knobs that don't change the code of an NVIDIA kernel.
OTHER_KNOBS = ("build", "redis", "cache", "autotuning", "amd", "proton")
# Useful switches that don't change the code: a test compiles under each of them.
SILENT = ("MLIR_DISABLE_MULTITHREADING", "MLIR_ENABLE_DIAGNOSTICS", "TRITON_ALWAYS_COMPILE", "TRITON_DUMP_PTXAS_LOG",
          "TRITON_FRONT_END_DEBUGGING", "TRITON_STORE_BINARY_ONLY")
# Prefixes of other compilers' switches in the native list.
OTHER_BACKENDS = ("AMDGCN_", "TRITON_HIP_", "TRITON_DUMP_MIR")
# Paths: the key has digests of the assembler and of libdevice; the other tools only read or launch code.
PATHS = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_LIBDEVICE_PATH", "TRITON_CUOBJDUMP_PATH",
         "TRITON_NVDISASM_PATH", "TRITON_LIBCUDA_PATH")
# Set by this project's compilation.
SET_HERE = ("TRITON_DISABLE_LINE_INFO",)
OFF = ("", "0", "false", "off", "n", "no")
TritonValue = Any  # Triton's untyped ASTSource, options and backend objects
ELF_ARCH_OFFSET = 0x31  # of the architecture's byte in e_flags, in the ELF of CUDA 12.8 and later


class ToolchainError(UserError):
    """A compiler that is missing, too old for a target, changed by a switch, or with other numerics than the recipe's."""

    exit_code = 1


def switches() -> dict[str, str]:
    """Value by environment variable of the set switches that may change code."""
    from triton import knobs
    from triton._C.libtriton import get_cache_invalidating_env_vars

    found = {name: value for name, value in get_cache_invalidating_env_vars().items() if value.lower() not in OFF}
    groups = [group for name, group in vars(knobs).items() if isinstance(group, knobs.base_knobs) and name not in OTHER_KNOBS]
    for knob in (knob for group in groups for knob in group.knob_descriptors.values()):
        found.pop(knob.key, None)
        if (value := os.environ.get(knob.key)) and knob.get() != getattr(knob, "default", None):
            found[knob.key] = value
    if knobs.runtime.add_stages_inspection_hook is not None:
        found["knobs.runtime.add_stages_inspection_hook"] = "set"
    allowed = {*SILENT, *PATHS, *SET_HERE}
    return {name: value for name, value in found.items()
            if name not in allowed and not name.startswith(OTHER_BACKENDS)}


@cache
def backend_of(capability: int) -> TritonValue:
    """Triton's NVIDIA backend for a target."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    return make_backend(GPUTarget("cuda", capability, 32))


def default_options(capability: int) -> TritonValue:
    """Triton's default options for a target."""
    return backend_of(capability).parse_options({"enable_fp_fusion": False})


def identity(capability: int) -> dict[str, object]:
    """The parts of the toolchain that an artefact depends on, for its key. Raises ToolchainError."""
    import triton

    return {"triton": triton.__version__, "assembler": assembler_digest(ptxas_path(capability)), "switches": switches()}


def file_digest(path: str) -> str:
    """SHA-256 of a file, cached by its size and modification time."""
    state = os.stat(path)
    return _digest_of(path, state.st_mtime_ns, state.st_size)


@cache
def _digest_of(path: str, modified_ns: int, size: int) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def assembler_digest(path: str) -> str:
    """SHA-256 of an assembler. For a script, also of each program that it names by an absolute path: one of them will run."""
    with open(path, "rb") as f:
        script = f.read(2) == b"#!"
    if not script:
        return file_digest(path)
    named = re.findall(r"/[^\s\"'`;|&()<>$]+", Path(path).read_text(errors="replace"))
    programs = sorted({p for p in named if os.path.isfile(p) and os.access(p, os.X_OK)})
    return hashlib.sha256("\n".join(map(file_digest, [path, *programs])).encode()).hexdigest()


def ptxas_path(capability: int) -> str:
    """The assembler that Triton uses for a target. Raises ToolchainError."""
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        return str(get_ptxas(capability).path)
    except RuntimeError as e:
        raise ToolchainError(f"no assembler for sm_{capability}: {e}", expected="ptxas in Triton's wheel",
                             action=REINSTALL) from None


def tool_path(name: str) -> str:
    """The path of nvdisasm or cuobjdump in Triton's wheel. Raises ToolchainError."""
    from triton import knobs

    try:
        return str(getattr(knobs.nvidia, name).path)
    except RuntimeError as e:
        raise ToolchainError(f"{name} not found: {e}", expected="the tools of Triton's wheel", action=REINSTALL) from None


def nvdisasm_path() -> str:
    """The disassembler of Triton's wheel. Raises ToolchainError."""
    return tool_path("nvdisasm")


def release(tool: str) -> str:
    """`13.1` from the tool's --version. Raises ToolchainError if it doesn't run."""
    try:
        return _release_of(tool, file_digest(tool))
    except (OSError, subprocess.CalledProcessError, IndexError) as e:
        raise ToolchainError(f"{tool} doesn't run: {e}", expected="the tools of Triton's wheel", action=REINSTALL) from None


@cache
def _release_of(tool: str, digest: str) -> str:
    text = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    return text.split("release ")[1].split(",")[0]


def installed(target: Target, numerics: Numerics) -> Toolchain:
    """The installed toolchain of a target, as promoted schedules record it. Raises ToolchainError."""
    import triton

    return Toolchain(triton.__version__, release(ptxas_path(target.capability)), numerics.flags(target.arch))


def check(targets: Sequence[Target], numerics: Numerics) -> str:
    """Check that Triton can compile for every target, without switches, with the recipe's numerics. Returns its version.

    Raises:
        ToolchainError: Triton is missing or untested, a switch changes code, the assembler is too old, or numerics differ.
    """
    try:
        import triton
    except ImportError as e:
        raise ToolchainError(f"Triton can't be imported: {e}", expected="Triton 3.6 to 3.9", action=INSTALL) from None
    version: str = triton.__version__
    if ".".join(version.split(".")[:2]) not in SUPPORTED_TRITON:
        raise ToolchainError(f"Triton {version}", expected="Triton 3.6 to 3.9", action=INSTALL)
    check_switches()
    for target in targets:
        check_assembler(target)
        check_numerics(target, numerics)
    return version


def check_switches() -> None:
    """Raises ToolchainError if a set switch changes code."""
    if found := sorted(switches()):
        raise ToolchainError(f"{', '.join(found)} set in the environment",
                             expected="no switches that change code", action=f"unset {' '.join(found)}")


def check_assembler(target: Target) -> None:
    """Assemble an empty kernel. Raises ToolchainError if the assembler doesn't support the target."""
    ptxas = ptxas_path(target.capability)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "empty.ptx"
        version = "8.8" if target.capability >= 103 else "8.6" if target.capability >= 100 else "8.0"
        source.write_text(f".version {version}\n.target {target.arch}a\n.address_size 64\n.visible .entry e()\n{{ ret; }}\n")
        try:
            done = subprocess.run([ptxas, f"--gpu-name={target.arch}a", str(source), "-o", str(source) + ".o"],
                                  capture_output=True, text=True)
            failed, message = done.returncode != 0, done.stderr.strip()[:300]
        except OSError as e:
            failed, message = True, str(e)
    if failed:
        raise ToolchainError(f"{ptxas} can't assemble for {target.arch}: {message}",
                             expected=f"an assembler that supports {target.arch}a",
                             action="install Triton 3.6 or newer, or unset TRITON_PTXAS_PATH and "
                                    "TRITON_PTXAS_BLACKWELL_PATH; or leave this target out with --target")


def check_numerics(target: Target, numerics: Numerics) -> None:
    """Raises ToolchainError if Triton accumulates FP8 products otherwise than the recipe requires."""
    found = default_options(target.capability).max_num_imprecise_acc_default
    pinned = numerics.max_num_imprecise_acc.get(target.arch)
    if pinned is not None and found != pinned:
        raise ToolchainError(f"this Triton's max_num_imprecise_acc on {target.arch} is {found}",
                             expected=f"{pinned}, as in the recipe",
                             action="use a tested Triton, or make a new recipe version for this one")


def disassemble(cubin: bytes) -> str:
    """SASS text of a cubin.

    The nvdisasm of CUDA 12.8 (Triton 3.6) prints nothing for sm_103. Relabelled as sm_100, the same bytes disassemble to the same
    text.

    Raises:
        ToolchainError: the output has no instructions. Empty text must never pass as 'no spills, no fallback'.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        for data in (cubin, _relabelled(cubin)):
            path.write_bytes(data)
            done = subprocess.run([nvdisasm_path(), "-c", str(path)], capture_output=True, text=True)
            if done.returncode == 0 and "EXIT" in done.stdout:
                return done.stdout
    raise ToolchainError(f"nvdisasm printed no instructions: {done.stderr.strip()[:300]}",
                         expected="a disassembler that supports the cubin's architecture",
                         action="install a newer Triton, whose wheel has a newer nvdisasm")


def _relabelled(cubin: bytes) -> bytes:
    changed = bytearray(cubin)
    if len(changed) > ELF_ARCH_OFFSET and changed[ELF_ARCH_OFFSET] == 103:
        changed[ELF_ARCH_OFFSET] = 100
    return bytes(changed)
