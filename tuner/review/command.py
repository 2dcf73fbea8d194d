"""`tune-kernels diff`: read both sides, compare, check, show."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from ...schedules.errors import ScheduleError
from ..errors import ReportError
from ..offline.record import write_text
from . import words
from .check import checked
from .code import with_code
from .compare import Diff, compare
from .source import collections


def difference(old: str, new: str | None = None, here: Path = Path(), bundles: Sequence[Path] = ()) -> Diff:
    """The checked difference of two sides, named as in `tune-kernels diff`.

    Raises:
        DiffError: an unknown side, or two that aren't comparable. ScheduleError, ReportError: an unreadable file.
    """
    before, after = collections(old, new, here)
    return with_code(checked(compare(before, after)), before, after, bundles)


def run(old: str, new: str | None, *, form: str, out: Path | None, check: bool, bundles: Sequence[Path]) -> int:
    """The command; returns its exit code. form: text, markdown, html, json, or line for JSON in one line."""
    try:
        diff = difference(old, new, bundles=bundles)
    except (ScheduleError, ReportError) as e:
        if not check:
            raise
        click.echo(f"refused: {e}", err=True)
        return 1
    if out is None and form == "text" and sys.stdout.isatty():
        from rich.console import Console

        from .as_text import print_diff

        print_diff(diff, Console())
    elif out is None:
        click.echo(_renderer(form)(diff), nl=False)
    else:
        write_text(out, _renderer(form)(diff))
        click.echo(f"wrote {out}")
    if check and diff.findings:
        rows = words.counted(len({f.row for f in diff.findings}), "row")
        click.echo(f"refused: {words.counted(len(diff.findings), 'finding')} in {rows}", err=True)
        if out is not None or form != "text":
            for finding in diff.findings:
                click.echo(f"  {finding.code}  {finding.what}: {finding.detail}", err=True)
    return 1 if check and diff.findings else 0


def _renderer(form: str) -> Callable[[Diff], str]:
    """The renderer of a format. Lazy imports: Jinja2 and rich take longer than the comparison."""
    if form == "text":
        from .as_text import render_text

        return render_text
    if form == "markdown":
        from .as_markdown import render_markdown

        return render_markdown
    if form == "html":
        from .as_html import render_html

        return render_html
    from .as_json import render_json

    return render_json if form == "json" else lambda diff: render_json(diff, indent=None)
