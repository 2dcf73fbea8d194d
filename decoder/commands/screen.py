"""The output of a command: errors, tables, progress. Foreign text is never markup, and a character that the terminal can't encode
is escaped."""

import functools
import io
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec

import click
from rich.console import Console
from rich.table import Table

from ...shapes.errors import UserError

P = ParamSpec("P")
PIPE_WIDTH = 160  # columns of a table in a pipe


def reported(command: Callable[P, None]) -> Callable[P, None]:
    """A decorator: prints a user's error without a traceback and exits with its code."""
    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            command(*args, **kwargs)
        except UserError as e:
            click.echo(f"error: {e}", err=True)
            sys.exit(e.exit_code)
    return run


class Progress:
    """One line that renews itself on a terminal, one line per message in a pipe; always on standard error."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, markup=False, emoji=False, highlight=False)
        self.status = self.console.status("") if self.console.is_terminal else None

    def __call__(self, message: str) -> None:
        if self.status:
            self.status.update(message)
            self.status.start()
        else:
            click.echo(message, err=True)

    def done(self) -> None:
        if self.status:
            self.status.stop()


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table, PIPE_WIDTH columns wide in a pipe."""
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, markup=False, emoji=False, highlight=False)
    shown = Table(*columns, title=title)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
