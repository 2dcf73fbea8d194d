"""Errors of schedules and recipes."""

from ..shapes.errors import UserError


class ScheduleError(UserError):
    """A wrong schedule or recipe file; knobs that a kernel doesn't have."""


class NotPromoted(UserError):
    """No such promoted schedule. Says how the nearest one differs, and the command to run."""

    exit_code = 1
