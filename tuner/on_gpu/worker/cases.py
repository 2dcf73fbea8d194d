"""Everything that a run asks of a kernel, in the worker: `Workload`. One for kernels of the decode step, one for one's own."""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from ....kernels import bundle, loading, registry
from ....kernels.operation import Launch
from ....schedules.recipe import OWN, Recipe, load_recipe
from ....schedules.schedule import HeadSchedule, MergeSchedule, OwnSchedule, Schedule
from ....shapes.model import AttentionShape, CertifiedHeadShape, HeadShape, KernelShape, LinearShape, MergeShape
from ....shapes.own import OwnShape
from ....shapes.target import load_sku
from ...offline import own
from ...offline.own import OwnKernel
from ..samples.bytes import read_bytes
from .attention import AttentionCase, MergeCase
from .case import Case
from .heads import CertifiedCase, HeadCase
from .linears import LinearCase
from .operands import SIZES, Operands, Sizes
from .own import OwnCase, launch_bytes, require_checkable
from .process import at_work, install, install_own
from .tasks import Answer, Problem

OWN_REPEATS = 32  # of a kernel whose order of sums nobody has looked at


class Workload(Protocol):
    """One kernel on one shape."""

    @property
    def read_bytes(self) -> float:
        """Bytes that one launch must read, as it is timed."""

    @property
    def bandwidth_bound(self) -> bool:
        """Whether these bytes tell the time of a launch, to the order of magnitude."""

    @property
    def sizes(self) -> Sizes:
        """Sizes of the checks."""

    def launch(self, schedule: Any) -> Launch:
        """The launch, as it was compiled offline."""

    def install(self) -> None:
        """From now on launches come from the bundle."""

    def case(self, make: Operands) -> Case[Any]:
        """The kernel on operands."""


@lru_cache(maxsize=4)
def workload_of(problem: Problem) -> Workload:
    """Raises KernelError: a kernel of one's own whose file can't be imported or has changed."""
    if problem.source is None:
        return StepWorkload(problem)
    return OwnWorkload(problem, problem.source)


@dataclass(frozen=True)
class DescribeTask:
    """A user's file or module to describe. words: as in CheckTask."""

    source: loading.Source
    words: str


def describe(task: DescribeTask) -> Answer[tuple[OwnKernel, ...]]:
    """Its kernels. Raises KernelError where one can't be checked."""
    def described() -> tuple[OwnKernel, ...]:
        found = own.describe(task.source)
        for kernel in found:
            require_checkable(loading.load(kernel.source))
        return found

    return at_work(task.words, described)


@dataclass(frozen=True)
class StepWorkload:
    """A kernel of the decode step, under a recipe."""

    problem: Problem

    @property
    def recipe(self) -> Recipe:
        return load_recipe(self.problem.recipe)

    @property
    def read_bytes(self) -> float:
        return read_bytes(self.problem.shape, self.recipe.kv_chunk, self.problem.occupancies)

    @property
    def bandwidth_bound(self) -> bool:
        return True

    @property
    def sizes(self) -> Sizes:
        return replace(SIZES, occupancies=self.problem.occupancies)

    def launch(self, schedule: Schedule) -> Launch:
        return registry.operation(self.problem.kernel).launch(self.problem.shape, schedule, self.recipe.numerics)

    def install(self) -> None:
        install(self.problem.bundle)

    def case(self, make: Operands) -> Case[Any]:
        arch = load_sku(self.problem.target).arch
        merge, lm_head = (registry.default_schedule(self.recipe, kernel, arch) for kernel in ("merge", "lm_head"))
        assert isinstance(merge, MergeSchedule) and isinstance(lm_head, HeadSchedule)
        beside = Beside(merge, lm_head)
        return make_case(self.problem.kernel, self.problem.shape, self.recipe, replace(make, sizes=self.sizes), beside)


@dataclass(frozen=True)
class OwnWorkload:
    """A kernel from a user's file."""

    problem: Problem
    source: loading.Source

    @property
    def shape(self) -> OwnShape:
        assert isinstance(self.problem.shape, OwnShape)
        return self.problem.shape

    @property
    def read_bytes(self) -> float:
        return launch_bytes(loading.load(self.source), self.shape)

    @property
    def bandwidth_bound(self) -> bool:
        return False

    @property
    def sizes(self) -> Sizes:
        return replace(SIZES, repeats=OWN_REPEATS)

    def launch(self, schedule: OwnSchedule, shape: OwnShape | None = None) -> Launch:
        return loading.load(self.source).operation.launch(shape or self.shape, schedule, OWN.numerics)

    def install(self) -> None:
        install_own(loading.load(self.source).jitted, self.problem.bundle)

    def case(self, make: Operands) -> Case[Any]:
        return OwnCase(loading.load(self.source), self.shape, make, self._at_hand)

    def _at_hand(self, shape: OwnShape, schedule: OwnSchedule) -> bool:
        """Whether the bundle has an artefact of another shape."""
        if loading.load(self.source).operation.contract(shape, schedule):
            return False
        key = bundle.artefact_key(self.launch(schedule, shape), load_sku(self.problem.target).capability)
        return (Path(self.problem.bundle) / "artefacts" / key).is_dir()


@dataclass(frozen=True)
class Beside:
    """The recipe's schedules of kernels that others are launched with: merge with attention, lm_head with the certified head."""

    merge: MergeSchedule
    lm_head: HeadSchedule


def make_case(kernel: str, shape: KernelShape, recipe: Recipe, make: Operands, beside: Beside) -> Case[Any]:
    """The case of one kernel of the step. beside: of the recipe."""
    if isinstance(shape, LinearShape):
        return LinearCase(shape, recipe, make)
    if isinstance(shape, HeadShape):
        return HeadCase(shape, recipe, make, logits=kernel == "lm_head_logits")
    if isinstance(shape, CertifiedHeadShape):
        return CertifiedCase(shape, recipe, make, beside.lm_head)
    if isinstance(shape, AttentionShape):
        return AttentionCase(shape, recipe, make, beside.merge)
    assert isinstance(shape, MergeShape), f"{kernel} isn't tuned"
    return MergeCase(shape, recipe, make)
