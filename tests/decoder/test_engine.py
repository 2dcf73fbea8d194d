"""AR, SD and SSD on tiny models: the same ids whatever the drafter, the script, the end, the delay."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tune_kernels.decoder import Decoder, Result
from tune_kernels.decoder.drafter import Branch, Outcome, likely_outcomes
from tune_kernels.decoder.drafters.scripted import ScriptedDrafter
from tune_kernels.decoder.errors import LoadError, RequestError
from tune_kernels.schedules.recipe import Recipe
from tune_kernels.shapes.model import ModelShape

PROMPT = [5, 9, 2, 40, 7]


@pytest.fixture(scope="module")
def decoder(tiny_shape: ModelShape, recipe_of: Callable[..., Recipe]) -> Decoder:
    """Random weights without a tokenizer: any id may be an end."""
    return Decoder.load("random:1", model=tiny_shape, recipe=recipe_of("fp32"), capacity=200)


def scripted(decoder: Decoder, ar: Result, accepted: Sequence[int], prompt: Sequence[int] = PROMPT, **options: Any) -> Decoder:
    decoder.drafter = ScriptedDrafter([*prompt, *ar.token_ids], accepted, decoder.model.shape.vocab_size, **options)
    return decoder


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("draft_length", range(1, 9))
def test_every_acceptance_pattern_and_width(decoder: Decoder, mode: str, draft_length: int) -> None:
    """Widths 2 to 9, every accepted count, and exactly the scripted acceptance."""
    ar = decoder.generate(PROMPT, "ar", max_new_tokens=40)
    for accepted in range(draft_length + 1):
        result = scripted(decoder, ar, [accepted]).generate(PROMPT, mode, max_new_tokens=40, draft_length=draft_length)
        assert result.token_ids == ar.token_ids
        full = result.stats.accepted_per_round[:-2]  # the last rounds have less room
        assert full == [accepted] * len(full)
        assert result.stats.emitted == 39 == result.stats.accepted + result.stats.rounds
        if mode == "ssd":
            assert result.stats.branch_misses == 0
            assert result.stats.branch_hits == result.stats.rounds - 1


@settings(max_examples=40, deadline=None)
@given(pattern=st.lists(st.integers(0, 9), min_size=1, max_size=6), hits=st.lists(st.booleans(), min_size=1, max_size=4),
       draft_length=st.integers(1, 15), limit=st.integers(1, 40), mode=st.sampled_from(["sd", "ssd"]),
       branches=st.integers(1, 6))
def test_any_script(decoder: Decoder, pattern: list[int], hits: list[bool], draft_length: int, limit: int, mode: str,
                    branches: int) -> None:
    """Any acceptance pattern, any hits and misses, any limit."""
    ar = decoder.generate(PROMPT, "ar", max_new_tokens=limit)
    assert len(ar.token_ids) == limit
    result = scripted(decoder, ar, pattern, hits=hits).generate(
        PROMPT, mode, max_new_tokens=limit, draft_length=draft_length, branches=branches)
    assert result.token_ids == ar.token_ids
    assert result.finish_reason == ar.finish_reason == "length"
    assert 0 <= result.stats.accepted <= result.stats.drafted
    if mode == "ssd" and result.stats.rounds > 1:
        expected = sum(hits[i % len(hits)] for i in range(result.stats.rounds - 1))
        assert result.stats.branch_hits == expected


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("at", range(6))
def test_an_end_at_each_position_of_a_draft(decoder: Decoder, mode: str, at: int) -> None:
    """An accepted end stops there; tokens past it count in no ratio."""
    ar = decoder.generate(PROMPT, "ar", max_new_tokens=40)
    index = next(i for i in range(1 + at, 40) if ar.token_ids[i] not in ar.token_ids[:i])
    scripted(decoder, ar, [4])
    for reason, options in (("stop", {"stop_token_ids": [ar.token_ids[index]]}), ("eos", {})):
        decoder.eos_ids = frozenset([ar.token_ids[index]] if reason == "eos" else [])
        result = decoder.generate(PROMPT, mode, max_new_tokens=40, draft_length=4, **options)
        again = decoder.generate(PROMPT, mode, max_new_tokens=40, draft_length=4, ignore_eos=True)
        decoder.eos_ids = frozenset()
        assert result.token_ids == ar.token_ids[:index + 1]
        assert result.finish_reason == reason
        assert result.stats.emitted == index
        assert result.stats.accepted <= result.stats.drafted
        assert again.token_ids == ar.token_ids


def test_a_rejected_end_does_not_end(decoder: Decoder) -> None:
    """A drafted end that the target rejects."""
    ar = decoder.generate(PROMPT, "ar", max_new_tokens=30)
    wrong = {(token + 1) % decoder.model.shape.vocab_size for token in ar.token_ids} - set(ar.token_ids)
    decoder.eos_ids = frozenset(wrong)
    try:
        for mode in ("sd", "ssd"):
            result = scripted(decoder, ar, [2]).generate(PROMPT, mode, max_new_tokens=30)
            assert result.token_ids == ar.token_ids
    finally:
        decoder.eos_ids = frozenset()


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 47, 48, 49])
def test_prompts_around_a_chunk_boundary(decoder: Decoder, length: int) -> None:
    """Every length ±1 around a boundary, crossed by drafts as well."""
    prompt = [(i * 31 + 5) % 61 for i in range(length)]
    ar = decoder.generate(prompt, "ar", max_new_tokens=20)
    for mode in ("sd", "ssd"):
        result = scripted(decoder, ar, [3, 0, 5, 1], prompt).generate(prompt, mode, max_new_tokens=20, draft_length=5)
        assert result.token_ids == ar.token_ids


def test_the_last_slot_of_the_cache_is_used(tiny_shape: ModelShape, recipe_of: Callable[..., Recipe]) -> None:
    """Within K of the capacity all modes run to the same end, and one token more is refused."""
    decoder = Decoder.load("random:1", model=tiny_shape, recipe=recipe_of("fp32"), capacity=24, drafter="random:1")
    for limit in range(12, 21):
        outs = [decoder.generate(PROMPT, m, max_new_tokens=limit, draft_length=8).token_ids for m in ("ar", "sd", "ssd")]
        assert outs[0] == outs[1] == outs[2]
        assert len(outs[0]) == limit
    with pytest.raises(RequestError, match=r"5 \+ 21 - 1 = 25 slots; the KV cache has 24"):
        decoder.generate(PROMPT, max_new_tokens=21)


def test_a_second_request_sees_nothing_of_the_first(decoder: Decoder, load_tiny: Callable[..., Decoder]) -> None:
    """A then B against B alone, with all drafters, poisoned in between."""
    for name in ("ngram", "self"):
        for mode in ("sd", "ssd"):
            used, fresh = load_tiny("llama", drafter=name), load_tiny("llama", drafter=name)
            used.generate("A long first request, to leave much behind in every cache.", mode, max_new_tokens=30)
            used.cache.buffer.fill_(torch.nan)
            second = used.generate("B", mode, max_new_tokens=30)
            alone = fresh.generate("B", mode, max_new_tokens=30)
            assert second.token_ids == alone.token_ids
            assert second.stats.accepted_per_round == alone.stats.accepted_per_round


class Delayed:
    """A drafter whose answers come late; counts the threads that called it."""

    name = "delayed"
    feature_layers: tuple[int, ...] = ()

    def __init__(self, inner: Any, seconds: float) -> None:
        self.inner, self.seconds = inner, seconds
        self.threads: set[str] = set()

    def start(self, tokens: list[int], features: Any, chooser: Any) -> None:
        self.inner.start(tokens, features, chooser)

    def draft(self, tokens: list[int], length: int) -> list[int]:
        return self.inner.draft(tokens, length)

    def accept(self, outcome: Outcome) -> None:
        self.inner.accept(outcome)

    def prepare(self, tokens: list[int], draft: list[int], branches: int, length: int) -> Branch:
        self.threads.add(threading.current_thread().name)
        time.sleep(self.seconds)
        return self.inner.prepare(tokens, draft, branches, length)


def test_a_delay_leaves_the_tokens_as_they_are(load_tiny: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow drafter, a slow target: the same tokens, the same hits."""
    decoder = load_tiny("llama", drafter="self")
    expected = decoder.generate("delay", "ssd", max_new_tokens=24)
    decoder.drafter = delayed = Delayed(decoder.drafter, 0.02)
    late = decoder.generate("delay", "ssd", max_new_tokens=24)
    assert late.token_ids == expected.token_ids
    assert late.stats.accepted_per_round == expected.stats.accepted_per_round
    assert late.stats.branch_hits == expected.stats.branch_hits
    assert delayed.threads == {"tune-kernels-drafter"}
    delayed.seconds = 0
    forward = decoder.model.forward
    monkeypatch.setattr(decoder.model, "forward", lambda *a: (time.sleep(0.005), forward(*a))[1])
    assert decoder.generate("delay", "ssd", max_new_tokens=24).token_ids == expected.token_ids


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8-v1"])
def test_a_model_that_drafts_for_itself_is_always_right(kind: str, recipe: str, load_tiny: Callable[..., Decoder]) -> None:
    """Acceptance 1 in SD and SSD, so no key of the drafter's cache is missing or stale,
    and a branch drafts what the sequence itself would."""
    decoder = load_tiny(kind, recipe, drafter="self")
    ar = decoder.generate("hello there", "ar", max_new_tokens=40, ignore_eos=True)
    for mode in ("sd", "ssd"):
        result = decoder.generate("hello there", mode, max_new_tokens=40, draft_length=3, ignore_eos=True)
        assert result.token_ids == ar.token_ids
        assert result.stats.acceptance == 1
        assert result.stats.rounds == 10
        assert result.stats.tokens_per_round == 3.9  # 39 tokens, the first comes from the prompt
    assert result.stats.hit_rate == 1  # the outcome of a full accept is prepared whatever the drafter believes


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_every_family_emits_hugging_faces_greedy_tokens(kind: str, load_tiny: Callable[..., Decoder],
                                                        tiny_folders: dict[str, Path]) -> None:
    """fp32, all modes, with the model as its own drafter and with n-grams."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folders[kind], dtype=torch.float32)
    decoder = load_tiny(kind, drafter="self")
    ids = decoder.tokenizer.encode("the same tokens")
    expected = list(ids)
    for _ in range(24):
        with torch.inference_mode():
            logits = model(torch.tensor([expected])).logits[0, -1, :decoder.tokenizer.size]
        expected.append(int(logits.argmax()))
    for mode in ("ar", "sd", "ssd"):
        found = decoder.generate(ids, mode, max_new_tokens=24, draft_length=3, ignore_eos=True).token_ids
        assert found == expected[len(ids):], mode
    assert load_tiny(kind, drafter="ngram").generate(ids, "sd", max_new_tokens=24, ignore_eos=True).token_ids == found


def test_likely_outcomes() -> None:
    """By the drafter's probability, the drafted token left out below K, the best of a full accept first; ties by id."""
    rows = [np.log(np.array(q)) for q in ([0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1])]
    assert likely_outcomes(rows, [0, 2], 4) == [(2, 1), (0, 1), (1, 0), (1, 1)]
    assert likely_outcomes(rows, [0, 2], 1) == [(2, 1)]
    everything = likely_outcomes(rows, [0, 2], 9)
    assert len(everything) == len(set(everything)) == 2 + 2 + 3
    assert (0, 0) not in everything
    assert likely_outcomes(rows[:1], [], 2) == [(0, 0), (0, 1)]


