#!/usr/bin/env python
"""AR tokens/s of this decoder and of Hugging Face's transformers, on one GPU in one run, one request, Qwen2.5-7B's shape.

Hugging Face in bf16, eager with its growing cache and with a static cache under torch.compile; this decoder under fp8-v1
with promoted schedules, and its bf16 recipe. Weights are random: right for time, not for text.

    python scripts/bench_peers.py --out peers.json
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from transformers import AutoModelForCausalLM, Qwen2Config, StaticCache
from tune_kernels.decoder import Decoder
from tune_kernels.shapes.errors import UserError
from tune_kernels.shapes.model import ModelShape, load_model_shape

SCHEMA = "tune-kernels/bench-peers/1"
PROMPT, NEW_TOKENS, REPEATS = 128, 256, 3


def config_of(shape: ModelShape) -> Qwen2Config:
    """Hugging Face's configuration of a Qwen2 shape."""
    return Qwen2Config(vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
                       num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
                       num_key_value_heads=shape.num_kv_heads, max_position_embeddings=shape.max_position,
                       rope_theta=shape.rope_theta, tie_word_embeddings=shape.tie_embeddings)


def median_rate(decode: Callable[[], float]) -> dict[str, Any]:
    """tokens/s of REPEATS runs after one that warms up; `decode` returns the seconds of NEW_TOKENS - 1 tokens."""
    decode()
    seconds = sorted(decode() for _ in range(REPEATS))
    return {"tokens_per_s": (NEW_TOKENS - 1) / seconds[REPEATS // 2], "seconds": seconds}


@torch.inference_mode()
def hugging_face(model: Any, ids: torch.Tensor, compiled: bool) -> float:
    """Seconds of NEW_TOKENS - 1 greedy tokens after the first."""
    cache = StaticCache(config=model.config, max_cache_len=PROMPT + NEW_TOKENS) if compiled else None
    out = model(ids, past_key_values=cache, use_cache=True, cache_position=torch.arange(PROMPT, device="cuda"))
    token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
    step = model.compiled_step if compiled else model
    torch.cuda.synchronize()
    began = time.perf_counter()
    for i in range(NEW_TOKENS - 1):
        position = torch.full((1,), PROMPT + i, device="cuda")
        token = step(token, past_key_values=cache, use_cache=True, cache_position=position).logits[:, -1:].argmax(-1).clone()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def ours(decoder: Any, ids: list[int]) -> float:
    """Seconds of NEW_TOKENS - 1 tokens after the first."""
    result = decoder.generate(ids, "ar", max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return float((NEW_TOKENS - 1) / result.stats.decode_tokens_per_s)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The record."""
    shape = load_model_shape(options.model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, shape.vocab_size, (PROMPT,), generator=generator).tolist()
    found: dict[str, Any] = {}
    for recipe in ("fp8-v1", "bf16"):
        decoder = Decoder.load("random:0", options.model, recipe, None, backend="triton", device="cuda", capacity=1024,
                               allow_untuned=True)
        found[f"tune-kernels {recipe}"] = median_rate(partial(ours, decoder, ids))
        del decoder
        torch.cuda.empty_cache()
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.bfloat16).eval()
    tensor = torch.tensor([ids], device="cuda")
    found["transformers eager"] = median_rate(partial(hugging_face, model, tensor, False))
    model.compiled_step = torch.compile(model, mode="reduce-overhead", fullgraph=False)
    found["transformers static cache, torch.compile"] = median_rate(partial(hugging_face, model, tensor, True))
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    return {"schema": SCHEMA, "model": options.model, "gpu": torch.cuda.get_device_name(), "driver": driver.stdout.split()[0],
            "torch": torch.__version__, "triton": triton.__version__, "transformers": transformers.__version__, "prompt": PROMPT,
            "new_tokens": NEW_TOKENS, "repeats": REPEATS, "rates": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record = run(options)
    text = json.dumps(record, sort_keys=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    print("\n".join(f"{name:45s} {rate['tokens_per_s']:6.0f} tokens/s" for name, rate in record["rates"].items()))
    print(text)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, OSError) as e:
        sys.exit(f"error: {e}")
