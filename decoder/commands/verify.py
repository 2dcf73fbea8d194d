"""`tune-kernels verify`: checks a model under a recipe, and writes the evidence."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from .options import DATA, Loading, load_options, model_options
from .screen import Progress, reported, table

if TYPE_CHECKING:
    from ..checks.check import CheckResult
    from ..checks.evidence import Evidence


class Values(Loading):
    """The values of the command, less its outputs."""

    kinds: tuple[str, ...]
    text: Path
    task: Path
    context: int
    text_tokens: int | None
    promote: bool


@click.command()
@model_options
@click.option("--kind", "kinds", multiple=True, type=click.Choice(("agreement", "reference", "quality")),
              default=("agreement", "reference"), show_default=True, help="Checks to run; may be repeated.")
@click.option("--text", type=click.Path(path_type=Path), default=DATA / "alice.txt", help="Text of the checks.")
@click.option("--task", type=click.Path(path_type=Path), default=DATA / "capitals.toml", help="Task of the quality check.")
@click.option("--context", default=600, show_default=True, help="Tokens of the reference check.")
@click.option("--text-tokens", type=int, default=None, help="Tokens of the quality text.  [default: all]")
@click.option("--promote", is_flag=True, help="If all checks pass, write them as evidence of the promoted schedules in use, in "
              "place of evidence from random weights. Writes to --schedules, $TUNE_KERNELS_SCHEDULES or the user's folder.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/evidence.json"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The evidence as one JSON object on standard output.")
@reported
def verify(out: Path, as_json: bool, **values: Unpack[Values]) -> None:
    """Check a model under a recipe: agreement, reference, quality. Exit code 1 if any check fails."""
    from ..checks.upgrade import upgrade
    from ..checks.verify import Plan
    from ..checks.verify import verify as run

    progress = Progress()

    def report(result: "CheckResult", position: str) -> None:
        progress(f"{result.kind}{position} {'ok  ' if result.passed else 'FAIL'} {result.name}"
                 + (f": {result.detail}" if result.detail else ""))

    plan = Plan(values["weights"], values["model"], values["recipe"], values["drafter"], load_options(values), values["kinds"],
                values["text"], values["task"], values["context"], values["text_tokens"], values["promote"])
    try:
        evidence = run(plan, report, progress)
    finally:
        progress.done()
    evidence.write(out)
    if not as_json:
        show_evidence(evidence, out)
    folder = Path(values["schedules"]) if values["schedules"] else None
    written = upgrade(evidence, folder) if values["promote"] and evidence.passed else []
    if as_json:
        promoted = {"promoted": [str(path) for path in written]} if values["promote"] else {}
        click.echo(json.dumps({**evidence.to_dict(), **promoted}, sort_keys=True))
    elif values["promote"]:
        show_promoted(evidence, written)
    if not evidence.passed:
        sys.exit(1)


def show_evidence(evidence: "Evidence", out: Path) -> None:
    """Prints the counts, and every result that isn't a passed agreement check."""
    rows = [(kind, str(n["run"]), str(n["passed"])) for kind, n in evidence.counts().items()]
    marked = " (random weights: good for speed and bits, not for quality)" if evidence.weights.startswith("random:") else ""
    click.echo(f"{evidence.weights}{marked}, recipe {evidence.recipe}")
    table("checks", ("kind", "run", "passed"), rows)
    for result in evidence.results:
        if not result.passed or result.kind != "agreement":
            click.echo(f"{'ok  ' if result.passed else 'FAIL'} {result.kind}: {result.name}: {result.detail}")
    for line in evidence.not_run:
        click.echo(f"not run: {line}")
    click.echo(f"evidence: {out}")


def show_promoted(evidence: "Evidence", written: Sequence[Path]) -> None:
    """Prints the rows with new evidence, and the files written."""
    if not written:
        click.echo("not promoted: a check failed")
    for row in evidence.in_use if written else ():
        click.echo(f"{row.kernel}: {row.schedule_id}: evidence of {evidence.weights}; before: {row.evidence.weights} "
                   f"({row.date})")
    for path in written:
        click.echo(f"promoted: {path}")
