"""Errors of schedules and recipes."""

from ..shapes.errors import UserError


class ScheduleError(UserError):
    """A schedule or recipe file that is wrong; knobs that a kernel doesn't have."""


class NotPromoted(UserError):
    """There is no such promoted schedule. Names the differences of the nearest one, and the command to run."""

    exit_code = 1
