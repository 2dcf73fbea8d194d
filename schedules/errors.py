"""Errors of schedules and recipes."""

from ..shapes.errors import UserError


class ScheduleError(UserError):
    """A schedule or recipe file that is wrong; knobs that a kernel doesn't have."""


class NotPromoted(UserError):
    """No promoted schedule for what was asked: what the nearest one differs in, and what to run."""

    exit_code = 1
