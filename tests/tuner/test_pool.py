"""The pool: a worker that dies or hangs costs one task (tuning 17 and 18), memory is bounded (19), nothing leaks."""

import concurrent.futures
import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tune_kernels.tuner import pool
from tune_kernels.tuner.errors import OutputError


@pytest.fixture
def execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[Any, Any]]:
    """Runs (kind, number) tasks on two workers; results by task."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "support"))
    import misbehaving  # type: ignore[import-not-found]

    def run(tasks: list[tuple[str, int]], *, cpu_seconds: float = 30, wall_seconds: float = 60) -> dict[Any, Any]:
        executor = pool.LocalExecutor(2, tmp_path, pool.Limits(cpu_seconds, wall_seconds))
        try:
            return dict(pool.run(executor, misbehaving.work, tasks, in_flight=4))
        finally:
            executor.shutdown(cancel_futures=True)

    return run


@pytest.mark.parametrize(("kind", "says"), [("crash", "worker died: SIGSEGV"), ("exit", "exit code 3"), ("memory", "memory"),
                                            ("assembler", "assembler died: SIGKILL")])
def test_a_worker_that_dies_costs_one_task(execute: Callable[..., dict[Any, Any]], kind: str, says: str) -> None:
    tasks = [(kind if i in (3, 11) else "fine", i) for i in range(20)]
    found = execute(tasks)
    assert len(found) == 20
    for (name, number), result in found.items():
        if name == "fine":
            assert result == number
        else:
            assert isinstance(result, pool.Died)
            assert says in result.detail
            assert not result.timeout


def test_a_task_that_never_ends_is_stopped_by_its_processor_time(execute: Callable[..., dict[Any, Any]]) -> None:
    """Processor time, not wall time: a loaded machine doesn't trip it."""
    started = time.monotonic()
    found = execute([("spin" if i == 2 else "fine", i) for i in range(10)], cpu_seconds=1)
    assert isinstance(found["spin", 2], pool.Died)
    assert found["spin", 2].timeout
    assert sum(not isinstance(r, pool.Died) for r in found.values()) == 9
    assert time.monotonic() - started < 45


def test_many_tasks_on_one_worker_do_not_add_up_to_its_limit(execute: Callable[..., dict[Any, Any]]) -> None:
    """F27: the operating system counts a process's whole life; the limit moves on with each task, under load too."""
    found = execute([("burn", i) for i in range(10)], cpu_seconds=1)
    assert sorted(found.values(), key=str) == list(range(10))


def test_a_task_that_waits_for_ever_is_stopped_by_the_wall_clock(execute: Callable[..., dict[Any, Any]]) -> None:
    found = execute([("sleep" if i == 1 else "fine", i) for i in range(6)], wall_seconds=2)
    assert isinstance(found["sleep", 1], pool.Died)
    assert found["sleep", 1].timeout
    assert [r for t, r in sorted(found.items()) if t[0] == "fine"] == [0, 2, 3, 4, 5]


def test_a_broken_environment_raises(execute: Callable[..., dict[Any, Any]]) -> None:
    with pytest.raises(ValueError, match="environment is broken"):
        execute([("raise", 0)])


def test_workers_do_not_import_torch(execute: Callable[..., dict[Any, Any]]) -> None:
    assert list(execute([("imports", 0)]).values()) == [0]


def test_few_tasks_are_in_flight_at_once() -> None:
    """Thousands of candidates are not all submitted: memory stays bounded."""
    most = 0
    waiting = 0

    class Slow(concurrent.futures.Executor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[Any]":
            nonlocal most, waiting
            waiting += 1
            most = max(most, waiting)
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()
            future.set_result(fn(*args))
            return future

    for _ in pool.run(Slow(), lambda task: task, range(100), in_flight=5):
        waiting -= 1
    assert most <= 5


def test_scratch_of_killed_runs_is_removed(tmp_path: Path) -> None:
    dead = tmp_path / "tmp" / "run-left"
    dead.mkdir(parents=True)
    with pool.scratch_folder(tmp_path) as mine:
        with pool.scratch_folder(tmp_path) as other:
            assert other.is_dir()
            assert mine.is_dir(), "another run's scratch stays while it runs"
        assert not dead.exists()
        assert not other.exists()
    assert not mine.exists()


@pytest.mark.parametrize("name", ["nowhere:make", "json", "json:nothing", "json:dumps", "builtins:dict", ":", ""])
def test_a_wrong_executor_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(pool.ExecutorError, match="executor"):
        pool.make_executor(name, 1, tmp_path)


def test_an_executor_whose_workers_die_is_an_error_that_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "support"))
    import misbehaving

    with concurrent.futures.ProcessPoolExecutor(1) as executor, pytest.raises(pool.ExecutorBroke, match="which continues"):
        list(pool.run(executor, misbehaving.work, [("exit", 0)], in_flight=1))


@pytest.mark.parametrize("inner", [concurrent.futures.ProcessPoolExecutor, concurrent.futures.ThreadPoolExecutor])
def test_limits_hold_under_any_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inner: Any) -> None:
    """F39: a task that crashes, spins, sleeps or fills the memory costs itself, and is named; the others are done."""
    support = str(Path(__file__).parents[1] / "support")
    monkeypatch.syspath_prepend(support)
    monkeypatch.setenv("PYTHONPATH", support, prepend=os.pathsep)
    import misbehaving

    def run(limits: pool.Limits, *tasks: tuple[str, int]) -> dict[Any, Any]:
        executor = pool.BoundedExecutor(inner(1), tmp_path, limits)
        try:
            return dict(pool.run(executor, misbehaving.work, tasks, in_flight=2))
        finally:
            executor.shutdown(cancel_futures=True)

    found = run(pool.Limits(cpu_seconds=1, memory_bytes=4 << 30),
                ("fine", 0), ("crash", 1), ("fine", 2), ("spin", 3), ("memory", 4), ("fine", 5))
    assert [found["fine", n] for n in (0, 2, 5)] == [0, 2, 5]
    assert found["crash", 1] == pool.Died(False, "the worker died: SIGSEGV")
    assert found["spin", 3] == pool.Died(True, "the worker exceeded its processor time")
    assert found["memory", 4] == pool.Died(False, "exceeded its memory limit")
    assert run(pool.Limits(wall_seconds=3), ("sleep", 0)) == {("sleep", 0): pool.Died(True, "did not end within its wall time")}


def test_a_scratch_folder_is_never_seen_unlocked(tmp_path: Path) -> None:
    """F15: of three sweeps at once, one lost the folder that it had just made to another's tidying."""
    code = ("import sys; from pathlib import Path; from tune_kernels.tuner import pool\n"
            "for _ in range(60):\n"
            "    with pool.scratch_folder(Path(sys.argv[1])) as mine:\n"
            "        (mine / 'file').write_text('x')\n")
    runs = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE, text=True) for _ in range(3)]
    errors = [run.communicate()[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], errors
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F19: it used to wait for ever."""
    def no_flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_flock)
    with pytest.raises(OutputError, match="no locks"), pool.scratch_folder(tmp_path):
        pass