def test_ssd_drafts_what_sd_drafts(load_tiny: Callable[..., Decoder], tiny_folders: dict[str, Path], tmp_path: Path,
                                   make_model: Callable[..., Path]) -> None:
    """An imperfect drafter accepts the same in SD and SSD, round for round, with hits and misses."""
    folder = make_model(tmp_path / "near", "llama", 0, num_hidden_layers=4)
    decoder = load_tiny("llama", drafter=str(folder))
    for prompt in ("one", "two two"):
        ar, sd, ssd = (decoder.generate(prompt, m, max_new_tokens=32, ignore_eos=True) for m in ("ar", "sd", "ssd"))
        assert ar.token_ids == sd.token_ids == ssd.token_ids
        assert sd.stats.accepted_per_round == ssd.stats.accepted_per_round
        assert ssd.stats.branch_hits + ssd.stats.branch_misses == ssd.stats.rounds - 1


def test_stats_are_pooled(decoder: Decoder) -> None:
    """Ratios of sums, within 0 and 1."""
    ar = decoder.generate(PROMPT, "ar", max_new_tokens=32)
    stats = scripted(decoder, ar, [4, 0]).generate(PROMPT, "sd", max_new_tokens=32).stats
    assert stats.acceptance == stats.accepted / stats.drafted
    assert stats.tokens_per_round == stats.emitted / stats.rounds
    assert stats.emitted == 31
    assert len(stats.round_s) == stats.rounds
    assert ar.stats.tokens_per_round == 1
    assert ar.stats.drafted == 0


