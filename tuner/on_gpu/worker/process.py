"""Work in a process that a candidate may kill. An illegal memory access breaks the CUDA context for good: the worker notes the
error and exits, and a new one takes its place."""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

from ....kernels.operation import Jitted
from ....shapes.errors import UserError
from ...errors import GpuError
from ...offline.report import read_report
from .calls import count_calls
from .tasks import Answer

T = TypeVar("T")
CRASHED = 70  # a worker's exit code after it noted its error


def at_work(words: str, work: Callable[[], T], name: str = "") -> Answer[T]:
    """The result of `work`, with the calls so far. A UserError is raised; any other error ends the process. words, name: as in
    CheckTask."""
    counter = count_calls()
    with last_words(Path(words), name):
        return Answer(work(), counter.calls, counter.process)


@contextlib.contextmanager
def last_words(words: Path, name: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that notes the current candidate in the file `words`. An error in the context is noted there and ends the
    process, unless it is a UserError."""
    current = name

    def note(candidate: str, died_of: str = "") -> None:
        nonlocal current
        current = candidate
        words.write_text(f"{candidate}\n{died_of}")

    note(name)
    try:
        yield note
    except UserError:
        raise
    except Exception as e:
        note(current, f"{type(e).__name__}: {' '.join(str(e).split())}"[:300])
        os._exit(CRASHED)


@cache
def judged(folder: str) -> dict[str, str]:
    """SHA-256 of the inspected cubin, by the key of its artefact. Raises ReportError."""
    return {v.artefact: v.facts.cubin_sha256 for v in read_report(Path(folder)).variants if v.artefact and v.facts}


@cache
def install(folder: str) -> None:
    """From now on kernels launch from the bundle, and each cubin must be the inspected one.

    Missing artefacts are compiled, and counted. Candidates never are: require_artefact refuses them before. Kernels of the full
    model may be, if the bundle has only some kernels.

    Raises:
        GpuError: torch finds no GPU.
    """
    from ....kernels import bundle, registry

    require_gpu()
    for kernel in registry.jitted():
        bundle.install(kernel, Path(folder), compile_missing=True, judged=judged(folder))


@cache
def install_own(kernel: Jitted, folder: str) -> None:
    """From now on a kernel of one's own launches from the bundle, and from nowhere else. Raises GpuError: torch finds no GPU."""
    from ....kernels import bundle

    require_gpu()
    bundle.install(kernel, Path(folder), judged=judged(folder))


def require_gpu() -> None:
    """Raises GpuError."""
    import torch

    if not torch.cuda.is_available():
        raise GpuError("torch finds no GPU", expected="an NVIDIA GPU and a CUDA build of torch")
