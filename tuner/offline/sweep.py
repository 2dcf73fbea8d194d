"""The offline sweep: space → compile → inspect → report, without a GPU: `tune-kernels --offline`. From Python:

    from pathlib import Path
    from tune_kernels.tuner.offline.sweep import SweepRequest, sweep

    if __name__ == "__main__":  # workers import this file
        report = sweep(SweepRequest(targets=("sm_90",), kernels=("down",), out=Path("build/down")))
        print(report.counts)
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...kernels import toolchain
from ...kernels.findings import FINDINGS
from ...kernels.loading import Source, is_own, source_of
from ...schedules import store
from ...schedules.errors import ScheduleError
from ...schedules.promoted import Artefact
from ...schedules.recipe import OWN, Numerics, Recipe, load_recipe, recipe_names
from ...schedules.schedule import schedule_to_dict
from ...shapes.fields import nearest
from ...shapes.model import ModelShape, dims_of, load_model_shape, shape_to_dict
from ...shapes.target import ARCHES, Target, load_arch, targets_named
from .. import pool
from ..errors import SpaceError, cannot_write
from . import compile as compilation
from .compile import Task
from .inspection import Verdict, verdict_on
from .plan import Planned, Workers, own_kernels, plan, plan_own
from .record import Reason, Record, read_record, record_path, write_json, write_text
from .report import Audit, Counts, Report, Toolchains, Variant
from .space import Space, Subject, candidates, load_space, shipped_names, sizes_in, with_fixed, with_those_in_place

# 0.2 to 1 s per compilation: started first, or one worker would finish long after the others.
SLOWEST = ("attention", "merge", "prefill_attention", "prefill_linear", "prefill_narrow")


@dataclass(frozen=True)
class SweepRequest:
    """One sweep. targets, kernels: all if empty. jobs: worker processes; None: one per core, memory allowing. max_spill_bytes:
    accepted spills per thread. schedules: the first folder in the search for promoted schedules. kernels: names, and files or
    modules of a user's. shapes: sizes in the place of the model's, as `N=4608,K=3584`. tp: GPUs that share the model. timeout:
    processor seconds of one variant."""

    model: str = "qwen2.5-7b"
    targets: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    space: str = "default"
    recipe: str = "fp8-v1"
    jobs: int | None = None
    out: Path = Path("build/offline")
    fresh: bool = False
    max_spill_bytes: int = 0
    executor: str | None = None
    schedules: Path | None = None
    shapes: tuple[str, ...] = ()
    tp: int = 1
    timeout: float = pool.CPU_SECONDS


@dataclass
class Progress:
    """Progress of a sweep: variants to compile, compiled, and their verdicts."""

    total: int = 0
    done: int = 0
    accepted: int = 0
    rejected: int = 0


def sweep(request: SweepRequest, watch: Callable[[Progress], None] = lambda progress: None) -> Report:
    """Compile and judge every candidate. Writes `report.json` and `report.html`, and returns the report.

    Raises:
        UserError: an unusable model, target, kernel, space, recipe, toolchain or folder.
        KeyboardInterrupt: stopped. Finished work is kept: the same call continues it.
    """
    started = time.perf_counter()
    asked = _asked(request)
    toolchain.check(asked.targets, asked.numerics)
    out = _prepare(request.out, request.fresh)
    workers = Workers(request.executor, request.jobs, request.timeout, out)
    own = own_kernels(asked.sources, asked.sized, workers)
    space = load_space(request.space, own)
    plan = _plan_built_in(request, asked, space, out) if asked.built_in else []
    plan += plan_own(own, space, asked.targets, asked.numerics, workers)
    records, cached = _records(plan, request, workers, watch)
    variants = tuple(_variant(p, records, request.max_spill_bytes) for p in plan)
    made = {t.arch: toolchain.installed(t, asked.numerics) for t in asked.targets}
    model = asked.model if asked.built_in else None
    report = Report(
        model=model.name if model else ", ".join(own), model_digest=model.digest if model else None, targets=tuple(made),
        space=space.name if model or request.space not in shipped_names() else OWN.name,
        recipe=request.recipe if model else OWN.name,
        max_spill_bytes=request.max_spill_bytes, toolchain=Toolchains.of(made, toolchain.release(toolchain.nvdisasm_path())),
        counts=_counts(plan, variants, cached), audit=_audit(plan, variants, records), variants=variants,
        seconds=round(time.perf_counter() - started, 2), sources={name: kernel.source for name, kernel in own.items()})
    _write(out, report)
    return report


@dataclass(frozen=True)
class _Asked:
    """The request's words as values. built_in: whether kernels of the model are asked for; sources: of the user's kernels."""

    model: ModelShape
    recipe: Recipe
    targets: list[Target]
    names: list[str]
    sources: list[Source]
    sized: list[dict[str, str]]

    @property
    def built_in(self) -> bool:
        return bool(self.names or not self.sources)

    @property
    def numerics(self) -> Numerics:
        return self.recipe.numerics if self.built_in else OWN.numerics


def _asked(request: SweepRequest) -> _Asked:
    """Raises UserError."""
    arches = dict.fromkeys(targets_named(word)[0].arch for word in request.targets or ARCHES)
    words = [word for word in request.kernels if is_own(word)]
    asked = _Asked(load_model_shape(request.model).shared_by(request.tp), load_recipe(request.recipe),
                   [load_arch(arch) for arch in arches], [word for word in request.kernels if word not in words],
                   [source_of(word) for word in dict.fromkeys(words)], [sizes_in(word) for word in request.shapes])
    if asked.built_in and not asked.recipe.defaults:
        raise ScheduleError(f"recipe {asked.recipe.name} has no default schedules", expected="a recipe for kernels",
                            action="choose one of " + ", ".join(n for n in recipe_names() if load_recipe(n).defaults))
    return asked


def _plan_built_in(request: SweepRequest, asked: _Asked, space: Space, out: Path) -> list[Planned]:
    """The model's kernels. Raises SpaceError, ScheduleError."""
    kernels = _kernels(asked, space)
    subject = Subject(asked.model, asked.recipe, kernels, asked.targets, asked.sized)
    found = candidates(space, subject)
    if request.space in shipped_names():
        found = with_those_in_place(found, subject, store.search_path(request.schedules))
    found = found if asked.sized else with_fixed(found, subject)  # the fixed kernels' shapes are the model's
    return [plan(candidate, asked.recipe.numerics, out) for candidate in found]


