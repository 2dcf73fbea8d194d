"""The space: candidate schedules of each kernel, and the reason for each impossible one.

A space is a TOML file of grids. A grid names kernels and gives each knob a value or a list; its candidates are the product.
Grids of one kernel add up; equal candidates count once. A candidate that breaks the kernel's contract is rejected before
compiling. A candidate that merely compiles badly is left to the artefact's inspection.
"""

import contextlib
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ...kernels import registry
from ...kernels.findings import FINDINGS
from ...kernels.fixed import FIXED
from ...kernels.loading import Source
from ...schedules import store
from ...schedules.errors import NotPromoted
from ...schedules.recipe import Recipe
from ...schedules.schedule import OwnSchedule, Schedule, check_knob, schedule_from_dict
from ...shapes.fields import Fields, nearest, read_table, shown
from ...shapes.model import KernelShape, ModelShape
from ...shapes.target import ARCHES, Target, load_targets
from ..errors import SpaceError
from .own import OwnKernel

SHIPPED = Path(__file__).parent / "spaces"
MAX_CANDIDATES = 100_000  # per grid: a typing error in a list must not exhaust memory


@dataclass(frozen=True)
class Grid:
    """The product of the knobs' values, for some kernels and targets."""

    kernels: tuple[str, ...]
    targets: tuple[str, ...]
    knobs: Mapping[str, tuple[object, ...]]


@dataclass(frozen=True)
class Space:
    """A named list of grids."""

    name: str
    grids: tuple[Grid, ...]


@dataclass(frozen=True)
class Candidate:
    """One schedule of one kernel for one target. problem: the reason why it can't run, or None; code: the reason's code; source:
    of a user's kernel."""

    kernel: str
    shape: KernelShape
    schedule: Schedule
    target: Target
    problem: str | None = None
    code: Literal["contract", "resource_limit"] = "contract"
    source: Source | None = None


@dataclass(frozen=True)
class Subject:
    """The model, recipe, built-in kernels and targets of a sweep. sized: sizes that stand for the model's, by name."""

    model: ModelShape
    recipe: Recipe
    kernels: Sequence[str]
    targets: Sequence[Target]
    sized: Sequence[Mapping[str, str]] = ()

    @cached_property
    def shapes(self) -> list[tuple[str, KernelShape]]:
        """(kernel, shape): the model's kernels, and the findings in the model's sizes.

        Raises SpaceError for a size that a kernel doesn't have."""
        found = self.model.kernel_shapes(self.recipe.linear_dtype, self.recipe.terms)
        found |= {name: finding.shape(self.model) for name, finding in FINDINGS.items()}
        mine = [(kernel, found[kernel]) for kernel in self.kernels if kernel in found]
        return [(kernel, resized(shape, sizes, kernel)) for kernel, shape in mine for sizes in self.sized] if self.sized else mine


def shipped_names() -> list[str]:
    return sorted(p.stem for p in SHIPPED.glob("*.toml"))


def sizes_in(word: str) -> dict[str, str]:
    """`N=4608,K=3584` by name. Raises SpaceError."""
    parts = [part.split("=") for part in word.split(",")]
    if not all(len(part) == 2 and part[0].strip().isidentifier() and part[1].strip() for part in parts):
        raise SpaceError(f"shape {shown(word)}", expected="sizes by name, such as N=4608,K=3584")
    return {name.strip(): value.strip() for name, value in parts}


def whole(name: str, value: str, kernel: str) -> int:
    """A size. Raises SpaceError."""
    if not value.isascii() or not value.isdecimal() or not 1 <= int(value[:20]) < 2**31:
        raise SpaceError(f"{kernel}: {name} is {shown(value)}", expected="a whole number from 1 to 2,147,483,647")
    return int(value)


