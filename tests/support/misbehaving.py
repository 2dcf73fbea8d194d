"""Tasks that misbehave, for the pool's tests: a worker imports this module by name."""

import os
import signal
import sys
import time

from tune_kernels.tuner.errors import AssemblerDied


def work(task: tuple[str, int]) -> int:
    """Misbehaves as the task's name says; returns its number."""
    kind, number = task
    if kind == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif kind == "exit":
        os._exit(3)
    elif kind == "spin":
        while True:
            pass
    elif kind == "sleep":
        time.sleep(3600)
    elif kind == "memory":
        return len(bytearray(64 << 30))
    elif kind == "raise":
        raise ValueError("the environment is broken")
    elif kind == "imports":
        return int("torch" in sys.modules)
    elif kind == "burn":
        end = time.process_time() + 0.6
        while time.process_time() < end:
            pass
    elif kind == "assembler":
        raise AssemblerDied(signal.SIGKILL)
    return number
