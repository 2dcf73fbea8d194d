"""What the decoder needs to know of a model beside its weights: its shape, its end-of-sequence ids, its sampling
wishes.

Features that this decoder doesn't have are refused by name; a configuration key is never ignored when it would
change the result.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...shapes.errors import ShapeError
from ...shapes.fields import read_table
from ...shapes.model import ModelShape, load_model_shape
from ..errors import LoadError
from .rope import frequencies


@dataclass(frozen=True)
class ModelConfig:
    """shape; eos_ids, any of which ends a request; notes: what the model's configuration asks for and greedy
    decoding here doesn't do."""

    shape: ModelShape
    eos_ids: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()


def load_config(folder: Path) -> ModelConfig:
    """The configuration of a Hugging Face folder.

    Raises:
        LoadError: a missing or wrong configuration; a feature that isn't supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise LoadError(f"{folder}: no config.json", expected="a Hugging Face model folder or a .gguf file")
    table = read_table(path, LoadError)
    try:
        shape = load_model_shape(str(path))
    except ShapeError as e:
        raise LoadError(e.found, expected=e.expected, action=e.action) from None
    refuse_unsupported(table, shape, str(path))
    generation_path = folder / "generation_config.json"
    generation = read_table(generation_path, LoadError) if generation_path.is_file() else {}
    return ModelConfig(shape, _eos_ids(generation, table, path), _notes(generation))


def refuse_unsupported(table: dict[str, Any], shape: ModelShape, where: str) -> None:
    """Raises LoadError for a configuration key that asks for what this decoder doesn't do."""
    def refuse(key: str, meaning: str) -> None:
        raise LoadError(f"{where}: {key} is {table.get(key)!r}: {meaning} is not supported",
                        action="use a Qwen2 or Llama model without it")

    sliding = table.get("use_sliding_window", shape.architecture != "qwen2" and table.get("sliding_window"))
    if sliding:
        refuse("use_sliding_window" if table.get("use_sliding_window") else "sliding_window", "sliding-window attention")
    if any(kind != "full_attention" for kind in table.get("layer_types") or []):
        refuse("layer_types", "attention other than full attention")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if table.get(key):
            refuse(key, "a mixture of experts")
    if table.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", "an activation other than silu")
    if table.get("quantization_config"):
        refuse("quantization_config", "a checkpoint that is quantised already")
    if table.get("partial_rotary_factor", 1.0) != 1.0:
        refuse("partial_rotary_factor", "partial rotary embedding")
    if table.get("mlp_bias"):
        refuse("mlp_bias", "a bias in the MLP")
    if table.get("attention_bias") and shape.architecture != "qwen2":
        refuse("attention_bias", "a bias in every attention projection")
    frequencies(shape)


def _eos_ids(generation: dict[str, Any], config: dict[str, Any], path: Path) -> frozenset[int]:
    """The generation config's ids win over the model config's, as in Hugging Face."""
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise LoadError(f"{path}: eos_token_id is {found!r}", expected="an id or a list of ids")
    return frozenset(ids)


def _notes(generation: dict[str, Any]) -> tuple[str, ...]:
    neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0}
    notes = [f"generation_config.json asks for {key} {generation[key]}; greedy decoding here is argmax without penalties"
             for key, value in neutral.items() if generation.get(key, value) not in (value, None)]
    if generation.get("do_sample"):
        notes.append("generation_config.json asks for sampling; the default here is greedy (temperature 0)")
    return tuple(notes)


def config_for_shape(shape: ModelShape, eos_ids: Iterable[int] = ()) -> ModelConfig:
    """The configuration of a model with random weights."""
    frequencies(shape)
    return ModelConfig(shape, frozenset(eos_ids))
