"""Errors of the tuner that a user can cause."""

from pathlib import Path

from ..shapes.errors import UserError


class SpaceError(UserError):
    """A wrong space file, or a space without a legal candidate."""


class ReportError(UserError):
    """An unreadable report, or an id that isn't in it."""


class DiffError(UserError):
    """Two sides that can't be compared, or an unreadable git revision."""


class OutputError(UserError):
    """A folder that can't be written or read."""

    exit_code = 1


def cannot_write(path: Path, error: OSError) -> OutputError:
    """The user's error for a failed write or read."""
    return OutputError(f"{path}: {error.strerror or error}", expected="a writable folder on a disk with free space",
                       action="free some space or name another folder with --out; finished work is kept")


class GpuError(UserError):
    """No GPU, an unlisted one, or an unusable one."""

    exit_code = 1


class StorageError(UserError):
    """A study's storage that can't be opened."""

    exit_code = 1


class RecordingError(UserError):
    """A recorded run that is unreadable, or was made under other conditions."""


class RecordError(UserError):
    """A program that can't be run, or that leaves nothing to record."""


class AssemblerDied(Exception):
    """A signal killed the assembler: a limit or lack of memory, not the candidate's fault."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number
