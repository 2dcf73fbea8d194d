#!/usr/bin/env python
"""Times AR on one GPU, one request: this decoder and Hugging Face's transformers, in one run, with Qwen2.5-7B's shape.

    python scripts/bench_peers.py [--out FILE.json]

Hugging Face in bf16: eager with its growing cache, and with a static cache under torch.compile. This decoder: fp8-v1 with
promoted schedules, and bf16. Weights are random: right for time, not for text. Prints a line per decoder, then one JSON line.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import transformers
import triton
from common import parser, publish, run
from transformers import AutoModelForCausalLM, Qwen2Config, StaticCache
from tune_kernels.decoder import Decoder
from tune_kernels.shapes.model import ModelShape, load_model_shape
from tune_kernels.tuner.on_gpu.worker import gpu_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCHEMA = "tune-kernels/bench-peers/1"
PROMPT, NEW_TOKENS, REPEATS = 128, 256, 3


def config_of(shape: ModelShape) -> Qwen2Config:
    """Hugging Face's configuration of a Qwen2 shape."""
    return Qwen2Config(vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
                       num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
                       num_key_value_heads=shape.num_kv_heads, max_position_embeddings=shape.max_position,
                       rope_theta=shape.rope_theta, tie_word_embeddings=shape.tie_embeddings)


def median_rate(decode: Callable[[], float]) -> dict[str, object]:
    """Median tokens/s of REPEATS runs, after one that warms up; `decode` returns the seconds of NEW_TOKENS - 1 tokens."""
    decode()
    seconds = sorted(decode() for _ in range(REPEATS))
    return {"tokens_per_s": (NEW_TOKENS - 1) / seconds[REPEATS // 2], "seconds": seconds}


@torch.inference_mode()
def hugging_face(model: "PreTrainedModel", ids: torch.Tensor, compiled: bool) -> float:
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


def ours(decoder: Decoder, ids: list[int]) -> float:
    """Seconds of NEW_TOKENS - 1 tokens after the first."""
    result = decoder.generate(ids, "ar", max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return float((NEW_TOKENS - 1) / result.stats.decode_tokens_per_s)


def measure(name: str) -> dict[str, dict[str, object]]:
    """Rates by decoder. name: of a model's shape."""
    shape = load_model_shape(name)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, shape.vocab_size, (PROMPT,), generator=generator).tolist()
    found: dict[str, dict[str, object]] = {}
    for recipe in ("fp8-v1", "bf16"):
        decoder = Decoder.load("random:0", name, recipe, None, backend="triton", device="cuda", capacity=1024,
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
    return found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--model", default="qwen2.5-7b", help="a shape of the Qwen2 family")
    given = options.parse_args()
    machine, found = gpu_state.this_machine(), measure(given.model)
    print("\n".join(f"{name:45s} {rate['tokens_per_s']:6.0f} tokens/s" for name, rate in found.items()))
    publish({"schema": SCHEMA, "model": given.model, "gpu": machine.gpu, "driver": machine.driver, "torch": torch.__version__,
             "triton": triton.__version__, "transformers": transformers.__version__, "prompt": PROMPT, "new_tokens": NEW_TOKENS,
             "repeats": REPEATS, "rates": found}, given.out)
    return 0


if __name__ == "__main__":
    run(main)
