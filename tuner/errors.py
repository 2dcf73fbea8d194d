"""Errors of the tuner that a user can cause."""

from pathlib import Path

from ..shapes.errors import UserError


class SpaceError(UserError):
    """A space file that is wrong, or a space in which nothing is legal."""


class ReportError(UserError):
    """A report that can't be read, or an id that isn't in it."""


class DiffError(UserError):
    """Two things that can't be compared, or a git revision that can't be read."""


class OutputError(UserError):
    """A folder that can't be written or read."""

    exit_code = 1


def cannot_write(path: Path, error: OSError) -> OutputError:
    """The user's error of a disk that refuses."""
    return OutputError(f"{path}: {error.strerror or error}", expected="a folder that can be written, with room in it",
                       action="free some space or name another folder with --out; what is finished is kept")


class GpuError(UserError):
    """No GPU, an unlisted one, or one that work can't be done on."""

    exit_code = 1


class StorageError(UserError):
    """A study's storage that can't be opened."""

    exit_code = 1


class RecordingError(UserError):
    """A recorded run that can't be read, or was made under other conditions."""


class AssemblerDied(Exception):
    """The assembler was killed by a signal: by a limit or for want of memory, through no fault of the candidate."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number
