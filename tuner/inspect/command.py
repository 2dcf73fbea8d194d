"""`tune-kernels inspect`: find, judge, compare with a baseline, show."""

import sys
from pathlib import Path

import click
from rich.console import Console

from ..errors import ReportError
from ..offline.record import write_text
from .baseline import read_baseline, regressions, worst_of
from .find import find
from .judge import Demands, Inspected, inspect
from .show import Inspection, ordered, print_text, render


def inspected(paths: list[Path], demands: Demands, baseline: Path | None = None) -> Inspection:
    """Every kernel below the paths, judged.

    Raises:
        ReportError: nothing to inspect, or a baseline that can't be read. ToolchainError: a tool of Triton's wheel is missing.
    """
    before = None if baseline is None else read_baseline(baseline)
    found: list[Inspected] = [one for artefact in find(paths) for one in inspect(artefact, demands)]
    if not found:
        raise ReportError(f"no compiled kernels in {', '.join(map(str, paths))}",
                          expected=".cubin or .ptx files, or files that embed them",
                          action="Triton's cache is ~/.triton/cache, or TRITON_CACHE_DIR")
    kernels = ordered(found)
    worse = None if before is None else tuple(regressions(before, worst_of(kernels)))
    return Inspection(kernels, worse)


def run(paths: list[Path], demands: Demands, *, baseline: Path | None, form: str, out: Path | None) -> int:
    """The command; returns its exit code. form: as show.render."""
    inspection = inspected(paths, demands, baseline)
    if out is not None:
        write_text(out, render(inspection, form))
        click.echo(f"wrote {out}: {inspection.closing}")
    elif form == "text" and sys.stdout.isatty():
        print_text(inspection, Console())
    else:
        click.echo(render(inspection, form), nl=False)
    return 1 if inspection.failed else 0
