#!/usr/bin/env python
"""On a GPU: the old one-block merge of 512 partials, which spills, beside the tiled one and the recipe's, at short and long
occupancy.

    python scripts/time_merge.py --bundle build/offline [--model qwen2.5-7b]

Prints a line each, then one JSON line. The old one is rejected offline; a bundle of the default space has it all the same.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tune_kernels.kernels.registry import default_schedule
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import MergeSchedule
from tune_kernels.shapes.model import load_model_shape
from tune_kernels.tuner import gpu_state
from tune_kernels.tuner.measure import Problem
from tune_kernels.tuner.timing import distribution, paired, ratios
from tune_kernels.tuner.worker import GpuMeasurer, gpu_executor

OCCUPANCIES = (600, 2_000, 83_000)  # tokens in the cache; the worklog saw the old merge at short occupancy and at 83,000
ROUNDS = 96


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=Path("build/offline"))
    parser.add_argument("--model", default="qwen2.5-7b")
    options = parser.parse_args()
    target, recipe = gpu_state.sku_of(gpu_state.this_machine()), load_recipe("fp8-v1")
    shape = load_model_shape(options.model).kernel_shapes()["merge"]
    candidates = {"old": MergeSchedule(BLOCK_D=128, splits=512, num_warps=4),
                  "tiled": MergeSchedule(BLOCK_D=32, splits=512, num_warps=4),
                  "recipe": default_schedule(recipe, "merge", target.arch)}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        executor = gpu_executor(Path(scratch))
        measurer = GpuMeasurer(executor, Path(scratch) / "words")
        for tokens in OCCUPANCIES:
            problem = Problem("merge", shape, target.name, recipe.name, str(options.bundle.absolute()), (tokens,))
            batch, dead = measurer.time(problem, candidates, "confirm", ROUNDS, tokens)
            for name, failure in dead.items():
                print(f"{tokens:>7} tokens  {name:<7} {failure.stage}: {failure.detail}")
            for name in batch.samples_us if batch else ():
                assert batch is not None
                times, change = distribution([batch], name), paired(ratios([batch], name, "old"))
                if times is None:
                    continue
                rows.append({"tokens": tokens, "merge": name, "median_us": times.median_us, "interval_us": times.interval_us,
                             "over_old": change and change.ratio})
                print(f"{tokens:>7} tokens  {name:<7} {times.median_us:8.2f} us  [{times.interval_us[0]:.2f}, "
                      f"{times.interval_us[1]:.2f}]  {change.ratio if change else 1:.3f} of the old one's time")
        executor.shutdown(cancel_futures=True)
    print(json.dumps({"gpu": target.name, "rows": rows, "calls": measurer.calls}))
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
