"""The model against Hugging Face, its rows against themselves, and its cache against poison."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.on_torch import cpu
from tune_kernels.decoder.on_torch.cache import KVCache
from tune_kernels.decoder.rows import Appended, Branches
from tune_kernels.shapes.model import ModelShape

KINDS = ["llama", "qwen2", "qwen3"]
RECIPES = ["fp32", "bf16", "fp8-v1"]
TOKENS = [(i * 7919 + 13) % 256 for i in range(70)]


def run(decoder: Decoder, cache: KVCache, tokens: list[int]) -> torch.Tensor:
    return decoder.model.forward(tokens, Appended(cache, len(tokens))).final


@pytest.mark.parametrize("kind", [*KINDS, "mistral"])
@pytest.mark.parametrize("chunk", [16, 48, 256])
def test_logits_are_hugging_faces(kind: str, chunk: int, tiny_folders: dict[str, Path], recipe_of: Any) -> None:
    """With a chunk of 48 or 256 and a head of 16, keys and values share no stride."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_folders[kind], dtype=torch.float32)
    decoder = Decoder.load(str(tiny_folders[kind]), recipe=recipe_of("fp32", chunk))
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    logits = decoder.model.logits(run(decoder, decoder.model.new_cache(80), TOKENS))
    limit = decoder.tokenizer.size
    assert torch.allclose(logits[:, :limit], expected[:, :limit], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_alone_and_together_with_poisoned_slots(kind: str, recipe: str, load_tiny: Callable[..., Decoder]) -> None:
    """Any split of the tokens into passes, any capacity, NaN in every free slot."""
    decoder = load_tiny(kind, recipe)
    whole = decoder.model.new_cache(70)
    expected = run(decoder, whole, TOKENS)
    for sizes in ([1] * 70, [16] * 5, [5, 9, 2, 3, 7, 8, 4, 6, 1, 16, 9], [31, 1, 1, 16, 15, 6], [69, 1]):
        cache = decoder.model.new_cache(200)
        cache.buffer.fill_(torch.nan)
        out, at = [], 0
        for size in sizes:
            part = TOKENS[at:at + size]
            out.append(run(decoder, cache, part))
            at += len(part)
        assert torch.equal(torch.cat(out), expected), sizes
    assert torch.equal(decoder.model.logits(expected[:1]), decoder.model.logits(expected)[:1])


@pytest.mark.parametrize("recipe", RECIPES)
def test_any_number_of_threads_gives_the_same_bits(recipe: str, load_tiny: Callable[..., Decoder],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: all rows at once and one by one, with 1 to 8 threads, which share the smallest product."""
    monkeypatch.setattr(cpu, "SMALL", 0)
    decoder = load_tiny("qwen2", recipe)
    expected, before = run(decoder, decoder.model.new_cache(70), TOKENS), torch.get_num_threads()
    try:
        for threads in (2, 3, 4, 8):
            torch.set_num_threads(threads)
            cache = decoder.model.new_cache(70)
            alone = torch.cat([run(decoder, cache, [token]) for token in TOKENS[:20]])
            assert torch.equal(alone, expected[:20]), threads
            assert torch.equal(run(decoder, decoder.model.new_cache(70), TOKENS), expected), threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_branch_has_the_bits_of_the_sequence(recipe: str, load_tiny: Callable[..., Decoder]) -> None:
    """Branches of unlike lengths in one batch, across a chunk boundary: each as if it had been decoded alone."""
    decoder = load_tiny("qwen2", recipe)
    cache = decoder.model.new_cache(100)
    run(decoder, cache, TOKENS[:35])
    lengths, steps = [12, 14, 15, 16, 17, 30, 31, 32, 35], 5
    own = Branches(cache, lengths, steps)
    rows = [decoder.model.forward([TOKENS[(b + 3 * s) % 70] for b in range(len(lengths))], own).final
            for s in range(steps)]
    for b, length in enumerate(lengths):
        alone = decoder.model.new_cache(100)
        run(decoder, alone, TOKENS[:length])
        for s in range(steps):
            assert torch.equal(run(decoder, alone, [TOKENS[(b + 3 * s) % 70]])[0], rows[s][b]), (b, s)
    assert cache.cursor == 35


def test_rope_is_tabled_for_the_cache_and_not_for_the_models_positions(tiny_shape: ModelShape) -> None:
    """F7: a model of 1e9 positions; a position's angles are the same in a short table and in a long one."""
    decoder = Decoder.load("random:0", model=replace(tiny_shape, max_position=10**9), recipe="fp32", capacity=300)
    rope: Any = decoder.model.rope  # type: ignore[attr-defined]
    assert len(rope.tables[0]) == 512  # 300 slots and the margin, in whole blocks
    before = rope.tables
    decoder.model.new_cache(2000)
    for short, long in zip(before, rope.tables):
        assert len(long) >= 2000 and torch.equal(short, long[:len(short)])


def test_the_head_never_emits_an_id_beyond_the_tokenizer(load_tiny: Callable[..., Decoder]) -> None:
    decoder = load_tiny("llama")
    logits = decoder.model.logits(run(decoder, decoder.model.new_cache(8), TOKENS[:3]))
    assert decoder.tokenizer.size == 259
    assert torch.isneginf(logits[:, 259:]).all()
    assert torch.isfinite(logits[:, :259]).all()


def test_random_weights_follow_their_rule(tiny_shape: ModelShape) -> None:
    """`random:SEED`: the same seed the same bits, another seed others, whatever was drawn before."""
    first, again, other = (Decoder.load(f"random:{s}", model=tiny_shape, recipe="fp32") for s in (3, 3, 4))
    outs = [d.generate([1, 2, 3], max_new_tokens=20).token_ids for d in (first, again, other)]
    assert outs[0] == outs[1] != outs[2]


def test_rope_scaling_is_hugging_faces(make_model: Callable[..., Path], tmp_path: Path, recipe_of: Any) -> None:
    """Llama3 and YaRN scale by the configuration alone: short and long prompts rotate alike."""
    from transformers import AutoModelForCausalLM

    scalings = {
        "llama3": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
                   "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
    }
    for name, scaling in scalings.items():
        folder = make_model(tmp_path / name, "llama", rope_parameters=scaling)
        decoder = Decoder.load(str(folder), recipe=recipe_of("fp32"))
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            expected = reference(torch.tensor([TOKENS])).logits[0, :, :259]
        logits = decoder.model.logits(run(decoder, decoder.model.new_cache(80), TOKENS))[:, :259]
        assert torch.allclose(logits, expected, atol=2e-4, rtol=1e-4), name
        short = decoder.model.logits(run(decoder, decoder.model.new_cache(80), TOKENS[:3]))[:, :259]
        assert torch.equal(short, logits[:3])
