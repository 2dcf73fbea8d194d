#!/usr/bin/env python
"""How far timings can be trusted: one candidate under two names, a planted slowdown, the smallest difference resolved.

    python scripts/calibrate_timing.py --bundle build/offline --out calibration.json     on a GPU: records, then says
    python scripts/calibrate_timing.py --replay calibration.json                         without one: says
    python scripts/calibrate_timing.py --run build/on-gpu                                from runs of --on-gpu

A run's finalists are compared with themselves, even rounds against odd ones: each on its own, and judged as the run did, which
shares the error among all of a confirmation. Two runs of one model: in how many contests the winner was the same.

Prints a line a kernel, then one JSON line. Exit 1 where the method doesn't hold: more than 5% false wins, or the planted
slowdown missed in more than 5%.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.shapes.errors import UserError
from tune_kernels.shapes.fields import read_fields
from tune_kernels.tuner import pool
from tune_kernels.tuner.errors import RecordingError
from tune_kernels.tuner.offline.record import write_json
from tune_kernels.tuner.offline.report import read_report
from tune_kernels.tuner.on_gpu import survivors
from tune_kernels.tuner.on_gpu.samples import recording
from tune_kernels.tuner.on_gpu.samples.calibration import Calibration, calibrate, calibrate_on
from tune_kernels.tuner.on_gpu.samples.machine import sku_of
from tune_kernels.tuner.on_gpu.samples.race import CONFIRM_ROUNDS
from tune_kernels.tuner.on_gpu.samples.ranking import rank_all
from tune_kernels.tuner.on_gpu.samples.timing import Batch, StoredBatch, batch_of, stored_batch
from tune_kernels.tuner.on_gpu.survivors import Conditions
from tune_kernels.tuner.on_gpu.worker import gpu_state
from tune_kernels.tuner.on_gpu.worker.measurer import GpuMeasurer, gpu_executor
from tune_kernels.tuner.on_gpu.worker.tasks import Problem

ONE, OTHER = "one", "the same"
AT_ONCE = 10  # comparisons in one task


def record(bundle: Path, kernels: list[str], comparisons: int, scratch: Path) -> dict[str, list[Batch]]:
    """Batches by kernel: each kernel's incumbent against itself."""
    report = read_report(bundle)
    recipe, target = load_recipe(report.recipe), sku_of(gpu_state.this_machine())
    wanted = Conditions(report.model, None, target, recipe)
    found = survivors.find_survivors(bundle, wanted, kernels, bundle)
    contests, skipped = survivors.contests(found, kernels, wanted)
    for kernel, why in skipped.items():
        print(f"{kernel}: skipped: {why}")
    measurer = GpuMeasurer(lambda: gpu_executor(scratch), scratch / "words")
    batches: dict[str, list[Batch]] = {}
    try:
        for kernel, contest in contests.items():
            schedule = contest.entrants[contest.incumbent].schedule
            problem = Problem(kernel, contest.shape, target.name, recipe.name, str(found.folder.absolute()))
            for seed in range(-(-comparisons // AT_ONCE)):
                batch, dead = measurer.time(problem, {ONE: schedule, OTHER: schedule}, "calibrate",
                                            AT_ONCE * CONFIRM_ROUNDS, seed)
                if batch is None:
                    raise SystemExit(f"{kernel}: {dead}")
                batches.setdefault(kernel, []).append(batch)
    finally:
        measurer.close()
    return batches


def line(kernel: str, found: Calibration) -> str:
    """What one kernel's recording says."""
    resolved = f"{100 * found.resolved:.2f}%" if found.resolved else "nothing under 20%"
    return (f"{kernel:<14} {found.comparisons} comparisons of {found.rounds} rounds: {found.false_wins} false wins, a planted 3% "
            f"found in {found.found}; smallest difference resolved: {resolved}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=Path("build/offline"))
    parser.add_argument("--kernel", action="append", default=[], help="repeat for several; default: gate_up and merge")
    parser.add_argument("--comparisons", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path("build/calibration.json"))
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--run", type=Path, action="append", default=[], help="repeat for several")
    options = parser.parse_args()
    if options.run:
        runs = [recording.load(path) for path in options.run]
        compare_runs(runs)
        confirmed = [b for run in runs for c in run.contests.values() for b in c.batches if b.phase == "confirm"]
        say({"each alone": calibrate_on(confirmed, shared=False)})
        return say({"as confirmed": calibrate_on(confirmed)})
    if options.replay:
        kernels = read_fields(options.replay, RecordingError).inner("kernels")
        batches = {k: [batch_of(b.read(StoredBatch), k) for b in kernels.items(k)] for k in kernels.table}
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with pool.scratch_folder(options.out.parent.absolute()) as scratch:
            batches = record(options.bundle, options.kernel or ["gate_up", "merge"], options.comparisons, scratch)
        machine = dataclasses.asdict(gpu_state.this_machine())
        write_json(options.out, {"machine": machine, "kernels": {
            k: [dataclasses.asdict(stored_batch(b)) for b in listed]
            for k, listed in batches.items()}})
    return say({kernel: calibrate(listed, ONE, OTHER) for kernel, listed in batches.items()})


def compare_runs(runs: list[recording.Recording]) -> None:
    """Prints on how many winners runs of one model agree, over contests that both finished."""
    same, names = 0, []
    for i, one in enumerate(runs):
        for other in (r for r in runs[i + 1:] if (r.model, r.target, r.recipe) == (one.model, one.target, one.recipe)):
            rankings = [rank_all(run, load_recipe(run.recipe)) for run in (one, other)]
            for kernel in (k for k, c in one.contests.items() if c.finished and k in other.contests):
                if not other.contests[kernel].finished:
                    continue
                first, second = (r[kernel].winner for r in rankings)
                same += first == second
                names.append(f"{one.model} {kernel}" + ("" if first == second else f": {first} and {second}"))
    if names:
        print(f"{same} of {len(names)} contests that two runs finished have the same winner; not: "
              f"{'; '.join(n for n in names if ': ' in n) or 'none'}")


def say(found: dict[str, Calibration]) -> int:
    """Prints it; 0 where the method holds."""
    for kernel, calibration in found.items():
        print(line(kernel, calibration))
    print(json.dumps({kernel: dataclasses.asdict(c) for kernel, c in found.items()}))
    return 0 if found and all(c.ok() for c in found.values()) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as e:
        sys.exit(f"error: {e}")
