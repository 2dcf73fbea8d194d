"""Which schedule each kernel of a model runs under: promoted ones with their evidence, or, where the caller allows it, the
recipe's defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..kernels.registry import default_schedule
from ..schedules.recipe import Recipe
from ..schedules.schedule import Schedule, schedule_id, schedule_to_dict
from ..shapes.model import ModelShape
from .errors import LoadError
from .precision import precision_of

KERNELS = ("qkv", "o", "gate_up", "down", "attention", "merge", "lm_head")


@dataclass(frozen=True)
class Options:
    """What the caller of a backend may choose. schedules: a folder of promoted schedules, asked first; overrides: schedules by
    kernel that are taken as they are, for measuring candidates; graphs: replay passes from CUDA graphs."""

    schedules: str | None = None
    allow_untuned: bool = False
    overrides: Mapping[str, Schedule] = field(default_factory=dict)
    graphs: bool = True


@dataclass(frozen=True)
class Selection:
    """schedules by kernel; rows: what `stats` says of each; warnings for the same place."""

    schedules: dict[str, Schedule]
    rows: tuple[dict[str, Any], ...]
    warnings: tuple[str, ...] = ()

    @property
    def pdl(self) -> bool:
        """Whether launches overlap: then the kernels that aren't tuned take part, or they would hold up the others."""
        return any(getattr(schedule, "pdl", False) for schedule in self.schedules.values())


def select_schedules(recipe: Recipe, shape: ModelShape, device: torch.device, options: Options) -> Selection:
    """A schedule for every tunable kernel of a model.

    Raises:
        LoadError: a device without defaults.
    """
    arch = device_arch(device)
    if arch not in recipe.defaults:
        raise LoadError(f"recipe {recipe.name} has no default schedules for {arch}",
                        expected=f"one of {', '.join(recipe.defaults) or 'no target at all'}", action="use another recipe")
    chosen: dict[str, Schedule] = {}
    rows = []
    precision = precision_of(recipe)
    shapes = shape.kernel_shapes(precision.linear, precision.terms)
    for kernel in [*KERNELS, *(["fc"] if shape.architecture == "eagle3" else [])]:
        chosen[kernel] = options.overrides.get(kernel) or default_schedule(recipe, kernel, arch, shapes[kernel])
        origin = "override" if kernel in options.overrides else "recipe default, no evidence"
        rows.append({"kernel": kernel, "schedule": schedule_to_dict(chosen[kernel]), "schedule_id": schedule_id(chosen[kernel]),
                     "origin": origin})
    return Selection(chosen, tuple(rows))


def device_arch(device: torch.device) -> str:
    """`sm_90` of a GPU; where there is none, the interpreter stands for it."""
    if device.type != "cuda":
        return "sm_90"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
