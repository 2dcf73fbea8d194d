#!/usr/bin/env python
"""Times fp32 decoding on this CPU: AR against Hugging Face's `generate` with its KV cache, in turn, on the same prompt.

    python scripts/bench_cpu.py [--threads 2] [--out FILE.json]

Rates are of decoding alone: tokens after the first, over the time since the first. Also times the verification of a draft of K
tokens, one pass of K + 1 rows, against a pass of one row. Prints a table, then one JSON line.
"""

import statistics
import time
from typing import TYPE_CHECKING

import numba
import numpy as np
import torch
import transformers
from common import cpu_model, parser, publish, run
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.checkpoint.loader import SMOLLM2, load_checkpoint
from tune_kernels.decoder.checks.reference import hugging_face_model
from tune_kernels.decoder.rows import Appended

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPT = "Write a short story about a lighthouse keeper who finds a letter in a bottle."


class Arrivals:
    """A streamer for Hugging Face: the time of each token. The first call brings the prompt."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def rate(self) -> float:
        """Tokens/s after the first."""
        return (len(self.at) - 2) / (self.at[-1] - self.at[1])


def hugging_face_run(model: "PreTrainedModel", ids: list[int], tokens: int) -> tuple[list[int], float]:
    """(new tokens, tokens/s)."""
    arrivals = Arrivals()
    with torch.inference_mode():
        prompt = torch.tensor([ids])
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens,
                             do_sample=False, use_cache=True, streamer=arrivals)
    return out[0, len(ids):].tolist(), arrivals.rate


def pass_ms(decoder: Decoder, ids: list[int], rows: int) -> float:
    """Milliseconds of one pass of `rows` rows after the prompt, with the logits and their argmax."""
    cache = decoder.cache
    cache.rollback(len(ids))
    started = time.perf_counter()
    decoder.model.greedy(decoder.model.forward(ids[:1] * rows, Appended(cache, rows)).final)
    return (time.perf_counter() - started) * 1e3


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--weights", default=SMOLLM2, help="a checkpoint")
    options.add_argument("--tokens", type=int, default=32, help="new tokens per run")
    options.add_argument("--repeats", type=int, default=7, help="runs of each decoder, in turn")
    options.add_argument("--draft-length", type=int, default=4, help="K")
    options.add_argument("--threads", type=int, help="torch's threads; its own default if left out")
    given = options.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    decoder = Decoder.load(given.weights, recipe="fp32", backend="torch", device="cpu")
    reference = hugging_face_model(load_checkpoint(given.weights, None, torch.device("cpu")), torch.float32)
    ids = decoder.tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
    rates: dict[str, list[float]] = {"this decoder": [], "Hugging Face": []}
    for repeat in range(given.repeats + 1):  # the first warms up
        theirs, their_rate = hugging_face_run(reference, ids, given.tokens)
        ours = decoder.generate(ids, mode="ar", max_new_tokens=given.tokens, ignore_eos=True)
        if repeat:
            rates["this decoder"].append(ours.stats.decode_tokens_per_s)
            rates["Hugging Face"].append(their_rate)
    passes: dict[int, list[float]] = {1: [], given.draft_length + 1: []}
    for _ in range(4 * given.repeats):
        for rows, times in passes.items():
            times.append(pass_ms(decoder, ids, rows))
    rate = {name: statistics.median(values) for name, values in rates.items()}
    cost = {rows: statistics.median(times) for rows, times in passes.items()}
    for name, value in rate.items():
        print(f"{name:13s} {value:6.1f} tokens/s ({min(rates[name]):.1f} to {max(rates[name]):.1f})")
    for rows, value in cost.items():
        print(f"{rows} rows {'':7s}{value:6.1f} ms per pass")
    ratio, verification = rate["this decoder"] / rate["Hugging Face"], cost[given.draft_length + 1] / cost[1]
    print(f"ratio of medians {ratio:.2f}; verification of {given.draft_length} over one token {verification:.2f}; "
               f"same tokens: {ours.token_ids == theirs}")
    publish({"cpu": cpu_model(), "threads": torch.get_num_threads(), "tokens": given.tokens, "repeats": given.repeats,
             "prompt_tokens": len(ids), "tokens_per_s": rates, "ratio": ratio, "pass_ms": cost,
             "verification_over_ar": verification, "draft_length": given.draft_length, "same_tokens": ours.token_ids == theirs,
             "torch": torch.__version__, "numba": numba.__version__, "numpy": np.__version__,
             "transformers": transformers.__version__}, given.out)
    return 0


if __name__ == "__main__":
    run(main)
