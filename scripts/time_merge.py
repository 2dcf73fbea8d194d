#!/usr/bin/env python
"""Times three merges of attention's partials on a GPU: an old kernel, its tiled form, and the recipe's, with few and many tokens.

    python scripts/time_merge.py [--model qwen2.5-7b] [--out FILE.json]

The old kernel (kernels/findings.py) merges 512 partials of a head at once, which spills; its tiled form computes 32 dimensions at
a time. Both merge at most 512 chunks of 256 keys. The recipe's kernel merges the recipe's chunks. Prints a line per measurement,
then one JSON line.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from common import parser, publish, run
from tune_kernels.kernels.findings import one_block_merge_kernel
from tune_kernels.kernels.registry import default_schedule
from tune_kernels.schedules.recipe import Recipe, load_recipe
from tune_kernels.schedules.schedule import MergeSchedule
from tune_kernels.shapes.model import MergeShape, load_model_shape
from tune_kernels.tuner.on_gpu.samples.machine import sku_of
from tune_kernels.tuner.on_gpu.samples.timing import Batch, distribution, paired, ratios
from tune_kernels.tuner.on_gpu.worker import gpu_state
from tune_kernels.tuner.on_gpu.worker.attention import MergeCase
from tune_kernels.tuner.on_gpu.worker.operands import CLASS_ROWS, SIZES, Operands
from tune_kernels.tuner.on_gpu.worker.tasks import Problem, TimeTask
from tune_kernels.tuner.on_gpu.worker.timing import Bench, rounds_of

OCCUPANCIES = (600, 2_000, 83_000)  # tokens in the cache
ROUNDS, COPIES, LAUNCHES = 96, 4, 64
OLD_CHUNK = 256  # keys per partial of the old merge


@dataclass(frozen=True)
class Old:
    """The old form: all SPLITS partials of BLOCK_D dimensions at once, for any occupancy."""

    BLOCK_D: int
    SPLITS: ClassVar[int] = 512
    num_warps: int = 4


class Merges(MergeCase):
    """The old kernel over chunks of OLD_CHUNK keys, and the current one over the recipe's chunks."""

    def __init__(self, shape: MergeShape, recipe: Recipe, make: Operands, tokens: int) -> None:
        assert tokens + CLASS_ROWS[-1] <= OLD_CHUNK * Old.SPLITS
        make = replace(make, sizes=replace(SIZES, occupancies=(tokens,)))
        super().__init__(shape, replace(recipe, kv_chunk=OLD_CHUNK), make)
        self.now = MergeCase(shape, recipe, make)

    def timed(self, schedule: Old | MergeSchedule, copy: int) -> None:
        if not isinstance(schedule, Old):
            self.now.timed(schedule, copy)
            return
        acc, rows = self.acc[copy], CLASS_ROWS[-1]
        heads, head_dim = acc.shape[2:]
        o = torch.empty((rows, heads, head_dim), dtype=torch.bfloat16, device=acc.device)
        one_block_merge_kernel[rows, heads, head_dim // schedule.BLOCK_D](
            acc, self.m, self.l, self.lengths[0], o, self.chunk, heads, head_dim, acc.shape[1], schedule.BLOCK_D,
            schedule.SPLITS, num_warps=schedule.num_warps)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--model", default="qwen2.5-7b", help="a model's shape")
    given = options.parse_args()
    target, recipe = sku_of(gpu_state.this_machine()), load_recipe("fp8-v1")
    shape = load_model_shape(given.model).merge_shape
    candidates: dict[str, Old | MergeSchedule] = {"old": Old(shape.head_dim), "tiled": Old(32),
                                  "recipe": default_schedule(recipe, "merge", target.arch)}
    rows = []
    for tokens in OCCUPANCIES:
        case = Merges(shape, recipe, Operands("cuda", copies=COPIES), tokens)
        problem = Problem("merge", shape, target.name, recipe.name, "", (tokens,))
        task = TimeTask(problem, tuple(candidates.items()), "confirm", ROUNDS, tokens, "")
        samples, states = rounds_of(task, Bench(case, COPIES, LAUNCHES), lambda name: None)
        batch = Batch("confirm", tokens, samples, states)
        for name in candidates:
            times, change = distribution([batch], name), paired(ratios([batch], name, "old"))
            if times is None or change is None:
                continue
            rows.append({"tokens": tokens, "merge": name, "median_us": times.median_us, "interval_us": times.interval_us,
                         "over_old": change.ratio})
            print(f"{tokens:>7} tokens  {name:<7} {times.median_us:8.2f} us  [{times.interval_us[0]:.2f}, "
                  f"{times.interval_us[1]:.2f}]  {change.ratio:.3f} of the old one's time")
    publish({"gpu": target.name, "rows": rows}, given.out)
    return 0 if rows else 1


if __name__ == "__main__":
    run(main)
