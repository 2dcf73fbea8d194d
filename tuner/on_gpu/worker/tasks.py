"""The GPU worker's tasks and answers: plain values that processes exchange."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from ....kernels.loading import Source
from ....schedules.schedule import Schedule
from ....shapes.model import KernelShape
from ..samples.bytes import OCCUPANCIES
from ..samples.usage import Calls

T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """One kernel and shape on one SKU. bundle: the folder of its artefacts. source: of a kernel of one's own. occupancies: tokens
    in the cache when attention and merge are timed."""

    kernel: str
    shape: KernelShape
    target: str
    recipe: str
    bundle: str
    occupancies: tuple[int, ...] = OCCUPANCIES
    source: Source | None = None


@dataclass(frozen=True)
class CheckTask:
    """One candidate to check. words: the file in which the worker notes its current candidate."""

    problem: Problem
    name: str
    schedule: Schedule
    words: str


@dataclass(frozen=True)
class TimeTask:
    """Candidates to time, in rounds of one sample each. words: as in CheckTask. serial: synchronise after each sample, which
    identifies a candidate that kills the worker."""

    problem: Problem
    candidates: tuple[tuple[str, Schedule], ...]
    phase: str
    rounds: int
    seed: int
    words: str
    serial: bool = False


@dataclass(frozen=True)
class Answer(Generic[T]):
    """A task's result, with its process's name and calls so far. first_sample: time of the first sample, seconds since the
    epoch."""

    value: T
    calls: Calls
    process: str
    first_sample: float | None = None
