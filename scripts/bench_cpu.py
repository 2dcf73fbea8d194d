"""Plain decoding on this CPU against Hugging Face's `generate` with its KV cache, in turn, on the same prompt; and the cost of
verifying a draft of K tokens, one pass of K + 1 rows, over a pass of one row. Prints a table and one JSON line.

Rates are of decoding alone: tokens after the first, over the time since the first.
"""

import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.checkpoint.loader import SMOLLM2, load_checkpoint
from tune_kernels.decoder.checks.reference import hugging_face_model
from tune_kernels.decoder.rows import Appended

PROMPT = "Write a short story about a lighthouse keeper who finds a letter in a bottle."


class Arrivals:
    """Hugging Face's streamer: when each token came. The first call brings the prompt."""

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


def hugging_face_run(model: Any, ids: list[int], tokens: int) -> tuple[list[int], float]:
    """(the tokens made, tokens/s)."""
    arrivals = Arrivals()
    with torch.inference_mode():
        prompt = torch.tensor([ids])
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens,
                             do_sample=False, use_cache=True, streamer=arrivals)
    return out[0, len(ids):].tolist(), arrivals.rate


def pass_ms(decoder: Decoder, ids: list[int], rows: int) -> float:
    """One pass of `rows` rows after the prompt, logits and winners included."""
    cache = decoder.cache
    cache.rollback(len(ids))
    started = time.perf_counter()
    decoder.model.greedy(decoder.model.forward(ids[:1] * rows, Appended(cache, rows)).final)
    return (time.perf_counter() - started) * 1e3


def cpu_model() -> str:
    """As /proc/cpuinfo names it, where there is one."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].split(":")[1].strip() if names else platform.processor()


@click.command()
@click.option("--weights", default=SMOLLM2, show_default=True)
@click.option("--tokens", default=32, show_default=True, help="Tokens of a run.")
@click.option("--repeats", default=7, show_default=True, help="Runs of each, in turn.")
@click.option("--draft-length", default=4, show_default=True)
@click.option("--threads", default=None, type=int, help="torch's; its default where not given.")
def main(weights: str, tokens: int, repeats: int, draft_length: int, threads: int | None) -> None:
    """Time fp32 decoding on a CPU."""
    import numba
    import transformers

    if threads:
        torch.set_num_threads(threads)
    decoder = Decoder.load(weights, recipe="fp32", backend="torch", device="cpu")
    reference = hugging_face_model(load_checkpoint(weights, None, torch.device("cpu")), torch.float32)
    ids = decoder.tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
    rates: dict[str, list[float]] = {"this decoder": [], "Hugging Face": []}
    for repeat in range(repeats + 1):  # the first warms up
        theirs, their_rate = hugging_face_run(reference, ids, tokens)
        ours = decoder.generate(ids, mode="ar", max_new_tokens=tokens, ignore_eos=True)
        if repeat:
            rates["this decoder"].append(ours.stats.decode_tokens_per_s)
            rates["Hugging Face"].append(their_rate)
    passes: dict[int, list[float]] = {1: [], draft_length + 1: []}
    for _ in range(4 * repeats):
        for rows, times in passes.items():
            times.append(pass_ms(decoder, ids, rows))
    rate = {name: statistics.median(values) for name, values in rates.items()}
    cost = {rows: statistics.median(times) for rows, times in passes.items()}
    for name, value in rate.items():
        click.echo(f"{name:13s} {value:6.1f} tokens/s ({min(rates[name]):.1f} to {max(rates[name]):.1f})")
    for rows, value in cost.items():
        click.echo(f"{rows} rows {'':7s}{value:6.1f} ms a pass")
    ratio, verification = rate["this decoder"] / rate["Hugging Face"], cost[draft_length + 1] / cost[1]
    click.echo(f"ratio of medians {ratio:.2f}; verification of {draft_length} over one token {verification:.2f}; "
               f"same tokens: {ours.token_ids == theirs}")
    click.echo(json.dumps({
        "cpu": cpu_model(), "threads": torch.get_num_threads(), "tokens": tokens, "repeats": repeats, "prompt_tokens": len(ids),
        "tokens_per_s": rates, "ratio": ratio, "pass_ms": cost, "verification_over_ar": verification,
        "draft_length": draft_length,
        "same_tokens": ours.token_ids == theirs, "torch": torch.__version__, "numba": numba.__version__,
        "numpy": np.__version__, "transformers": transformers.__version__}, sort_keys=True))


if __name__ == "__main__":
    main()
