"""Ends, stop strings, streaming, sampling and log-probabilities."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.drafters.scripted import ScriptedDrafter
from tune_kernels.decoder.request.output import EndRules, Output, held_back
from tune_kernels.decoder.sampling import Chooser, log_softmax, most_likely, nucleus

MODES = ["ar", "sd", "ssd"]


@pytest.fixture(scope="module")
def decoder(load_tiny: Callable[..., Decoder]) -> Decoder:
    return load_tiny("qwen2", drafter="self")


def push_all(decoder: Decoder, text: str, rules: EndRules) -> tuple[Output, list[str]]:
    """Feeds the text's ids until the output ends; the pieces released on the way."""
    output, pieces = Output(rules, decoder.tokenizer), []
    for token in decoder.tokenizer.encode(text):
        if output.finish_reason is None:
            output.push(token)
            pieces.append(output.release())
    return output, pieces


def test_stop_string_beats_the_limit_at_the_same_token(decoder: Decoder) -> None:
    """Both in one round, both at one token."""
    output, _ = push_all(decoder, "one END two", EndRules(7, stop=("END",)))
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("one ", "stop", 7)
    output, _ = push_all(decoder, "one END two", EndRules(6, stop=("END",)))
    assert (output.text, output.finish_reason) == ("one EN", "length")
    output, _ = push_all(decoder, "one END two", EndRules(99, stop=("two", "END t", "D")))
    assert output.text == "one EN"


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="abé€😀 ", max_size=20), stop=st.text(alphabet="abé€", min_size=1, max_size=3),
       limit=st.integers(1, 60))
def test_streamed_pieces_make_up_the_text(decoder: Decoder, text: str, stop: str, limit: int) -> None:
    """Characters of several bytes and stop strings that begin and then don't: nothing is taken back, nothing is
    lost."""
    output, pieces = push_all(decoder, text, EndRules(limit, stop=(stop,)))
    if output.finish_reason:
        assert "".join(pieces) == output.text
        assert stop not in output.text
    whole = decoder.tokenizer.encode(text)
    if stop in text and limit >= len(whole):
        assert output.text == text[:text.index(stop)]


def test_held_back() -> None:
    assert [held_back(t, "END") for t in ("", "x", "E", "xEN", "END", "ENE")] == [0, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("mode", MODES)
def test_stop_strings_end_inside_a_draft(decoder: Decoder, mode: str) -> None:
    """Ids end with the token that completes the string, text before it, in every mode alike."""
    ar = decoder.generate("stop", "ar", max_new_tokens=40, ignore_eos=True)
    drafter = decoder.drafter
    decoder.drafter = ScriptedDrafter([*decoder.tokenizer.encode("stop"), *ar.token_ids], [5, 2, 7], 259)
    compared = 0
    try:
        for start in range(30):
            text = decoder.tokenizer.decode(ar.token_ids[start:start + 2])
            if "\ufffd" in text or len(text) < 2:
                continue
            compared += 1
            one = decoder.generate("stop", "ar", max_new_tokens=40, ignore_eos=True, stop=text)
            result = decoder.generate("stop", mode, max_new_tokens=40, ignore_eos=True, stop=text, draft_length=7)
            assert (result.text, result.token_ids, result.finish_reason) == (one.text, one.token_ids, one.finish_reason)
            assert "".join(decoder.stream("stop", mode, max_new_tokens=40, ignore_eos=True, stop=text)) == one.text
    finally:
        decoder.drafter = drafter
    assert compared >= 3


def test_a_stream_may_be_left_early(decoder: Decoder) -> None:
    expected = decoder.generate("left", "ssd", max_new_tokens=30, ignore_eos=True)
    stream = decoder.stream("left", "ssd", max_new_tokens=30, ignore_eos=True)
    next(stream)
    stream.close()
    assert decoder.generate("left", "ssd", max_new_tokens=30, ignore_eos=True).token_ids == expected.token_ids


@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 3.0},
                                     {"temperature": 2.0, "top_k": 5, "min_p": 0.02}])
def test_seeded_sampling_is_the_same_in_every_mode(decoder: Decoder, options: dict[str, float]) -> None:
    """The same draw at each index, whoever drafted: ids and log-probabilities are equal; another seed gives others."""
    runs = [decoder.generate("sample", mode, max_new_tokens=40, ignore_eos=True, seed=7, logprobs=2, **options)
            for mode in MODES]
    assert runs[0].token_ids == runs[1].token_ids == runs[2].token_ids
    assert runs[0].logprobs == runs[1].logprobs == runs[2].logprobs
    assert runs[1].stats.acceptance == 1  # the drafter is the model itself and draws with the same noise
    other = decoder.generate("sample", "sd", max_new_tokens=40, ignore_eos=True, seed=8, **options)
    assert other.token_ids != runs[0].token_ids
    assert other.stats.seed == 8


