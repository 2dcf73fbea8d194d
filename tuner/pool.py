"""Parallel work through one `concurrent.futures.Executor`: the local one, or a cluster's.

The local executor keeps warm worker processes, forked from a server that has imported the compiler. A worker that dies or hangs
costs one task. The operating system limits its processor time (an endless compile loop gets SIGXCPU), on a loaded machine too; a
generous wall time limits waits. Workers ignore Ctrl-C, which the parent handles, and die with the parent.
"""

import concurrent.futures
import contextlib
import copy
import ctypes
import importlib
import multiprocessing
import multiprocessing.util
import os
import resource
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import pebble

from ..shapes.errors import UserError
from ..shapes.files import locked
from .errors import AssemblerDied, cannot_write

T = TypeVar("T")
Task = TypeVar("Task")
P = ParamSpec("P")

CPU_SECONDS = 60  # per task; the slowest variant seen took 1.3 s
WALL_SECONDS = 600  # per task: for a wait that uses no processor time
MEMORY_BYTES = 8 << 30  # address space per worker; a warm one has 0.2 GB
TASKS_PER_WORKER = 500  # then it is replaced, because of leaks
WORKER_BYTES = 512 << 20  # memory per worker that default_jobs assumes
PR_SET_PDEATHSIG = 1
OFFLINE_PRELOAD = "tune_kernels.tuner.offline.warm"


@dataclass(frozen=True)
class Limits:
    """Limits per task. memory_bytes: address space of its process, None without a limit."""

    cpu_seconds: float = CPU_SECONDS
    wall_seconds: float = WALL_SECONDS
    memory_bytes: int | None = MEMORY_BYTES


@dataclass(frozen=True)
class Died:
    """The end of a worker that died or was killed. timeout: whether it ran out of time."""

    timeout: bool
    detail: str


class ExecutorError(UserError):
    """A name that refers to no executor."""


class ExecutorBroke(UserError):
    """An executor whose workers can't start."""

    exit_code = 1


def default_jobs() -> int:
    """Number of workers: one per available core, fewer if memory is short."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return max(1, min(cores, available // WORKER_BYTES))
    return cores


class LocalExecutor(concurrent.futures.Executor):
    """Worker processes on this machine. Memory, processor time and wall time of each task are bounded."""

    def __init__(self, jobs: int, scratch: Path, limits: Limits = Limits(), preload: str | None = OFFLINE_PRELOAD) -> None:
        """scratch: for temporary files. preload: the module that a fork server imports before it forks the workers; None: workers
        are spawned."""
        context = multiprocessing.get_context("forkserver" if preload else "spawn")
        if preload:
            context.set_forkserver_preload([preload])
        self.limits = limits
        self.pool = pebble.ProcessPool(max_workers=jobs, max_tasks=TASKS_PER_WORKER, context=context,
                                       initializer=_start_worker, initargs=(str(scratch), limits.memory_bytes))

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "concurrent.futures.Future[T]":
        future: concurrent.futures.Future[T] = self.pool.schedule(
            _within_cpu, args=(self.limits.cpu_seconds, fn, args, kwargs), timeout=self.limits.wall_seconds)
        return future

    def within(self, wall_seconds: float) -> "LocalExecutor":
        """The same workers, with another wall time limit per task."""
        other = copy.copy(self)
        other.limits = replace(self.limits, wall_seconds=wall_seconds)
        return other

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self.pool.stop()
        else:
            self.pool.close()
        if wait:
            self.pool.join()


def _start_worker(scratch: str, memory_bytes: int | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tempfile.tempdir = scratch


def _within_cpu(cpu_seconds: float, fn: Callable[..., T], args: tuple[object, ...], kwargs: dict[str, object]) -> T:
    """Runs one task with its own processor time. The operating system's limit counts the process's whole life: it moves per
    task."""
    soft = int(time.process_time() + cpu_seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
    return fn(*args, **kwargs)


class BoundedExecutor(concurrent.futures.Executor):
    """Another executor, whose workers run each task in a child process under the same limits. A task that kills its process,
    spins or fills the memory costs itself alone."""

    def __init__(self, inner: concurrent.futures.Executor, scratch: Path, limits: Limits = Limits()) -> None:
        self.inner, self.scratch, self.limits = inner, scratch, limits

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "concurrent.futures.Future[T]":
        future = self.inner.submit(_in_own_process, self.scratch, self.limits, fn, args, kwargs)
        return cast("concurrent.futures.Future[T]", future)  # or of a Died, which _outcome passes on

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.inner.shutdown(wait=wait, cancel_futures=cancel_futures)
        for own in (_own_processes.pop(key) for key in list(_own_processes)):  # of workers that are threads of this process
            own.shutdown(cancel_futures=True)


_own_processes: dict[tuple[int, int], LocalExecutor] = {}  # a worker's own executor, by (process, thread)


def _in_own_process(scratch: Path, limits: Limits, fn: Callable[..., T], args: tuple[object, ...],
                    kwargs: dict[str, object]) -> "T | Died":
    """Runs in a worker of another executor. Returns Died if the task's process died."""
    key = os.getpid(), threading.get_ident()
    if key not in _own_processes:
        _own_processes[key] = own = LocalExecutor(1, scratch, limits, preload=None)
        # A worker process waits for its children when it ends: this one must be stopped.
        multiprocessing.util.Finalize(None, own.shutdown, kwargs={"cancel_futures": True}, exitpriority=100)
    return _outcome(_own_processes[key].submit(fn, *args, **kwargs))


