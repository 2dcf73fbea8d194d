"""`tune-kernels generate`: one prompt, in one mode or in all three."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

import click

from ..draft_length import AUTO
from ..stats import MODES
from .options import LENGTH, Loading, load_decoder, model_options
from .screen import reported, table

if TYPE_CHECKING:
    from ..engine import Decoder
    from ..request.request import Prompt, RequestOptions
    from ..request.stream import Result


class Values(Loading):
    """The command's values."""

    prompt: str
    mode: str
    draft_length: int | str | None
    branches: int
    max_new_tokens: int
    stop: tuple[str, ...]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    raw: bool
    compare: bool
    as_json: bool


@click.command()
@click.argument("prompt")
@model_options
@click.option("--mode", type=click.Choice((*MODES, AUTO)), default="sd", show_default=True,
              help="auto takes AR or SD, and K, from measured times and acceptance.")
@click.option("--draft-length", type=LENGTH, default=None, help="Tokens drafted per round (K), or auto.  [default: 4; auto with "
              "--mode auto]")
@click.option("--branches", default=4, show_default=True, help="Outcomes that SSD prepares for.")
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--stop", multiple=True, help="Stop string; may be repeated.")
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", default=1.0, show_default=True)
@click.option("--top-k", default=0, show_default=True, help="Most likely tokens that may be drawn; 0 for all.")
@click.option("--min-p", default=0.0, show_default=True, help="Least probability of a drawn token over the largest one.")
@click.option("--seed", type=int, default=None, help="Seed of the draws.  [default: random]")
@click.option("--raw", is_flag=True, help="Continue the text, without the chat template.")
@click.option("--compare", is_flag=True, help="Run AR, SD and SSD and compare their tokens.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@reported
def generate(**values: Unpack[Values]) -> None:
    """Decode PROMPT and stream its text. Exit code 1 if --compare finds a difference."""
    decoder, mode = load_decoder(values), None if values["mode"] == AUTO else values["mode"]
    length = values["draft_length"] or (AUTO if mode is None else 4)
    options: RequestOptions = {
        "max_new_tokens": values["max_new_tokens"], "draft_length": length, "branches": values["branches"],
        "stop": values["stop"], "temperature": values["temperature"], "top_p": values["top_p"],
        "top_k": values["top_k"], "min_p": values["min_p"], "seed": values["seed"]}
    prompt = prompt_of(decoder, values["prompt"], values["raw"])
    if values["compare"]:
        compare(decoder, prompt, options, values["as_json"])
    elif values["as_json"] or decoder.tokenizer is None:
        result = decoder.generate(prompt, mode, **options)
        click.echo(json.dumps(as_table(result), sort_keys=True) if values["as_json"] else " ".join(map(str, result.token_ids)))
    else:
        with decoder.stream(prompt, mode, **options) as pieces:
            for piece in pieces:
                click.echo(piece, nl=False)
        click.echo()
        if pieces.result.stats.decision:
            click.echo(pieces.result.stats.decision, err=True)
        for warning in pieces.result.stats.warnings:
            click.echo(f"warning: {warning}", err=True)


def prompt_of(decoder: "Decoder", text: str, raw: bool) -> "Prompt":
    """Token ids for a model without tokenizer; a chat if the model has a template, unless `raw`; else the text."""
    if decoder.tokenizer is None:
        return [int(i) for i in text.split()] if text.replace(" ", "").isdigit() else text
    messages: Sequence[Mapping[str, str]] = [{"role": "user", "content": text}]
    return messages if decoder.tokenizer.has_chat_template and not raw else text


def as_table(result: "Result") -> dict[str, object]:
    """A result for JSON."""
    return {"text": result.text, "token_ids": result.token_ids, "finish_reason": result.finish_reason,
            "stats": result.stats.to_dict()}


def compare(decoder: "Decoder", prompt: "Prompt", options: "RequestOptions", as_json: bool) -> None:
    """Decodes one prompt in all three modes and prints whether they agree. Exits with code 1 if not."""
    if options["seed"] is None:
        options["seed"] = 0
    results = {mode: decoder.generate(prompt, mode, **options) for mode in MODES}
    same = all(r.token_ids == results["ar"].token_ids and r.text == results["ar"].text for r in results.values())
    if as_json:
        click.echo(json.dumps({"same": same, **{mode: as_table(r) for mode, r in results.items()}}, sort_keys=True))
    else:
        text = results["ar"].text
        click.echo(" ".join(map(str, results["ar"].token_ids)) if text is None else text)
        table("AR, SD, SSD" + (": the same tokens" if same else ": THEY DIFFER"),
              ("mode", "tokens", "rounds", "tau", "acceptance", "hit rate", "tokens/s (decode)", "same as AR"),
              [(mode, str(len(r.token_ids)), str(r.stats.rounds), f"{r.stats.tokens_per_round:.2f}",
                f"{r.stats.acceptance:.2f}" if mode != "ar" else "", f"{r.stats.hit_rate:.2f}" if mode == "ssd" else "",
                f"{r.stats.decode_tokens_per_s:.1f}", "yes" if r.token_ids == results["ar"].token_ids else "NO")
               for mode, r in results.items()])
    if not same:
        sys.exit(1)
