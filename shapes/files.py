"""Atomic writes and locks for files that several processes use.

`replace_text` and `replace_bytes` are the only writers of files that another process may read. `locked` is the lock for a
read-modify-write. After `end_on_signals`, TERM and HUP unwind like Ctrl-C: half-written files are removed.
"""

import contextlib
import errno
import fcntl
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

PATIENCE_S = 1.0  # of waiting for a lock without a message
LONGEST_WAIT_S = 120.0  # for a lock: a promotion holds it for milliseconds, or seconds on a slow network disk
POLL_S = 0.05


def replace_text(path: Path, text: str, *, durable: bool = False) -> None:
    """As `replace_bytes`, for text in UTF-8."""
    replace_bytes(path, text.encode("utf-8"), durable=durable)


def replace_bytes(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a temporary file in the same folder, then rename it: a reader sees the old file or the new one. Makes the folder.

    durable: the file is on the disk when this returns, for files that can't be made again.

    Raises:
        OSError: the old file is unchanged, and the temporary file removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as f:
            f.write(data)
            if durable:
                f.flush()
                os.fsync(f.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
        if durable:
            _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _sync_folder(folder: Path) -> None:
    """Make a rename durable, if the file system can sync a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    """This process's umask, which mkstemp ignores."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def locked(path: Path, longest_s: float = LONGEST_WAIT_S) -> Iterator[None]:
    """Hold an exclusive lock on the file at `path`, against other processes and threads. A wait longer than PATIENCE_S prints a
    line on stderr.

    Raises:
        OSError: the file isn't writable; its file system has no locks; another holder keeps it for longer than `longest_s`.
    """
    with open(path, "ab") as file:
        began, printed = time.monotonic(), False
        while not _try_lock(file.fileno(), path):
            waited = time.monotonic() - began
            if waited >= longest_s:
                raise OSError(errno.ETIMEDOUT, f"{_holder(path)} has held this lock for {waited:.0f} s", str(path))
            if waited >= PATIENCE_S and not printed:
                printed = True
                print(f"waiting for {path}: {_holder(path)} holds it", file=sys.stderr, flush=True)
            time.sleep(POLL_S)
        yield


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as e:
        raise OSError(e.errno, f"its file system has no locks (flock: {e.strerror}); use a folder on a local disk",
                      str(path)) from None


def _holder(path: Path) -> str:
    """The holder of a lock, if Linux lists it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        inode = str(path.stat().st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == inode:
                return f"process {fields[4]} ({Path('/proc', fields[4], 'comm').read_text().strip()})"
    return "another process"


def end_on_signals() -> None:
    """From now on TERM and HUP raise SystemExit with the shell's exit code: half-written files are removed. Forked children still
    end at once."""
    owner = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            raise SystemExit(128 + number)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # keeps nohup's ignored HUP
            signal.signal(number, end)
