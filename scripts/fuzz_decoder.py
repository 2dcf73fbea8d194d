"""Thousands of short requests on a tiny random model, over modes, widths, drafters, stops, delays, sampling and reuse:
each against an AR run of the same options on a decoder of its own. Prints counts and one JSON line; exit code 1 if one
byte differs. A smaller seeded run is a test (tests/decoder/test_fuzz.py)."""

import json
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.agreement import Delayed
from tune_kernels.decoder.drafter import Drafter
from tune_kernels.decoder.ngram import NGramDrafter
from tune_kernels.decoder.scripted import ScriptedDrafter
from tune_kernels.decoder.small_model import SmallModelDrafter
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.shapes.model import ModelShape

SHAPE = ModelShape("fuzz", "llama", 32, 48, 2, 2, 1, 16, 61, 10000.0, 1e-5, False, False, 256, "fuzz_decoder")
CAPACITY = 96  # tokens
DELAY_S = 0.0005  # of the longest delay; a round of the tiny model takes about ten times that


class Fuzz:
    """Two decoders of one model: one serves every request, so that reuse is tested; the other gives the AR answers."""

    def __init__(self, seed: int, recipe: str) -> None:
        self.random = random.Random(seed)
        small_chunks = replace(load_recipe(recipe), kv_chunk=16)
        self.used, self.clean = (Decoder.load(f"random:{seed}", model=SHAPE, recipe=small_chunks, capacity=CAPACITY)
                                 for _ in range(2))
        other = Decoder.load(f"random:{seed + 1}", model=SHAPE, recipe=small_chunks, capacity=CAPACITY)
        self.drafters: dict[str, Drafter] = {
            "ngram": NGramDrafter(), "itself": SmallModelDrafter(self.used.model, CAPACITY),
            "another model": SmallModelDrafter(other.model, CAPACITY)}

    def request(self) -> tuple[list[int], dict[str, Any]]:
        """A prompt and the options that both modes share."""
        draw = self.random
        pool = draw.choice([61, 61, 7])  # few ids repeat themselves, which feeds the n-gram drafter
        prompt = [draw.randrange(pool) for _ in range(draw.choice([1, 2, 5, 14, 15, 16, 17, 31, 32, 33, 50]))]
        options: dict[str, Any] = {"max_new_tokens": draw.randint(1, min(24, CAPACITY - len(prompt) + 1))}
        if draw.random() < 0.4:
            options["stop_token_ids"] = [draw.randrange(61) for _ in range(draw.randint(1, 6))]
        if draw.random() < 0.25:
            options |= {"temperature": draw.choice([0.5, 1.0, 2.0]), "top_p": draw.choice([1.0, 0.9]),
                        "seed": draw.randrange(10**6)}
        if draw.random() < 0.1:
            options["logprobs"] = 1
        return prompt, options

    def drafter(self, reference: list[int]) -> tuple[str, Drafter]:
        """A drafter by lot, late by lot."""
        draw = self.random
        name = draw.choice([*self.drafters, "scripted", "scripted"])
        if name == "scripted":
            pattern = [draw.randint(0, 9) for _ in range(draw.randint(1, 6))]
            chosen: Drafter = ScriptedDrafter(reference, pattern, 61, [draw.random() < 0.6 for _ in range(3)])
        else:
            chosen = self.drafters[name]
        if draw.random() < 0.15:
            return f"{name}, late", Delayed(chosen, draw.random() * DELAY_S)
        return name, chosen

    def one(self) -> tuple[str, str]:
        """Serves one request; (what it was, what differs or an empty string)."""
        draw = self.random
        prompt, options = self.request()
        self.clean.eos_ids = self.used.eos_ids = frozenset(draw.sample(range(61), draw.choice([0, 0, 1, 3])))
        expected = self.clean.generate(prompt, "ar", **options)
        mode = draw.choice(["sd", "sd", "ssd", "ssd", "ar"])
        reference = [*prompt, *expected.token_ids]
        name, self.used.drafter = ("none", None) if mode == "ar" else self.drafter(reference)
        if draw.random() < 0.2:
            self.used.cache.buffer.fill_(torch.nan)
        result = self.used.generate(prompt, mode, draft_length=draw.randint(1, 9), branches=draw.randint(1, 6), **options)
        what = f"{mode}, drafter {name}"
        for field in ("token_ids", "finish_reason", "logprobs"):
            found, right = getattr(result, field), getattr(expected, field)
            if found != right:
                return what, f"{field}: {found} and AR {right}, prompt {prompt}, options {options}"
        return what, ""


@click.command()
@click.option("--requests", default=10_000, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--recipe", default="fp32", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Write the JSON there as well.")
def main(requests: int, seed: int, recipe: str, out: Path | None) -> None:
    """Run the requests and count the differing ones."""
    torch.set_num_threads(1)
    fuzz, counts, differing, started = Fuzz(seed, recipe), Counter[str](), 0, time.perf_counter()
    for number in range(requests):
        what, problem = fuzz.one()
        counts[what] += 1
        if problem:
            differing += 1
            click.echo(f"request {number}: {what}: {problem}")
        if (number + 1) % 1000 == 0:
            click.echo(f"{number + 1} requests, {differing} differing", err=True)
    for what, count in sorted(counts.items()):
        click.echo(f"{count:6d}  {what}")
    text = json.dumps({"requests": requests, "seed": seed, "recipe": recipe, "differing": differing, "by_kind": dict(counts),
                       "seconds": round(time.perf_counter() - started, 1)}, sort_keys=True)
    if out:
        out.write_text(text + "\n", encoding="utf-8")
    click.echo(text)
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
