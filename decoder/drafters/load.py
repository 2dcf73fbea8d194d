"""Makes a drafter from what the user names, and refuses one that doesn't fit its target."""

from pathlib import Path

import torch

from ...schedules.recipe import Recipe
from ...shapes.fields import read_table
from ...shapes.model import ModelShape, load_model_shape
from ..backend import Model, load_model
from ..checkpoint.loader import RANDOM, load_checkpoint, random_seed, resolve
from ..drafter import Drafter
from ..errors import LoadError
from ..request.tokenizer import Tokenizer, load_tokenizer
from ..selection import Options
from .ngram import NGramDrafter
from .small_model import SmallModelDrafter


def load_drafter(name: str, target: Model, tokenizer: Tokenizer | None, recipe: Recipe, backend: str | None,
                 device: torch.device, capacity: int, options: Options | None = None) -> Drafter:
    """`ngram`; a path of a small model or an EAGLE-3 checkpoint; `random:SEED`, a model of the target's own shape, or
    `random:SEED:SHAPE`, a model or an EAGLE-3 drafter of a named shape.

    Raises:
        LoadError: nothing there, or a drafter and a target that don't fit: tokenizer, vocabulary, hidden size,
        positions.
"""
    if name == NGramDrafter.name:
        return NGramDrafter()
    chosen = options or Options()
    weights, shape = random_shape(name, target)
    if shape is not None and shape.architecture == "eagle3":
        from .eagle3_checkpoint import random_eagle3

        return random_eagle3(random_seed(weights) or 0, shape, target, recipe, device, capacity, chosen)
    if shape is None and is_eagle3(path := resolve(name)):
        from .eagle3_checkpoint import load_eagle3

        return load_eagle3(path, target, recipe, device, capacity, chosen)
    return load_small_model(weights, shape, target, tokenizer, recipe, backend, device, capacity, chosen)


def random_shape(name: str, target: Model) -> tuple[str, ModelShape | None]:
    """(weights, shape) of `random:SEED` or `random:SEED:SHAPE`; (name, None) of a path."""
    if not name.startswith(RANDOM):
        return name, None
    seed, _, shape = name.removeprefix(RANDOM).partition(":")
    return RANDOM + seed, load_model_shape(shape) if shape else target.shape


def is_eagle3(path: Path) -> bool:
    """Whether a folder's configuration is that of an EAGLE-3 drafter, in either spelling."""
    if not path.is_dir():
        return False
    config = read_table(path / "config.json", LoadError)
    return "draft_vocab_size" in config or any("Eagle3" in str(a) for a in config.get("architectures") or [])


def load_small_model(name: str, shape: ModelShape | None, target: Model, tokenizer: Tokenizer | None, recipe: Recipe,
                     backend: str | None, device: torch.device, capacity: int, options: Options) -> SmallModelDrafter:
    """A small model, its tokenizer compared with the target's. Sizes of vocabularies may differ, meanings of ids may
    not."""
    checkpoint = load_checkpoint(name, shape, device)
    shape = checkpoint.config.shape
    if checkpoint.path and tokenizer:
        own = load_tokenizer(checkpoint.path)
        if own.fingerprint() != tokenizer.fingerprint():
            raise LoadError(f"drafter {name}: its tokenizer ({own.size} ids) isn't the target's ({tokenizer.size} ids)",
                            expected="the same token for each id", action="use a drafter of the target's model family")
    need = tokenizer.size if tokenizer else target.shape.vocab_size
    if shape.vocab_size < need:
        raise LoadError(f"drafter {name}: an embedding of {shape.vocab_size} rows", expected=f"at least {need}, one for each "
                        "id that the target may emit")
    if shape.max_position < capacity:
        raise LoadError(f"drafter {name}: {shape.max_position} positions", expected=f"at least {capacity}, the capacity of "
                        "the target's cache", action=f"load with capacity={shape.max_position}, or use another drafter")
    model = load_model(checkpoint, recipe, backend or target.notes.name, device, options)
    model.limit_vocabulary(need)
    return SmallModelDrafter(model, capacity)
