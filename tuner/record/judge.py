"""From the recorded program's artefacts to their judgement, by the rules of `inspect`."""

import base64
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ..inspect.find import Artefact, find
from ..inspect.judge import Demands, Inspected, inspect
from ..offline.cubin import Unreadable
from ..offline.early_access import written
from ..offline.record import Reason
from .recording import RecordedKernel, Recording


def judged(recording: Recording, cache: Path, demands: Demands) -> tuple[Recording, dict[str, Inspected]]:
    """The recording with the outputs of its kernels, and the judgement of each, by its hash."""
    kernels, judgements = [], {}
    for kernel in recording.kernels:
        artefact = _artefact(kernel, cache)
        judgements[kernel.hash] = _judged(kernel, artefact, demands)
        kernels.append(replace(kernel, outputs=outputs_of(kernel, artefact)))
    return replace(recording, kernels=tuple(kernels)), judgements


def _artefact(kernel: RecordedKernel, cache: Path) -> Artefact | None:
    """Its files in Triton's cache: the folder is the hash in base 32."""
    folder = cache / base64.b32encode(bytes.fromhex(kernel.hash)).decode().rstrip("=")
    return next(iter(find([folder])), None) if folder.is_dir() else None


def _judged(kernel: RecordedKernel, artefact: Artefact | None, demands: Demands) -> Inspected:
    if artefact is not None:
        for one in inspect(artefact, demands):
            return one
    problem = "its code isn't in the recording's cache: the program has Triton keep it elsewhere"
    return Inspected(kernel.name, kernel.source, reasons=(Reason("not_inspectable", problem),))


def outputs_of(kernel: RecordedKernel, artefact: Artefact | None) -> tuple[str, ...] | None:
    """The arguments that its PTX writes to, or None where that can't be read."""
    if artefact is None or artefact.ptx is None:
        return None
    try:
        return tuple(written(artefact.ptx, list(_pointers(kernel.signature))))
    except Unreadable:
        return None


def _pointers(signature: Iterable[tuple[str, str]]) -> Iterable[str]:
    """The argument of each pointer parameter; a tuple has as many as pointers stand in its type."""
    for name, kind in signature:
        yield from [name] * (kind.count("*") + kind.count("tensordesc"))
