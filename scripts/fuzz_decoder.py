#!/usr/bin/env python
"""Compares random requests with AR on a tiny random model: modes, widths, drafters (some fail or return rubbish), stops, delays,
sampling, reuse, streams that are left early, and requests during a stream.

    python scripts/fuzz_decoder.py [--requests 10000] [--recipe fp32] [--out FILE.json]

A second decoder runs AR on the same request. Prints differing requests and counts, then one JSON line. Exit 1 if one byte
differs. A smaller seeded run is a test (tests/decoder/test_fuzz.py).
"""

import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from common import ROOT, parser, publish, run
from tune_kernels.decoder import Decoder, Result, Stream
from tune_kernels.decoder.checks.agreement import Delayed
from tune_kernels.decoder.drafter import Drafter
from tune_kernels.decoder.drafters.ngram import NGramDrafter
from tune_kernels.decoder.drafters.scripted import ScriptedDrafter
from tune_kernels.decoder.drafters.small_model import SmallModelDrafter
from tune_kernels.decoder.errors import RequestError
from tune_kernels.decoder.loading import default_backend, torch_device
from tune_kernels.decoder.request.request import RequestOptions
from tune_kernels.schedules.recipe import Recipe, load_recipe
from tune_kernels.shapes.model import ModelShape

sys.path.insert(0, str(ROOT / "tests" / "support"))
from bad_drafters import Rubbish  # type: ignore[import-not-found]

SHAPE = ModelShape("fuzz", "llama", 32, 48, 2, 2, 1, 16, 61, 10000.0, 1e-5, False, False, 512, "fuzz_decoder")
CHUNK = 16  # keys a chunk on `torch`, so that short prompts cross chunks
DELAY_S = 0.0005  # of the longest delay; a round of the tiny model takes about ten times that


class Digits:
    """Stands for a tokenizer, so that ids stream as text."""

    size, special_ids = 61, dict[str, int]()

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"{i} " for i in ids)


