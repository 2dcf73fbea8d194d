"""The three decoders as simply as Hugging Face's growing cache allows: the starting point, kept for comparison.

Nothing here is row-invariant and nothing is fixed: the cache grows by concatenation and is cropped on a rejection,
the drafter is a loop of one-token forward passes, and SSD runs it in a thread. So SD and SSD may emit other tokens
than AR in bf16; the script counts how often. It shares no code with the decoder but the loading of weights and
prompts.
"""

import json
import statistics
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import torch
from tune_kernels.decoder.loader import SMOLLM2, load_checkpoint
from tune_kernels.decoder.reference import hugging_face_model
from tune_kernels.decoder.tokenizer import load_tokenizer

PROMPTS = Path(__file__).parent.parent / "tests" / "data" / "prompts.toml"


class Sequence:
    """One model's growing cache."""

    def __init__(self, model: Any) -> None:
        from transformers import DynamicCache

        self.model, self.cache = model, DynamicCache(config=model.config)

    def feed(self, tokens: list[int]) -> list[int]:
        """The winning token after each of `tokens`."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([tokens]), past_key_values=self.cache, use_cache=True).logits[0]
        winners: list[int] = logits.argmax(-1).tolist()
        return winners

    def crop(self, length: int) -> None:
        """Keeps the first `length` tokens."""
        extra = self.cache.get_seq_length() - length
        if extra > 0:
            self.cache.crop(-extra)


def autoregressive(model: Any, prompt: list[int], limit: int) -> tuple[list[int], int]:
    """(new tokens, forward passes after the prompt)."""
    sequence = Sequence(model)
    tokens = [sequence.feed(prompt)[-1]]
    while len(tokens) < limit:
        tokens.append(sequence.feed(tokens[-1:])[-1])
    return tokens, limit - 1


def propose(drafter: Sequence, tokens: list[int], length: int) -> list[int]:
    """`length` tokens from the drafter, fed what it lacks first."""
    drafter.crop(len(tokens) - 1)
    rest, drafted = tokens[drafter.cache.get_seq_length():], list[int]()
    while len(drafted) < length:
        drafted.append(drafter.feed(rest)[-1])
        rest = drafted[-1:]
    return drafted


def speculative(model: Any, drafter_model: Any, prompt: list[int], limit: int, length: int,
                ahead: ThreadPoolExecutor | None = None) -> tuple[list[int], int]:
    """SD, or SSD where `ahead` is a thread: it drafts on for the outcome in which all is accepted."""
    target, drafter = Sequence(model), Sequence(drafter_model)
    tokens, rounds = [*prompt, target.feed(prompt)[-1]], 0
    draft = propose(drafter, tokens, length)
    while len(tokens) < len(prompt) + limit:
        next_draft: Future[list[int]] | None = ahead.submit(propose, drafter, tokens + draft, length + 1) if ahead else None
        winners = target.feed([tokens[-1], *draft])
        accepted = next((i for i, token in enumerate(draft) if token != winners[i]), length)
        tokens += winners[:accepted + 1]
        target.crop(len(tokens) - 1)
        rounds += 1
        guess = next_draft.result() if next_draft else []
        drafter.crop(len(tokens) - 1)
        hit = bool(guess) and accepted == length and guess[0] == tokens[-1]
        draft = guess[1:] if hit else propose(drafter, tokens, length)
    return tokens[len(prompt):len(prompt) + limit], rounds


@click.command()
@click.option("--weights", default=SMOLLM2, show_default=True, help="The target, and its own drafter where no other is named.")
@click.option("--drafter", default=None, help="A small model of the same vocabulary.")
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), default="float32", show_default=True)
@click.option("--draft-length", default=4, show_default=True)
@click.option("--tokens", default=32, show_default=True)
def main(weights: str, drafter: str | None, dtype: str, draft_length: int, tokens: int) -> None:
    """Time the naive decoders on the six evaluation prompts."""
    kind = getattr(torch, dtype)
    checkpoint = load_checkpoint(weights, None, torch.device("cpu"))
    model = hugging_face_model(checkpoint, kind)
    small = hugging_face_model(load_checkpoint(drafter, None, torch.device("cpu")), kind) if drafter else model
    assert checkpoint.path is not None
    tokenizer = load_tokenizer(checkpoint.path)
    rows: dict[str, list[tuple[float, bool, int]]] = {}
    with ThreadPoolExecutor(1) as ahead:
        for prompt in tomllib.loads(PROMPTS.read_text(encoding="utf-8"))["evaluation"]:
            ids = tokenizer.encode_chat([{"role": "user", "content": prompt["text"]}])
            modes: dict[str, Callable[[], tuple[list[int], int]]] = {
                "ar": lambda ids=ids: autoregressive(model, ids, tokens),  # type: ignore[misc]
                "sd": lambda ids=ids: speculative(model, small, ids, tokens, draft_length),  # type: ignore[misc]
                "ssd": lambda ids=ids: speculative(model, small, ids, tokens, draft_length, ahead)}  # type: ignore[misc]
            expected: list[int] = []
            for mode, run in modes.items():
                started = time.perf_counter()
                made, rounds = run()
                expected = expected or made
                rows.setdefault(mode, []).append((tokens / (time.perf_counter() - started), made == expected, rounds))
    for mode, runs in rows.items():
        click.echo(f"{mode:4s} {statistics.median(r[0] for r in runs):7.1f} tokens/s with the prompt, same as AR on "
                   f"{sum(r[1] for r in runs)} of {len(runs)} prompts, {sum(r[2] for r in runs)} rounds")
    click.echo(json.dumps({"weights": weights, "dtype": dtype, "draft_length": draft_length, "tokens": tokens, "rows": {
        mode: {"tokens_per_s_with_prefill": statistics.median(r[0] for r in runs), "same": sum(r[1] for r in runs),
               "prompts": len(runs), "rounds": sum(r[2] for r in runs)} for mode, runs in rows.items()}}))


if __name__ == "__main__":
    main()
