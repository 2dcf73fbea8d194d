"""A model's configuration: its shape, its end-of-sequence ids, its own sampling settings.

A feature that this decoder lacks is refused by name. No key that may change the result is ignored (switches.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...shapes.errors import ShapeError
from ...shapes.fields import Fields, Table, read_table
from ...shapes.model import ModelShape, load_model_shape
from ..errors import LoadError
from .fp8 import check_quantisation
from .rope import frequencies
from .switches import HARMLESS, READ, SWITCHES, check_switches

# Keys of one architecture. attention_bias is a size of Qwen2's; Qwen's sliding_window counts only if use_sliding_window is set.
SIZES: dict[str, set[str]] = {
    "qwen2": {"attention_bias", "sliding_window"}, "qwen3": {"sliding_window"}, "llama": set(), "mistral": set(),
    "eagle3": {"draft_vocab_size", "target_hidden_size"}}
MISTRAL_WINDOW = 4096  # of a configuration that names none, in transformers


@dataclass(frozen=True)
class ModelConfig:
    """shape; eos_ids, any of which ends a request; notes: settings of the model's own that greedy decoding here ignores;
    stores_fp8: projections are e4m3 in the file."""

    shape: ModelShape
    eos_ids: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    stores_fp8: bool = False


def load_config(folder: Path) -> ModelConfig:
    """The configuration of a Hugging Face folder.

    Raises:
        LoadError: the configuration is missing or wrong, or asks for an unsupported feature.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise LoadError(f"{folder}: no config.json", expected="a Hugging Face model folder or a .gguf file")
    table = read_table(path, LoadError)
    try:
        shape = load_model_shape(str(path))
    except ShapeError as e:
        raise LoadError(e.found, expected=e.expected, action=e.action) from None
    stores_fp8 = check_quantisation(Fields(table, str(path), LoadError))
    check_switches(table, str(path), READ | SIZES[shape.architecture] | {"quantization_config"}, SWITCHES, HARMLESS)
    if shape.architecture == "mistral" and "sliding_window" not in table:
        raise LoadError(f"{path}: sliding_window is missing, which means {MISTRAL_WINDOW:,} tokens: sliding-window attention is "
                        "not supported", expected="sliding_window null, as in Mistral-7B v0.2 and later")
    frequencies(shape)
    generation_path = folder / "generation_config.json"
    generation = read_table(generation_path, LoadError) if generation_path.is_file() else {}
    return ModelConfig(shape, _eos_ids(generation, table, path), _notes(generation), stores_fp8)


def _eos_ids(generation: Table, config: Table, path: Path) -> frozenset[int]:
    """The end-of-sequence ids. Those of generation_config.json override those of config.json, as in Hugging Face."""
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise LoadError(f"{path}: eos_token_id is {found!r}", expected="an id or a list of ids")
    return frozenset(ids)


def _notes(generation: Table) -> tuple[str, ...]:
    neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0}
    notes = [f"generation_config.json asks for {key} {generation[key]}; greedy decoding here is argmax without penalties"
             for key, value in neutral.items() if generation.get(key, value) not in (value, None)]
    if generation.get("do_sample"):
        notes.append("generation_config.json asks for sampling; the default here is greedy (temperature 0)")
    return tuple(notes)


def config_for_shape(shape: ModelShape, eos_ids: Iterable[int] = ()) -> ModelConfig:
    """The configuration of a model with random weights. Raises LoadError for an unsupported RoPE."""
    frequencies(shape)
    return ModelConfig(shape, frozenset(eos_ids))
