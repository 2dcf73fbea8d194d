"""The checks of one candidate that need no decoder, and its numerics class. Runs in the worker on the GPU."""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ....schedules.promoted import Checks
from ....schedules.recipe import load_recipe
from ....schedules.schedule import HeadSchedule, MergeSchedule, Schedule
from ....shapes.target import load_sku
from ..samples.bytes import read_bytes
from ..samples.gate import Checked, Failure
from .cases import Beside, make_case
from .operands import SIZES, Case, Operands, Sizes, poisoned
from .process import at_work, install, judged
from .tasks import Answer, CheckTask, Problem

if TYPE_CHECKING:
    import torch

L2_TURNS = 3  # minimum total size of the large operands' copies, in L2 sizes
MAX_LAUNCHES = 256  # per graph
S = TypeVar("S")


def check(task: CheckTask) -> Answer[Checked]:
    """The checks of one candidate, cheapest first, up to the first failure."""
    def checks() -> Checked:
        return run_checks(usual_case(task.problem), wide_case(task.problem), task.schedule)

    return _from_bundle(task, checks)


def classify(task: CheckTask) -> Answer[Checked]:
    """The numerics class of one candidate, without checks."""
    return _from_bundle(task, lambda: Checked(numerics_class=numerics_class(wide_case(task.problem), task.schedule)))


def _from_bundle(task: CheckTask, checks: Callable[[], Checked]) -> Answer[Checked]:
    """The result of `checks` on a candidate from the bundle; a failure if its artefact is missing or isn't the inspected one, or
    if it breaks the kernel's contract."""
    from ....kernels.bundle import BundleError
    from ....kernels.operation import ContractError

    def checked() -> Checked:
        try:
            require_artefact(task.problem, task.schedule)
            install(task.problem.bundle)
            return checks()
        except (BundleError, ContractError) as e:
            return Checked(failure=Failure("launch", e.found))

    return at_work(task.words, checked, task.name)


def require_artefact(problem: Problem, schedule: Schedule) -> None:
    """Raises BundleError if a candidate's artefact is missing in the bundle, or isn't the inspected one."""
    from ....kernels import bundle, registry

    launch = registry.operation(problem.kernel).launch(problem.shape, schedule, load_recipe(problem.recipe).numerics)
    key = bundle.artefact_key(launch, load_sku(problem.target).capability)
    bundle.require_judged(bundle.read(Path(problem.bundle) / "artefacts" / key), key, judged(problem.bundle))


def copies_of(problem: Problem) -> int:
    """Copies of the large operands that together have L2_TURNS times the size of the L2; at most MAX_LAUNCHES."""
    size = read_bytes(problem.shape, load_recipe(problem.recipe).kv_chunk, problem.occupancies)
    copies = math.ceil(L2_TURNS * load_sku(problem.target).l2_bytes / size)
    return 2 * math.ceil(min(copies, MAX_LAUNCHES) / 2) if copies > 1 else 1  # even: two occupancies alternate


@lru_cache(maxsize=1)
def usual_case(problem: Problem) -> Case[Schedule]:
    """The case for one problem's checks and times, on the GPU. Only the last problem's is kept."""
    import torch

    torch.cuda.empty_cache()
    return case_of(problem, Operands("cuda", copies=copies_of(problem)))


@lru_cache(maxsize=1)
def wide_case(problem: Problem) -> Case[Schedule]:
    """The case for one problem's numerics classes, on the GPU. Only the last problem's is kept."""
    return case_of(problem, Operands("cuda", wide=True))


def case_of(problem: Problem, operands: Operands) -> Case[Schedule]:
    """The case of a problem, with its occupancies."""
    from ....kernels.registry import default_schedule

    recipe = load_recipe(problem.recipe)
    merge, lm_head = (default_schedule(recipe, kernel, load_sku(problem.target).arch) for kernel in ("merge", "lm_head"))
    assert isinstance(merge, MergeSchedule) and isinstance(lm_head, HeadSchedule)
    sizes = replace(operands.sizes, occupancies=problem.occupancies)
    return make_case(problem.kernel, problem.shape, recipe, replace(operands, sizes=sizes), Beside(merge, lm_head))


def run_checks(case: Case[S], wide: Case[S], schedule: S, sizes: Sizes = SIZES) -> Checked:
    """Checks: error against the reference with poisoned output, row invariance, determinism. Then the class. case: for the
    checks; wide: for the class."""
    rows = case.rows(schedule)
    with poisoned():
        whole = case.output(schedule, 0, rows)
    error, limit = case.error(whole), case.limit(schedule)
    checks = {"reference": Checks(1, int(error <= limit))}
    if not error <= limit:
        wrong = f"relative RMS error {error:.2e} against fp64, at most {limit:.0e} in this recipe"
        return Checked(checks, error, failure=Failure("reference", unwritten(whole) or wrong))
    with poisoned():
        differ = [what for what, found, right in _row_pairs(case, schedule, whole) if not same(found, right)]
        checks["rows"] = Checks(2 * rows - 1, 2 * rows - 1 - len(differ))
        if differ:
            return Checked(checks, error, failure=Failure("rows", f"bits differ: {', '.join(differ[:3])}"))
        again = [case.output(schedule, 0, rows) for _ in range(sizes.repeats)]
    differing = sum(not same(one, whole) for one in again)
    checks["determinism"] = Checks(sizes.repeats, sizes.repeats - differing)
    if differing:
        return Checked(checks, error, failure=Failure("determinism", f"{differing} of {sizes.repeats} runs gave other bits"))
    return Checked(checks, error, numerics_class(wide, schedule, sizes))


def _row_pairs(case: Case[S], schedule: S, whole: "torch.Tensor") -> "Iterator[tuple[str, torch.Tensor, torch.Tensor]]":
    for rows in range(1, len(whole)):
        yield f"{rows} rows of {len(whole)}", case.output(schedule, 0, rows), whole[:rows]
    for r in range(len(whole)):
        yield f"row {r} alone", case.output(schedule, r, 1), whole[r:r + 1]


def numerics_class(wide: Case[S], schedule: S, sizes: Sizes = SIZES) -> str:
    """SHA-256 of at least `class_outputs` outputs on `wide` operands."""
    import torch

    digest, count = hashlib.sha256(), 0
    with poisoned():
        for part in wide.bits(schedule):
            digest.update(part.contiguous().view(torch.uint8).cpu().numpy().tobytes())
            count += part.numel()
            if count >= sizes.class_outputs:
                break
    return digest.hexdigest()


def unwritten(output: "torch.Tensor") -> str:
    """A message on outputs that are still poison, or an empty string."""
    import torch

    poison = output.isnan() if output.is_floating_point() else output == torch.iinfo(output.dtype).max
    left = int(poison.sum())
    return f"{left} of {output.numel()} outputs were not written, or are NaN" if left else ""


def same(a: "torch.Tensor", b: "torch.Tensor") -> bool:
    """Whether two tensors are equal byte for byte: NaN equals itself, 0.0 differs from -0.0."""
    import torch

    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
