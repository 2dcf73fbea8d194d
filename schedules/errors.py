"""Errors of schedules and recipes."""

from ..shapes.errors import UserError


class ScheduleError(UserError):
    """A schedule or recipe file that is wrong; knobs that a kernel doesn't have."""
