"""The command behind `tune-kernels --on-gpu`: a run or a replay, its reports, and what is promoted."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console

from ...schedules import store
from ...schedules.promoted import RANDOM_WEIGHTS
from ...schedules.store import PromotedFile
from ...shapes.model import load_model_shape
from .. import pool
from ..errors import SpaceError
from ..offline.record import write_json, write_text
from . import run as on_gpu
from .report import make_report, print_report
from .report_html import render_gpu_report
from .rows import merged
from .run import Outcome, Request
from .worker import gpu_state
from .worker.measurer import GpuMeasurer, gpu_executor
from .worker.probe import GpuProbe, Loaded

HEAD_BYTES = 1 << 20  # of each weights file, in its fingerprint


def run(as_json: bool, model: str, kernels: tuple[str, ...], recipe: str, out: Path, bundle: Path, weights: str, budget: float,
        storage: str | None, schedules: Path | None, promote: bool, dry_run: bool, replay: Path | None) -> int:
    """Returns the exit code: 1 where nothing may be promoted or a kernel was skipped."""
    if promote and dry_run:
        raise click.UsageError("--promote and --dry-run don't go together")
    console = Console(stderr=as_json)
    request = Request(model, bundle, kernels, weights, recipe, budget, storage, schedules, out, promote)

    def watch(line: str) -> None:
        if not as_json:
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    outcome = on_gpu.replay(replay) if replay else _measured(request, watch)
    change = _change(outcome, request) if promote else None  # as it was, before it is written
    if promote:
        on_gpu.promote(outcome, request)
    report = make_report(outcome)
    write_json(out / "report.json", report)
    write_text(out / "report.html", render_gpu_report(report))
    if as_json:
        told = {k: report[k] for k in ("promotable", "calls", "gpu_seconds", "seconds_to_first_sample", "skipped", "notes")}
        click.echo(json.dumps({**told, "report": str(out / "report.json"), "written": outcome.written and str(outcome.written)}))
    else:
        print_report(report, console)
        _show_change(outcome, change or _change(outcome, request), request, console)
    return 0 if on_gpu.complete(outcome) else 1


def _measured(request: Request, watch: on_gpu.Watch) -> Outcome:
    """One run with this machine's GPU in a worker."""
    machine = gpu_state.this_machine()
    drafter = load_model_shape(request.model).architecture == "eagle3"
    out = request.out.absolute()
    with pool.scratch_folder(out) as scratch:
        executor = gpu_executor(scratch)
        measurer = GpuMeasurer(executor, scratch / "words")

        def probe(bundle: Path) -> GpuProbe:
            return GpuProbe(measurer, str(bundle), Loaded(request.model, request.weights, request.recipe))

        try:
            return on_gpu.tune(replace(request, weights=weights_name(request.weights)), machine, measurer,
                               None if drafter else probe, watch, fingerprint(request.weights))
        finally:
            executor.shutdown(cancel_futures=True)


def weights_name(weights: str) -> str:
    """`random:SEED` as it is; a path as `path:NAME`, without where it lies."""
    return weights if weights.startswith(RANDOM_WEIGHTS) else f"path:{Path(weights).name}"


def fingerprint(weights: str) -> str | None:
    """Of weights in files: names, sizes and the first MiB of each; None for random ones. Raises SpaceError."""
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


def _change(outcome: Outcome, request: Request) -> tuple[PromotedFile | None, PromotedFile]:
    """The store's file as it is, and as the promoted rows make it. Raises ScheduleError: what is there can't be read."""
    return merged(store.search_path(request.schedules)[0], outcome.promoted)


def _show_change(outcome: Outcome, change: tuple[PromotedFile | None, PromotedFile], request: Request, console: Console) -> None:
    """What was written, or would be, as `tune-kernels diff` shows it."""
    from ..review.as_text import show_promotion

    old, new = change
    if not outcome.promoted.rows:
        return
    show_promotion([old] if old else [], [new], console)
    path = store.search_path(request.schedules)[0] / new.name
    said = f"promoted: {outcome.written}" if outcome.written else (
        f"--promote would write {len(outcome.promoted.rows)} rows to {path}")
    console.print(said, highlight=False, markup=False, soft_wrap=True)
