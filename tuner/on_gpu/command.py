"""The command `tune-kernels --on-gpu`: a run or a replay, its reports, its promotion."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Console

from ...kernels.loading import Source, is_own, source_of
from ...schedules import store
from ...schedules.promoted import RANDOM_WEIGHTS
from ...schedules.store import PromotedFile
from ...shapes.errors import printable
from ...shapes.model import load_model_shape
from .. import pool
from ..errors import SpaceError
from ..offline.record import write_json, write_text
from . import run as on_gpu
from .report import Report, make_report, report_to_dict
from .report_html import render_gpu_report
from .report_text import print_report
from .rows import merged
from .run import Outcome, Request
from .worker import gpu_state
from .worker.measurer import GpuMeasurer, gpu_executor
from .worker.probe import GpuProbe, Loaded

HEAD_BYTES = 1 << 20  # of each weights file that its fingerprint covers
MEASURING = ("model", "kernels", "recipe", "bundle", "weights", "budget", "storage")  # options that a replay doesn't take
OF_A_MODEL = ("model", "weights", "recipe")  # and to a kernel of one's own


@dataclass(frozen=True)
class Printing:
    """The command's output. as_json: stdout has one line of JSON alone."""

    as_json: bool
    console: Console

    def line(self, text: str) -> None:
        """Print a line of text, unless as_json."""
        if not self.as_json:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def run(request: Request, *, as_json: bool = False, promote: bool = False, dry_run: bool = False, replay: Path | None = None,
        given: Iterable[str] = ()) -> int:
    """Returns the exit code: 1 if a kernel has no schedule that passed the gate. given: names of the options that the user gave.

    The promotion comes last: everything else that can fail is done before it."""
    if promote and dry_run:
        raise click.UsageError("--promote and --dry-run don't go together")
    if replay and (unused := [name for name in MEASURING if name in given]):
        raise click.UsageError(f"--replay takes no --{'kernel' if unused[0] == 'kernels' else unused[0]}")
    request = replace(request, sources=_sources(request, given))
    printing = Printing(as_json, Console(stderr=as_json))
    outcome = on_gpu.replay(replay) if replay else _measured(request, printing)
    report = make_report(outcome)
    changes = [merged(store.search_path(request.schedules)[0], file) for file in outcome.promoted.files()]
    write_json(request.out / "report.json", report_to_dict(report))
    write_text(request.out / "report.html", render_gpu_report(report))
    if not as_json:
        print_report(report, printing.console)
        _print_changes(changes, outcome, request, promote, printing)
    written = on_gpu.promote(outcome, request.schedules) if promote else []
    if as_json:
        click.echo(_summary(report, request, written))
        if not outcome.complete:
            missing = ", ".join(f"{d.kernel}: {d.outcome}" for d in report.decisions) or "no kernel"
            click.echo(f"not every kernel has a schedule that passed the gate: {printable(missing)}", err=True)
    for path in () if as_json else written:
        printing.line(f"promoted: {path}")
    return 0 if outcome.complete else 1


def _sources(request: Request, given: Iterable[str]) -> tuple[Source, ...]:
    """Of kernels of one's own. Raises UsageError: mixed with built-in ones, or with options that these alone have."""
    words = [word for word in request.kernels if is_own(word)]
    if words and len(words) < len(request.kernels):
        raise click.UsageError("kernels of your own and built-in ones don't go together: run one after the other")
    if words and (unused := [name for name in OF_A_MODEL if name in given]):
        raise click.UsageError(f"--{unused[0]} means nothing to a kernel of your own: no decoder is asked")
    return tuple(source_of(word) for word in words)


def _summary(report: Report, request: Request, written: Sequence[Path]) -> str:
    """The line that --json prints."""
    table = report_to_dict(report)
    names = ("promotable", "unchanged", "calls", "gpu_seconds", "seconds_to_first_sample", "skipped", "notes")
    outcomes = {d.kernel: {"outcome": d.outcome, "why": d.why} for d in report.decisions}
    return json.dumps({**{n: table[n] for n in names}, "decisions": outcomes, "report": str(request.out / "report.json"),
                       "written": [str(path) for path in written]})


def _measured(request: Request, printing: Printing) -> Outcome:
    """One run on this machine's GPU, in a worker process."""
    machine = gpu_state.this_machine()
    alone = bool(request.sources) or load_model_shape(request.model).architecture == "eagle3"
    with pool.scratch_folder(request.out.absolute()) as scratch:
        measurer = GpuMeasurer(lambda: gpu_executor(scratch), scratch / "words")

        def probe(bundle: Path) -> GpuProbe:
            return GpuProbe(measurer, str(bundle), Loaded(request.model, request.weights, request.recipe))

        try:
            return on_gpu.tune(replace(request, weights=weights_name(request.weights)), machine, measurer,
                               None if alone else probe, printing.line, None if request.sources else fingerprint(request.weights))
        finally:
            measurer.close()


def weights_name(weights: str) -> str:
    """`random:SEED` unchanged; a path as `path:NAME`, without its folder."""
    return weights if weights.startswith(RANDOM_WEIGHTS) else f"path:{Path(weights).name}"


def fingerprint(weights: str) -> str | None:
    """SHA-256 over name, size and first MiB of each weights file; None for random weights. Raises SpaceError."""
    if weights.startswith(RANDOM_WEIGHTS):
        return None
    folder = Path(weights)
    files = sorted(folder.glob("*.*")) if folder.is_dir() else [folder]
    digest = hashlib.sha256()
    try:
        for path in (p for p in files if p.suffix in (".safetensors", ".bin", ".gguf")):
            with path.open("rb") as file:
                digest.update(f"{path.name} {path.stat().st_size}\n".encode() + file.read(HEAD_BYTES))
    except OSError as e:
        raise SpaceError(f"weights {weights}: {e.strerror}", expected="random:SEED, or a model's files") from None
    return digest.hexdigest()


def _print_changes(changes: Sequence[tuple[PromotedFile | None, PromotedFile]], outcome: Outcome, request: Request, promote: bool,
                   printing: Printing) -> None:
    """The changes of files that are or would be written, as `tune-kernels diff` shows them."""
    from ..review.as_text import show_promotion

    if not changes:
        return
    show_promotion([old for old, _ in changes if old], [new for _, new in changes], printing.console)
    folder = store.search_path(request.schedules)[0]
    for file in outcome.promoted.files():
        count, path = len(file.rows), folder / file.name
        printing.line(f"writing {count} rows to {path}" if promote else f"--promote would write {count} rows to {path}")
