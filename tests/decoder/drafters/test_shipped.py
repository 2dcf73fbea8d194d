"""The drafters that come with the package: small, good, whole, and given to their own target alone."""

import dataclasses
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from eagle3_reader import read_drafter
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.checkpoint.loader import load_checkpoint
from tune_kernels.decoder.checkpoint.weights import fingerprint
from tune_kernels.decoder.cli import main
from tune_kernels.decoder.drafters import load
from tune_kernels.decoder.drafters.card import JSON, MARKDOWN, as_markdown, read_card
from tune_kernels.decoder.drafters.identity import identity_of
from tune_kernels.decoder.drafters.load import AUTO, DrafterPlan, load_drafter
from tune_kernels.decoder.drafters.shipped import FOLDER, shipped_drafter
from tune_kernels.decoder.request.tokenizer import Tokenizer, load_tokenizer
from tune_kernels.schedules.errors import NotPromoted
from tune_kernels.shapes.model import ModelShape

LARGEST = 8_000_000  # bytes of a drafter's weights in the package
LEAST_TAU = 2.3  # at K = 4, on held-out prompts
SHIPPED = sorted(path.parent for path in FOLDER.glob(f"*/{JSON}"))


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(smollm2)


def test_one_ships() -> None:
    assert [path.name for path in SHIPPED] == ["smollm2-135m-instruct-eagle3"]


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda path: path.name)
def test_it_is_small_and_good_and_its_card_is_its_own(folder: Path) -> None:
    card = read_card(folder)
    assert card.bytes == (folder / "model.safetensors").stat().st_size <= LARGEST
    assert card.tau() >= LEAST_TAU and {r.draft_length for r in card.stored_results} == {4}
    assert {r.kind for r in card.stored_results} == {"all", "code", "maths", "prose"}
    for result in (*card.results, *card.stored_results):
        assert result.tau == pytest.approx(result.tokens / result.rounds, abs=1e-4)
        assert result.tau == pytest.approx(1 + sum(result.acceptance), abs=0.02)  # but for rounds that an answer's end cut short
    assert (folder / MARKDOWN).read_text() == as_markdown(card, "curve.svg")
    assert (folder / "curve.svg").is_file()
    plain = read_drafter(folder, torch.zeros(1, 1))
    assert plain.tensors["lm_head.weight"].shape[0] == card.data.draft_vocabulary
    floats = sum(t.numel() for name, t in plain.tensors.items() if name not in ("d2t", "t2d"))
    assert floats == card.training.parameters


def test_it_belongs_to_its_target_alone(smollm2: Path, tokenizer: Tokenizer) -> None:
    checkpoint = load_checkpoint(str(smollm2), None, torch.device("cpu"))
    shape, found = checkpoint.config.shape, shipped_drafter(checkpoint.config.shape, tokenizer)
    assert found == SHIPPED[0]
    assert read_card(found).target.weights == fingerprint(checkpoint.tensors)
    renamed = dataclasses.replace(shape, name="other", source="elsewhere", rms_norm_eps=1e-5)
    assert shipped_drafter(renamed, tokenizer) == found
    assert shipped_drafter(shape, None) is None
    for change in ({"num_layers": 32}, {"rope_theta": 10000.0}, {"hidden_size": 960}, {"tie_embeddings": False}):
        assert shipped_drafter(dataclasses.replace(shape, **change), tokenizer) is None


def test_another_vocabulary_is_another_target(tiny_folders: dict[str, Path], tiny_shape: ModelShape) -> None:
    own = load_tokenizer(tiny_folders["llama"])
    other = load_tokenizer(tiny_folders["llama"])
    assert identity_of(tiny_shape, own) == identity_of(tiny_shape, other)
    other.inner.add_tokens(["<another>"])
    assert identity_of(tiny_shape, own) != identity_of(tiny_shape, other)


def test_auto_is_the_shipped_drafter_or_ngram(smollm2: Path, tiny_folders: dict[str, Path],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens with it, in fewer rounds; n-gram for another model, and where its kernels have no schedules."""
    decoder = Decoder.load(str(smollm2), recipe="fp32", drafter=AUTO, capacity=256)
    assert decoder.drafter.name == "eagle3"
    prompt = [{"role": "user", "content": "What is 17 times 24? Show each step of the multiplication."}]
    runs = [decoder.generate(prompt, mode, max_new_tokens=24) for mode in ("ar", "sd")]
    assert runs[0].token_ids == runs[1].token_ids
    assert runs[1].stats.tokens_per_round > 1.5
    plan = DrafterPlan(decoder.model, decoder.tokenizer, torch.device("cpu"), 256)

    def refuse(*_: object) -> None:
        raise NotPromoted("no schedule")

    monkeypatch.setattr(load, "load_eagle3", refuse)
    assert load_drafter(AUTO, plan).name == "ngram"
    with pytest.raises(NotPromoted):
        load_drafter(str(SHIPPED[0]), plan)
    assert Decoder.load(str(tiny_folders["llama"]), recipe="fp32", drafter=AUTO).drafter.name == "ngram"


def test_the_commands_say_which_drafter_auto_is(tiny_folders: dict[str, Path]) -> None:
    result = CliRunner().invoke(main, ["generate", "hi", "--weights", str(tiny_folders["llama"]), "--max-new-tokens", "4"])
    assert result.exit_code == 0 and "drafter: ngram (auto)" in result.stderr
