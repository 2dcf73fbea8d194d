"""Work in a process that may die, by a candidate's fault alone. An illegal access breaks the CUDA context for good: the worker
writes a record of it and exits, and the next one starts afresh."""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

from ....shapes.errors import UserError
from ...errors import GpuError
from ...offline.report import read_report
from .calls import count_calls
from .tasks import Answer

T = TypeVar("T")
CRASHED = 70  # a worker's exit code after it wrote its last words


def at_work(words: str, work: Callable[[], T], name: str = "") -> Answer[T]:
    """The result of `work`, with the calls it made. Raises UserErrors as they are; after anything else the worker exits."""
    counter = count_calls()
    with last_words(Path(words), name):
        return Answer(work(), counter.calls, counter.process)


@contextlib.contextmanager
def last_words(words: Path, name: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that notes which candidate is at work. Any error other than a user's ends the process, after it is
    written down."""
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
    """SHA-256 of the cubin that was inspected, by the key of its artefact. Raises ReportError."""
    return {v.artefact: v.facts.cubin_sha256 for v in read_report(Path(folder)).variants if v.artefact and v.facts}


@cache
def install(folder: str) -> None:
    """Kernels launch from the bundle from now on, and each cubin must be the one that was inspected. A kernel that isn't in it is
    compiled, and counted: no candidate gets so far, but a kernel of the full model may, where the bundle was made of some kernels
    only. Raises GpuError if torch finds no GPU."""
    import torch

    from ....kernels import bundle, registry

    if not torch.cuda.is_available():
        raise GpuError("torch finds no GPU", expected="an NVIDIA GPU and a CUDA build of torch")
    for kernel in registry.jitted():
        bundle.install(kernel, Path(folder), compile_missing=True, judged=judged(folder))
