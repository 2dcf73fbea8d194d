"""What an offline bundle brings to a GPU machine: the accepted variants of each kernel, checked against the toolchain here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...kernels import bundle, registry, toolchain
from ...schedules import store
from ...schedules.errors import NotPromoted
from ...schedules.promoted import Toolchain
from ...schedules.recipe import Recipe
from ...schedules.schedule import Schedule, schedule_from_dict
from ...shapes.fields import nearest
from ...shapes.model import shape_from_dict
from ...shapes.target import Target
from ..errors import ReportError, SpaceError
from ..offline.report import FACT_FIELDS, Report, read_report
from ..offline.sweep import Request, sweep
from .samples.recording import Contest, Entrant


@dataclass(frozen=True)
class Survivors:
    """folder: of the artefacts; report: what the offline run said; differs: why they were compiled anew, empty where not."""

    folder: Path
    report: Report
    toolchain: Toolchain
    differs: str = ""


def find_survivors(folder: Path, model: str, kernels: Sequence[str], target: Target, recipe: Recipe, out: Path,
                   schedules: Path | None = None) -> Survivors:
    """The bundle, or, where its toolchain or kernel sources aren't those of this machine, the same space compiled here.

    Raises:
        ReportError: no bundle. SpaceError: a bundle of another model or target, or without a kernel that was asked for.
    """
    report = read_report(folder)
    if report["model"] != model:
        raise SpaceError(f"{folder} is of {report['model']}", expected=f"a bundle of {model}",
                         action=f"tune-kernels --offline --model {model} --target {target.arch} --out {folder}")
    here = toolchain.installed(target, recipe.numerics)
    differs = difference(report, here, target)
    if differs:
        request = Request(model=model, targets=(target.arch,), kernels=tuple(kernels), space=report["space"], recipe=recipe.name,
                          out=out / "bundle", max_spill_bytes=report.get("max_spill_bytes", 0), schedules=schedules)
        report, folder = sweep(request), request.out
    mine = [v for v in report["variants"] if v["target"] == target.arch]
    if not mine:
        raise SpaceError(f"{folder} has nothing for {target.arch}", expected=f"variants for {target.name}",
                         action=f"tune-kernels --offline --model {model} --target {target.arch} --out {folder}")
    known = list(dict.fromkeys(v["kernel"] for v in mine if v["kernel"] in registry.TUNABLE))
    for name in kernels:
        if name not in known:
            raise SpaceError(f"kernel {name!r}{nearest(name, known)} is not in {folder}", expected=f"one of {', '.join(known)}")
    return Survivors(folder, report, here, differs)


def difference(report: Report, here: Toolchain, target: Target) -> str:
    """What of a bundle isn't as here, or an empty string."""
    made = report["toolchain"]
    flags = {k: v.get(target.arch) if isinstance(v, Mapping) else v for k, v in made.get("flags", {}).items()}
    ptxas = made.get("ptxas", {}).get(target.arch)
    for name, found, expected in (("Triton", made.get("triton"), here.triton), ("ptxas", ptxas, here.ptxas),
                                  ("flags", flags, dict(here.flags))):
        if found != expected:
            return f"the bundle was made with {name} {found}, here is {expected}"
    for variant in report["variants"]:
        name = variant["kernel"]
        if registry.known(name) and variant["kernel_digest"] != bundle.kernel_digest(registry.operation(name).kernel):
            return f"the source of {name} has changed since the bundle was made"
    return ""


def contests(found: Survivors, kernels: Sequence[str], target: Target, recipe: Recipe,
             folders: Sequence[Path]) -> tuple[dict[str, Contest], dict[str, str]]:
    """A contest for each kernel, and why there is none for others: their incumbent isn't among the survivors."""
    made: dict[str, Contest] = {}
    skipped: dict[str, str] = {}
    accepted = [v for v in found.report["variants"] if v["target"] == target.arch and v["verdict"] == "accepted"]
    for kernel in dict.fromkeys(v["kernel"] for v in accepted if v["kernel"] in registry.TUNABLE):
        if kernels and kernel not in kernels:
            continue
        mine = [v for v in accepted if v["kernel"] == kernel]
        contest = _contest(kernel, mine, target, recipe, folders)
        if contest.incumbent:
            made[kernel] = contest
        else:
            skipped[kernel] = (f"what is in place ({contest.origin}) is not among the {len(mine)} accepted variants of "
                               f"{found.folder}: add its knobs to the space and run tune-kernels --offline again")
    return made, skipped


def _contest(kernel: str, variants: Sequence[dict[str, Any]], target: Target, recipe: Recipe, folders: Sequence[Path]) -> Contest:
    shape = shape_from_dict(variants[0]["shape"], variants[0]["id"], ReportError)
    operation = registry.operation(kernel)
    entrants = {v["id"]: Entrant(v["id"], schedule_from_dict(operation.schedule_type, v["schedule"], v["id"]),
                                 {n: v.get(n) for n in ("instructions", *FACT_FIELDS)}) for v in variants}
    key = registry.store_key(kernel, shape, target, recipe)
    shared = False
    try:
        row = store.lookup(key, folders)
        in_place: Schedule = row.schedule
        origin, shared = "promoted", "agreement" in row.evidence.checks
    except NotPromoted:
        in_place, origin = registry.default_schedule(recipe, kernel, target.arch, shape), "recipe default"
    founded = founded_class(kernel, shape, target, recipe, folders)
    incumbent = next((n for n, e in entrants.items() if e.schedule == in_place), "")
    return Contest(kernel, shape, key.kernel_digest, entrants, incumbent, origin, founded, shared)


def founded_class(kernel: str, shape: Any, target: Target, recipe: Recipe, folders: Sequence[Path]) -> str | None:
    """The class that this recipe already has for a kernel and shape on a SKU, made with whatever toolchain; or None."""
    rows = store.rows_like(folders, lambda r: (r.target, r.recipe, r.kernel, r.shape) == (target.name, recipe.name, kernel, shape)
                           and not r.problems())
    return rows[0].numerics_class if rows else None
