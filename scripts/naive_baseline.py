#!/usr/bin/env python
"""Times the naive decoders (decoder/bench/naive.py) alone, on a CPU, on the six evaluation prompts.

    python scripts/naive_baseline.py [--dtype bfloat16] [--out FILE.json]

`tune-kernels bench --naive` runs them in turn with the decoder. Prints a line per mode, then one JSON line.
"""

import statistics

import torch
from common import evaluation_prompts, parser, publish, run
from tune_kernels.decoder.bench.naive import Naive
from tune_kernels.decoder.checkpoint.loader import SMOLLM2, resolve
from tune_kernels.decoder.request.tokenizer import load_tokenizer
from tune_kernels.decoder.stats import MODES, Stats


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--weights", default=SMOLLM2, help="the target's checkpoint")
    options.add_argument("--drafter", help="a small model of the same vocabulary, or ngram  (default: the target)")
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and activations")
    options.add_argument("--draft-length", type=int, default=4, help="K")
    options.add_argument("--tokens", type=int, default=32, help="new tokens per prompt")
    given = options.parse_args()
    naive = Naive(given.weights, None, given.drafter, getattr(torch, given.dtype), torch.device("cpu"))
    tokenizer = load_tokenizer(resolve(given.weights))
    runs: dict[str, list[tuple[Stats, bool]]] = {mode: [] for mode in MODES}
    for prompt in evaluation_prompts():
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
        expected: list[int] = []
        for mode in MODES:
            made, stats = naive.run(mode, ids, given.tokens, given.draft_length)
            expected = expected or made
            runs[mode].append((stats, made == expected))
    rows = {mode: {"tokens_per_s": statistics.median(stats.decode_tokens_per_s for stats, _ in of),
                   "tokens_per_s_with_prefill": statistics.median(given.tokens / (s.prefill_s + s.decode_s) for s, _ in of),
                   "same_as_ar": sum(same for _, same in of), "prompts": len(of), "rounds": sum(s.rounds for s, _ in of)}
            for mode, of in runs.items()}
    for mode, row in rows.items():
        print(f"{mode:4s} {row['tokens_per_s']:7.1f} tokens/s, {row['tokens_per_s_with_prefill']:.1f} with the prompt, same as "
              f"AR on {row['same_as_ar']} of {row['prompts']} prompts, {row['rounds']} rounds")
    publish({"weights": given.weights, "drafter": given.drafter or "the model itself", "dtype": given.dtype,
             "draft_length": given.draft_length, "tokens": given.tokens, "rows": rows}, given.out)
    return 0


if __name__ == "__main__":
    run(main)