def make_executor(name: str | None, jobs: int, scratch: Path, limits: Limits = Limits()) -> concurrent.futures.Executor:
    """The local executor, or the one that `module:callable` returns. jobs: number of local workers. scratch: for temporary files.

    Raises:
        ExecutorError: no such module or callable, or it returns no Executor.
    """
    if name is None:
        return LocalExecutor(jobs, scratch, limits)
    module, _, attribute = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except Exception as e:  # the user's code may raise anything
        raise ExecutorError(f"executor {name!r}: {type(e).__name__}: {e}", expected="module:callable that returns an Executor",
                            action="put the module's folder on PYTHONPATH") from None
    if not isinstance(made, concurrent.futures.Executor):
        raise ExecutorError(f"executor {name!r} made a {type(made).__name__}",
                            expected="a concurrent.futures.Executor whose workers see the --out folder")
    return BoundedExecutor(made, scratch, limits)


def run(executor: concurrent.futures.Executor, function: Callable[[Task], T], tasks: Iterable[Task], *,
        in_flight: int) -> Iterator[tuple[Task, "T | Died"]]:
    """(task, result) in order of completion, with a `Died` if the worker died. in_flight: maximum of submitted tasks.

    An exception of `function` is raised here. It means a broken environment: a candidate's fault is part of the result.
    """
    waiting: dict[concurrent.futures.Future[T], Task] = {}
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
            outcome = _outcome(future)
            yield waiting.pop(future), outcome


def _outcome(future: "concurrent.futures.Future[T]") -> "T | Died":
    try:
        return future.result()
    except pebble.ProcessExpired as e:
        return _killed("worker", -e.exitcode) if e.exitcode < 0 else Died(False, f"the worker died: exit code {e.exitcode}")
    except AssemblerDied as e:
        return _killed("assembler", e.signal_number)
    except concurrent.futures.TimeoutError:
        return Died(True, "did not end within its wall time")
    except MemoryError:
        return Died(False, "exceeded its memory limit")
    except concurrent.futures.BrokenExecutor as e:
        raise ExecutorBroke(f"the executor broke: {e}", expected="workers that start; finished work is kept",
                            action="run the same command again, which continues; a script that calls sweep() needs "
                                   "`if __name__ == '__main__':` around the call, since workers import it") from None


def _killed(who: str, number: int) -> Died:
    if number == signal.SIGXCPU:
        return Died(True, f"the {who} exceeded its processor time")
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    return Died(False, f"the {who} died: {name}")


@contextlib.contextmanager
def scratch_folder(out: Path) -> Iterator[Path]:
    """A folder for temporary files inside `out`, removed at the end, as are those of killed runs.

    Its lock is a file next to it, taken before the folder is made: no other run ever sees the folder unlocked. Raises
    OutputError.
    """
    place = out / "tmp"
    mine = place / f"run-{uuid.uuid4().hex}"
    with contextlib.ExitStack() as stack:
        try:
            place.mkdir(parents=True, exist_ok=True)
            clear_left(out)
            stack.enter_context(locked(_lock_of(mine)))
            stack.callback(_remove, mine)
            mine.mkdir()
        except OSError as e:
            raise cannot_write(place, e) from None
        yield mine


def clear_left(out: Path) -> None:
    """Remove the scratch folders of killed runs inside `out`: those that no run has locked."""
    with contextlib.suppress(OSError):
        for old in [folder for folder in (out / "tmp").iterdir() if folder.is_dir()]:
            # A lock dies with its holder, in another container too. A lock without a folder belongs to a run that has just begun.
            with contextlib.suppress(OSError), locked(_lock_of(old), longest_s=0):
                _remove(old)


def _lock_of(folder: Path) -> Path:
    return folder.with_suffix(".lock")


def _remove(folder: Path) -> None:
    """Remove a folder and its lock, which the caller holds."""
    shutil.rmtree(folder, ignore_errors=True)
    _lock_of(folder).unlink(missing_ok=True)
