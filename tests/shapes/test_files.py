"""Files are whole or not there, locks are waited for aloud, and a signal leaves nothing half done."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tune_kernels.shapes import files
from tune_kernels.shapes.files import locked, replace_text


def test_a_file_that_can_not_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.json"
    replace_text(path, "old", durable=True)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_text(path, "new", durable=True)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["f.json"]


def test_a_wait_for_a_lock_is_told_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """F19: silence until the holder is gone."""
    monkeypatch.setattr(files, "PATIENCE_S", 0.1)
    path, inside = tmp_path / "lock", threading.Event()

    def hold() -> None:
        with locked(path):
            inside.set()
            time.sleep(0.5)

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(10)
    with locked(path):
        said = capsys.readouterr().err
    holder.join()
    assert said.startswith(f"waiting for {path}: process {os.getpid()} (") and said.count("\n") == 1


def test_a_lock_that_is_never_given_back_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """F19: and the wait ends."""
    with locked(tmp_path / "lock"), pytest.raises(OSError, match=r"has held this lock for \d+ s.*lock"), \
            locked(tmp_path / "lock", longest_s=0.2):
        pass


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F19: a waiting loop took any error of flock for a lock that another holds."""
    def none(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(OSError, match=r"file system has no locks .*No locks available"), locked(tmp_path / "lock"):
        pass


HALFWAY = """
import os, sys, time
from pathlib import Path
from tune_kernels.shapes import files
files.end_on_signals()
def slow(descriptor):
    print("halfway", flush=True)
    time.sleep(60)
os.fsync = slow
files.replace_text(Path(sys.argv[1]), "new", durable=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_half_written_file(tmp_path: Path, number: signal.Signals) -> None:
    """F20: `.new-*` files stayed for good."""
    path = tmp_path / "f.json"
    path.write_text("old")
    with subprocess.Popen([sys.executable, "-c", HALFWAY, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "halfway\n"
        assert [p.name.startswith(".new-") for p in tmp_path.iterdir()].count(True) == 1
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["f.json"]


def test_a_forked_child_ends_at_once() -> None:
    """Handlers are inherited: a worker that runs the parent's clean-up would undo the parent's work."""
    code = ("import os, signal, time; from tune_kernels.shapes.files import end_on_signals; end_on_signals(); child = os.fork()\n"
            "if child == 0:\n try:\n  time.sleep(60)\n finally:\n  print('unwound')\n"
            "time.sleep(0.5); os.kill(child, signal.SIGTERM); print(os.waitpid(child, 0)[1])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{signal.SIGTERM.value}\n"
