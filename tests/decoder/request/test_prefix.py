"""A chat's later turns reuse the keys of the turns before, and emit the tokens of a cold start."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.request.prefix import Prefix

OPTIONS = {"max_new_tokens": 16, "ignore_eos": True, "draft_length": 3}
QUESTIONS = ("hello there", "and then?", "why")
Chat = list[dict[str, str]]


def turns(decoder: Decoder, mode: str, cold: Decoder | None = None) -> list[int]:
    """Three turns; the number of reused tokens of each. cold: decodes each turn from nothing, and must emit the same."""
    chat: Chat = []
    reused = []
    for question in QUESTIONS:
        chat.append({"role": "user", "content": question})
        found = decoder.generate(chat, mode, **OPTIONS)
        if cold is not None:
            assert found.token_ids == cold.generate(cold.token_ids(chat), mode, **OPTIONS).token_ids
        assert found.stats.prompt_tokens == len(decoder.token_ids(chat))
        reused.append(found.stats.reused_tokens)
        chat.append({"role": "assistant", "content": found.text or ""})
    return reused


@pytest.mark.parametrize("recipe", ["fp32", "fp8-v1"])
@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_turns_are_those_of_a_cold_start(mode: str, recipe: str, load_tiny: Callable[..., Decoder]) -> None:
    """Decoding is prefill here, so the answer's keys are reused, too: all but the pending token and the new text."""
    first, second, third = turns(load_tiny("llama", recipe, drafter="self"), mode, load_tiny("llama", recipe, drafter="self"))
    assert first == 0 < len("user: hello there\n") < second < third


def test_features_are_kept_for_a_drafter_that_reads_them(load_tiny: Callable[..., Decoder],
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter gets the features of every token of the prompt; other layers mean another prompt's pass."""
    decoder, cold = load_tiny("llama", drafter="self"), load_tiny("llama", drafter="self")
    got: dict[Decoder, list[torch.Tensor]] = {decoder: [], cold: []}

    def watch(one: Decoder) -> None:
        start = one.drafter.start

        def started(tokens: list[int], features: torch.Tensor, chooser: Any) -> None:
            got[one].append(features)
            start(tokens, None, chooser)
        monkeypatch.setattr(one.drafter, "feature_layers", (1, 3))
        monkeypatch.setattr(one.drafter, "start", started)

    watch(decoder)
    watch(cold)
    first, second, third = turns(decoder, "sd", cold)
    assert first == 0 < second < third
    assert len(got[decoder]) == len(got[cold]) == 3 and all(map(torch.equal, got[decoder], got[cold]))
    monkeypatch.setattr(decoder.drafter, "feature_layers", (0, 2))
    assert turns(decoder, "sd")[0] == 0


def test_only_chats_reuse_and_others_leave_nothing(load_tiny: Callable[..., Decoder]) -> None:
    """Ids and text are decoded from nothing, and overwrite the cache."""
    decoder = load_tiny("llama")
    chat: Chat = [{"role": "user", "content": "the same"}]
    ids = decoder.token_ids(chat)
    results = [decoder.generate(prompt, "ar", **OPTIONS) for prompt in (chat, chat, ids, chat, "another text", chat)]
    assert [r.stats.reused_tokens for r in results] == [0, len(ids) - 1, 0, 0, 0, 0]
    assert len({tuple(r.token_ids) for r in results if r is not results[4]}) == 1


def test_a_failed_or_closed_turn(load_tiny: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's pass that fails leaves nothing; a stream that is closed after it leaves the prompt."""
    decoder = load_tiny("llama")
    chat: Chat = [{"role": "user", "content": "closed early"}]
    expected = decoder.generate(chat, "ar", **OPTIONS).token_ids
    prefill = decoder.model.prefill
    monkeypatch.setattr(decoder.model, "prefill", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decoder.generate([*chat, {"role": "user", "content": "more"}], "ar", **OPTIONS)
    monkeypatch.setattr(decoder.model, "prefill", prefill)
    with decoder.stream(chat, "ar", **OPTIONS) as pieces:
        next(pieces)
    found = decoder.generate(chat, "ar", **OPTIONS)
    assert found.token_ids == expected and found.stats.reused_tokens == found.stats.prompt_tokens - 1


@given(st.lists(st.integers(0, 2), max_size=9), st.lists(st.integers(0, 2), min_size=1, max_size=9), st.booleans())
def test_what_is_kept(before: list[int], prompt: list[int], featured: bool) -> None:
    """The longest common beginning, never the whole prompt; features of those tokens and no others."""
    layers = (1,) if featured else ()
    prefix = Prefix()
    assert prefix.keep(before or [0], layers) == 0
    prefix.add(before, torch.arange(len(before))[:, None] if featured else None)
    kept = prefix.keep(prompt, layers)
    assert before[:kept] == prompt[:kept] == prefix.tokens and kept < len(prompt)
    assert kept == len(prompt) - 1 or kept == len(before) or before[kept] != prompt[kept]
    assert (torch.cat(prefix.features)[:, 0].tolist() if prefix.features else []) == (list(range(kept)) if featured else [])
