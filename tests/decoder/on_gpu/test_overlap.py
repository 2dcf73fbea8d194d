"""On a GPU: whole passes in which kernels overlap, by programmatic dependent launch and in graphs, against the same launches one
after the other, each waited for. A kernel that reads before the one in front has written shows here and nowhere else."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import assert_same_bytes
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.drafters.eagle3_checkpoint import random_eagle3
from tune_kernels.decoder.rows import Appended
from tune_kernels.decoder.selection import Options
from tune_kernels.kernels.operation import Launch
from tune_kernels.shapes.model import load_model_shape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
SHAPE = replace(load_model_shape("qwen2.5-0.5b"), name="overlap", num_layers=8)
EAGLE = replace(SHAPE, name="overlap-eagle3", architecture="eagle3", num_layers=1, qkv_bias=False, tie_embeddings=False,
                target_hidden_size=SHAPE.hidden_size, draft_vocab_size=4096)
LAYERS = (1, 3, 4)
PROMPT = [(i * 7919 + 13) % 1000 for i in range(300)]  # crosses a chunk of 256 keys
CAPACITY = 600
REPLAYS = 40
Pieces = dict[str, torch.Tensor]


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on each launch is waited for before the next one begins."""
    def begin() -> None:
        launch = Launch.__call__

        def waited_for(self: Launch, *arguments: Any, **named: Any) -> None:
            launch(self, *arguments, **named)
            torch.cuda.synchronize()
        monkeypatch.setattr(Launch, "__call__", waited_for)
    return begin


@pytest.fixture(params=["fp8-v1", "bf16"])
def loaded(request: pytest.FixtureRequest) -> Iterator[Callable[[bool], Decoder]]:
    """A decoder with graphs or without, its weights the same, and an EAGLE-3 drafter."""
    def load(graphs: bool) -> Decoder:
        decoder = Decoder.load("random:0", model=SHAPE, recipe=request.param, backend="triton", capacity=CAPACITY,
                               allow_untuned=True, graphs=graphs)
        decoder.drafter = random_eagle3(1, EAGLE, decoder.model, decoder.model.device, CAPACITY,
                                        Options(allow_untuned=True, graphs=graphs))
        return decoder
    yield load
    torch.cuda.empty_cache()


def passes(decoder: Decoder, cache: Any, times: int) -> Iterator[Pieces]:
    """A prompt's pass, then the same decode pass of 5 rows and of 1, `times` times: rows, features, logits, keys and values."""
    model = decoder.model
    for _ in range(times):
        cache.clear()
        found: Pieces = {}
        before = model.prefill(PROMPT, Appended(cache, len(PROMPT)), LAYERS)
        found["prompt"] = before.final
        for rows in (5, 1):
            hidden = model.forward(PROMPT[:rows], Appended(cache, rows), LAYERS)
            assert hidden.features is not None
            found[f"final of {rows}"], found[f"features of {rows}"] = hidden.final, hidden.features
            found[f"logits of {rows}"] = model.logits(hidden.final)
        found["cache"] = cache.buffer[:, :, :cache.cursor].clone()
        yield found


def test_a_whole_pass_has_the_same_bytes_with_and_without_overlap(loaded: Callable[[bool], Decoder],
                                                                  one_by_one: Callable[[], None]) -> None:
    """Launched one after the other, overlapping, and from graphs, again and again."""
    eager, graphed = loaded(False), loaded(True)
    overlapping = list(passes(eager, eager.model.new_cache(CAPACITY), 3))
    replayed = list(passes(graphed, graphed.model.new_cache(CAPACITY), REPLAYS))
    one_by_one()
    expected = next(passes(eager, eager.model.new_cache(CAPACITY), 1))
    for kind, runs in (("overlapping", overlapping), ("replayed", replayed)):
        for number, found in enumerate(runs):
            for name, piece in expected.items():
                assert_same_bytes(found[name], piece, f"{kind}, run {number}: {name}")


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_whole_rounds_have_the_same_tokens_with_and_without_overlap(mode: str, loaded: Callable[[bool], Decoder],
                                                                    one_by_one: Callable[[], None]) -> None:
    """Rounds on the device with graphs, against rounds whose launches are waited for one by one: tokens, acceptance, hits."""
    eager, graphed = loaded(False), loaded(True)
    options: dict[str, Any] = {"max_new_tokens": 24, "draft_length": 3, "branches": 2, "ignore_eos": True}
    found = [graphed.generate(PROMPT, mode, **options) for _ in range(3)]
    one_by_one()
    expected = eager.generate(PROMPT, mode, **options)
    for result in found:
        assert result.token_ids == expected.token_ids
        assert result.stats.accepted_per_round == expected.stats.accepted_per_round
        assert (result.stats.branch_hits, result.stats.branch_misses) == \
            (expected.stats.branch_hits, expected.stats.branch_misses)
