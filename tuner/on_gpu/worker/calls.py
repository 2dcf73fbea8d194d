"""Counts the calls that an --on-gpu run should not make: compilations, assemblies, builds of launchers. Python's audit hook sees
every new process, Triton's listener every compilation."""

import os
import sys
import time
from functools import cache

from ..samples.usage import Calls

ASSEMBLERS = ("ptxas", "ptxas-blackwell")
C_COMPILERS = ("gcc", "cc", "clang", "g++", "c++", "nvcc")


class Counter:
    """Calls since this process began. process: its unique name."""

    def __init__(self) -> None:
        self.calls = Calls()
        self.process = f"{os.getpid()}-{time.time_ns()}"

    def audit(self, event: str, arguments: tuple[object, ...]) -> None:
        """A hook of sys.addaudithook. Version queries of the assembler don't count."""
        if event != "subprocess.Popen":
            return
        executable, command = arguments[:2]
        program = os.path.basename(os.fsdecode(executable))  # type: ignore[arg-type]
        if program in ASSEMBLERS and "--version" not in map(str, command):  # type: ignore[call-overload]
            self.calls += Calls(ptxas=1)
        elif program in C_COMPILERS or program.split("-")[-1] in C_COMPILERS:
            self.calls += Calls(c_compiler=1)

    def listener(self, *, cache_hit: bool, **_: object) -> None:
        """A hook of Triton's compiler."""
        self.calls += Calls(compiler=not cache_hit)


@cache
def count_calls() -> Counter:
    """The counter of this process, which starts at the first call."""
    import triton

    counter = Counter()
    sys.addaudithook(counter.audit)
    triton.knobs.compilation.listener = counter.listener
    return counter
