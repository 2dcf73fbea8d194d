#!/usr/bin/env python
"""Checks an offline bundle on a GPU: launches every accepted variant, without compiling.

    python scripts/check_bundle.py --bundle build/offline [--out FILE.json]

Makes the checks of `tune-kernels --on-gpu` that come before timing: error of poisoned outputs against fp64; 1 to 9 rows, each
alone and among others, byte for byte; repeated launches; the numerics class. They run in this process: a variant that kills it
ends the run. Needs the Triton that made the bundle. Prints a line per kernel, then one JSON line. Exit 1 if a check fails.
"""

import dataclasses
import json
import time
from pathlib import Path

import torch
import triton
from common import parser, publish, run
from tune_kernels.kernels import registry
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.tuner.offline.report import Variant, read_report
from tune_kernels.tuner.on_gpu.samples.gate import Checked, Failure, stored_checked
from tune_kernels.tuner.on_gpu.samples.machine import sku_of
from tune_kernels.tuner.on_gpu.worker import checks, gpu_state
from tune_kernels.tuner.on_gpu.worker.calls import count_calls
from tune_kernels.tuner.on_gpu.worker.process import install
from tune_kernels.tuner.on_gpu.worker.tasks import Problem


def check(variant: Variant, target: str, recipe: str, bundle: Path) -> Checked:
    """The checks of one variant. An exception is a failure of this variant alone."""
    problem = Problem(variant.kernel, variant.shape, target, recipe, str(bundle))
    try:
        checks.require_artefact(problem, variant.schedule)
        install(problem.bundle)
        return checks.run_checks(checks.usual_case(problem), checks.wide_case(problem), variant.schedule)
    except Exception as e:
        return Checked(failure=Failure("launch", f"{type(e).__name__}: {e}"[:500]))


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--bundle", type=Path, default=Path("build/offline"), help="the folder of an offline run")
    given = options.parse_args()
    counter = count_calls()
    report = read_report(given.bundle)
    machine = gpu_state.this_machine()
    target, recipe = sku_of(machine), load_recipe(report.recipe)
    variants = [v for v in report.variants
                if v.target == target.arch and v.accepted and v.kernel in registry.TUNABLE]
    started = time.perf_counter()
    found: dict[str, list[tuple[str, Checked]]] = {}
    for variant in variants:
        checked = check(variant, target.name, recipe.name, given.bundle.absolute())
        found.setdefault(variant.kernel, []).append((variant.id, checked))
        if checked.failure:
            print(f"{variant.id} {variant.kernel}: {checked.failure.stage}: {checked.failure.detail}")
    for kernel, mine in found.items():
        good = [c for _, c in mine if not c.failure]
        worst = max((c.error for _, c in mine if c.error is not None), default=float("nan"))
        print(f"{kernel:<16} {len(good)} of {len(mine)} right and row-invariant, worst error {worst:.2e}, "
              f"{len({c.numerics_class for c in good})} numerics classes")
    right = sum(not c.failure for mine in found.values() for _, c in mine)
    result = {"gpu": machine.gpu, "driver": machine.driver, "torch": torch.__version__, "triton": triton.__version__,
              "target": target.arch, "variants": len(variants), "ok": right, "calls": dataclasses.asdict(counter.calls),
              "seconds": round(time.perf_counter() - started, 1)}
    if given.out:
        listed = [{"id": i, "kernel": k, **dataclasses.asdict(stored_checked(c))} for k, mine in found.items() for i, c in mine]
        given.out.write_text(json.dumps({**result, "found": listed}, sort_keys=True) + "\n")
    publish(result, None)
    return 0 if right == len(variants) and variants else 1


if __name__ == "__main__":
    run(main)
