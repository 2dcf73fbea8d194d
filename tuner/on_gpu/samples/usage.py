"""A run's use of its machine: seconds, and calls of compilers that it should not need."""

from dataclasses import dataclass

from ....shapes.fields import Count


@dataclass(frozen=True)
class Calls:
    """compiler: Triton's; ptxas: the assembler; c_compiler: Triton 3.6 builds a launcher with it for each new signature."""

    compiler: Count = 0
    ptxas: Count = 0
    c_compiler: Count = 0

    def __add__(self, other: "Calls") -> "Calls":
        return Calls(self.compiler + other.compiler, self.ptxas + other.ptxas, self.c_compiler + other.c_compiler)


NO_CALLS = Calls()


@dataclass(frozen=True)
class Usage:
    """calls: over all worker processes; busy_seconds: for which the worker was at work; first_sample: when it was taken, in
    seconds since the epoch."""

    calls: Calls = NO_CALLS
    busy_seconds: float = 0.0
    first_sample: float | None = None
