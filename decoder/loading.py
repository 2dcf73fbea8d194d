"""Loads the parts of a decoder from checked arguments: a model on a backend, a tokenizer, a fitting drafter."""

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

import torch

from ..schedules.recipe import Recipe, load_recipe
from ..schedules.schedule import Schedule
from ..shapes.fields import nearest
from ..shapes.model import ModelShape
from .backend import Model
from .checkpoint.loader import Checkpoint, StrPath, load_checkpoint, path_text
from .drafter import Drafter
from .drafters.load import DrafterPlan, load_drafter
from .errors import LoadError
from .request.arguments import shown, switch, whole
from .request.request import Server
from .request.tokenizer import find_tokenizer
from .selection import Options

BACKENDS = {"torch": ".on_torch.model:load_torch_model", "triton": ".on_gpu.model:load_triton_model"}
DEFAULT_CAPACITY = 4096  # slots, unless the model has fewer positions
DRAFTER_METHODS = ("start", "draft", "accept", "prepare")

class LoadOptions(TypedDict, total=False):
    """The options of Decoder.load; defaults in parentheses.

    backend: `torch`, or `triton` on a GPU (triton on a GPU if the recipe has schedules for it). device: such as `cuda:1` (the
    first GPU, or the CPU). drafter_device (the target's). capacity: tokens of the KV cache (4096, or the model's positions if
    fewer). For the triton backend alone: schedules, allow_untuned (False), overrides, graphs (True), see selection.Options.
    """

    backend: str | None
    device: str | torch.device | None
    drafter_device: str | torch.device | None
    capacity: int | None
    schedules: StrPath | None
    allow_untuned: bool
    overrides: Mapping[str, Schedule] | None
    graphs: bool


@dataclass(frozen=True)
class Loaded:
    """The parts of a decoder. source: of the weights, for evidence; notes: for `stats.warnings`."""

    server: Server
    source: str
    notes: tuple[str, ...] = ()


def load(weights: StrPath, model: StrPath | ModelShape | None, recipe: str | Recipe, drafter: StrPath | Drafter | None,
         given: LoadOptions) -> Loaded:
    """The parts of a decoder. Arguments and errors as in Decoder.load."""
    unknown = sorted(set(given) - set(LoadOptions.__annotations__))
    if unknown:
        raise LoadError(f"unknown option {unknown[0]}", expected=f"one of {', '.join(LoadOptions.__annotations__)}")
    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(path_text("recipe", recipe))
    place = torch_device(given.get("device"))
    checkpoint = load_checkpoint(weights, model, place)
    tokenizer = find_tokenizer(checkpoint.path) if checkpoint.path else None
    shape = checkpoint.config.shape
    capacity = _capacity(given.get("capacity"), shape)
    if tokenizer and tokenizer.size > shape.vocab_size:
        raise LoadError(f"the tokenizer has {tokenizer.size} ids, the embedding {shape.vocab_size} rows",
                        expected="at least one row for each id", action="use the tokenizer that belongs to the model")
    options = _options(given)
    target = load_model(checkpoint, chosen, given.get("backend"), place, options)
    if tokenizer:
        target.limit_vocabulary(tokenizer.size)
    beside = given.get("drafter_device")
    plan = DrafterPlan(target, tokenizer, place if beside is None else torch_device(beside), capacity, options)
    server = Server(target, tokenizer, checkpoint.config.eos_ids, chosen, _drafter(drafter, plan), capacity)
    return Loaded(server, checkpoint.source, tuple(checkpoint.config.notes))


def _capacity(given: object, shape: ModelShape) -> int:
    if given is None:
        return min(shape.max_position, DEFAULT_CAPACITY)
    return whole("capacity", given, 1, shape.max_position, ", the model's positions", LoadError)


def _options(given: LoadOptions) -> Options:
    folder = given.get("schedules")
    return Options(None if folder is None else path_text("schedules", folder),
                   switch("allow_untuned", given.get("allow_untuned", False), LoadError), given.get("overrides") or {},
                   switch("graphs", given.get("graphs", True), LoadError))


def _drafter(given: StrPath | Drafter | None, plan: DrafterPlan) -> Drafter | None:
    if isinstance(given, str | os.PathLike):
        return load_drafter(path_text("drafter", given), plan)
    missing = [name for name in DRAFTER_METHODS if given is not None and not callable(getattr(given, name, None))]
    if missing:
        raise LoadError(f"drafter is {shown(given)}", expected="a path, 'ngram', 'random:SEED', None, or an object with the "
                        f"methods {', '.join(DRAFTER_METHODS)}")
    return given


def load_model(checkpoint: Checkpoint, recipe: Recipe, backend: str | None, device: torch.device,
               options: Options | None = None) -> Model:
    """A model on the named backend; None is the default backend. The checkpoint's tensors are consumed.

    Raises:
        LoadError: an unknown backend; anything that the backend refuses.
    """
    name = default_backend(recipe, device) if backend is None else backend
    if name not in BACKENDS:
        raise LoadError(f"unknown backend {shown(name)}{nearest(str(name), BACKENDS)}", expected=f"one of {', '.join(BACKENDS)}")
    module, function = BACKENDS[name].split(":")
    load_on_backend = getattr(importlib.import_module(module, __package__), function)
    model: Model = load_on_backend(checkpoint, recipe, device, options or Options())
    return model


def default_backend(recipe: Recipe, device: torch.device) -> str:
    """`triton` on a GPU if the recipe has default schedules, else `torch`."""
    return "triton" if device.type == "cuda" and recipe.defaults else "torch"


def torch_device(name: str | torch.device | None) -> torch.device:
    """The device of this name; None is the first GPU, or the CPU.

    Raises:
        LoadError: this machine has no such device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(name, str | torch.device):
        raise LoadError(f"device is {shown(name)}", expected="a device of this machine, such as 'cpu'")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as e:
        raise LoadError(f"device {str(name)!r}: {str(e).splitlines()[0]}",
                        expected="a device of this machine, such as cpu") from None
    return device
