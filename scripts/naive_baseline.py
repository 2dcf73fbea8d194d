"""The naive decoders (tune_kernels/decoder/bench/naive.py) alone on the six evaluation prompts. `tune-kernels bench --naive` runs
them in turn with the decoder. Prints a line a mode and one JSON line."""

import json
import statistics
import tomllib
from pathlib import Path

import click
import torch
from tune_kernels.decoder.bench.naive import MODES, Naive
from tune_kernels.decoder.checkpoint.loader import SMOLLM2, resolve
from tune_kernels.decoder.request.tokenizer import load_tokenizer
from tune_kernels.decoder.stats import Stats

PROMPTS = Path(__file__).parent.parent / "decoder" / "checks" / "data" / "prompts.toml"


@click.command()
@click.option("--weights", default=SMOLLM2, show_default=True, help="The target, and its own drafter where no other is named.")
@click.option("--drafter", default=None, help="A small model of the same vocabulary, or ngram.")
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), default="float32", show_default=True)
@click.option("--draft-length", default=4, show_default=True)
@click.option("--tokens", default=32, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Write the JSON there as well.")
def main(weights: str, drafter: str | None, dtype: str, draft_length: int, tokens: int, out: Path | None) -> None:
    """Time the naive decoders on the six evaluation prompts."""
    naive = Naive(weights, None, drafter, getattr(torch, dtype), torch.device("cpu"))
    tokenizer = load_tokenizer(resolve(weights))
    runs: dict[str, list[tuple[Stats, bool]]] = {mode: [] for mode in MODES}
    for prompt in tomllib.loads(PROMPTS.read_text(encoding="utf-8"))["evaluation"]:
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt["text"]}])
        expected: list[int] = []
        for mode in MODES:
            made, stats = naive.run(mode, ids, tokens, draft_length)
            expected = expected or made
            runs[mode].append((stats, made == expected))
    rows = {mode: {"tokens_per_s": statistics.median(stats.decode_tokens_per_s for stats, _ in of),
                   "tokens_per_s_with_prefill": statistics.median(tokens / (s.prefill_s + s.decode_s) for s, _ in of),
                   "same_as_ar": sum(same for _, same in of), "prompts": len(of), "rounds": sum(s.rounds for s, _ in of)}
            for mode, of in runs.items()}
    for mode, row in rows.items():
        click.echo(f"{mode:4s} {row['tokens_per_s']:7.1f} tokens/s, {row['tokens_per_s_with_prefill']:.1f} with the prompt, same "
                   f"as AR on {row['same_as_ar']} of {row['prompts']} prompts, {row['rounds']} rounds")
    text = json.dumps({"weights": weights, "drafter": drafter or "the model itself", "dtype": dtype,
                       "draft_length": draft_length, "tokens": tokens, "rows": rows}, sort_keys=True)
    if out:
        out.write_text(text + "\n", encoding="utf-8")
    click.echo(text)


if __name__ == "__main__":
    main()