def test_draws_follow_the_distribution() -> None:
    """20,000 draws against their softmax, within and without top-p: chi-square below its 99.9% point (7 degrees:
    24.3)."""
    logits = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 1.5], dtype=np.float32)
    chooser = Chooser(temperature=0.8, seed=3)
    counts = np.bincount([chooser.choose(logits, i) for i in range(20_000)], minlength=8)
    p = np.exp(log_softmax(logits / np.float32(0.8)))
    assert (((counts - 20_000 * p) ** 2) / (20_000 * p)).sum() < 24.3
    narrow = Chooser(temperature=0.8, top_p=0.6, seed=3)
    allowed = nucleus(logits.astype(np.float64) / 0.8, 0.6)
    assert {narrow.choose(logits, i) for i in range(2000)} == set(np.flatnonzero(allowed).tolist())
    assert 0.6 <= p[allowed].sum() < 1


@pytest.mark.parametrize(("limits", "allowed"), [
    ({"top_k": 1}, {0}), ({"top_k": 3}, {0, 1, 7}), ({"top_k": 8}, set(range(8))), ({"top_k": 99}, set(range(8))),
    ({"min_p": 1.0}, {0}), ({"min_p": 0.2}, {0, 1, 2, 7}), ({"top_k": 3, "min_p": 0.5}, {0, 7}),
    ({"top_k": 2, "top_p": 0.9}, {0, 7}), ({"top_p": 0.01}, {0}),
])
def test_limits_of_a_draw(limits: dict[str, Any], allowed: set[int]) -> None:
    """Each limit judges the whole softmax; a token is drawn if all of them keep it. Equal logits: the lower id first."""
    logits = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 1.5], dtype=np.float32)
    chooser = Chooser(temperature=1.0, seed=5, **limits)
    assert {chooser.choose(logits, i) for i in range(4000)} == allowed
    assert {Chooser(1.0, top_k=2).choose(np.zeros(4, dtype=np.float32), i) for i in range(100)} == {0, 1}


def test_speculative_draws_follow_the_distribution() -> None:
    """Lossless: whatever is drafted at an index, the token kept there is the draw that AR makes. Here a fixed draft
    d is kept with frequency p(d), and after a rejection the tokens follow p without d: rejection sampling's two
    laws."""
    logits = np.array([1.0, 0.0, 0.3, -1.0], dtype=np.float32)
    p = np.exp(log_softmax(logits))
    draws = np.array([Chooser(1.0, seed=11).choose(logits, i) for i in range(20_000)])
    kept = draws == 2
    assert abs(kept.mean() - p[2]) < 3.3 * np.sqrt(p[2] * (1 - p[2]) / 20_000)
    rest = np.bincount(draws[~kept], minlength=4)[[0, 1, 3]]
    expected = p[[0, 1, 3]] / (1 - p[2]) * rest.sum()
    assert ((rest - expected) ** 2 / expected).sum() < 13.8  # chi-square, 2 degrees, 99.9%


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0, 2.0])
def test_acceptance_of_a_drafter_that_draws_with_the_same_noise(spread: float) -> None:
    """20,000 indices, p and q at a total variation distance TV: they agree on at most 1 - TV of them, what rejection
    sampling reaches, and on at least (1 - TV) / (1 + TV) (Daliri, Musco, Suresh 2024)."""
    random, n = np.random.default_rng(5), 20_000
    logits = random.normal(size=16).astype(np.float32)
    drafter_logits = logits + spread * random.normal(size=16).astype(np.float32)
    p, q = np.exp(log_softmax(logits)), np.exp(log_softmax(drafter_logits))
    distance = 0.5 * np.abs(p - q).sum()
    chooser = Chooser(1.0, seed=4)
    kept = np.mean([chooser.choose(logits, i) == chooser.choose(drafter_logits, i) for i in range(n)])
    noise = 3.3 * np.sqrt(kept * (1 - kept) / n)
    assert (1 - distance) / (1 + distance) - noise <= kept <= 1 - distance + noise


def test_nucleus_and_ties() -> None:
    scaled = np.log(np.array([0.4, 0.2, 0.2, 0.2]))
    assert nucleus(scaled, 0.3).tolist() == [True, False, False, False]
    assert nucleus(scaled, 0.5).tolist() == [True, True, False, False]
    assert nucleus(scaled, 1e-9).sum() == 1
    assert most_likely(np.array([1.0, 3.0, 3.0, 2.0]), 3) == [1, 2, 3]


def test_logprobs(decoder: Decoder) -> None:
    """Of the chosen token and the most likely ones; sums to one; the same bits in every mode."""
    runs = [decoder.generate("log", mode, max_new_tokens=12, ignore_eos=True,
                             logprobs=decoder.tokenizer.size) for mode in MODES]
    assert runs[0].logprobs == runs[1].logprobs == runs[2].logprobs
    for token, entry in zip(runs[0].token_ids, runs[0].logprobs):
        assert entry["token_id"] == token == entry["top"][0]["token_id"]
        assert abs(sum(np.exp(t["logprob"]) for t in entry["top"]) - 1) < 1e-9
    bare = decoder.generate("log", max_new_tokens=3, logprobs=0).logprobs
    assert bare[0]["top"] == []
    assert decoder.generate("log", max_new_tokens=3).logprobs is None


def test_chat_messages(decoder: Decoder) -> None:
    chat = decoder.generate([{"role": "user", "content": "hi"}], "ar", max_new_tokens=5)
    assert chat.token_ids == decoder.generate("user: hi\nassistant: ", "ar", max_new_tokens=5).token_ids
