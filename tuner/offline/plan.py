"""From candidates to compilations. A user's are planned in workers, where its code may run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ...kernels import registry
from ...kernels.arguments import KernelError
from ...kernels.bundle import kernel_digest
from ...kernels.loading import Source
from ...schedules.recipe import Numerics
from ...schedules.schedule import OwnSchedule
from ...shapes.fields import nearest
from ...shapes.own import Frozen, OwnShape
from ...shapes.target import Target
from .. import pool
from . import compile as compilation
from .compile import Task
from .own import OwnKernel, describe, in_a_worker
from .space import Candidate, Space, own_schedules, reject, whole

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 200  # candidates of a user's kernel in one task of a worker


@dataclass(frozen=True)
class Planned:
    """A candidate and its compilation. task: None if a rule has rejected it already."""

    candidate: Candidate
    digest: str
    task: Task | None


@dataclass(frozen=True)
class Share:
    """Schedules of a user's kernel in one shape, for a worker to plan. numerics: of the sweep; a user's kernel has its own."""

    kernel: OwnKernel
    shape: OwnShape
    schedules: tuple[OwnSchedule, ...]
    target: Target
    numerics: Numerics
    folder: Path


def plan(candidate: Candidate, numerics: Numerics, folder: Path) -> Planned:
    """No task for a candidate that a rule rejects, except the audited sample of those that need too much shared memory."""
    digest = kernel_digest(registry.operation(candidate.kernel, candidate.source).kernel)
    if candidate.problem and candidate.code == "contract":
        return Planned(candidate, digest, None)
    task = compilation.make_task(candidate.kernel, candidate.target.arch, candidate.shape, candidate.schedule, numerics, folder,
                                 candidate.source)
    if candidate.problem and not compilation.audited(task.key):
        return Planned(candidate, digest, None)
    return Planned(candidate, digest, task)


def plan_share(share: Share) -> list[Planned]:
    """Runs in a worker. What the user's functions raise is a candidate's problem."""
    with in_a_worker():
        return [_planned(share, schedule) for schedule in share.schedules]


def _planned(share: Share, schedule: OwnSchedule) -> Planned:
    kernel = share.kernel
    candidate = Candidate(kernel.name, share.shape, schedule, share.target, source=kernel.source)
    try:
        return plan(reject(candidate), share.numerics, share.folder)
    except (Exception, SystemExit) as e:  # of a function that raises now and then, or of Triton on an odd value
        return Planned(replace(candidate, problem=f"{type(e).__name__}: {e}"[:400]), kernel.digest, None)


@dataclass(frozen=True)
class Workers:
    """How a sweep's processes are made. executor: `module:callable` of another one than the local; jobs: None for one per core;
    timeout: processor seconds of one task; out: the sweep's folder."""

    executor: str | None
    jobs: int | None
    timeout: float
    out: Path

    def run(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[T, "R | pool.Died"]]:
        """As pool.run, in processes that are made for these tasks and end with them."""
        if not tasks:
            return
        jobs = self.jobs or pool.default_jobs()
        limits = pool.Limits(cpu_seconds=self.timeout)
        with pool.scratch_folder(self.out) as scratch:
            executor = pool.make_executor(self.executor, min(jobs, len(tasks)), scratch, limits)
            try:
                yield from pool.run(executor, function, tasks, in_flight=3 * jobs)
            except BaseException:
                executor.shutdown(wait=True, cancel_futures=True)
                raise
            executor.shutdown(wait=True)


def own_kernels(sources: Sequence[Source], sized: Sequence[Mapping[str, str]], workers: Workers) -> dict[str, OwnKernel]:
    """A user's kernels by name, each file read in a process of its own. sized: sizes that stand for the described ones.

    Raises KernelError for an import that fails, hangs or kills its process, a name that is taken, a size that a kernel lacks.
    """
    found: dict[str, OwnKernel] = {}
    for source in sources:
        for _, result in workers.run(describe, [source]):
            if isinstance(result, pool.Died):
                raise KernelError(f"{source.place}: the import failed: {result.detail}", expected="a file that Python imports")
            for kernel in result:
                known = found.setdefault(kernel.name, kernel)
                if known.source != kernel.source or registry.known(kernel.name):
                    other = "a built-in kernel" if registry.known(kernel.name) else f"a kernel of {known.source.place}"
                    raise KernelError(f"{source.place}: {kernel.name} is the name of {other}",
                                      expected="a name of its own: Kernel(..., name=...)")
    return {name: replace(kernel, shapes=_resized(kernel, sized)) if sized else kernel for name, kernel in found.items()}


def _resized(kernel: OwnKernel, sized: Sequence[Mapping[str, str]]) -> tuple[OwnShape, ...]:
    found: dict[OwnShape, None] = {}
    for sizes in sized:
        for shape in kernel.shapes:
            for name in sizes:
                if name not in shape.dims:
                    raise KernelError(f"{kernel.name} has no {name}{nearest(name, shape.dims)}",
                                      expected=f"one of {', '.join(shape.dims)}")
            found[OwnShape(Frozen({**shape.dims, **{n: whole(n, v, kernel.name) for n, v in sizes.items()}}))] = None
    return tuple(found)


def plan_own(own: Mapping[str, OwnKernel], space: Space, targets: Sequence[Target], numerics: Numerics,
             workers: Workers) -> list[Planned]:
    """Every candidate of the user's kernels. Contract, grid, heuristics and functions in arguments run in workers."""
    shares = [Share(kernel, shape, tuple(mine[i : i + AT_ONCE]), target, numerics, workers.out)
              for target in targets for kernel in own.values() for mine in [own_schedules(space, kernel, target.arch)]
              for shape in kernel.shapes for i in range(0, len(mine), AT_ONCE)]
    found: dict[int, list[Planned]] = {}
    for place in dict.fromkeys(share.kernel.source.place for share in shares):
        mine = [(i, share) for i, share in enumerate(shares) if share.kernel.source.place == place]
        for (i, share), result in workers.run(_plan_numbered, mine):
            found[i] = _unplanned(share, result.detail) if isinstance(result, pool.Died) else result
    return [planned for i in sorted(found) for planned in found[i]]


def _plan_numbered(numbered: tuple[int, Share]) -> list[Planned]:
    return plan_share(numbered[1])


def _unplanned(share: Share, detail: str) -> list[Planned]:
    """All of a share whose worker died."""
    problem = f"its contract, grid or arguments, asked for {len(share.schedules)} schedules at once: {detail}"
    return [Planned(Candidate(share.kernel.name, share.shape, schedule, share.target, problem, source=share.kernel.source),
                    share.kernel.digest, None) for schedule in share.schedules]
