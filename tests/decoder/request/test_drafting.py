"""F3: whatever a drafter returns, raises or doesn't do, the tokens are AR's and the request succeeds."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from bad_drafters import ANSWERS, ERRORS, BadDrafter, NoName
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.drafter import Drafter
from tune_kernels.decoder.drafters.ngram import NGramDrafter
from tune_kernels.decoder.drafters.small_model import SmallModelDrafter
from tune_kernels.decoder.errors import NumericsError
from tune_kernels.decoder.request.drafting import MOST_ERRORS, THREAD
from tune_kernels.schedules.recipe import Recipe
from tune_kernels.shapes.model import ModelShape

PROMPT = [5, 9, 2, 40, 7]
SPECULATIVE = ["sd", "ssd"]
SAMPLED = {"temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def decoder(tiny_shape: ModelShape, recipe_of: Callable[..., Recipe]) -> Decoder:
    return Decoder.load("random:1", model=tiny_shape, recipe=recipe_of("fp32"), capacity=100)


def check(decoder: Decoder, drafter: Any, mode: str, **options: Any) -> Any:
    """The tokens are AR's; the result."""
    decoder.drafter = None
    ar = decoder.generate(PROMPT, "ar", max_new_tokens=14, **options)
    decoder.drafter = drafter
    result = decoder.generate(PROMPT, mode, max_new_tokens=14, **options)
    assert (result.token_ids, result.finish_reason) == (ar.token_ids, ar.finish_reason)
    assert sum("drafter" in line for line in result.stats.warnings) == bool(result.stats.drafter_faults)
    return result


@pytest.mark.parametrize("mode", SPECULATIVE)
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("answer", ANSWERS, ids=lambda a: a.name)
def test_rubbish_for_an_answer(answer: Any, options: dict[str, Any], mode: str, decoder: Decoder) -> None:
    """F3: drafts and branches of wrong types, lengths and ids."""
    result = check(decoder, BadDrafter(draft=answer.make, prepare=answer.make), mode, **options)
    assert result.stats.drafter_faults > 0


