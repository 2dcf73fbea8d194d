"""F4, F5, F24, F26, F28: arguments of a caller, text and ends, checkpoints without a tokenizer, vocabularies with padding."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.errors import DecoderError, LoadError, RequestError
from tune_kernels.decoder.request.output import EndRules, Output
from tune_kernels.decoder.request.tokenizer import TextStream, Tokenizer
from tune_kernels.schedules.recipe import Recipe
from tune_kernels.shapes.model import ModelShape

PROMPT = [5, 9, 2]
HUGE = 10**400


@pytest.fixture(scope="module")
def decoder(load_tiny: Callable[..., Decoder]) -> Decoder:
    return load_tiny("llama", drafter="ngram", capacity=64)


@pytest.mark.parametrize(("name", "values"), [
    ("max_new_tokens", [None, 2.5, "5", True, 0, -1, float("nan"), [3], HUGE, np.float32(3)]),
    ("draft_length", [None, 2.5, "4", True, 0, -1, HUGE]), ("branches", [None, 2.5, "4", False, 0, HUGE]),
    ("stop", [1, [1], [""], "", [None], {"a": 1}, b"x", 2.5, True]),
    ("stop_token_ids", [5, None, ["a"], [1.5], [-1], [True], "12", [[1]], {1: 2}, [HUGE], torch.zeros(2, 2, dtype=torch.int64)]),
    ("ignore_eos", [None, 1, "yes"]), ("temperature", [None, "1", True, -1, float("nan"), float("inf"), 1e-9, [1]]),
    ("top_p", [None, "1", True, 0, 1.1, float("nan")]), ("seed", ["1", 1.5, True, -1, 2**64, HUGE, [1]]),
    ("logprobs", ["1", 1.5, True, -1, HUGE]), ("mode", [1, "fast", ["sd"], True]), ("max_tokens", [5]),
])
def test_wrong_options_are_refused_by_name(name: str, values: list[object], decoder: Decoder) -> None:
    """F24: an error that names the argument and the values allowed; no traceback, and the decoder is free."""
    for value in values:
        with pytest.raises(RequestError, match=rf"{name}[\s\S]*expected:"):
            decoder.generate("x", **{"max_new_tokens": 4, name: value})
    assert decoder.generate("x", max_new_tokens=2).token_ids


@pytest.mark.parametrize("prompt", [None, 5, 2.5, True, b"abc", {"role": "user"}, {1, 2}, [1.5], ["a"], [True], [-1], [10**6],
                                    [[1, 2]], np.zeros((2, 2), dtype=int), torch.tensor(3), [None], [], "", "\ud800", [HUGE],
                                    [{"role": "user", "content": "\ud800"}]], ids=repr)
def test_wrong_prompts_are_refused(prompt: object, decoder: Decoder) -> None:
    """F24."""
    with pytest.raises(RequestError):
        decoder.generate(prompt)


def test_numbers_of_other_libraries_are_numbers(decoder: Decoder) -> None:
    """F24: numpy and torch integers and arrays of them; sets of stop ids."""
    expected = decoder.generate([1, 2, 3], max_new_tokens=4, stop_token_ids=[7], temperature=1.0, seed=5).token_ids
    for prompt in (np.array([1, 2, 3]), torch.tensor([1, 2, 3]), (1, 2, 3), [np.int64(1), torch.tensor(2), 3]):
        found = decoder.generate(prompt, max_new_tokens=np.int32(4), stop_token_ids={7}, temperature=np.float32(1),
                                 seed=np.int64(5))
        assert found.token_ids == expected


@pytest.mark.parametrize("options", [
    {"weights": None}, {"weights": 5}, {"weights": "a\0b"}, {"model": 5}, {"recipe": None}, {"recipe": 5}, {"drafter": 5},
    {"drafter": object}, {"capacity": 0}, {"capacity": -1}, {"capacity": 2.5}, {"capacity": "64"}, {"capacity": True},
    {"capacity": HUGE}, {"device": 5}, {"device": "nowhere"}, {"drafter_device": 5}, {"backend": 5}, {"backend": ""},
    {"schedules": 5}, {"allow_untuned": "yes"}, {"graphs": 1}, {"kapacity": 5},
], ids=str)
def test_wrong_options_of_load_are_refused(options: dict[str, Any], tiny_shape: ModelShape,
                                           recipe_of: Callable[..., Recipe]) -> None:
    """F24: a capacity of 0 is no default."""
    with pytest.raises(DecoderError, match="expected:"):
        Decoder.load(**{"weights": "random:0", "model": tiny_shape, "recipe": recipe_of("fp32"), **options})


def test_paths_are_paths(tiny_folders: dict[str, Path], recipe_of: Callable[..., Recipe]) -> None:
    """F24: pathlib.Path for weights and drafter."""
    decoder = Decoder.load(tiny_folders["llama"], recipe=recipe_of("fp32"), drafter=tiny_folders["llama"], capacity=64)
    assert decoder.generate("x", "sd", max_new_tokens=4).stats.acceptance == 1


def test_every_seed_of_64_bits_draws_differently(decoder: Decoder) -> None:
    """F4: neighbours at the top of the range too."""
    seeds = [0, 1, 2**53, 2**53 + 1, 2**63, 2**63 + 1, 2**63 + 2, 2**64 - 2, 2**64 - 1]
    drawn = {tuple(decoder.generate("seed", "ar", max_new_tokens=24, ignore_eos=True, temperature=3.0, seed=seed).token_ids)
             for seed in seeds}
    assert len(drawn) == len(seeds)


def whole(decoder: Decoder, pieces: list[str], stop: tuple[str, ...]) -> tuple[str, str | None]:
    """Text and finish reason where tokens of these texts come."""
    output = Output(EndRules(99, stop=stop), decoder.tokenizer)
    texts = iter(pieces)
    output._stream.push = lambda token: next(texts)  # type: ignore[union-attr, method-assign]
    for _ in pieces:
        if output.finish_reason is None:
            output.push(1)
    return output.text, output.finish_reason


@pytest.mark.parametrize(("text", "stop"), [
    ("The quick fox", ("quick", "ui")), ("abcdef", ("bcde", "cd", "abcdef")), ("xxENDx", ("END", "ND", "xEND")),
    ("aaa", ("aa", "a")),
    ("one two", ("never",))])
def test_one_token_or_many_stop_at_the_same_character(text: str, stop: tuple[str, ...], decoder: Decoder) -> None:
    """F5: the stop string that is complete first ends the text, however its characters come in tokens."""
    alone = whole(decoder, list(text), stop)
    assert alone == whole(decoder, [text], stop)
    for cut in range(1, len(text)):
        assert whole(decoder, [text[:cut], text[cut:]], stop) == alone
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    assert alone == ((text[:min(ends)[1]], "stop") if ends else (text, None))


def sentencepiece(words: list[str]) -> Tokenizer:
    """A tokenizer whose decoder puts a space for ▁ and strips the first one of a text, as Llama's does."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    inner = Inner(models.WordLevel({word: i for i, word in enumerate(["<unk>", "</s>", *words])}, unk_token="<unk>"))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>"))


