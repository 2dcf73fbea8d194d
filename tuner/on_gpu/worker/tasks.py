"""Tasks of the worker on the GPU, and its answers: plain values that go from process to process."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from ....schedules.schedule import Schedule
from ....shapes.model import KernelShape
from ..samples.bytes import OCCUPANCIES
from ..samples.usage import Calls

T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """One kernel and shape on one SKU, from one bundle. occupancies: tokens in the cache when attention and merge are timed."""

    kernel: str
    shape: KernelShape
    target: str
    recipe: str
    bundle: str
    occupancies: tuple[int, ...] = OCCUPANCIES


@dataclass(frozen=True)
class CheckTask:
    """words: the file in which the worker writes which candidate it is at."""

    problem: Problem
    name: str
    schedule: Schedule
    words: str


@dataclass(frozen=True)
class TimeTask:
    """rounds of one sample each. words: as in CheckTask; serial: wait after each sample and write whose it is, to find which
    candidate kills."""

    problem: Problem
    candidates: tuple[tuple[str, Schedule], ...]
    phase: str
    rounds: int
    seed: int
    words: str
    serial: bool = False


@dataclass(frozen=True)
class Answer(Generic[T]):
    """A task's result, the calls of compiler and assemblers in its process so far, and which process it was."""

    value: T
    calls: Calls
    process: str
    first_sample: float | None = None
