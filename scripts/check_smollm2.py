#!/usr/bin/env python
"""Compares SmolLM2-135M in fp32 with Hugging Face: AR, SD and SSD on the six evaluation prompts, greedy.

    python scripts/check_smollm2.py [--drafter ngram] [--out FILE.json]

Prints a line per prompt, then one JSON line. Exit 1 if a single token differs.
"""

from dataclasses import asdict, dataclass

import torch
from common import evaluation_prompts, parser, publish, run
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.checkpoint.loader import SMOLLM2, load_checkpoint
from tune_kernels.decoder.checks.reference import hugging_face_model
from tune_kernels.decoder.stats import MODES


@dataclass(frozen=True)
class Compared:
    """One prompt in one mode. tau: tokens per round."""

    same: bool
    rounds: int
    tau: float
    hit_rate: float


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--weights", default=SMOLLM2, help="a checkpoint")
    options.add_argument("--tokens", type=int, default=128, help="new tokens per prompt")
    options.add_argument("--drafter", default="ngram", help="of SD and SSD")
    given = options.parse_args()
    reference = hugging_face_model(load_checkpoint(given.weights, None, torch.device("cpu")), torch.float32)
    decoder = Decoder.load(given.weights, recipe="fp32", drafter=given.drafter)
    rows, same = [], True
    for prompt in evaluation_prompts():
        chat = [{"role": "user", "content": prompt.text}]
        ids = decoder.token_ids(chat)
        with torch.inference_mode():
            made = reference.generate(torch.tensor([ids]), max_new_tokens=given.tokens, do_sample=False, repetition_penalty=1.0,
                                      pad_token_id=next(iter(decoder.eos_ids)))
        expected = made[0, len(ids):].tolist()
        found: dict[str, Compared] = {}
        for mode in MODES:
            result = decoder.generate(chat, mode, max_new_tokens=given.tokens)
            found[mode] = Compared(result.token_ids == expected, result.stats.rounds, round(result.stats.tokens_per_round, 3),
                                   round(result.stats.hit_rate, 3))
        same = same and all(c.same for c in found.values())
        rows.append({"prompt": prompt.name, "prompt_tokens": len(ids), "new_tokens": len(expected),
                     **{mode: asdict(c) for mode, c in found.items()}})
        print(f"{prompt.name}: {len(ids)} + {len(expected)} tokens: "
              + ", ".join(f"{mode} {'same' if c.same else 'DIFFERS'} in {c.rounds} rounds" for mode, c in found.items()))
    publish({"weights": decoder.source, "recipe": "fp32", "drafter": given.drafter, "tokens": given.tokens, "same": same,
             "rows": rows}, given.out)
    return 0 if same else 1


if __name__ == "__main__":
    run(main)