def _records(plan: list[Planned], request: SweepRequest, workers: Workers,
             watch: Callable[[Progress], None]) -> tuple[dict[str, Record], set[str]]:
    """(record by key of each task, keys of the records that an earlier run left)."""
    tasks = {p.task.record_key: p.task for p in plan if p.task}
    known = {key: record for key in tasks if (record := read_record(workers.out, record_path(workers.out, key))) is not None}
    missing = sorted((t for k, t in tasks.items() if k not in known), key=lambda t: t.kernel not in SLOWEST)
    return known | _compile(missing, request, workers, watch, Progress(total=len(missing))), set(known)


def _kernels(asked: _Asked, space: Space) -> list[str]:
    """The requested kernels. Without a request: the findings that the space names, and all of the model's if it names any of
    those; with sizes, those that have them."""
    own = asked.model.kernel_shapes()
    known = [*own, *FINDINGS]
    for name in asked.names:
        if name not in known:
            raise SpaceError(f"unknown kernel {name!r}{nearest(name, known)} in {asked.model.name}",
                             expected=f"one of {', '.join(known)}, or FILE.py[:NAME] of your own")
    if asked.names:
        return [kernel for kernel in known if kernel in asked.names]
    named = {kernel for grid in space.grids for kernel in grid.kernels}
    found = [kernel for kernel in known if kernel in named or (kernel in own and named & {*own})]
    sizes = {name for words in asked.sized for name in words}
    return [kernel for kernel in found if sizes <= {*dims_of(own[kernel])}] if sizes else found


def _prepare(out: Path, fresh: bool) -> Path:
    """Make the output folder and check that it is writable. Returns its absolute path. Raises OutputError."""
    out = out.absolute()
    try:
        out.mkdir(parents=True, exist_ok=True)
        if fresh:
            for name in ("records", "intermediate"):
                shutil.rmtree(out / name, ignore_errors=True)
        write_json(out / ".writable", True)
        (out / ".writable").unlink(missing_ok=True)
    except OSError as e:
        raise cannot_write(out, e) from None
    return out


