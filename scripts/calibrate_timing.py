#!/usr/bin/env python
"""Calibrates the timings of --on-gpu: false wins between equals, a planted slowdown, the smallest difference resolved.

    python scripts/calibrate_timing.py --bundle build/offline --out FILE.json     on a GPU: record, then evaluate
    python scripts/calibrate_timing.py --replay FILE.json                         without a GPU: evaluate a recording
    python scripts/calibrate_timing.py --run build/on-gpu                         without a GPU: evaluate runs of --on-gpu

On a GPU, each kernel's incumbent is timed against itself under two names. With --run, each finalist of a run is compared with
itself, even rounds against odd ones: alone, and with the error shared among a confirmation's comparisons, as in the run. For
several runs of one model, also prints the number of contests with the same winner.

Prints a line per kernel, then one JSON line. Exit 1 if more than 5% are false wins, or a planted slowdown of 3% is missed in more
than 5%.
"""

import dataclasses
from pathlib import Path

from common import parser, publish, run
from tune_kernels.schedules.recipe import load_recipe
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
AT_ONCE = 10  # comparisons per task


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
    """The calibration of one kernel's recording, for a reader."""
    resolved = f"{100 * found.resolved:.2f}%" if found.resolved else "nothing under 20%"
    return (f"{kernel:<14} {found.comparisons} comparisons of {found.rounds} rounds: {found.false_wins} false wins, a planted 3% "
            f"found in {found.found}; smallest difference resolved: {resolved}")


def main() -> int:
    options = parser(__doc__)
    options.set_defaults(out=Path("build/calibration.json"))
    options.add_argument("--bundle", type=Path, default=Path("build/offline"), help="accepted artefacts")
    options.add_argument("--kernel", action="append", help="repeat for several; without it gate_up and merge")
    options.add_argument("--comparisons", type=int, default=120, help="of each kernel with itself")
    options.add_argument("--replay", type=Path, metavar="FILE", help="a recording of this script")
    options.add_argument("--run", type=Path, action="append", metavar="FOLDER", help="of --on-gpu; repeat for several")
    given = options.parse_args()
    if given.run:
        runs = [recording.load(path) for path in given.run]
        compare_runs(runs)
        confirmed = [b for run in runs for c in run.contests.values() for b in c.batches if b.phase == "confirm"]
        evaluate({"each alone": calibrate_on(confirmed, shared=False)})
        return evaluate({"as confirmed": calibrate_on(confirmed)})
    if given.replay:
        kernels = read_fields(given.replay, RecordingError).inner("kernels")
        batches = {k: [batch_of(b.read(StoredBatch), k) for b in kernels.items(k)] for k in kernels.table}
    else:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        with pool.scratch_folder(given.out.parent.absolute()) as scratch:
            batches = record(given.bundle, given.kernel or ["gate_up", "merge"], given.comparisons, scratch)
        machine = dataclasses.asdict(gpu_state.this_machine())
        write_json(given.out, {"machine": machine, "kernels": {
            k: [dataclasses.asdict(stored_batch(b)) for b in listed]
            for k, listed in batches.items()}})
    return evaluate({kernel: calibrate(listed, ONE, OTHER) for kernel, listed in batches.items()})


def compare_runs(runs: list[recording.Recording]) -> None:
    """Prints how many contests that two runs of one model finished have the same winner."""
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


def evaluate(found: dict[str, Calibration]) -> int:
    """Prints the calibrations; 0 if all are within the limits."""
    for kernel, calibration in found.items():
        print(line(kernel, calibration))
    publish({kernel: dataclasses.asdict(c) for kernel, c in found.items()}, None)
    return 0 if found and all(c.ok() for c in found.values()) else 1


if __name__ == "__main__":
    run(main)
