"""Compiled artefacts that a launch loads without compiling, on any machine, path or Python version.

Triton's own cache isn't portable: its files hold absolute paths, its key hashes the compiler library and the kernel's line
number. A bundle's key hashes content: the kernel's source without comments, argument types, constants, attributes, options,
target, and the toolchain's `identity`. After `install`, `kernel[grid](...)` asks a bundle before the compiler.

A bundle is a folder. Each artefact is a folder `artefacts/KEY` in it: `NAME.cubin`, `NAME.json` (Triton's metadata),
`kernel.ptx.gz` and `sha256.json`. It is written under a temporary name and renamed: it exists whole or not at all.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import shutil
import tempfile
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from ..shapes.errors import UserError
from ..shapes.fields import read_table, require_name
from .operation import Constant, Jitted, Launch
from .toolchain import TritonValue, backend_of, file_digest, identity


class BundleError(UserError):
    """An artefact that is missing or damaged."""

    exit_code = 1


def normalised_source(source: str) -> str:
    """Python source as tokens, without comments, docstrings and layout."""
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
    layout = {tokenize.NEWLINE: "\n", tokenize.INDENT: "{", tokenize.DEDENT: "}"}
    words: list[str] = []
    statement_starts = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in skip or (token.type == tokenize.STRING and statement_starts):
            continue
        if token.type == tokenize.NEWLINE and statement_starts:
            continue  # ends a docstring
        words.append(layout.get(token.type, token.string))
        statement_starts = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return " ".join(words)


def jitted_sources(kernel: Jitted) -> dict[str, str]:
    """By name: normalised source of a jitted function and of all jitted functions it calls, in any module but Triton's; their
    constants."""
    from triton.runtime.jit import JITCallable

    found: dict[str, str] = {}
    seen: list[Jitted] = []
    waiting: list[Jitted] = [kernel]
    while waiting:
        function = waiting.pop()
        if any(function is known for known in seen):
            continue
        seen.append(function)
        _add(found, function.__name__, function.__module__, normalised_source(function.src))
        for name, module, value in _named(function.fn):
            if isinstance(value, JITCallable):
                if not value.__module__.startswith("triton."):
                    waiting.append(value)
            elif (text := _constant(value)) is not None:
                _add(found, f"global {name}", module, text)
    return found


def _add(found: dict[str, str], name: str, module: str, text: str) -> None:
    """Under the name; of a second one that differs also its module's, since two modules may have one name for two things."""
    if found.setdefault(name, text) != text:
        found[f"{name} of {module}"] = text


def _named(function: FunctionType) -> Iterator[tuple[str, str, object]]:
    """(name, module, value) of the globals, closed-over variables and attributes of modules that a function's code names."""
    names = sorted({name for code in _codes(function.__code__) for name in code.co_names})
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    scope = {**function.__globals__, **{name: cell.cell_contents for name, cell in cells}}
    for name in [*names, *function.__code__.co_freevars]:
        value = scope.get(name)
        yield name, function.__module__, value
        if isinstance(value, ModuleType) and value.__name__.split(".")[0] != "triton":
            yield from ((other, value.__name__, getattr(value, other)) for other in names if hasattr(value, other))


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions and comprehensions in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _constant(value: object) -> str | None:
    """A constant as the digest has it, or None if it is none."""
    from triton.language import constexpr, dtype

    if isinstance(value, constexpr):
        return f"constexpr {_constant(value.value) or value.value!r}"
    if isinstance(value, (int, float, str, bool)):
        return repr(value)
    if isinstance(value, dtype):
        return str(value)
    if isinstance(value, (tuple, list)):
        return str([_constant(part) for part in value])
    return None


@cache
def kernel_digest(kernel: Jitted) -> str:
    """Digest of `jitted_sources`: 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(jitted_sources(kernel), sort_keys=True).encode()).hexdigest()[:16]


def _digest(source: TritonValue, chosen: TritonValue, capability: int) -> str:
    """The key of an artefact. source: an ASTSource. chosen: full options."""
    options = dict(chosen.__dict__)
    options["extern_libs"] = [(name, file_digest(path)) for name, path in options["extern_libs"]]
    parts = {
        "source": kernel_digest(source.fn), "signature": list(source.signature.items()),
        "constants": sorted((str(k), _constant_key(v)) for k, v in source.constants.items()),
        "attributes": sorted((str(k), str(v)) for k, v in source.attrs.items() if v),
        "options": {k: str(v) for k, v in sorted(options.items())}, "target": capability,
        "toolchain": identity(capability),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _constant_key(value: TritonValue) -> str:
    """A constant in an artefact's key: of a function its source, of text with its quotes, for "1" is not 1."""
    from triton.runtime.jit import JITCallable

    if isinstance(value, JITCallable):
        return kernel_digest(value)
    return repr(value) if isinstance(value, str) else str(value)


def source_of(launch: Launch) -> TritonValue:
    """Triton's ASTSource of a launch."""
    from triton.compiler import ASTSource

    return ASTSource(launch.kernel, launch.signature(), launch.constant_paths(), launch.attributes())


def compiler_options(launch: Launch, capability: int) -> TritonValue:
    """Triton's full options for a launch."""
    return backend_of(capability).parse_options({"debug": False, "instrumentation_mode": "", **launch.options})


