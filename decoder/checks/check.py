"""One check and its result. Three kinds, never merged: agreement, reference, quality."""

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
