"""The real model, in full: six prompts, 128 tokens each, AR, SD (n-gram) and SSD (n-gram) against Hugging Face's greedy
tokens in fp32. Prints a line a prompt and one JSON line; exit code 1 if a single token differs."""

import json
import sys
import tomllib
from pathlib import Path

import click
import torch
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.checkpoint.loader import SMOLLM2, load_checkpoint
from tune_kernels.decoder.checks.reference import hugging_face_model

PROMPTS = Path(__file__).parent.parent / "decoder" / "checks" / "data" / "prompts.toml"


@click.command()
@click.option("--weights", default=SMOLLM2, show_default=True)
@click.option("--tokens", default=128, show_default=True)
@click.option("--drafter", default="ngram", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Write the JSON there as well.")
def main(weights: str, tokens: int, drafter: str, out: Path | None) -> None:
    """Compare the three decoders with Hugging Face on the six evaluation prompts."""
    reference = hugging_face_model(load_checkpoint(weights, None, torch.device("cpu")), torch.float32)
    decoder = Decoder.load(weights, recipe="fp32", drafter=drafter)
    rows = []
    for prompt in tomllib.loads(PROMPTS.read_text(encoding="utf-8"))["evaluation"]:
        chat = [{"role": "user", "content": prompt["text"]}]
        ids = decoder.token_ids(chat)
        with torch.inference_mode():
            made = reference.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, repetition_penalty=1.0,
                                      pad_token_id=next(iter(decoder.eos_ids)))
        expected = made[0, len(ids):].tolist()
        row: dict[str, object] = {"prompt": prompt["name"], "prompt_tokens": len(ids), "new_tokens": len(expected)}
        for mode in ("ar", "sd", "ssd"):
            result = decoder.generate(chat, mode, max_new_tokens=tokens)
            row[mode] = {"same": result.token_ids == expected, "rounds": result.stats.rounds,
                         "tau": round(result.stats.tokens_per_round, 3), "hit_rate": round(result.stats.hit_rate, 3)}
        rows.append(row)
        click.echo(f"{prompt['name']}: {len(ids)} + {len(expected)} tokens: " + ", ".join(
            f"{mode} {'same' if row[mode]['same'] else 'DIFFERS'} in {row[mode]['rounds']} rounds"  # type: ignore[index]
            for mode in ("ar", "sd", "ssd")))
    same = all(row[mode]["same"] for row in rows for mode in ("ar", "sd", "ssd"))  # type: ignore[index]
    text = json.dumps({"weights": decoder.source, "recipe": "fp32", "drafter": drafter, "tokens": tokens, "same": same,
                       "rows": rows})
    if out:
        out.write_text(text + "\n", encoding="utf-8")
    click.echo(text)
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