def resized(shape: KernelShape, sizes: Mapping[str, str], kernel: str) -> KernelShape:
    """The shape with other sizes. Raises SpaceError for one that its kind doesn't have."""
    kinds = {name: type(value) for name, value in vars(shape).items()}
    changed: dict[str, object] = {}
    for name, value in sizes.items():
        if name not in kinds:
            raise SpaceError(f"{kernel} has no {name}{nearest(name, kinds)}", expected=f"one of {', '.join(kinds)}")
        if kinds[name] is not int and value not in (words := {bool: ("false", "true"), str: ("e4m3", "bf16")}[kinds[name]]):
            raise SpaceError(f"{kernel}: {name} is {shown(value)}", expected=" or ".join(words))
        changed[name] = whole(name, value, kernel) if kinds[name] is int else value == "true" if kinds[name] is bool else value
    return replace(shape, **changed)  # type: ignore[arg-type]  # each was checked above


def load_space(name_or_path: str, own: Mapping[str, OwnKernel] = MappingProxyType({})) -> Space:
    """A shipped space by name, or a user's by path. own: the user's kernels, which its grids may name.

    Raises:
        SpaceError: an unknown name, kernel, target or knob; an unreadable file; an empty list; a grid that is too large.
    """
    path = SHIPPED / f"{name_or_path}.toml" if name_or_path in shipped_names() else Path(name_or_path)
    if not os.path.isfile(path):
        raise SpaceError(f"unknown space {name_or_path!r}{nearest(name_or_path, shipped_names())}",
                         expected=f"one of {', '.join(shipped_names())}, or the path of a TOML file",
                         action="copy tuner/offline/spaces/default.toml and change it")
    fields = Fields(read_table(path, SpaceError), path.name, SpaceError)
    name = fields.get("name", str, path.stem)
    tables = fields.get("grid", list)
    fields.done()
    return Space(name, tuple(_grid(t, f"{path.name}: grid {i + 1}", own) for i, t in enumerate(tables)))


def _grid(table: object, where: str, own: Mapping[str, OwnKernel]) -> Grid:
    if not isinstance(table, dict):
        raise SpaceError(f"{where}: is {table!r}", expected="a table [[grid]]")
    kernels = _names(table.get("kernels"), [*registry.IN_SPACES, *own], f"{where}: kernels")
    targets = _names(table.get("targets", list(ARCHES)), list(ARCHES), f"{where}: targets")
    chosen: dict[str, tuple[object, ...]] = {}
    for knob, value in table.items():
        if knob in ("kernels", "targets"):
            continue
        listed = value if isinstance(value, list) else [value]
        if not listed:
            raise SpaceError(f"{where}: {knob} is an empty list", expected="at least one value")
        for kernel in kernels:
            for v in listed:
                problem = own[kernel].knob_problem(knob, v) if kernel in own else check_knob(
                    registry.IN_SPACES[kernel].schedule_type, knob, v)
                if problem:
                    raise SpaceError(f"{where}: {kernel}: {problem}")
        chosen[knob] = tuple({(type(v), v): v for v in listed}.values())
    size = math.prod(len(values) for values in chosen.values())
    if size > MAX_CANDIDATES:
        raise SpaceError(f"{where}: {size:,} candidates", expected=f"at most {MAX_CANDIDATES:,} in one grid")
    for kernel in (k for k in kernels if k not in own):  # checks on the first candidate that knobs without a default are given
        schedule_from_dict(registry.IN_SPACES[kernel].schedule_type, {k: v[0] for k, v in chosen.items()},
                           f"{where}: {kernel}")
    return Grid(kernels, targets, chosen)


def _names(value: object, known: Sequence[str], where: str) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        raise SpaceError(f"{where}: is {value!r}", expected=f"a list of {', '.join(known)}")
    for name in names:
        if name not in known:
            raise SpaceError(f"{where}: unknown {name!r}{nearest(str(name), known)}",
                             expected=f"one of {', '.join(known)}")
    return tuple(names)


def schedules(space: Space, kernel: str, arch: str) -> list[Schedule]:
    """The space's schedules of one kernel for one target, each once, in file order."""
    kind = registry.IN_SPACES[kernel].schedule_type
    found: dict[Schedule, None] = {}
    for grid in space.grids:
        if kernel in grid.kernels and arch in grid.targets:
            for values in itertools.product(*grid.knobs.values()):
                found[kind(**dict(zip(grid.knobs, values)))] = None
    return list(found)


