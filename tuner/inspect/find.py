"""Finds compiled kernels below a path: in Triton's caches, bundles, cubins, PTX, and files that embed them.

Triton's NAME.cubin, NAME.ptx, NAME.ttir and NAME.json in one folder are one kernel. `cuobjdump` of Triton's wheel unpacks a fat
binary (.fatbin, .so, an object or executable file).
"""

import gzip
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...kernels.toolchain import tool_path
from ...shapes.fields import parse_fields
from ..errors import ReportError

MOST_FILES = 100_000  # per path
MOST_BYTES = 1 << 30  # per file
ELF, FATBIN = b"\x7fELF", b"\x50\xed\x55\xba"  # first bytes of a cubin or object file, and of a bare fat binary
KINDS = (".cubin", ".ptx", ".ptx.gz", ".ttir", ".json")
CUDA_MACHINE = 190  # e_machine of a cubin
_FUNCTION = re.compile(r"tt\.func public @\"?[^\"(]+\"?\((.*?)\) attributes", re.DOTALL)
_POINTER = re.compile(r"%(\w+): !tt\.(?:ptr|tensordesc)<")


@dataclass(frozen=True)
class Metadata:
    """A kernel's metadata in Triton's JSON. Bytes and columns are per block."""

    num_warps: int
    shared_bytes: int
    tmem_columns: int
    launch_pdl: bool


@dataclass(frozen=True)
class Artefact:
    """One compiled kernel, or one file of several. where: its path. pointers: names of its pointer arguments in order, if there
    is TTIR. embedded: whether it was unpacked from a fat binary. problem: the reason why it is unreadable, or None."""

    where: str
    cubin: bytes | None = None
    ptx: str | None = None
    metadata: Metadata | None = None
    pointers: tuple[str, ...] = ()
    embedded: bool = False
    problem: str | None = None


def find(paths: list[Path]) -> Iterator[Artefact]:
    """Every artefact at or below the paths, in order of name.

    Raises:
        ReportError: a missing path, or one with more than MOST_FILES files.
    """
    for path in paths:
        if not path.exists():
            raise ReportError(f"no file or folder {path}", expected="a Triton cache, a bundle, a cubin, PTX or a fat binary",
                              action="Triton's cache is ~/.triton/cache, or TRITON_CACHE_DIR")
        if path.is_file():
            yield from _of_file(path)
        else:
            yield from _of_folder(path)


def _of_folder(folder: Path) -> Iterator[Artefact]:
    groups: dict[Path, dict[str, Path]] = {}
    for count, path in enumerate(sorted(folder.rglob("*"))):
        if count > MOST_FILES:
            raise ReportError(f"{folder} has more than {MOST_FILES:,} files", expected="a folder of artefacts",
                              action="name the folder of one kernel, or fewer")
        kind = next((k for k in KINDS if path.name.endswith(k)), None)
        if kind is None or path.name.startswith("__grp__") or not path.is_file():
            continue
        stem = path.with_name(path.name.removesuffix(kind))
        stem = path.with_name("kernel") if kind == ".ptx.gz" else stem
        groups.setdefault(stem, {})[kind] = path
    for stem, files in groups.items():
        if ".ptx.gz" in files and ".cubin" not in files:
            continue  # a bundle's PTX, which belongs to the cubin in the same folder
        if ".cubin" in files or ".ptx" in files:
            gz = groups.get(stem.with_name("kernel"), {}).get(".ptx.gz")
            yield _of_group(stem, {**files, **({".ptx.gz": gz} if gz else {})})


def _of_group(stem: Path, files: dict[str, Path]) -> Artefact:
    """One kernel of a Triton cache or bundle, by suffix of its files."""
    where = str(files.get(".cubin") or files[".ptx"])
    try:
        cubin = files[".cubin"].read_bytes() if ".cubin" in files else None
        if ".ptx.gz" in files:
            ptx: str | None = gzip.decompress(files[".ptx.gz"].read_bytes()).decode(errors="replace")
        else:
            ptx = files[".ptx"].read_text(errors="replace") if ".ptx" in files else None
        ttir = files[".ttir"].read_text(errors="replace") if ".ttir" in files else ""
        metadata = _metadata(files[".json"]) if ".json" in files else None
    except (OSError, EOFError, gzip.BadGzipFile) as e:
        return Artefact(where, problem=f"can't be read: {e}")
    except ReportError as e:
        return Artefact(where, problem=str(e))
    match = _FUNCTION.search(ttir)
    return Artefact(where, cubin, ptx, metadata, tuple(_POINTER.findall(match.group(1))) if match else ())


def _metadata(path: Path) -> Metadata | None:
    """None for JSON that isn't a kernel's metadata. Raises ReportError."""
    fields = parse_fields(path.read_bytes(), "JSON", str(path), ReportError)
    if "num_warps" not in fields.table:
        return None
    return Metadata(fields.get("num_warps", int), fields.get("shared", int, 0), fields.get("tmem_size", int, 0),
                    fields.get("launch_pdl", bool, False))


def _of_file(path: Path) -> Iterator[Artefact]:
    """A cubin, PTX, or a file that embeds them."""
    if path.name.endswith((".cubin", ".ptx")):
        stem = path.with_suffix("")
        yield _of_group(stem, {kind: found for kind in (".cubin", ".ptx", ".ttir", ".json")
                               if (found := path.with_name(stem.name + kind)).is_file()})
        return
    if path.stat().st_size > MOST_BYTES:
        yield Artefact(str(path), problem=f"more than {MOST_BYTES:,} bytes")
        return
    data = path.read_bytes()
    if data[:4] == ELF and int.from_bytes(data[18:20], "little") == CUDA_MACHINE:
        yield Artefact(str(path), cubin=data)
    elif data[:4] in (ELF, FATBIN) or data[:7] == b"!<arch>":
        yield from _embedded(path)
    elif b".entry" in data and b".target" in data:
        yield Artefact(str(path), ptx=data.decode(errors="replace"))
    else:
        yield Artefact(str(path), problem="neither a cubin, PTX nor an object file")


def _embedded(path: Path) -> Iterator[Artefact]:
    """The cubins of a fat binary, or its PTX if it has none, unpacked by cuobjdump."""
    with tempfile.TemporaryDirectory() as folder:
        message = ""
        for option, suffix in (("-xelf", "*.cubin"), ("-xptx", "*.ptx")):
            done = subprocess.run([tool_path("cuobjdump"), option, "all", str(path.resolve())], cwd=folder, capture_output=True,
                                  text=True, errors="replace")
            message = done.stderr.strip() or message
            if found := sorted(Path(folder).glob(suffix)):
                for file in found:
                    where = f"{path}:{file.name}"
                    if suffix == "*.cubin":
                        yield Artefact(where, cubin=file.read_bytes(), embedded=True)
                    else:
                        yield Artefact(where, ptx=file.read_text(errors="replace"), embedded=True)
                return
        yield Artefact(str(path), problem=f"no kernels in it: {message[:200] or 'cuobjdump found nothing'}")
