"""The choice of a schedule for each kernel of a model: a promoted one with its evidence, or the recipe's default if the caller
allows it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..kernels.registry import default_schedule, store_key
from ..schedules import store
from ..schedules.errors import NotPromoted
from ..schedules.promoted import PromotedSchedule
from ..schedules.recipe import Recipe
from ..schedules.schedule import Schedule, StepSchedules, schedule_id, schedule_to_dict, step_schedules
from ..shapes.fields import Table
from ..shapes.model import KernelShape, ModelShape
from ..shapes.target import Target, load_sku, sku_of
from .errors import LoadError

KERNELS = ("qkv", "o", "gate_up", "down", "attention", "merge", "lm_head")
INTERPRETED = "nvidia-h200"  # the target of kernels that run in Triton's interpreter, on a CPU
UNTUNED, PROMOTED = "recipe default, no evidence", "promoted"  # origins of a schedule


@dataclass(frozen=True)
class Options:
    """The options of a backend. schedules: a folder of promoted schedules, searched first; allow_untuned: the recipe's default
    runs for a kernel without a promoted schedule; overrides: schedules by kernel, for the measurement of candidates; graphs:
    whether passes are replayed from CUDA graphs."""

    schedules: str | None = None
    allow_untuned: bool = False
    overrides: Mapping[str, Schedule] = field(default_factory=dict)
    graphs: bool = True


@dataclass(frozen=True)
class Selection:
    """The schedules of a model. rows: each with its origin and evidence, for `stats`; warnings: for `stats`; promoted: the rows
    of the store among them."""

    schedules: StepSchedules
    rows: tuple[Table, ...]
    warnings: tuple[str, ...] = ()
    promoted: tuple[PromotedSchedule, ...] = ()


def select_schedules(recipe: Recipe, shape: ModelShape, device: torch.device, options: Options) -> Selection:
    """A schedule for every tunable kernel of a model.

    Raises:
        NotPromoted: a kernel has no promoted schedule, and untuned ones aren't allowed.
        LoadError: the recipe has no defaults for the device.
        ShapeError: an unlisted GPU.
    """
    target = load_sku(INTERPRETED) if device.type != "cuda" else sku_of(torch.cuda.get_device_name(device))
    if target.arch not in recipe.defaults:
        raise LoadError(f"recipe {recipe.name} has no default schedules for {target.arch}",
                        expected=f"one of {', '.join(recipe.defaults) or 'no target at all'}", action="use another recipe")
    precision = recipe.precision
    shapes = shape.kernel_shapes(precision.linear, precision.terms)
    chosen: dict[str, Schedule] = {}
    rows, promoted = [], []
    for kernel in [*KERNELS, *(["fc"] if shape.architecture == "eagle3" else [])]:
        chosen[kernel], note, found = _select(kernel, shapes[kernel], recipe, target, options)
        promoted += [found] if found else []
        rows.append({"kernel": kernel, "schedule": schedule_to_dict(chosen[kernel]), "schedule_id": schedule_id(chosen[kernel]),
                     **note})
    untuned = [row["kernel"] for row in rows if row["origin"] == UNTUNED]
    warnings = (f"{shape.name}: no promoted schedule of {', '.join(untuned)}: the recipe's defaults run",) if untuned else ()
    return Selection(step_schedules(chosen), tuple(rows), warnings, tuple(promoted))


def _select(kernel: str, shape: KernelShape, recipe: Recipe, target: Target,
            options: Options) -> tuple[Schedule, Table, PromotedSchedule | None]:
    """(one kernel's schedule, its origin and evidence, its promoted row or None)."""
    if kernel in options.overrides:
        return options.overrides[kernel], {"origin": "override"}, None
    try:
        folders = store.search_path(Path(options.schedules) if options.schedules else None)
        row = store.lookup(store_key(kernel, shape, target, recipe), folders)
        return row.schedule, {"origin": PROMOTED, "evidence": evidence_of(row)}, row
    except NotPromoted:
        if not options.allow_untuned:
            raise
    return default_schedule(recipe, kernel, target.arch, shape), {"origin": UNTUNED}, None


def evidence_of(row: PromotedSchedule) -> Table:
    """A promoted row's evidence, for `stats`."""
    return {"date": row.date, "weights": row.evidence.weights, "random_weights": row.evidence.random_weights,
            "numerics_class": row.numerics_class, "median_us": row.timing.times.median_us,
            "checks": {kind: {"run": checks.run, "passed": checks.passed} for kind, checks in row.evidence.checks.items()}}
