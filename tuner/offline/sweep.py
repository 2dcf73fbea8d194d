"""The offline sweep: space → compile → inspect → report, with no GPU. What `tune-kernels --offline` runs."""

import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...kernels import registry, toolchain
from ...kernels.bundle import kernel_digest
from ...schedules import store
from ...schedules.errors import ScheduleError
from ...schedules.recipe import Recipe, load_recipe, recipe_names
from ...schedules.schedule import schedule_to_dict
from ...shapes.fields import nearest
from ...shapes.model import load_model_shape, shape_to_dict
from ...shapes.target import ARCHES, Target, load_arch
from .. import pool
from ..errors import SpaceError
from . import compile as compilation
from .compile import Task
from .inspection import Reason, Verdict, judge
from .record import Record, cannot_write, read_record, write_json, write_text
from .report import FACT_FIELDS, SCHEMA, Report
from .space import Candidate, candidates, load_space, shipped_names, with_fixed, with_those_in_place

# 0.2 to 1 s each: begun first, so that no worker ends alone with one of them.
DEAREST = ("attention", "merge", "prefill_attention", "prefill_linear", "prefill_narrow")


@dataclass(frozen=True)
class Request:
    """What to sweep. kernels empty: all that the model has; jobs 0: one worker a core, memory allowing; schedules: the folder
    of promoted schedules that is asked first."""

    model: str = "qwen2.5-7b"
    targets: tuple[str, ...] = ARCHES
    kernels: tuple[str, ...] = ()
    space: str = "default"
    recipe: str = "fp8-v1"
    jobs: int = 0
    out: Path = Path("build/offline")
    fresh: bool = False
    max_spill_bytes: int = 0
    executor: str | None = None
    schedules: Path | None = None


@dataclass
class Progress:
    """What a caller may show while a sweep runs."""

    total: int = 0
    done: int = 0
    accepted: int = 0
    rejected: int = 0


@dataclass(frozen=True)
class Planned:
    """A candidate and the compilation that answers it. task is None where a rule has answered already."""

    candidate: Candidate
    digest: str
    task: Task | None


def sweep(request: Request, watch: Callable[[Progress], None] = lambda progress: None) -> Report:
    """Compile and judge every candidate; write `report.json` and `report.html` and return the report.

    Raises:
        UserError: a model, target, kernel, space, recipe, toolchain or folder that is wrong or can't be used.
        KeyboardInterrupt: stopped; what was finished is kept, and the same call goes on from there.
    """
    started = time.perf_counter()
    shape = load_model_shape(request.model)
    targets = [load_arch(name) for name in dict.fromkeys(request.targets)]
    kernels = _kernels(request.kernels, list(shape.kernel_shapes()), shape.name)
    recipe = load_recipe(request.recipe)
    if not recipe.defaults:
        raise ScheduleError(f"recipe {recipe.name} has no kernels", expected="a recipe with default schedules",
                            action="choose one of " + ", ".join(n for n in recipe_names() if load_recipe(n).defaults))
    space = load_space(request.space)
    shapes = shape.kernel_shapes(recipe.linear_dtype, recipe.terms)
    toolchain.check(targets, recipe.numerics)
    found = candidates(space, shapes, kernels, targets)
    if request.space in shipped_names():
        found = with_those_in_place(found, recipe, shapes, kernels, targets, store.search_path(request.schedules))
    found = with_fixed(found, shape, recipe)
    out = _prepare(request.out, request.fresh)
    plan = [_plan(c, recipe, out) for c in found]
    tasks = {p.task.record_key: p.task for p in plan if p.task}
    records: dict[str, Record] = {}
    for record_key in tasks:
        if (known := read_record(out, record_key)) is not None:
            records[record_key] = known
    cached = set(records)
    missing = sorted((t for k, t in tasks.items() if k not in records), key=lambda t: t.kernel not in DEAREST)
    records |= _compile(missing, request, out, watch, Progress(total=len(missing)))
    variants = [_variant(p, records, request.max_spill_bytes) for p in plan]
    counts = _counts(plan, variants, cached)
    report: Report = {
        "schema": SCHEMA, "toolchain": _toolchain(targets, recipe), "model": shape.name,
        "targets": [t.arch for t in targets], "space": space.name, "recipe": recipe.name,
        "max_spill_bytes": request.max_spill_bytes, "counts": counts, "audit": _audit(plan, variants, records),
        "variants": variants, "seconds": round(time.perf_counter() - started, 2),
    }
    _write(out, report)
    return report


def _toolchain(targets: Sequence[Target], recipe: Recipe) -> dict[str, Any]:
    """As the report has it: by target what differs between targets."""
    made = {t.arch: toolchain.installed(t, recipe.numerics) for t in targets}
    flags = {"enable_fp_fusion": recipe.numerics.enable_fp_fusion, "promote_every": recipe.numerics.promote_every,
             "max_num_imprecise_acc": {t.arch: recipe.numerics.max_num_imprecise_acc.get(t.arch) for t in targets}}
    return {"triton": made[targets[0].arch].triton, "ptxas": {arch: m.ptxas for arch, m in made.items()},
            "nvdisasm": toolchain.release(toolchain.nvdisasm_path()), "flags": flags}


def _kernels(asked: Sequence[str], known: list[str], model: str) -> list[str]:
    for name in asked:
        if name not in known:
            raise SpaceError(f"unknown kernel {name!r}{nearest(name, known)} in {model}",
                             expected=f"one of {', '.join(known)}")
    return [k for k in known if k in asked] if asked else known