@pytest.mark.parametrize("mode", SPECULATIVE)
@pytest.mark.parametrize("method", ["start", "draft", "accept", "prepare", "feature_layers", "name"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_an_error_in_any_method(error: BaseException, method: str, mode: str, decoder: Decoder) -> None:
    """F3: StopIteration, SystemExit and an error whose text fails included; after MOST_ERRORS the drafter is left alone."""
    def fail(*_: object) -> Any:
        raise error

    result = check(decoder, BadDrafter(**{method: fail}), mode)
    if method == "name" or (method == "prepare" and mode == "sd"):
        assert result.stats.drafter_faults == 0
    else:
        assert 1 <= result.stats.drafter_faults <= MOST_ERRORS
        assert type(error).__name__ in result.stats.warnings[-1]


@pytest.mark.parametrize("layers", [None, 5, "ab", [0, 99], [-1], [0, 0], [1.5], [0, None]])
def test_rubbish_for_feature_layers(layers: object, decoder: Decoder) -> None:
    """F3: before anything is asked of the target."""
    for mode in SPECULATIVE:
        assert check(decoder, BadDrafter(feature_layers=lambda: layers), mode).stats.drafter_faults == 1


@pytest.mark.parametrize("rows", ["8", None, -1, 2.5, float("nan"), True])
def test_rubbish_for_max_rows(rows: object, decoder: Decoder) -> None:
    """F3: no bound of the drafts, and no refusal."""
    drafter = BadDrafter()
    drafter.max_rows = rows
    check(decoder, drafter, "sd")


def test_a_drafter_that_changes_its_arguments(decoder: Decoder) -> None:
    """F3: it has copies."""
    def vandal(tokens: list[int], *_: object) -> list[int]:
        tokens[:] = [0] * 3
        return tokens

    def accept(outcome: Any) -> None:
        outcome.emitted.clear()

    for mode in SPECULATIVE:
        check(decoder, BadDrafter(draft=vandal, accept=accept, start=vandal), mode)


@pytest.mark.parametrize("mode", SPECULATIVE)
@pytest.mark.parametrize("method", ["start", "draft", "accept", "prepare"])
def test_a_drafter_that_never_answers(method: str, mode: str, decoder: Decoder) -> None:
    """F3: the request waits `drafter_timeout_s` once and goes on alone; so does the next one while the drafter is still busy;
    when it has answered at last, it drafts again."""
    release = threading.Event()

    def hang(*_: object) -> Any:
        release.wait(60)
        return {} if method == "prepare" else []

    drafter, kept = BadDrafter(**{method: hang}), decoder.drafter_timeout_s
    asked = mode == "ssd" or method != "prepare"
    try:
        decoder.drafter_timeout_s = 0.05
        result = check(decoder, drafter, mode)
        assert result.stats.drafter_faults == asked
        if asked:
            assert "has not answered in 0.05 s" in result.stats.warnings[-1]
            again = check(decoder, drafter, mode)
            assert "has not answered an earlier request yet" in again.stats.warnings[-1]
            decoder.drafter_timeout_s = 60
            assert check(decoder, NGramDrafter(), mode).stats.drafter_faults == 0  # another drafter isn't busy
        release.set()
        for thread in threading.enumerate():
            if thread.name == THREAD:
                thread.join(60)
        decoder.drafter_timeout_s = 60
        assert check(decoder, drafter, mode).stats.drafter_faults == 0
    finally:
        release.set()
        decoder.drafter_timeout_s = kept


def test_a_drafter_that_is_late_is_waited_for(decoder: Decoder) -> None:
    """A stream that ended while the drafter still prepared: the next request waits for it, and drafts."""
    busy = threading.Event()

    def slow(*_: object) -> dict[tuple[int, int], list[int]]:
        busy.set()
        time.sleep(0.2)
        return {}

    decoder.drafter = BadDrafter(prepare=slow)
    ar = decoder.generate(PROMPT, "ar", max_new_tokens=8)
    forward, calls = decoder.model.forward, []

    def fails_once(*arguments: Any) -> Any:
        busy.wait(10)
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError
        return forward(*arguments)

    decoder.model.forward = fails_once
    try:
        with pytest.raises(MemoryError):
            decoder.generate(PROMPT, "ssd", max_new_tokens=8)
    finally:
        decoder.model.forward = forward
    result = decoder.generate(PROMPT, "ssd", max_new_tokens=8)
    assert result.token_ids == ar.token_ids
    assert result.stats.drafter_faults == 0


def test_no_thread_is_left_over(decoder: Decoder) -> None:
    def fail(*_: object) -> Any:
        return 1 / 0

    for drafter in (NGramDrafter(), BadDrafter(prepare=fail), NoName()):
        check(decoder, drafter, "ssd")
        for thread in threading.enumerate():
            if thread.name == THREAD:
                thread.join(10)
                assert not thread.is_alive()


def overflowing(decoder: Decoder, tiny_shape: ModelShape, recipe: Recipe) -> Drafter:
    """A small model of finite weights whose activations are infinite."""
    other = Decoder.load("random:2", model=tiny_shape, recipe=recipe, capacity=100)
    for layer in other.model.layers:  # type: ignore[attr-defined]
        layer.gate_up.w.mul_(1e25)
    return SmallModelDrafter(other.model, 100)


@pytest.mark.parametrize("mode", SPECULATIVE)
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_activations_that_overflow_in_a_small_model(options: dict[str, Any], mode: str, decoder: Decoder, tiny_shape: ModelShape,
                                                    recipe_of: Callable[..., Recipe]) -> None:
    """F3: gate and up x 1e25: no draft, counted, named as the drafter's."""
    result = check(decoder, overflowing(decoder, tiny_shape, recipe_of("fp32")), mode, **options)
    assert result.stats.drafted == 0
    assert 1 <= result.stats.drafter_faults <= MOST_ERRORS
    assert "drafter model: draft raised NumericsError" in result.stats.warnings[-1]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [{}, SAMPLED, {"logprobs": 1}], ids=["greedy", "sampled", "logprobs"])
@pytest.mark.parametrize("mode", ["ar", *SPECULATIVE])
def test_no_answer_in_a_row_that_counts(mode: str, options: dict[str, Any], value: float, decoder: Decoder,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """F4: NaN and +inf are the same error in every mode, at the same token."""
    logits, emitted = decoder.model.logits, decoder.generate(PROMPT, "ar", max_new_tokens=9, **options).token_ids
    broken = broken_after(decoder, [*PROMPT, *emitted], len(PROMPT) + 6, value, monkeypatch)
    decoder.drafter = BadDrafter(draft=lambda tokens, length: [*PROMPT, *emitted][len(tokens):len(tokens) + length])
    whole = decoder.generate(PROMPT, mode, max_new_tokens=7, **options)
    assert whole.token_ids == emitted[:7]
    with pytest.raises(NumericsError, match="the model's logits hold NaN or infinity"):
        decoder.generate(PROMPT, mode, max_new_tokens=8, **options)
    assert broken
    assert decoder.model.logits is not logits


def broken_after(decoder: Decoder, tokens: list[int], position: int, value: float, patch: pytest.MonkeyPatch) -> list[int]:
    """From the row of `tokens[position]` on, logits hold `value`; the rows seen there."""
    seen: list[int] = []
    forward, logits = decoder.model.forward, decoder.model.logits
    first = [0]

    def watched(fed: list[int], rows: Any, layers: tuple[int, ...] = ()) -> Any:
        first[0] = rows.positions[0]
        return forward(fed, rows, layers)

    def broken(final: torch.Tensor) -> torch.Tensor:
        found = logits(final).clone()
        for row in range(max(position - first[0], 0), len(found)):
            found[row, 3] = value
            seen.append(first[0] + row)
        return found

    patch.setattr(decoder.model, "forward", watched)
    patch.setattr(decoder.model, "logits", broken)
    return seen


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", SPECULATIVE)
def test_no_answer_in_a_rejected_row_is_nobodys_business(mode: str, options: dict[str, Any], value: float, decoder: Decoder,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """F3: AR never computes the rows after a wrong token, so SD and SSD don't judge them."""
    decoder.drafter = None
    ar = decoder.generate(PROMPT, "ar", max_new_tokens=14, **options)
    wrong = 60 if 60 not in ar.token_ids else 59
    forward, logits = decoder.model.forward, decoder.model.logits
    bad = [np.zeros(0, dtype=bool)]

    def watched(fed: list[int], rows: Any, layers: tuple[int, ...] = ()) -> Any:
        bad[0] = np.array(fed) == wrong
        return forward(fed, rows, layers)

    def broken(final: torch.Tensor) -> torch.Tensor:
        found = logits(final).clone()
        if len(found) == len(bad[0]):
            found[torch.from_numpy(bad[0])] = value
        return found

    monkeypatch.setattr(decoder.model, "forward", watched)
    monkeypatch.setattr(decoder.model, "logits", broken)
    decoder.drafter = BadDrafter(draft=lambda tokens, length: [wrong] * length)
    result = decoder.generate(PROMPT, mode, max_new_tokens=14, **options)
    assert result.token_ids == ar.token_ids
    assert result.stats.drafted > 0 == result.stats.drafter_faults


def test_a_request_ends_before_a_row_without_an_answer(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """F3: an end inside the accepted tokens comes first, as in AR."""
    decoder.drafter = None
    emitted = decoder.generate(PROMPT, "ar", max_new_tokens=9).token_ids
    at = next(i for i in range(2, 9) if emitted[i] not in emitted[:i])
    broken_after(decoder, [*PROMPT, *emitted], len(PROMPT) + at, torch.nan, monkeypatch)
    decoder.drafter = BadDrafter(draft=lambda tokens, length: [*PROMPT, *emitted][len(tokens):len(tokens) + length])
    for mode in ("ar", *SPECULATIVE):
        result = decoder.generate(PROMPT, mode, max_new_tokens=20, draft_length=8, stop_token_ids=[emitted[at]])
        assert (result.token_ids, result.finish_reason) == (emitted[:at + 1], "stop")


@pytest.mark.parametrize("mode", SPECULATIVE)
def test_a_drafted_token_that_breaks_the_targets_own_numbers(mode: str, tiny_shape: ModelShape,
                                                             recipe_of: Callable[..., Recipe]) -> None:
    """F3: its values are NaN, and 0 x NaN is NaN in the rows beside it: the pass is repeated without the draft."""
    decoder = Decoder.load("random:1", tiny_shape, recipe_of("fp32"), capacity=100)
    ar = decoder.generate(PROMPT, "ar", max_new_tokens=14)
    wrong = 60 if 60 not in ar.token_ids else 59
    decoder.model.embedding[wrong] = torch.nan
    decoder.drafter = BadDrafter(draft=lambda tokens, length: [ar.token_ids[len(tokens) - len(PROMPT)], wrong, 1][:length])
    result = decoder.generate(PROMPT, mode, max_new_tokens=14)
    assert result.token_ids == ar.token_ids
    assert result.stats.drafter_faults > 0
    assert "beside its draft" in result.stats.warnings[-1]
