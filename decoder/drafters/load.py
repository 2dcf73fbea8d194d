"""Loads a drafter by name, and refuses one that doesn't fit its target."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from ...schedules.errors import NotPromoted
from ...shapes.fields import read_table
from ...shapes.model import ModelShape, load_model_shape
from ..backend import Model
from ..checkpoint.loader import RANDOM, load_checkpoint, random_seed, resolve
from ..drafter import Drafter
from ..errors import LoadError
from ..request.tokenizer import Tokenizer, find_tokenizer
from ..selection import Options
from .eagle3_checkpoint import load_eagle3, random_eagle3
from .ngram import NGramDrafter
from .shipped import shipped_drafter
from .small_model import SmallModelDrafter

AUTO = "auto"  # the commands' default name of a drafter


@dataclass(frozen=True)
class DrafterPlan:
    """The environment of a drafter. tokenizer: the target's; device: the drafter's; capacity: tokens of the drafter's cache."""

    target: Model
    tokenizer: Tokenizer | None
    device: torch.device
    capacity: int
    options: Options = field(default_factory=Options)


def load_drafter(name: str, plan: DrafterPlan) -> Drafter:
    """A drafter by name: `auto` (see `automatic_drafter`); `ngram`; the path of a small model or an EAGLE-3 checkpoint;
    `random:SEED`, a model of the target's shape, or `random:SEED:SHAPE`, a model or an EAGLE-3 drafter of a named shape.

    Raises:
        LoadError: nothing found, or tokenizer, vocabulary, hidden size or positions don't fit the target.
        NotPromoted: see select_schedules.
    """
    if name == AUTO:
        return automatic_drafter(plan)
    if name == NGramDrafter.name:
        return NGramDrafter()
    weights, shape = random_shape(name, plan.target)
    rest = plan.target, plan.device, plan.capacity, plan.options
    if shape is not None and shape.architecture == "eagle3":
        return random_eagle3(random_seed(weights) or 0, shape, *rest)
    if shape is None and is_eagle3(path := resolve(name)):
        return load_eagle3(path, *rest)
    return load_small_model(weights, shape, plan)


def automatic_drafter(plan: DrafterPlan) -> Drafter:
    """The drafter that ships for this target, if its kernels have promoted schedules on the device; else n-gram look-up."""
    found = shipped_drafter(plan.target.shape, plan.tokenizer)
    try:
        return NGramDrafter() if found is None else load_drafter(str(found), plan)
    except NotPromoted:
        return NGramDrafter()


def random_shape(name: str, target: Model) -> tuple[str, ModelShape | None]:
    """(weights, shape) for `random:SEED` or `random:SEED:SHAPE`; (name, None) for a path."""
    if not name.startswith(RANDOM):
        return name, None
    seed, _, shape = name.removeprefix(RANDOM).partition(":")
    return RANDOM + seed, load_model_shape(shape) if shape else target.shape


def is_eagle3(path: Path) -> bool:
    """Whether a folder holds an EAGLE-3 drafter, by its config.json. Raises LoadError if that can't be read."""
    if not path.is_dir():
        return False
    config = read_table(path / "config.json", LoadError)
    return "draft_vocab_size" in config or any("Eagle3" in str(a) for a in config.get("architectures") or [])


def load_small_model(name: str, shape: ModelShape | None, plan: DrafterPlan) -> SmallModelDrafter:
    """A small model on the target's backend. Tokenizers are compared, not embedding rows: rows beyond a tokenizer are padding.
    Without a tokenizer, ids beyond the smaller vocabulary are padding for both models.

    Raises:
        LoadError: tokenizer, vocabulary or positions don't fit the target.
    """
    checkpoint = load_checkpoint(name, shape, plan.device)
    shape, target, tokenizer = checkpoint.config.shape, plan.target, plan.tokenizer
    own = find_tokenizer(checkpoint.path) if checkpoint.path else None
    if own and tokenizer and own.fingerprint() != tokenizer.fingerprint():
        raise LoadError(f"drafter {name}: its tokenizer ({own.size} ids) isn't the target's ({tokenizer.size} ids)",
                        expected="the same token for each id", action="use a drafter of the target's model family")
    if tokenizer and shape.vocab_size < tokenizer.size:
        raise LoadError(f"drafter {name}: an embedding of {shape.vocab_size} rows", expected=f"at least {tokenizer.size}, one "
                        "for each id of the target's tokenizer")
    if shape.max_position < plan.capacity:
        raise LoadError(f"drafter {name}: {shape.max_position} positions", expected=f"at least {plan.capacity}, the capacity of "
                        "the target's cache", action=f"load with capacity={shape.max_position}, or use another drafter")
    limit = tokenizer.size if tokenizer else min(target.vocab_limit, shape.vocab_size)
    model = target.sibling(checkpoint, plan.device, plan.options)
    for each in (model, target):
        each.limit_vocabulary(limit)
    return SmallModelDrafter(model, plan.capacity)
