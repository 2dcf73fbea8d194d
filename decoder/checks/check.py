"""One check and its result. Three kinds, never merged: agreement, reference, quality."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from ...shapes.fields import Table

KINDS = ("agreement", "reference", "quality")


@dataclass(frozen=True)
class CheckResult:
    """detail: the first difference, or the measurement, in words; numbers: its figures."""

    kind: str
    name: str
    passed: bool
    detail: str = ""
    numbers: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> Table:
        return asdict(self)


def result(kind: str, name: str, passed: object, detail: str, **numbers: float) -> CheckResult:
    """A CheckResult of plain Python values, whatever numpy made of them."""
    plain = {key: int(value) if isinstance(value, int) else float(value) for key, value in numbers.items()}
    return CheckResult(kind, name, bool(passed), detail, plain)


class Countdown:
    """Steps done of a known total, and the time that the rest takes at the pace so far."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.started = total, 0, time.perf_counter()

    def step(self, done: int | None = None) -> str:
        """After one more step, or after `done`: such as `12 of 233, 40 s left`."""
        self.done = self.done + 1 if done is None else done
        left_s = (time.perf_counter() - self.started) / max(self.done, 1) * max(self.total - self.done, 0)
        return f"{self.done} of {self.total}, {f'{left_s / 60:.0f} min' if left_s >= 90 else f'{left_s:.0f} s'} left"


@dataclass(frozen=True)
class Check:
    """A check that is still to be run. `run` returns the fault that it found, or an empty string."""

    name: str
    run: Callable[[], str]


def run_checks(kind: str, checks: Iterator[Check]) -> Iterator[CheckResult]:
    """Runs them one by one."""
    for check in checks:
        problem = check.run()
        yield CheckResult(kind, check.name, not problem, problem)
