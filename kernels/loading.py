"""Kernels of one's own from a file or a module. Importing runs the user's code: the tuner does it in a worker, never in its own
process.

    FILE.py             every Kernel in it           FILE.py:NAME            one of them
    package.module      every Kernel in it           package.module:NAME     one of them
"""

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from ..shapes.fields import nearest, shown
from .arguments import KernelError
from .kernel import Kernel


@dataclass(frozen=True)
class Source:
    """Where a user's kernels come from. place: the absolute path of a file, or a module's name; name: of one kernel's variable,
    None for all; digest: of the file's bytes, None for a module."""

    place: str
    name: str | None = None
    digest: str | None = None

    def of(self, name: str) -> "Source":
        """One of its kernels."""
        return Source(self.place, name, self.digest)


def is_own(word: str) -> bool:
    """Whether a word of --kernel means a user's kernels, and not a built-in one."""
    return ":" in word or "." in word or os.sep in word


def source_of(word: str) -> Source:
    """Raises KernelError for a file that can't be read, and a word that is neither a file nor a module."""
    place, _, name = word.rpartition(":") if ":" in word else (word, "", "")
    path = Path(place)
    if place.endswith(".py") or os.sep in place:
        try:
            data = path.read_bytes()
        except (OSError, ValueError) as e:
            raise KernelError(f"{word}: {e.strerror if isinstance(e, OSError) else e}",
                              expected="a Python file with a Kernel") from None
        return Source(str(path.absolute()), name or None, hashlib.sha256(data).hexdigest())
    if not all(part.isidentifier() for part in place.split(".")):
        raise KernelError(f"kernel {shown(word)}", expected="a built-in kernel's name, FILE.py[:NAME] or package.module[:NAME]")
    return Source(place, name or None)


@cache
def kernels_in(source: Source) -> dict[str, Kernel]:
    """The kernels of a source by the variable that holds them, each once. Imports it.

    Raises KernelError where the import fails, there is no kernel, none of that name, or two have one name.
    """
    module = _imported(source)
    found: dict[str, Kernel] = {}
    for name, value in vars(module).items():
        if isinstance(value, Kernel) and not any(value is known for known in found.values()):
            found[name] = value
    if source.name is not None:
        value = vars(module).get(source.name)
        if not isinstance(value, Kernel):
            raise KernelError(f"{source.place}: {source.name} is {'missing' if value is None else f'a {type(value).__name__}'}"
                              f"{nearest(source.name, found)}", expected=f"a Kernel, one of {', '.join(found) or 'none here'}")
        found = {source.name: value}
    if not found:
        raise KernelError(f"{source.place}: no Kernel", expected="kernel = Kernel(function, arguments=..., shapes=...)")
    names = [kernel.name for kernel in found.values()]
    for name in names:
        if names.count(name) > 1:
            raise KernelError(f"{source.place}: two kernels are called {name}", expected="one name each: Kernel(..., name=...)")
    return found


def load(source: Source) -> Kernel:
    """The one kernel that a source names. Raises KernelError."""
    [kernel] = kernels_in(source).values()
    return kernel


def _imported(source: Source) -> ModuleType:
    try:
        if source.digest is None:
            if "" not in sys.path:
                sys.path.insert(0, "")
            return importlib.import_module(source.place)
        return _from_file(Path(source.place), source.digest)
    except (Exception, SystemExit) as e:
        frames = reversed(traceback.extract_tb(e.__traceback__))
        line = next((f"line {frame.lineno}: " for frame in frames if frame.filename == source.place), "")
        if isinstance(e, KernelError):
            raise KernelError(f"{source.place}: {line}{e.found}", expected=e.expected, action=e.action) from None
        raise KernelError(f"{source.place}: the import failed: {line}{type(e).__name__}: {e}"[:1000],
                          expected="a file that Python imports") from None


def _from_file(path: Path, digest: str) -> ModuleType:
    """Imported under a name of its own, with its folder on the path, as `python FILE` would."""
    if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        raise KernelError(f"{path} has changed since this run began", expected="the same file", action="run the command again")
    name = f"own_{path.stem}_{digest[:8]}" if path.stem in sys.modules else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise KernelError(f"{path} is no Python file", expected="FILE.py")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
