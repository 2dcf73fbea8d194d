"""A run's use of its machine: seconds, and calls of compilers, which it should not need."""

from dataclasses import dataclass, field

from ....shapes.fields import Count


@dataclass(frozen=True)
class Calls:
    """Numbers of calls. compiler: Triton's. ptxas: the assembler's. c_compiler: Triton 3.6 builds a launcher per signature with
    it."""

    compiler: Count = 0
    ptxas: Count = 0
    c_compiler: Count = 0

    def __add__(self, other: "Calls") -> "Calls":
        return Calls(self.compiler + other.compiler, self.ptxas + other.ptxas, self.c_compiler + other.c_compiler)


@dataclass(frozen=True)
class Usage:
    """calls: of all worker processes. busy_seconds: spent in tasks. first_sample: its time in seconds since the epoch."""

    calls: Calls = field(default_factory=Calls)
    busy_seconds: float = 0.0
    first_sample: float | None = None