def own_schedules(space: Space, kernel: OwnKernel, arch: str) -> list[OwnSchedule]:
    """A user's schedules for one target; where grids name the kernel, those whose knobs one of them has for this target."""
    grids = [grid for grid in space.grids if kernel.name in grid.kernels]
    here = [grid.knobs for grid in grids if arch in grid.targets]
    return [s for s in kernel.schedules if not grids or any(_within(s, knobs) for knobs in here)]


def _within(schedule: OwnSchedule, knobs: Mapping[str, tuple[object, ...]]) -> bool:
    return all(any(type(v) is type(schedule.knobs.get(name)) and v == schedule.knobs.get(name) for v in values)
               for name, values in knobs.items())


def candidates(space: Space, subject: Subject) -> list[Candidate]:
    """Every candidate of the subject's kernels, legal or not.

    Raises:
        SpaceError: no candidate is legal.
    """
    found = [reject(Candidate(kernel, shape, schedule, target)) for target in subject.targets
             for kernel, shape in subject.shapes for schedule in schedules(space, kernel, target.arch)]
    if not any(c.problem is None for c in found):
        first = next((f"; the first: {c.kernel}: {c.problem}" for c in found if c.problem), "")
        named = ", ".join(subject.kernels)
        raise SpaceError(f"space {space.name!r}: none of {len(found)} candidates for {named} is legal{first}",
                         expected="at least one schedule that fits a shape of this model",
                         action="widen the space, or start from tuner/offline/spaces/default.toml")
    return found


def with_those_in_place(found: Sequence[Candidate], subject: Subject, folders: Sequence[Path]) -> list[Candidate]:
    """The candidates plus the schedules in place: the recipe's defaults, and the rows promoted in these folders for the targets'
    SKUs. A decoder runs under them, and a race starts from them.

    Raises:
        ScheduleError: a file of promoted schedules can't be read.
    """
    added = [Candidate(kernel, shape, schedule, target)
             for target in subject.targets if target.arch in subject.recipe.defaults
             for kernel, shape in subject.shapes if kernel in registry.TUNABLE
             for schedule in _in_place(kernel, shape, subject.recipe, target, folders)]
    known = {(c.kernel, c.shape, c.target, c.schedule) for c in found}
    new = dict.fromkeys(c for c in added if (c.kernel, c.shape, c.target, c.schedule) not in known)
    return [*found, *map(reject, new)]


def _in_place(kernel: str, shape: KernelShape, recipe: Recipe, target: Target, folders: Sequence[Path]) -> list[Schedule]:
    """The schedules in place of one kernel. lm_head_logits has its own rows and also runs under lm_head's."""
    found = [registry.default_schedule(recipe, kernel, target.arch, shape)]
    for name in dict.fromkeys((kernel, registry.DEFAULT_OF.get(kernel, kernel))):
        for sku in load_targets():
            if sku.arch == target.arch:
                with contextlib.suppress(NotPromoted):
                    found.append(store.lookup(registry.store_key(name, shape, sku, recipe), folders).schedule)
    return found


def with_fixed(found: Sequence[Candidate], subject: Subject) -> list[Candidate]:
    """The candidates plus the kernels that aren't tuned, in every shape that the legal candidates entail."""
    added = []
    for target in dict.fromkeys(c.target for c in found):
        legal: dict[str, list[Schedule]] = {}
        for c in found:
            if c.target == target and c.problem is None:
                legal.setdefault(c.kernel, []).append(c.schedule)
        added += [Candidate(name, shape, fixed.schedule, target) for name, fixed in FIXED.items()
                  for shape in fixed.shapes(subject.model, subject.recipe, legal)]
    return [*found, *map(reject, added)]


def reject(candidate: Candidate) -> Candidate:
    """The candidate with the reason if it can't run: it breaks the contract, or needs too much shared memory per block."""
    operation = registry.operation(candidate.kernel, candidate.source)
    problem = operation.contract(candidate.shape, candidate.schedule)
    code: Literal["contract", "resource_limit"] = "contract"
    if problem is None:
        needed = operation.shared_bytes(candidate.shape, candidate.schedule)
        limit = candidate.target.shared_bytes_per_block
        if needed > limit:
            problem = f"at least {needed:,} B of shared memory per block; {candidate.target.arch} has {limit:,} B"
            code = "resource_limit"
    return replace(candidate, problem=problem, code=code)