@pytest.mark.parametrize("ids", [[2, 0, 3], [0, 2, 3], [2, 0, 0, 3], [0, 0, 2, 0, 3, 2], [2, 4, 3], [4, 2, 0, 4, 3], [2, 1, 3]])
def test_streamed_text_is_the_text_of_all_ids(ids: list[int]) -> None:
    """F5: a special token between two words takes no space away."""
    tokenizer = sentencepiece(["▁one", "▁two", "▁"])
    stream = TextStream(tokenizer)
    assert "".join([*map(stream.push, ids), stream.flush()]) == tokenizer.decode(ids)


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_a_stop_string_that_is_a_special_token_ends_by_its_id(mode: str, decoder: Decoder,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """F5: no text holds it, so its id is meant."""
    ids = decoder.generate("special", "ar", max_new_tokens=20, ignore_eos=True).token_ids
    at = next(i for i in range(3, 20) if ids[i] not in ids[:i])
    monkeypatch.setattr(Tokenizer, "special_ids", {"<over>": ids[at]})
    result = decoder.generate("special", mode, max_new_tokens=20, ignore_eos=True, stop="<over>")
    assert (result.token_ids, result.finish_reason) == (ids[:at + 1], "stop")
    monkeypatch.undo()
    assert decoder.tokenizer.special_ids == {"<bos>": 256, "<eos>": 257, "<pad>": 258}


def test_a_folder_without_a_tokenizer_serves_token_ids(tiny_folders: dict[str, Path], tmp_path: Path,
                                                       recipe_of: Callable[..., Recipe]) -> None:
    """F26: a broken tokenizer is still an error."""
    bare = shutil.copytree(tiny_folders["llama"], tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    decoder = Decoder.load(bare, recipe=recipe_of("fp32"), drafter="ngram", capacity=64)
    ar = decoder.generate(PROMPT, "ar", max_new_tokens=6)
    assert decoder.generate(PROMPT, "sd", max_new_tokens=6).token_ids == ar.token_ids
    assert ar.text is None
    with pytest.raises(RequestError, match="no tokenizer"):
        decoder.stream(PROMPT)
    (bare / "tokenizer.json").write_text("{")
    with pytest.raises(LoadError, match="no readable tokenizer"):
        Decoder.load(bare, recipe=recipe_of("fp32"))


@pytest.mark.parametrize("rows", [(304, 272), (272, 304), (259, 272)])
def test_rows_beyond_the_tokenizer_are_padding(rows: tuple[int, int], make_model: Callable[..., Path], tmp_path: Path,
                                               recipe_of: Callable[..., Recipe]) -> None:
    """F28: a target and a drafter with one tokenizer and unlike embeddings; a padded row that would win is never chosen."""
    folders = [make_model(tmp_path / str(i), "llama", seed=i, vocab_size=n) for i, n in enumerate(rows)]
    decoder = Decoder.load(folders[0], recipe=recipe_of("fp32"), drafter=folders[1], capacity=64)
    decoder.model.head.w.mul_(-1)  # type: ignore[attr-defined]
    runs = [decoder.generate("pad", mode, max_new_tokens=20, ignore_eos=True) for mode in ("ar", "sd", "ssd")]
    assert runs[0].token_ids == runs[1].token_ids == runs[2].token_ids
    assert all(run.stats.drafter_faults == 0 for run in runs)
    assert max(runs[0].token_ids) < decoder.tokenizer.size == decoder.model.vocab_limit


@pytest.mark.parametrize("rows", [(61, 53), (53, 61)])
def test_random_weights_share_the_smaller_vocabulary(rows: tuple[int, int], tiny_shape: ModelShape,
                                                     recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    """F28: as Qwen2.5-7B with 152,064 rows and Qwen2.5-0.5B with 151,936."""
    from tune_kernels.decoder.drafters.load import DrafterPlan, load_small_model

    decoder = Decoder.load("random:0", replace(tiny_shape, vocab_size=rows[0]), recipe_of("fp32"), capacity=64)
    plan = DrafterPlan(decoder.model, None, torch.device("cpu"), 64)
    decoder.drafter = load_small_model("random:1", replace(tiny_shape, vocab_size=rows[1]), plan)
    runs = [decoder.generate(PROMPT, mode, max_new_tokens=40) for mode in ("ar", "sd", "ssd")]
    assert runs[0].token_ids == runs[1].token_ids == runs[2].token_ids
    assert all(run.stats.drafter_faults == 0 for run in runs)
    assert max(runs[0].token_ids) < 53
    with pytest.raises(RequestError, match="token id 53 in the prompt"):
        decoder.generate([53])
