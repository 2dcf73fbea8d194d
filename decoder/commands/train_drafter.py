"""`tune-kernels train-drafter`: an EAGLE-3 drafter from the target's own answers."""

import dataclasses
import json
from pathlib import Path
from typing import TypedDict, Unpack

import click

from .screen import reported


class Values(TypedDict):
    """The fields of drafters/training/settings.py: Settings."""

    weights: str
    out: Path
    minutes: float
    draft_vocab: int
    prompts: Path | None
    seed: int
    storage: str


@click.command("train-drafter")
@click.option("--weights", default="smollm2", show_default=True, help="The target: Hugging Face folder, .gguf file, or smollm2.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A new folder, or that of an interrupted run.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True, help="Time of the run.")
@click.option("--draft-vocab", type=click.IntRange(min=1), default=8192, show_default=True, help="Size of the drafter's "
              "vocabulary: the most frequent tokens of the target's answers.")
@click.option("--prompts", type=click.Path(path_type=Path), default=None, help="A file with one prompt per line; one in ten is "
              "held out.  [default: shipped topics and tasks]")
@click.option("--device", default=None, help="cuda, cuda:1, cpu.  [default: the first GPU]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--storage", type=click.Choice(("bf16", "int8")), default="bf16", show_default=True,
              help="Type of the stored weights.")
@click.option("--json", "as_json", is_flag=True, help="The card as one JSON object on standard output.")
@reported
def train_drafter(device: str | None, as_json: bool, **values: Unpack[Values]) -> None:
    """Train an EAGLE-3 drafter on the target's own answers, without a data set. Resumes an interrupted run."""
    from ..drafters.training.settings import Settings, sizes_for
    from ..drafters.training.train import refuse_cpu
    from ..drafters.training.train import train_drafter as train
    from ..errors import writing
    from ..loading import torch_device

    settings, place = Settings(**values), torch_device(device)
    if device is None and place.type == "cpu":
        refuse_cpu(settings)
    with writing(settings.out):
        card = train(settings, sizes_for(place), place, lambda line: click.echo(line, err=True))
    click.echo(json.dumps(dataclasses.asdict(card), sort_keys=True) if as_json else (settings.out / "card.md").read_text("utf-8"))
