"""Counting what an --on-gpu run should not do: compile, assemble, build launchers. From Python's audit of new processes and
Triton's own listener, so that nothing that goes round our code is missed."""

import os
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

ASSEMBLERS = ("ptxas", "ptxas-blackwell")
C_COMPILERS = ("gcc", "cc", "clang", "g++", "c++", "nvcc")


@dataclass
class Calls:
    """Counts since this process began. c_compiler: Triton 3.6 builds a launcher with it for each new signature."""

    compiler: int = 0
    ptxas: int = 0
    c_compiler: int = 0

    def as_dict(self) -> dict[str, int]:
        return {"compiler": self.compiler, "ptxas": self.ptxas, "c_compiler": self.c_compiler}


@cache
def count_calls() -> Calls:
    """Begins to count, once in a process; a version query is no call of the assembler."""
    import triton

    calls = Calls()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "subprocess.Popen":
            return
        program, command = os.path.basename(os.fsdecode(arguments[0])), [str(a) for a in arguments[1]]
        if program in ASSEMBLERS and "--version" not in command:
            calls.ptxas += 1
        elif program in C_COMPILERS or program.split("-")[-1] in C_COMPILERS:
            calls.c_compiler += 1

    def listener(*, cache_hit: bool, **_: Any) -> None:
        calls.compiler += not cache_hit

    sys.addaudithook(audit)
    triton.knobs.compilation.listener = listener
    return calls
