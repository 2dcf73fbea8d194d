"""The accepted variants of an offline bundle, checked against the model and this machine's toolchain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...kernels import bundle, registry, toolchain
from ...schedules import store
from ...schedules.errors import NotPromoted
from ...schedules.promoted import Toolchain
from ...schedules.recipe import Recipe
from ...schedules.store import Key
from ...shapes.fields import nearest
from ...shapes.model import KernelShape, ModelShape
from ...shapes.target import Target
from ..errors import ReportError, SpaceError
from ..offline.own import OwnKernel
from ..offline.report import Report, Variant, read_report
from ..offline.sweep import SweepRequest, sweep
from .samples.recording import Contest, Entrant, Origin, schedule_type


@dataclass(frozen=True)
class Conditions:
    """The conditions that survivors must meet. model: as load_model_shape takes it. shape: None accepts the bundle's. folders: of
    promoted schedules, in search order. own: kernels of one's own by name; then the run is of these alone."""

    model: str
    shape: ModelShape | None
    target: Target
    recipe: Recipe
    folders: Sequence[Path] = ()
    own: Mapping[str, OwnKernel] = field(default_factory=dict)

    def tunes(self, kernel: str) -> bool:
        """Whether a run may tune a kernel of this name."""
        return kernel in self.own if self.own else kernel in registry.TUNABLE

    def digest(self, kernel: str) -> str | None:
        """Of a kernel's source here; None for an unknown kernel."""
        if kernel in self.own:
            return self.own[kernel].digest
        return bundle.kernel_digest(registry.operation(kernel).kernel) if registry.known(kernel) else None

    def command(self, folder: Path) -> str:
        """The command that makes a bundle for these."""
        what = [f"--kernel {k.source.place}" for k in self.own.values()] or [f"--model {self.model}"]
        return f"tune-kernels --offline {' '.join(dict.fromkeys(what))} --target {self.target.arch} --out {folder}"


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
    again = wanted.command(folder)
    if other := other_model(report, wanted):
        raise SpaceError(f"{folder} is of {report.model}: {other}", expected=f"a bundle of {wanted.model}", action=again)
    here = toolchain.installed(target, recipe.numerics)
    differs = difference(report, here, wanted)
    if differs:
        request = SweepRequest(targets=(target.arch,), kernels=tuple(kernels), space=report.space, out=out / "bundle",
                               max_spill_bytes=report.max_spill_bytes, schedules=schedules)
        if not wanted.own:
            request = replace(request, model=wanted.model, recipe=recipe.name)
        report, folder = sweep(request), request.out
    mine = [v for v in report.variants if v.target == target.arch]
    if not mine:
        raise SpaceError(f"{folder} has nothing for {target.arch}", expected=f"variants for {target.name}", action=again)
    known = list(dict.fromkeys(v.kernel for v in mine if wanted.tunes(v.kernel)))
    for name in wanted.own or kernels:
        if name not in known:
            raise SpaceError(f"kernel {name!r}{nearest(name, known)} is not in {folder}",
                             expected=f"one of {', '.join(known) or 'none'}", action=again)
    return Survivors(folder, report, here, differs)


def other_model(report: Report, wanted: Conditions) -> str:
    """The first kernel of a bundle with another shape than the model's, in words, or an empty string. Names aren't compared."""
    if wanted.own or wanted.shape is None or wanted.shape.digest == report.model_digest:
        return ""
    expected = wanted.shape.kernel_shapes(wanted.recipe.linear_dtype, wanted.recipe.terms)
    for variant in report.variants:
        if variant.kernel in registry.TUNABLE and variant.shape != expected.get(variant.kernel):
            return f"{variant.kernel} is {variant.shape}, not {expected.get(variant.kernel)}"
    return ""


def difference(report: Report, here: Toolchain, wanted: Conditions) -> str:
    """The difference between a bundle's and this machine's toolchain or sources, in words, or an empty string."""
    made = report.toolchain.on(wanted.target.arch)
    flags = [] if wanted.own else [("flags", dict(made.flags), dict(here.flags))]  # a recipe's; knobs of one's own have theirs
    for name, found, expected in (("Triton", made.triton, here.triton), ("ptxas", made.ptxas, here.ptxas), *flags):
        if found != expected:
            return f"the bundle was made with {name} {found}, this machine has {expected}"
    for variant in report.variants:
        if variant.kernel_digest != (wanted.digest(variant.kernel) or variant.kernel_digest):
            return f"the source of {variant.kernel} has changed since the bundle was made"
    return ""


def contests(found: Survivors, kernels: Sequence[str], wanted: Conditions) -> tuple[dict[str, Contest], dict[str, str]]:
    """(contest by name, reason by name without one: its incumbent isn't among the survivors)."""
    made: dict[str, Contest] = {}
    skipped: dict[str, str] = {}
    accepted = [v for v in found.report.variants if v.target == wanted.target.arch and v.accepted]
    asked = wanted.own or kernels
    for kernel, shape in dict.fromkeys((v.kernel, v.shape) for v in accepted if wanted.tunes(v.kernel)):
        if asked and kernel not in asked:
            continue
        mine = [v for v in accepted if (v.kernel, v.shape) == (kernel, shape)]
        contest = _contest(kernel, shape, mine, wanted)
        if contest.incumbent:
            made[contest.name] = contest
        else:
            skipped[contest.name] = (
                f"the schedule in place ({contest.origin}) is not among the {len(mine)} accepted variants of {found.folder}: "
                "add its knobs to the space and run tune-kernels --offline again")
    return made, skipped


def _contest(kernel: str, shape: KernelShape, variants: Sequence[Variant], wanted: Conditions) -> Contest:
    entrants = {v.id: _entrant(v) for v in variants}
    key = Key(wanted.target.name, wanted.recipe.name, kernel, shape, toolchain.installed(wanted.target, wanted.recipe.numerics),
              wanted.digest(kernel) or "")
    origin: Origin = "recipe default"
    shared = False
    try:
        row = store.lookup(key, wanted.folders)
        in_place, origin, shared = row.schedule, "promoted", "agreement" in row.evidence.checks
    except NotPromoted:
        if wanted.own:  # variants are in the order of the knobs or configs: the first is what a launch without tuning has
            in_place, origin = variants[0].schedule, "first accepted"
        else:
            in_place = registry.default_schedule(wanted.recipe, kernel, wanted.target.arch, shape)
    incumbent = next((n for n, e in entrants.items() if e.schedule == in_place), "")
    return Contest(kernel, shape, key.kernel_digest, entrants, incumbent, origin, founded_class(kernel, shape, wanted), shared)


def _entrant(variant: Variant) -> Entrant:
    """Raises ReportError for an edited entry: another kernel's schedule, or accepted without facts."""
    if variant.facts is None or not isinstance(variant.schedule, schedule_type(variant.kernel, variant.shape)):
        raise ReportError(f"{variant.id}: not an accepted variant of {variant.kernel}",
                          expected="as tune-kernels --offline wrote it")
    return Entrant(variant.id, variant.schedule, variant.facts)


def founded_class(kernel: str, shape: KernelShape, wanted: Conditions) -> str | None:
    """The numerics class of promoted rows for this kernel, shape, recipe and SKU, of any toolchain, or None."""
    mine = (wanted.target.name, wanted.recipe.name, kernel, shape)
    source = wanted.digest(kernel) if wanted.own else None  # of one's own, which may mean other bits once it is edited
    rows = store.rows_like(wanted.folders, lambda r: (r.target, r.recipe, r.kernel, r.shape) == mine and not r.problems()
                           and source in (None, r.kernel_digest))
    return rows[0].numerics_class if rows else None
