"""Parallel work through one `concurrent.futures.Executor`, so that a cluster's can stand in for the local one.

The local executor keeps warm worker processes, forked from a server that has imported the compiler. A worker that dies or
hangs costs one task: processor time is bounded by the operating system (a compile loop that never ends gets SIGXCPU),
however loaded the machine is; waiting without end is bounded by a generous wall clock. Workers ignore Ctrl-C, which is the
parent's to answer, and die with it.
"""

import concurrent.futures
import contextlib
import copy
import ctypes
import importlib
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pebble
from filelock import FileLock, Timeout

from ..shapes.errors import UserError
from .errors import AssemblerDied
from .offline.record import cannot_write

T = TypeVar("T")

CPU_SECONDS = 60  # of one task; the dearest variant seen took 1.3 s
WALL_SECONDS = 600  # of one task: for a wait that uses no processor time
MEMORY_BYTES = 8 << 30  # address space of one worker; a warm one holds 0.2 GB
TASKS_PER_WORKER = 500  # then it is replaced, so that nothing it leaks adds up
WORKER_BYTES = 512 << 20  # what one worker is reckoned at when their number is chosen
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Died:
    """A worker that died or was killed, and what that says of its task. timeout: it was out of time."""

    timeout: bool
    detail: str


class ExecutorError(UserError):
    """An executor that can't be made, or that broke."""

    exit_code = 1


def default_jobs() -> int:
    """Workers: one a core this process may use, fewer where memory is short."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return max(1, min(cores, available // WORKER_BYTES))
    return cores


class LocalExecutor(concurrent.futures.Executor):
    """Worker processes on this machine. Memory, processor time and wall time of each task are bounded."""

    def __init__(self, jobs: int, scratch: Path, *, cpu_seconds: float = CPU_SECONDS,
                 wall_seconds: float = WALL_SECONDS, memory_bytes: int | None = MEMORY_BYTES,
                 preload: str = "tune_kernels.tuner.offline.warm") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([preload])
        self.wall_seconds = wall_seconds
        self.pool = pebble.ProcessPool(max_workers=jobs, max_tasks=TASKS_PER_WORKER, context=context,
                                       initializer=_start_worker, initargs=(str(scratch), cpu_seconds, memory_bytes))

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[T]":
        future: concurrent.futures.Future[T] = self.pool.schedule(_bounded, args=(fn, args, kwargs),
                                                                  timeout=self.wall_seconds)
        return future

    def within(self, wall_seconds: float) -> "LocalExecutor":
        """The same workers, with another limit of a task's wall time."""
        other = copy.copy(self)
        other.wall_seconds = wall_seconds
        return other

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self.pool.stop()
        else:
            self.pool.close()
        if wait:
            self.pool.join()


_cpu_seconds = float(CPU_SECONDS)


def _start_worker(scratch: str, cpu_seconds: float, memory_bytes: int | None) -> None:
    global _cpu_seconds  # a worker's own setting, made once at its start
    _cpu_seconds = cpu_seconds
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tempfile.tempdir = scratch


def _bounded(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    """Run one task with its share of processor time: the limit counts the process's whole life, so it moves on."""
    soft = int(time.process_time() + _cpu_seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
    return fn(*args, **kwargs)


def make_executor(name: str | None, jobs: int, scratch: Path) -> concurrent.futures.Executor:
    """The local executor, or the one that `module:callable` makes when called without arguments.

    Raises:
        ExecutorError: no such module or callable, or what it makes is no Executor.
    """
    if name is None:
        return LocalExecutor(jobs, scratch)
    module, _, attribute = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except Exception as e:  # it is the user's own code
        raise ExecutorError(f"executor {name!r}: {type(e).__name__}: {e}", expected="module:callable that returns an Executor",
                            action="put the module's folder on PYTHONPATH") from None
    if not isinstance(made, concurrent.futures.Executor):
        raise ExecutorError(f"executor {name!r} made a {type(made).__name__}",
                            expected="a concurrent.futures.Executor whose workers see the --out folder")
    return made


def run(executor: concurrent.futures.Executor, function: Callable[[Any], T], tasks: Iterable[Any], *,
        in_flight: int) -> Iterator[tuple[Any, "T | Died"]]:
    """(task, result) in the order of completion; a task whose worker died gives a `Died`.

    At most `in_flight` tasks are submitted at once. An exception that `function` raises is raised here: tasks report what is
    wrong with a candidate in their result, so it means that the environment is broken.
    """
    waiting: dict[concurrent.futures.Future[T], Any] = {}
    source = iter(tasks)
    done = False
    while waiting or not done:
        while not done and len(waiting) < in_flight:
            try:
                task = next(source)
            except StopIteration:
                done = True
                break
            waiting[executor.submit(function, task)] = task
        finished, _ = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in finished:
            yield waiting.pop(future), _outcome(future)


def _outcome(future: "concurrent.futures.Future[Any]") -> Any:
    """The result, or a Died."""
    try:
        return future.result()
    except pebble.ProcessExpired as e:
        return _killed("worker", -e.exitcode) if e.exitcode < 0 else Died(False, f"the worker died: exit code {e.exitcode}")
    except AssemblerDied as e:
        return _killed("assembler", e.signal_number)
    except concurrent.futures.TimeoutError:
        return Died(True, "did not end in its time")
    except MemoryError:
        return Died(False, f"used more than {MEMORY_BYTES >> 30} GiB of memory")
    except concurrent.futures.BrokenExecutor as e:
        raise ExecutorError(f"the executor broke: {e}", expected="workers that start; what was finished is kept",
                            action="run the same command again, which goes on from there; a script that calls sweep() needs "
                                   "`if __name__ == '__main__':` around it, since workers import it") from None


def _killed(who: str, number: int) -> Died:
    if number == signal.SIGXCPU:
        return Died(True, f"the {who} used more than its processor time")
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    return Died(False, f"the {who} died: {name}")


@contextlib.contextmanager
def scratch_folder(out: Path) -> Iterator[Path]:
    """A folder for temporary files inside `out`, removed at the end. What killed runs left is removed too."""
    place = out / "tmp"
    try:
        place.mkdir(parents=True, exist_ok=True)
        clear_left(out)
        mine = Path(tempfile.mkdtemp(prefix="run-", dir=place))
        held = FileLock(mine / "held")
        held.acquire()
    except OSError as e:
        raise cannot_write(place, e) from None
    try:
        yield mine
    finally:
        held.release()
        _remove(mine)


def clear_left(out: Path) -> None:
    """Remove the scratch folders inside `out` that no run holds: those of runs that were killed."""
    with contextlib.suppress(OSError):
        for old in list((out / "tmp").iterdir()):
            _remove_if_left(old)


def _remove_if_left(folder: Path) -> None:
    """Remove a scratch folder that no run holds: a lock dies with its holder, also in another container."""
    with contextlib.suppress(OSError, Timeout), FileLock(folder / "held", timeout=0):
        _remove(folder)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
