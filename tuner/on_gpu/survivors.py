"""The accepted variants of an offline bundle, checked against the model and this machine's toolchain."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...kernels import bundle, registry, toolchain
from ...schedules import store
from ...schedules.errors import NotPromoted
from ...schedules.promoted import Toolchain
from ...schedules.recipe import Recipe
from ...shapes.fields import nearest
from ...shapes.model import KernelShape, ModelShape
from ...shapes.target import Target
from ..errors import ReportError, SpaceError
from ..offline.report import Report, Variant, read_report
from ..offline.sweep import SweepRequest, sweep
from .samples.recording import Contest, Entrant, Origin


@dataclass(frozen=True)
class Conditions:
    """The conditions that survivors must meet. model: as load_model_shape takes it. shape: None accepts the bundle's. folders: of
    promoted schedules, in search order."""

    model: str
    shape: ModelShape | None
    target: Target
    recipe: Recipe
    folders: Sequence[Path] = ()


@dataclass(frozen=True)
class Survivors:
    """folder: of the artefacts. report: of the offline run. differs: the reason why they were compiled here, empty if they
    weren't."""

    folder: Path
    report: Report
    toolchain: Toolchain
    differs: str = ""


def find_survivors(folder: Path, wanted: Conditions, kernels: Sequence[str], out: Path,
                   schedules: Path | None = None) -> Survivors:
    """The bundle. If its toolchain or kernel sources differ from this machine's: the same space compiled into out/bundle.

    Raises:
        ReportError: no bundle. SpaceError: a bundle of another model or target, or without a requested kernel.
    """
    report, target, recipe = read_report(folder), wanted.target, wanted.recipe
    again = f"tune-kernels --offline --model {wanted.model} --target {target.arch} --out {folder}"
    if other := other_model(report, wanted):
        raise SpaceError(f"{folder} is of {report.model}: {other}", expected=f"a bundle of {wanted.model}", action=again)
    here = toolchain.installed(target, recipe.numerics)
    differs = difference(report, here, target)
    if differs:
        request = SweepRequest(model=wanted.model, targets=(target.arch,), kernels=tuple(kernels), space=report.space,
                               recipe=recipe.name, out=out / "bundle", max_spill_bytes=report.max_spill_bytes,
                               schedules=schedules)
        report, folder = sweep(request), request.out
    mine = [v for v in report.variants if v.target == target.arch]
    if not mine:
        raise SpaceError(f"{folder} has nothing for {target.arch}", expected=f"variants for {target.name}", action=again)
    known = list(dict.fromkeys(v.kernel for v in mine if v.kernel in registry.TUNABLE))
    for name in kernels:
        if name not in known:
            raise SpaceError(f"kernel {name!r}{nearest(name, known)} is not in {folder}", expected=f"one of {', '.join(known)}")
    return Survivors(folder, report, here, differs)


def other_model(report: Report, wanted: Conditions) -> str:
    """The first kernel of a bundle with another shape than the model's, in words, or an empty string. Names aren't compared."""
    if wanted.shape is None or wanted.shape.digest == report.model_digest:
        return ""
    expected = wanted.shape.kernel_shapes(wanted.recipe.linear_dtype, wanted.recipe.terms)
    for variant in report.variants:
        if variant.kernel in registry.TUNABLE and variant.shape != expected.get(variant.kernel):
            return f"{variant.kernel} is {variant.shape}, not {expected.get(variant.kernel)}"
    return ""


def difference(report: Report, here: Toolchain, target: Target) -> str:
    """The difference between a bundle's and this machine's toolchain or sources, in words, or an empty string."""
    made = report.toolchain.on(target.arch)
    for name, found, expected in (("Triton", made.triton, here.triton), ("ptxas", made.ptxas, here.ptxas),
                                  ("flags", dict(made.flags), dict(here.flags))):
        if found != expected:
            return f"the bundle was made with {name} {found}, this machine has {expected}"
    for variant in report.variants:
        name = variant.kernel
        if registry.known(name) and variant.kernel_digest != bundle.kernel_digest(registry.operation(name).kernel):
            return f"the source of {name} has changed since the bundle was made"
    return ""


def contests(found: Survivors, kernels: Sequence[str], wanted: Conditions) -> tuple[dict[str, Contest], dict[str, str]]:
    """(contest by kernel, reason by kernel without one: its incumbent isn't among the survivors)."""
    made: dict[str, Contest] = {}
    skipped: dict[str, str] = {}
    accepted = [v for v in found.report.variants if v.target == wanted.target.arch and v.accepted]
    for kernel in dict.fromkeys(v.kernel for v in accepted if v.kernel in registry.TUNABLE):
        if kernels and kernel not in kernels:
            continue
        mine = [v for v in accepted if v.kernel == kernel]
        contest = _contest(kernel, mine, wanted)
        if contest.incumbent:
            made[kernel] = contest
        else:
            skipped[kernel] = (f"the schedule in place ({contest.origin}) is not among the {len(mine)} accepted variants of "
                               f"{found.folder}: add its knobs to the space and run tune-kernels --offline again")
    return made, skipped


def _contest(kernel: str, variants: Sequence[Variant], wanted: Conditions) -> Contest:
    shape = variants[0].shape
    entrants = {v.id: _entrant(kernel, v) for v in variants}
    key = registry.store_key(kernel, shape, wanted.target, wanted.recipe)
    origin: Origin = "recipe default"
    shared = False
    try:
        row = store.lookup(key, wanted.folders)
        in_place, origin, shared = row.schedule, "promoted", "agreement" in row.evidence.checks
    except NotPromoted:
        in_place = registry.default_schedule(wanted.recipe, kernel, wanted.target.arch, shape)
    incumbent = next((n for n, e in entrants.items() if e.schedule == in_place), "")
    return Contest(kernel, shape, key.kernel_digest, entrants, incumbent, origin, founded_class(kernel, shape, wanted), shared)


def _entrant(kernel: str, variant: Variant) -> Entrant:
    """Raises ReportError for an edited entry: another kernel's schedule, or accepted without facts."""
    if variant.facts is None or not isinstance(variant.schedule, registry.operation(kernel).schedule_type):
        raise ReportError(f"{variant.id}: not an accepted variant of {kernel}", expected="as tune-kernels --offline wrote it")
    return Entrant(variant.id, variant.schedule, variant.facts)


def founded_class(kernel: str, shape: KernelShape, wanted: Conditions) -> str | None:
    """The numerics class of promoted rows for this kernel, shape, recipe and SKU, of any toolchain, or None."""
    mine = (wanted.target.name, wanted.recipe.name, kernel, shape)
    rows = store.rows_like(wanted.folders, lambda r: (r.target, r.recipe, r.kernel, r.shape) == mine and not r.problems())
    return rows[0].numerics_class if rows else None
