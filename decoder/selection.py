"""The choice of a schedule for each kernel of a model: a promoted one with its evidence, or the recipe's default if the caller
allows it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.registry import default_schedule, store_key
from ..kernels.screen import screen_bytes
from ..schedules import store
from ..schedules.errors import NotPromoted
from ..schedules.promoted import PromotedSchedule
from ..schedules.recipe import Recipe
from ..schedules.schedule import Schedule, StepSchedules, schedule_id, schedule_to_dict, step_schedules
from ..shapes.fields import Table
from ..shapes.model import CertifiedHeadShape, KernelShape, ModelShape
from ..shapes.target import Target, load_sku, sku_of
from .errors import LoadError

CERTIFIED = "lm_head_certified"  # in the head's place where it is promoted and was timed as the faster one, or asked for
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
    found = {kernel: _select(kernel, shapes[kernel], recipe, target, options)
             for kernel in [*KERNELS, *(["fc"] if shape.architecture == "eagle3" else [])]}
    if certified := _certified(shapes.get(CERTIFIED), found["lm_head"].promoted, recipe, target, options):
        found[CERTIFIED] = certified
    rows = [{"kernel": kernel, "schedule": schedule_to_dict(one.schedule), "schedule_id": schedule_id(one.schedule), **one.note}
            for kernel, one in found.items()]
    untuned = [row["kernel"] for row in rows if row["origin"] == UNTUNED]
    warnings = (f"{shape.name}: no promoted schedule of {', '.join(untuned)}: the recipe's defaults run",) if untuned else ()
    return Selection(step_schedules({kernel: one.schedule for kernel, one in found.items()}), tuple(rows), warnings,
                     tuple(one.promoted for one in found.values() if one.promoted))


class _Found(NamedTuple):
    """One kernel's schedule, its origin and evidence for `stats`, its promoted row or None."""

    schedule: Schedule
    note: Table
    promoted: PromotedSchedule | None = None


def _certified(shape: KernelShape | None, plain: PromotedSchedule | None, recipe: Recipe, target: Target,
               options: Options) -> _Found | None:
    """The certified head, or None where the plain one runs: it isn't promoted, or not the faster one, and nobody asks for it."""
    if not isinstance(shape, CertifiedHeadShape) or not (plain or CERTIFIED in options.overrides):
        return None
    try:
        found = _select(CERTIFIED, shape, recipe, target, replace(options, allow_untuned=False))
    except NotPromoted:
        return None
    if plain and found.promoted and found.promoted.timing.times.median_us >= plain.timing.times.median_us:
        return None
    return found._replace(note={**found.note, "memory_bytes": screen_bytes(shape)})


def _select(kernel: str, shape: KernelShape, recipe: Recipe, target: Target, options: Options) -> _Found:
    if kernel in options.overrides:
        return _Found(options.overrides[kernel], {"origin": "override"})
    try:
        folders = store.search_path(Path(options.schedules) if options.schedules else None)
        row = store.lookup(store_key(kernel, shape, target, recipe), folders)
        return _Found(row.schedule, {"origin": PROMOTED, "evidence": evidence_of(row)}, row)
    except NotPromoted:
        if not options.allow_untuned:
            raise
    return _Found(default_schedule(recipe, kernel, target.arch, shape), {"origin": UNTUNED})


def evidence_of(row: PromotedSchedule) -> Table:
    """A promoted row's evidence, for `stats`."""
    return {"date": row.date, "weights": row.evidence.weights, "random_weights": row.evidence.random_weights,
            "numerics_class": row.numerics_class, "median_us": row.timing.times.median_us,
            "checks": {kind: {"run": checks.run, "passed": checks.passed} for kind, checks in row.evidence.checks.items()}}