@pytest.mark.parametrize(("options", "message"), [
    ({"mode": "fast"}, "unknown mode"), ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"draft_length": 16, "mode": "sd"}, "1 to 15"), ({"branches": 0}, "branches is 0"),
    ({"temperature": -1}, "temperature"), ({"top_p": 0.0}, "top_p"), ({"stop": "x"}, "need a tokenizer"),
    ({"logprobs": -1}, "logprobs is -1"),
])
def test_wrong_requests_say_what_to_do(decoder: Decoder, options: dict[str, Any], message: str) -> None:
    decoder.drafter = ScriptedDrafter([], [0], 61)
    with pytest.raises(RequestError, match=message):
        decoder.generate(PROMPT, **options)


def test_wrong_prompts(decoder: Decoder) -> None:
    for prompt, message in (([], "empty"), ("text", "no tokenizer"), ([61], "token id 61")):
        with pytest.raises(RequestError, match=message):
            decoder.generate(prompt)
    decoder.drafter = None
    with pytest.raises(RequestError, match="needs a drafter"):
        decoder.generate(PROMPT, "sd")


def test_a_drafter_that_does_not_fit_is_refused(load_tiny: Callable[..., Decoder], make_model: Callable[..., Path],
                                                tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    """Another tokenizer, too few rows, too few positions. Sizes alone may differ."""
    other = shutil.copytree(tiny_folders["llama"], tmp_path / "other")
    table = json.loads((other / "tokenizer.json").read_text())
    ids = table["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (other / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(LoadError, match="isn't the target's"):
        load_tiny("llama", drafter=str(other))
    short = make_model(tmp_path / "short", "llama", max_position_embeddings=128)
    with pytest.raises(LoadError, match="128 positions"):
        load_tiny("llama", drafter=str(short))
    wide = make_model(tmp_path / "wide", "llama", vocab_size=300)
    assert load_tiny("llama", drafter=str(wide)).generate("x", "sd", max_new_tokens=8).token_ids == \
        load_tiny("llama").generate("x", "ar", max_new_tokens=8).token_ids


@pytest.mark.parametrize("drafter", ["ngram", "self"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_auto_takes_lengths_and_no_other_tokens(drafter: str, options: Any, load_tiny: Callable[..., Decoder]) -> None:
    """With and without a mode; what an earlier request measured stays. Each chosen length is counted."""
    decoder = load_tiny("llama", drafter=drafter)
    prompt = [5, 6, 7, 8, 5, 6, 7]
    ar = decoder.generate(prompt, "ar", max_new_tokens=40, ignore_eos=True, **options)
    for mode, length in ((None, None), ("sd", "auto")):
        asked = {} if length is None else {"draft_length": length}
        found = decoder.generate(prompt, mode, max_new_tokens=40, ignore_eos=True, **options, **asked)
        assert found.token_ids == ar.token_ids
        assert sum(found.stats.rounds_by_draft_length.values()) == found.stats.rounds
        assert set(found.stats.rounds_by_draft_length) <= set(range(9))
        assert found.stats.decision.startswith("auto took")
    assert not ar.stats.rounds_by_draft_length and not ar.stats.decision
    assert decoder.generate(prompt, "sd", max_new_tokens=4).stats.decision == ""


def test_acceptance_by_position_and_branches_by_count(load_tiny: Callable[..., Decoder]) -> None:
    """Of a script: each place in a draft counts the rounds that reached it."""
    decoder = load_tiny("llama", drafter="self")
    prompt = [5, 6, 7]
    ar = decoder.generate(prompt, "ar", max_new_tokens=11, ignore_eos=True).token_ids
    decoder.drafter = ScriptedDrafter([*prompt, *ar], [2, 0, 1, 3], 200, [True, False])
    stats = decoder.generate(prompt, "ssd", max_new_tokens=11, ignore_eos=True, draft_length=3).stats
    assert stats.accepted_per_round == [2, 0, 1, 3] and stats.drafted_per_round == [3, 3, 3, 3]
    assert stats.acceptance_by_position == [3 / 4, 2 / 3, 1 / 2]
    assert (stats.hits_by_accepted, stats.misses_by_accepted) == ({2: 1, 1: 1}, {0: 1})
    assert (stats.branch_hits, stats.branch_misses) == (2, 1)
