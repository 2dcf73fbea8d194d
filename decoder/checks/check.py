"""One check and its result. There are three kinds, counted separately: agreement, reference, quality."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from ...shapes.fields import Table

KINDS = ("agreement", "reference", "quality")


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. detail: the first difference or the measurement, in words; numbers: its figures."""

    kind: str
    name: str
    passed: bool
    detail: str = ""
    numbers: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> Table:
        return asdict(self)


def result(kind: str, name: str, passed: object, detail: str, **numbers: float) -> CheckResult:
    """A CheckResult with numpy's numbers as Python's."""
    plain = {key: int(value) if isinstance(value, int) else float(value) for key, value in numbers.items()}
    return CheckResult(kind, name, bool(passed), detail, plain)


class Countdown:
    """Counts the steps of a known total, and estimates the remaining time from the pace so far."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.started = total, 0, time.perf_counter()

    def step(self, done: int | None = None) -> str:
        """Counts one more step, or `done` in all. Returns a text such as `12 of 233, 40 s left`."""
        self.done = self.done + 1 if done is None else done
        left_s = (time.perf_counter() - self.started) / max(self.done, 1) * max(self.total - self.done, 0)
        return f"{self.done} of {self.total}, {f'{left_s / 60:.0f} min' if left_s >= 90 else f'{left_s:.0f} s'} left"


@dataclass(frozen=True)
class Check:
    """A check to run. run: returns the fault that it found, or an empty string."""

    name: str
    run: Callable[[], str]


def run_checks(kind: str, checks: Iterator[Check]) -> Iterator[CheckResult]:
    """Runs the checks one by one."""
    for check in checks:
        problem = check.run()
        yield CheckResult(kind, check.name, not problem, problem)