def _compile(missing: list[Task], request: SweepRequest, workers: Workers, watch: Callable[[Progress], None],
             progress: Progress) -> dict[str, Record]:
    """Run the tasks without a record. One whose worker died is rejected in this report and retried by the next run. A user's file
    has processes of its own."""
    watch(progress)
    if not missing:
        pool.clear_left(workers.out)  # scratch folders of a run that was killed after its last record
        return {}
    found: dict[str, Record] = {}
    for place in dict.fromkeys(task.source and task.source.place for task in missing):
        mine = [task for task in missing if (task.source and task.source.place) == place]
        for task, result in workers.run(compilation.compile_task, mine):
            if isinstance(result, pool.Died):
                code: Literal["timeout", "compile_error"] = "timeout" if result.timeout else "compile_error"
                result = Record("contract", (Reason(code, result.detail),))
            found[task.record_key] = result
            progress.done += 1
            verdict = _judged(task, result, request.max_spill_bytes)
            progress.accepted += verdict.accepted
            progress.rejected += not verdict.accepted
            watch(progress)
    return found


def _judged(task: Task, record: Record, max_spill_bytes: int) -> Verdict:
    return verdict_on(record, task.wanted, task.schedule, load_arch(task.arch), max_spill_bytes)


def _variant(planned: Planned, records: dict[str, Record], max_spill_bytes: int) -> Variant:
    c = planned.candidate
    record = records[planned.task.record_key] if planned.task else None
    if planned.task and record:
        verdict = _judged(planned.task, record, max_spill_bytes)
    else:
        verdict = Verdict(False, "contract", (Reason(c.code, c.problem or ""),))
    identity = json.dumps([c.kernel, c.target.arch, shape_to_dict(c.shape), schedule_to_dict(c.schedule)], sort_keys=True)
    return Variant(
        id=hashlib.sha256(identity.encode()).hexdigest()[:12], kernel=c.kernel, kernel_digest=planned.digest,
        target=c.target.arch, shape=c.shape, schedule=c.schedule, verdict="accepted" if verdict.accepted else "rejected",
        stage=verdict.stage, reasons=verdict.reasons, warnings=verdict.warnings,
        lines=(*verdict.lines, *(record.log if record else ())), compile_ms=record.compile_ms if record else None,
        artefact=record.artefact if record else None, facts=_facts(verdict))


def _facts(verdict: Verdict) -> Artefact | None:
    """The facts as promoted rows record them; None before the stage `sass`."""
    facts = verdict.facts
    if facts is None or verdict.blocks_per_sm is None:
        return None
    return Artefact(tuple(sorted(facts.instructions)), facts.registers, facts.spill_store_bytes, facts.spill_load_bytes,
                    facts.stack_bytes, facts.shared_bytes, facts.tmem_columns, verdict.blocks_per_sm, facts.cubin_sha256)


def _counts(plan: list[Planned], variants: Sequence[Variant], cached: set[str]) -> Counts:
    accepted = [v for v in variants if v.accepted]
    contract = sum(p.candidate.problem is not None and p.candidate.code == "contract" for p in plan)
    return Counts(variants=len(variants), contract=contract, accepted=len(accepted),
                  rejected=len(variants) - len(accepted) - contract,
                  cached=sum(p.task is None or p.task.record_key in cached for p in plan),
                  cubins=len({v.facts.cubin_sha256 for v in variants if v.facts}),
                  accepted_cubins=len({v.facts.cubin_sha256 for v in accepted if v.facts}))


def _audit(plan: list[Planned], variants: Sequence[Variant], records: dict[str, Record]) -> Audit:
    """Compares predicted and found faults of the early rejects that were compiled to the end."""
    sampled, disagreed = 0, []
    for planned, variant in zip(plan, variants):
        if planned.task is None:
            continue
        foreseen = {r.code for r in records[planned.task.record_key].early}
        if planned.candidate.problem:
            foreseen.add(planned.candidate.code)
        if foreseen:
            sampled += 1
            found = {r.code for r in variant.reasons}
            if not foreseen <= found and not found & {"compile_error", "assembler_error", "timeout"}:
                disagreed.append(variant.id)
    return Audit(compilation.AUDIT_ONE_IN, sampled, tuple(disagreed))


def _write(out: Path, report: Report) -> None:
    from .report_html import render_report

    write_json(out / "report.json", report.to_dict())
    write_text(out / "report.html", render_report(report))
