"""The checks of one candidate that need no decoder, and its numerics class. Runs in the worker on the GPU."""

import hashlib
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from ....schedules.promoted import Checks
from ....schedules.schedule import Schedule
from ....shapes.target import load_sku
from ..samples.gate import Checked, Failure
from .case import Case, bytes_of, same
from .cases import workload_of
from .operands import SIZES, Operands, Sizes, poisoned
from .own import StrayWrite
from .process import at_work, judged
from .tasks import Answer, CheckTask, Problem

L2_TURNS = 3  # minimum total size of the large operands' copies, in L2 sizes
MAX_LAUNCHES = 256  # per graph
S = TypeVar("S")


def check(task: CheckTask) -> Answer[Checked]:
    """The checks of one candidate, cheapest first, up to the first failure."""
    def checks() -> Checked:
        return run_checks(usual_case(task.problem), wide_case(task.problem), task.schedule, workload_of(task.problem).sizes)

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
            workload_of(task.problem).install()
            return checks()
        except (BundleError, ContractError, StrayWrite) as e:
            return Checked(failure=Failure("launch", e.found))

    return at_work(task.words, checked, task.name)


def require_artefact(problem: Problem, schedule: Schedule) -> None:
    """Raises BundleError if a candidate's artefact is missing in the bundle, or isn't the inspected one."""
    from ....kernels import bundle

    key = bundle.artefact_key(workload_of(problem).launch(schedule), load_sku(problem.target).capability)
    bundle.require_judged(bundle.read(Path(problem.bundle) / "artefacts" / key), key, judged(problem.bundle))


def copies_of(problem: Problem) -> int:
    """Copies of the large operands that together have L2_TURNS times the size of the L2; at most MAX_LAUNCHES."""
    copies = math.ceil(L2_TURNS * load_sku(problem.target).l2_bytes / workload_of(problem).read_bytes)
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
    """The case of a problem."""
    return workload_of(problem).case(operands)


def run_checks(case: Case[S], wide: Case[S], schedule: S, sizes: Sizes = SIZES) -> Checked:
    """Checks: error against the reference with poisoned output, row invariance, determinism. Then the class. case: for the
    checks; wide: for the class."""
    with poisoned():
        whole = case.whole(schedule)
    error, wrong = case.wrong(whole, schedule)
    checks = {"reference": Checks(1, int(not wrong))}
    if wrong:
        return Checked(checks, error, failure=Failure("reference", wrong))
    with poisoned():
        pairs = [(what, same(found, right)) for what, found, right in case.row_pairs(schedule, whole)]
        differ = [what for what, equal in pairs if not equal]
        if pairs:
            checks["rows"] = Checks(len(pairs), len(pairs) - len(differ))
        if differ:
            return Checked(checks, error, failure=Failure("rows", f"bits differ: {', '.join(differ[:3])}"))
        differing = sum(not same(case.whole(schedule), whole) for _ in range(sizes.repeats))
    checks["determinism"] = Checks(sizes.repeats, sizes.repeats - differing)
    if differing:
        return Checked(checks, error, failure=Failure("determinism", f"{differing} of {sizes.repeats} runs gave other bits"))
    return Checked(checks, error, numerics_class(wide, schedule, sizes))


def numerics_class(wide: Case[S], schedule: S, sizes: Sizes = SIZES) -> str:
    """SHA-256 of at least `class_outputs` outputs on `wide` operands."""
    digest, count = hashlib.sha256(), 0
    with poisoned():
        for part in wide.bits(schedule):
            digest.update(bytes_of(part).cpu().numpy().tobytes())
            count += part.numel()
            if count >= sizes.class_outputs:
                break
    return digest.hexdigest()