class Fuzz:
    """Two decoders of one model: one serves every request, which tests reuse; the other gives the AR answers. options: of
    Decoder.load."""

    def __init__(self, seed: int, recipe: str, **options: Any) -> None:
        self.random = random.Random(seed)
        chosen, shape = fitting(load_recipe(recipe), options.get("backend"))
        self.chunk, self.capacity = chosen.kv_chunk, 6 * chosen.kv_chunk
        options = {**options, "capacity": self.capacity, "allow_untuned": True}

        def load(number: int) -> Decoder:
            return Decoder.load(f"random:{number}", shape, chosen, **options)

        self.used, self.clean, other = load(seed), load(seed), load(seed + 1)
        self.drafters: dict[str, Drafter] = {
            "ngram": NGramDrafter(), "itself": SmallModelDrafter(self.used.model, self.capacity),
            "another model": SmallModelDrafter(other.model, self.capacity)}

    def request(self) -> tuple[list[int], RequestOptions]:
        """A prompt and the options that both modes share."""
        draw = self.random
        pool = draw.choice([61, 61, 7])  # few ids repeat themselves, which feeds the n-gram drafter
        chunk = self.chunk
        lengths = [1, 2, 5, chunk - 2, chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 2 * chunk, 2 * chunk + 1, 3 * chunk + 2]
        prompt = [draw.randrange(pool) for _ in range(draw.choice(lengths))]
        options: RequestOptions = {"max_new_tokens": draw.randint(1, min(24, self.capacity - len(prompt) + 1))}
        if draw.random() < 0.4:
            options["stop_token_ids"] = [draw.randrange(61) for _ in range(draw.randint(1, 6))]
        if draw.random() < 0.25:
            options["temperature"], options["top_p"] = draw.choice([0.5, 1.0, 2.0]), draw.choice([1.0, 0.9])
            options["seed"] = draw.randrange(10**6)
        if draw.random() < 0.1:
            options["logprobs"] = 1
        return prompt, options

    def drafter(self, reference: list[int]) -> tuple[str, Drafter]:
        """A random drafter, sometimes late. (name, drafter)."""
        draw = self.random
        name = draw.choice([*self.drafters, "scripted", "scripted"])
        if name == "scripted":
            pattern = [draw.randint(0, 9) for _ in range(draw.randint(1, 6))]
            chosen: Drafter = ScriptedDrafter(reference, pattern, 61, [draw.random() < 0.6 for _ in range(3)])
        else:
            chosen = self.drafters[name]
        if draw.random() < 0.15:
            return f"{name}, late", Delayed(chosen, draw.random() * DELAY_S)
        if draw.random() < 0.25:
            return f"{name}, rubbish", Rubbish(chosen, random.Random(draw.random()), draw.choice([0.1, 0.5, 1.0]))
        return name, chosen

    def one(self) -> tuple[str, str]:
        """Serves one request: (mode and drafter, the difference or an empty string)."""
        draw = self.random
        prompt, options = self.request()
        self.clean.eos_ids = self.used.eos_ids = frozenset(draw.sample(range(61), draw.choice([0, 0, 1, 3])))
        expected = self.clean.generate(prompt, "ar", **options)
        mode = draw.choice(["sd", "sd", "ssd", "ssd", "ar"])
        reference = [*prompt, *expected.token_ids]
        name, self.used.drafter = ("none", None) if mode == "ar" else self.drafter(reference)
        if draw.random() < 0.2:
            self.used.cache.buffer.fill_(torch.nan)
        shared: RequestOptions = {**options, "draft_length": draw.randint(1, 9), "branches": draw.randint(1, 6)}
        kind = f"{mode}, drafter {name}"
        if draw.random() < 0.1:
            self.leave(prompt, mode, shared)
            kind += ", after a stream left early"
        result, refusal = self.serve(prompt, mode, shared)
        for field in ("token_ids", "finish_reason", "logprobs"):
            found, right = getattr(result, field), getattr(expected, field)
            if found != right:
                return kind, f"{field}: {found} and AR {right}, prompt {prompt}, options {options}"
        return kind, refusal

    def serve(self, prompt: list[int], mode: str, options: RequestOptions) -> tuple[Result, str]:
        """The request, whole or as a stream beside which another one is asked for: (its result, any fault of the other)."""
        if self.random.random() < 0.7:
            return self.used.generate(prompt, mode, **options), ""
        stream, refusal = self.open(prompt, mode, options), ""
        for number, _ in enumerate(stream):
            if number == 0 and not stream.closed and not self.refused(prompt):
                refusal = "a second request was served beside the first"
        return stream.result, refusal

    def open(self, prompt: list[int], mode: str, options: RequestOptions) -> Stream:
        """A stream of ids as digits."""
        self.used.tokenizer = Digits()
        try:
            return self.used.stream(prompt, mode, **options)
        finally:
            self.used.tokenizer = None

    def leave(self, prompt: list[int], mode: str, options: RequestOptions) -> None:
        """A stream that is closed or dropped, before or after its first pieces."""
        stream = self.open(prompt[::-1], mode, options)
        for _ in range(self.random.randint(0, 3)):
            next(stream, "")
        if self.random.random() < 0.5:
            stream.close()

    def refused(self, prompt: list[int]) -> bool:
        """Whether a request beside another one is refused."""
        try:
            self.used.generate(prompt, "ar", max_new_tokens=2)
        except RequestError as e:
            return "another request" in e.found
        return False


def fitting(recipe: Recipe, backend: str | None) -> tuple[Recipe, ModelShape]:
    """Recipe and shape for a backend: `torch` takes small chunks; default schedules of kernels need the recipe's, heads of 64."""
    if (backend or default_backend(recipe, torch_device(None))) == "triton":
        return recipe, replace(SHAPE, head_dim=64)
    return replace(recipe, kv_chunk=CHUNK), SHAPE


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=10_000, help="number of requests")
    options.add_argument("--seed", type=int, default=0, help="of weights and requests")
    options.add_argument("--recipe", default="fp32", help="precisions")
    given = options.parse_args()
    torch.set_num_threads(1)
    fuzz, counts, differing, started = Fuzz(given.seed, given.recipe), Counter[str](), list[str](), time.perf_counter()
    for number in range(given.requests):
        kind, problem = fuzz.one()
        counts[kind] += 1
        if problem:
            differing.append(f"request {number}: {kind}: {problem}")
            print(differing[-1])
        if (number + 1) % 1000 == 0:
            print(f"{number + 1} requests, {len(differing)} differing", file=sys.stderr)
    for kind, count in sorted(counts.items()):
        print(f"{count:6d}  {kind}")
    publish({"seed": given.seed, "counts": {f"{given.recipe} requests": given.requests, "differing": len(differing), **counts},
             "faults": differing, "seconds": round(time.perf_counter() - started, 1)}, given.out)
    return 1 if differing else 0


if __name__ == "__main__":
    run(main)