def _prepare(out: Path, fresh: bool) -> Path:
    """The output folder, absolute, made and known to be writable. Raises OutputError."""
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


def _plan(candidate: Candidate, recipe: Recipe, out: Path) -> Planned:
    """Candidates that a rule rejects aren't compiled, but for the audited sample of those that lack shared memory."""
    kernel, arch = candidate.kernel, candidate.target.arch
    operation = registry.operation(kernel)
    digest = kernel_digest(operation.kernel)
    if candidate.problem and candidate.code == "contract":
        return Planned(candidate, digest, None)
    task = compilation.make_task(kernel, arch, candidate.shape, candidate.schedule, recipe.numerics, out)
    if candidate.problem and not compilation.audited(task.key):
        return Planned(candidate, digest, None)
    return Planned(candidate, digest, task)


def _compile(missing: list[Task], request: Request, out: Path, watch: Callable[[Progress], None],
             progress: Progress) -> dict[str, Record]:
    """Run what isn't known yet. A task whose worker died is told in this run's report and tried again in the next."""
    watch(progress)
    if not missing:
        pool.clear_left(out)  # a run that was killed after its last record left nothing to do but this
        return {}
    found: dict[str, Record] = {}
    jobs = request.jobs or pool.default_jobs()
    with pool.scratch_folder(out) as scratch:
        executor = pool.make_executor(request.executor, min(jobs, len(missing)), scratch)
        try:
            for task, result in pool.run(executor, compilation.compile_task, missing, in_flight=3 * jobs):
                if isinstance(result, pool.Died):
                    code = "timeout" if result.timeout else "compile_error"
                    result = Record("contract", [dataclasses.asdict(Reason(code, result.detail))])
                found[task.record_key] = result
                progress.done += 1
                verdict = _judged(task, result, request.max_spill_bytes)
                progress.accepted += verdict.accepted
                progress.rejected += not verdict.accepted
                watch(progress)
        except BaseException:
            executor.shutdown(wait=True, cancel_futures=True)
            raise
        executor.shutdown(wait=True)
    return found


def _judged(task: Task, record: Record, max_spill_bytes: int) -> Verdict:
    wanted = compilation.wanted_instructions(task.kernel, task.shape, task.arch)
    return judge(record, wanted, task.schedule, load_arch(task.arch), max_spill_bytes)


def _variant(planned: Planned, records: dict[str, Record], max_spill_bytes: int) -> dict[str, Any]:
    """One entry of the report."""
    c = planned.candidate
    record = records[planned.task.record_key] if planned.task else None
    if planned.task and record:
        verdict = _judged(planned.task, record, max_spill_bytes)
    else:
        verdict = Verdict(False, "contract", (Reason(c.code, c.problem or ""),))
    shape, schedule = shape_to_dict(c.shape), schedule_to_dict(c.schedule)
    identity = json.dumps([c.kernel, c.target.arch, shape, schedule], sort_keys=True)
    facts = {**verdict.facts, "blocks_per_sm": verdict.blocks_per_sm}
    return {
        "id": hashlib.sha256(identity.encode()).hexdigest()[:12], "kernel": c.kernel, "kernel_digest": planned.digest,
        "target": c.target.arch, "shape": shape, "schedule": schedule,
        "verdict": "accepted" if verdict.accepted else "rejected", "stage": verdict.stage,
        "reasons": [{"code": r.code, "detail": r.detail, "lines": list(r.lines)} for r in verdict.reasons],
        "warnings": list(verdict.warnings),
        "lines": [*verdict.lines, *(record.log if record else [])],
        "instructions": sorted(facts["instructions"]) if "instructions" in facts else None,
        **{name: facts.get(name) for name in FACT_FIELDS},
        "compile_ms": record.compile_ms if record else None,
        "artefact": record.artefact if record else None,
    }


def _counts(plan: list[Planned], variants: list[dict[str, Any]], cached: set[str]) -> dict[str, int]:
    accepted = [v for v in variants if v["verdict"] == "accepted"]
    contract = sum(p.candidate.problem is not None and p.candidate.code == "contract" for p in plan)
    return {
        "variants": len(variants), "contract": contract, "accepted": len(accepted),
        "rejected": len(variants) - len(accepted) - contract,
        "cached": sum(p.task is None or p.task.record_key in cached for p in plan),
        "cubins": len({v["cubin_sha256"] for v in variants if v["cubin_sha256"]}),
        "accepted_cubins": len({v["cubin_sha256"] for v in accepted}),
    }


def _audit(plan: list[Planned], variants: list[dict[str, Any]], records: dict[str, Record]) -> dict[str, Any]:
    """Early rejects that were compiled to the end all the same: does the artefact have the fault that was foreseen?"""
    sampled, disagreed = 0, []
    for planned, variant in zip(plan, variants):
        if planned.task is None:
            continue
        foreseen = {r["code"] for r in records[planned.task.record_key].early}
        if planned.candidate.problem:
            foreseen.add(planned.candidate.code)
        if foreseen:
            sampled += 1
            found = {r["code"] for r in variant["reasons"]}
            if not foreseen <= found and not found & {"compile_error", "assembler_error", "timeout"}:
                disagreed.append(variant["id"])
    return {"one_in": compilation.AUDIT_ONE_IN, "sampled": sampled, "disagreed": disagreed}


def _write(out: Path, report: Report) -> None:
    from .report_html import render_report

    write_json(out / "report.json", report)
    write_text(out / "report.html", render_report(report))