def artefact_key(launch: Launch, capability: int) -> str:
    """The key under which a launch's artefact is stored: 32 hexadecimal digits."""
    return _digest(source_of(launch), compiler_options(launch, capability), capability)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def save(bundle: Path, key: str, name: str, metadata: Mapping[str, object], ptx: str, cubin: bytes) -> None:
    """Write one artefact, unless the same one is there already, whole. Raises OSError."""
    folder = bundle / "artefacts"
    folder.mkdir(parents=True, exist_ok=True)
    target = {"target": vars(metadata["target"])} if "target" in metadata else {}
    files = {
        f"{name}.json": json.dumps({**metadata, **target, "hash": key}, sort_keys=True, default=str).encode(),
        f"{name}.cubin": cubin,
        "kernel.ptx.gz": gzip.compress(ptx.encode(), compresslevel=3, mtime=0),
    }
    files["sha256.json"] = json.dumps({n: sha256(data) for n, data in files.items()}).encode()
    with _new_folder(folder / key) as new:
        for file, data in files.items():
            (new / file).write_bytes(data)


def link(bundle: Path, key: str, same_as: str) -> None:
    """Store an artefact that equals another one, as hard links to its files."""
    folder = bundle / "artefacts"
    with _new_folder(folder / key) as new:
        for file in (folder / same_as).iterdir():
            os.link(file, new / file.name)


@contextlib.contextmanager
def _new_folder(place: Path) -> Iterator[Path]:
    """A folder to fill, which is published at `place` in the end."""
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=place.parent))
    try:
        new.chmod(0o755)  # mkdtemp's folders are readable by their owner alone
        yield new
        publish(new, place)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def publish(new: Path, place: Path) -> None:
    """Rename a finished folder into place, unless the same artefact is there already, whole."""
    while True:
        try:
            os.rename(new, place)
            return
        except OSError:
            if not place.is_dir():
                raise
            try:
                if read(place) == read(new):
                    return
            except BundleError:
                pass
            shutil.rmtree(place, ignore_errors=True)


def read(place: Path) -> dict[str, bytes]:
    """The files of one artefact, by name, verified. Raises BundleError for a missing or changed file."""
    again = "run tune-kernels --offline into this folder again: it recompiles damaged artefacts"
    try:
        digests = read_table(place / "sha256.json", BundleError)
        files = {name: (place / require_name(name, "file", BundleError)).read_bytes() for name in digests}
    except (OSError, BundleError):
        raise BundleError(f"artefact {place}: files are missing or unreadable", expected="a whole artefact",
                          action=again) from None
    for name, data in files.items():
        if sha256(data) != digests[name]:
            raise BundleError(f"artefact {place}: {name} ({len(data)} bytes) has changed since it was written",
                              expected=f"sha256 {str(digests[name])[:12]}", action=again)
    for kind in ("cubin", "json", "ptx.gz"):
        if not any(name.endswith(f".{kind}") for name in files):
            raise BundleError(f"artefact {place}: sha256.json names no {kind}", expected="a whole artefact", action=again)
    return files


def require_judged(files: Mapping[str, bytes], key: str, judged: Mapping[str, str]) -> None:
    """Raises BundleError if an artefact's cubin isn't the inspected one.

    judged: SHA-256 of the inspected cubin, by key. An artefact without an entry was never a candidate and passes."""
    found = next(sha256(data) for name, data in files.items() if name.endswith(".cubin"))
    if judged.get(key, found) != found:
        raise BundleError(f"artefact {key}: its cubin is {found[:12]}, the inspected one was {judged[key][:12]}",
                          expected="the cubin of the report", action="run tune-kernels --offline into this folder with --fresh")


def install(kernel: Jitted, bundle: Path, *, device: int = 0, compile_missing: bool = False,
            judged: Mapping[str, str] | None = None) -> None:
    """Make `kernel[grid](...)` load its artefacts from a bundle. judged: as in require_judged.

    Replaces the `compile` attribute that Triton's JITFunction sets when it first sees a device (Triton 3.6 to 3.9). Triton
    specialises arguments as usual, and missing artefacts can still be compiled.

    Raises, at launch:
        BundleError: the artefact is missing, unless compile_missing; or it is damaged, or not the inspected one.
    """
    import triton
    from triton.compiler import CompiledKernel

    kernel.device_caches[device]  # creates the binder, which sets kernel.compile; only then can it be replaced
    compile_anew = kernel.compile

    def compile_or_load(src: TritonValue, target: TritonValue, options: Mapping[str, Constant], **rest: object) -> object:
        chosen = backend_of(target.arch).parse_options(dict(options))
        key = _digest(src, chosen, target.arch)
        place = bundle / "artefacts" / key
        if not place.is_dir():
            if compile_missing:
                return compile_anew(src, target=target, options=options, **rest)
            raise BundleError(f"no artefact {key} for {src.name} with {dict(src.constants)}",
                              expected=f"one in {bundle / 'artefacts'}, made with Triton {triton.__version__}",
                              action="compile the bundle with this Triton and assembler: make tune TRITON=VERSION")
        files = read(place)
        require_judged(files, key, judged or {})
        group = {name: str(place / name) for name in files if name.endswith((".json", ".cubin"))}
        return CompiledKernel(src, group, key)

    kernel.compile = compile_or_load
