"""Numerics classes: which schedules of a kernel give the same output bits, and which knobs change them.

The class of a schedule is the SHA-256 of its output on fixed inputs (`measure.numerics_class`). What is said of a knob rests on
pairs of schedules that differ in that knob alone; where the bundle has none, nothing is said.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...schedules import store
from ...schedules.promoted import PromotedSchedule
from ...schedules.recipe import load_recipe
from ...schedules.schedule import Schedule, schedule_id, schedule_to_dict
from ...shapes.fields import nearest
from ...shapes.model import load_model_shape, shape_to_dict
from ..errors import RecordingError
from ..offline.report import read_report
from . import survivors
from .samples import recording
from .samples.recording import Contest, Recording, require_some_life
from .worker import gpu_state
from .worker.gpu_state import Machine
from .worker.measure import Problem
from .worker.measurer import GpuMeasurer, Measurer

SCHEMA = "tune-kernels/classes/1"
YES, NO, NOT_VARIED = "yes", "no", "not varied alone"
SAME, DIFFERS, NOT_COMPUTED = "same class", "another class", "not computed"
NO_WEIGHTS = "none"  # classes are of kernels: no model is loaded


@dataclass(frozen=True)
class Effect:
    """Whether a knob changes the bits: `yes`, `no`, or `not varied alone`; and two schedules that show it."""

    says: str
    pair: tuple[Schedule, Schedule] | None = None


def changes_bits(classes: Mapping[Schedule, str]) -> dict[str, Effect]:
    """By knob, from the class of each schedule of one kernel. A pair of two classes is shown where there is one."""
    knobs = {schedule: schedule_to_dict(schedule) for schedule in classes}
    return {knob: _effect(knob, knobs, classes) for knob in next(iter(knobs.values()), {})}


def _effect(knob: str, knobs: Mapping[Schedule, Mapping[str, Any]], classes: Mapping[Schedule, str]) -> Effect:
    alike: dict[tuple[Any, ...], list[Schedule]] = {}
    for schedule, values in knobs.items():
        alike.setdefault(tuple(v for k, v in values.items() if k != knob), []).append(schedule)
    groups = [group for group in alike.values() if len(group) > 1]
    if not groups:
        return Effect(NOT_VARIED)
    pairs = itertools.chain.from_iterable(itertools.combinations(group, 2) for group in groups)
    other = next(((a, b) for a, b in pairs if classes[a] != classes[b]), None)
    return Effect(YES, other) if other else Effect(NO, (groups[0][0], groups[0][1]))


def sizes(classes: Mapping[Schedule, str]) -> list[dict[str, Any]]:
    """The classes, the largest first: how many candidates, and for each knob the values that occur."""
    found: dict[str, list[dict[str, Any]]] = {}
    for schedule, digest in classes.items():
        found.setdefault(digest, []).append(schedule_to_dict(schedule))
    return [{"class": digest, "candidates": len(mine), "knobs": {k: sorted({s[k] for s in mine}, key=str) for k in mine[0]}}
            for digest, mine in sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))]


@dataclass(frozen=True)
class Request:
    """What to classify. model and recipe: the bundle's where None; schedules: a folder of promoted schedules, asked first; out:
    where a bundle that must be compiled anew is put."""

    bundle: Path
    model: str | None
    recipe: str | None
    kernels: tuple[str, ...]
    schedules: Path | None
    out: Path


@dataclass
class Classified:
    """The classes of a bundle or of a recorded run. recording: with each candidate's class, or what it failed; skipped: why a
    kernel was left out."""

    recording: Recording
    skipped: Mapping[str, str] = field(default_factory=dict)
    seconds: float | None = None


def classify(request: Request, machine: Machine, measurer: Measurer, watch: Callable[[str], None]) -> Classified:
    """The class of every accepted variant of a bundle on this GPU. A variant that dies costs itself alone.

    Raises:
        UserError: a bundle, recipe or GPU that is wrong or can't be used; GpuError where the first variants all die.
    """
    began = time.monotonic()
    report = read_report(request.bundle)
    model = load_model_shape(request.model).name if request.model else report["model"]
    recipe, target = load_recipe(request.recipe or report.get("recipe", "fp8-v1")), gpu_state.sku_of(machine)
    found = survivors.find_survivors(request.bundle, model, request.kernels, target, recipe, request.out)
    if found.differs:
        watch(f"{found.differs}: compiled here")
    folders = store.search_path(request.schedules)
    contests, skipped = survivors.contests(found, request.kernels, target, recipe, folders)
    now = Recording(model, target.name, recipe.name, found.toolchain, machine, 0, NO_WEIGHTS, None, contests)
    for kernel, contest in contests.items():
        problem = Problem(kernel, contest.shape, target.name, recipe.name, str(found.folder.absolute()))
        for name in sorted(contest.entrants, key=lambda n: n != contest.incumbent):
            contest.checked[name] = measurer.check(problem, name, contest.entrants[name].schedule)
            require_some_life(contest)
        watch(f"{kernel}: {len(set(classes_of(contest).values()))} classes, {len(contest.fit())} of {len(contest.entrants)} "
              "variants")
    if isinstance(measurer, GpuMeasurer):
        now.calls = measurer.calls
    return Classified(now, skipped, round(time.monotonic() - began, 1))


def of_recording(path: Path, kernels: Sequence[str]) -> Classified:
    """The classes that a run of --on-gpu recorded, of some kernels or all. Raises RecordingError."""
    now = recording.load(path)
    for name in kernels:
        if name not in now.contests:
            raise RecordingError(f"kernel {name!r}{nearest(name, now.contests)} is not in {path}",
                                 expected=f"one of {', '.join(now.contests)}")
    return Classified(replace(now, contests={k: c for k, c in now.contests.items() if not kernels or k in kernels}))


def classes_of(contest: Contest) -> dict[Schedule, str]:
    """The class of each candidate that has one."""
    return {contest.entrants[n].schedule: contest.checked[n].numerics_class or "" for n in contest.fit()}


def make_report(found: Classified, folders: Sequence[Path]) -> dict[str, Any]:
    """What was found, as JSON. passed: nothing was skipped, every recipe's schedule has a class, and every promoted row whose
    schedule is here has the class that it was promoted with. Raises ScheduleError: a file of promoted schedules is damaged."""
    now = found.recording
    listed = [_kernel(now, contest, folders) for contest in now.contests.values()]
    passed = bool(listed) and not found.skipped and all(
        k["class"] and all(row["verdict"] != DIFFERS for row in k["promoted"]) for k in listed)
    return {
        "schema": SCHEMA, "model": now.model, "target": now.target, "recipe": now.recipe, "passed": passed,
        "machine": {"gpu": now.machine.gpu, "driver": now.machine.driver, "cuda": now.machine.cuda},
        "toolchain": {"triton": now.toolchain.triton, "ptxas": now.toolchain.ptxas, "flags": dict(now.toolchain.flags)},
        "calls": dict(now.calls), "seconds": found.seconds, "skipped": dict(found.skipped), "kernels": listed,
    }


def _kernel(now: Recording, contest: Contest, folders: Sequence[Path]) -> dict[str, Any]:
    classes = classes_of(contest)
    in_place = contest.entrants[contest.incumbent].schedule
    return {
        "kernel": contest.kernel, "shape": shape_to_dict(contest.shape), "variants": len(classes), "origin": contest.origin,
        "schedule": schedule_to_dict(in_place), "class": classes.get(in_place), "classes": sizes(classes),
        "knobs": {knob: _as_dict(effect, classes) for knob, effect in changes_bits(classes).items()},
        "promoted": [_compared(row, classes) for row in _promoted(now, contest, folders)],
        "without_class": {n: f"{f.stage}: {f.detail}" for n in contest.checked if (f := contest.failure(n))},
    }


def _as_dict(effect: Effect, classes: Mapping[Schedule, str]) -> dict[str, Any]:
    return {"changes_bits": effect.says, "pair": [
        {"id": schedule_id(s), "schedule": schedule_to_dict(s), "class": classes[s]} for s in effect.pair or ()]}


def _promoted(now: Recording, contest: Contest, folders: Sequence[Path]) -> list[PromotedSchedule]:
    """The rows of this kernel and shape under this recipe on this SKU, made with whatever toolchain: one recipe, one class."""
    mine = (now.target, now.recipe, contest.kernel, contest.shape)
    return store.rows_like(folders, lambda r: (r.target, r.recipe, r.kernel, r.shape) == mine and not r.problems())


def _compared(row: PromotedSchedule, classes: Mapping[Schedule, str]) -> dict[str, Any]:
    found = classes.get(row.schedule)
    verdict = NOT_COMPUTED if found is None else SAME if found == row.numerics_class else DIFFERS
    return {"schedule_id": row.schedule_id, "date": row.date, "triton": row.toolchain.triton, "kernel_digest": row.kernel_digest,
            "class": row.numerics_class, "found": found, "verdict": verdict}
