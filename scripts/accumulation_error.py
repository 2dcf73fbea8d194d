#!/usr/bin/env python
"""Measures an FP8 linear on a GPU: error against fp64, and time, for each distance along K after which products are promoted to
fp32 (the recipe's `promote_every`).

    python scripts/accumulation_error.py [--model qwen2.5-7b] [--kernel down]... [--out FILE.json]

Three schedules: the recipe's default, the same with preload toggled, and the longest chain: two splits without preloading. All
give fp32 partials without SwiGLU, because a rounding to bf16 would hide the accumulator's error. A dot promotes at its end:
longer distances give the same artefact. `never` leaves promotion to the compiler: after a whole split on sm_90; sm_100 and sm_103
accumulate in fp32 anyway.

Operands are those of the tuner's reference check: exact e4m3 values, multiplied and summed in fp64. Error: RMS and maximum of the
difference, over the RMS of the output, fp32 partials added in index order.

Every setting is compiled here. Prints a line per setting, then one JSON line. Exit 1 if the recipe's own setting exceeds its
limit.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
from common import parser, publish, run
from tune_kernels.kernels.linear import linear_contract
from tune_kernels.kernels.registry import default_schedule
from tune_kernels.schedules.recipe import Numerics, Recipe, load_recipe
from tune_kernels.schedules.schedule import LinearSchedule, schedule_to_dict
from tune_kernels.shapes.model import LinearShape, load_model_shape
from tune_kernels.shapes.target import Target
from tune_kernels.tuner.offline.report import describe_schedule
from tune_kernels.tuner.on_gpu.samples.machine import sku_of
from tune_kernels.tuner.on_gpu.samples.timing import Batch, distribution
from tune_kernels.tuner.on_gpu.worker import gpu_state
from tune_kernels.tuner.on_gpu.worker.linears import LinearCase
from tune_kernels.tuner.on_gpu.worker.operands import Operands, relative_rms
from tune_kernels.tuner.on_gpu.worker.tasks import Problem, TimeTask
from tune_kernels.tuner.on_gpu.worker.timing import Bench, rounds_of

NEVER = 0
EVERY = (NEVER, 512, 256, 128, 64, 32)  # products along K; 32 is one FP8 instruction
ROUNDS, COPIES, LAUNCHES = 48, 4, 16  # the copies of a linear's weights together don't fit into the L2


@dataclass(frozen=True)
class Setting:
    """every: products along K after which the artefact promotes; own: whether this is the recipe's own distance."""

    schedule: LinearSchedule
    every: int
    own: bool

    @property
    def name(self) -> str:
        return f"{describe_schedule(schedule_to_dict(self.schedule))}, {self.every}"


@dataclass(frozen=True)
class Row:
    """The measurement of one setting. every and recipe: as in Setting; errors: over the RMS of the output; ms: None if the
    GPU throttled."""

    kernel: str
    N: int
    K: int
    schedule: dict[str, object]
    every: int
    recipe: bool
    rms_error: float
    max_error: float
    ms: float | None


def schedules(shape: LinearShape, recipe: Recipe, kernel: str, arch: str) -> list[LinearSchedule]:
    """The default, the other of preloaded and not, and the longest chain; without those that break the kernel's contract."""
    default = default_schedule(recipe, kernel, arch, shape)
    assert isinstance(default, LinearSchedule)
    split = replace(default, split_k=max(2, default.split_k))
    steps = -(-shape.K // default.BLOCK_K)
    preloaded = [replace(split, split_k=n, preload=True) for n in range(2, steps + 1)]
    other = [replace(split, preload=False)] if split.preload else [s for s in preloaded if not linear_contract(shape, s)][:1]
    chosen = [split, *other, replace(split, split_k=2, preload=False)]
    return [s for s in dict.fromkeys(chosen) if linear_contract(shape, s) is None]


def settings(shape: LinearShape, schedule: LinearSchedule, recipe: Recipe) -> Iterator[Setting]:
    """One setting per artefact: all distances beyond a dot's own length give the same one."""
    dot = -(-shape.K // schedule.BLOCK_K) // schedule.split_k * schedule.BLOCK_K if schedule.preload else schedule.BLOCK_K
    own = recipe.numerics.promote_every
    for every in dict.fromkeys(min(e, dot) for e in sorted({*EVERY, own})):
        yield Setting(schedule, every, every == min(own, dot))


class Settings(LinearCase):
    """A linear that is launched with settings instead of schedules."""

    numerics: Numerics

    def launch(self, schedule: Setting, first: int, rows: int, copy: int = 0) -> torch.Tensor:
        self.numerics = replace(self.numerics, promote_every=schedule.every)
        return super().launch(schedule.schedule, first, rows, copy)

    def output(self, schedule: Setting, first: int, rows: int) -> torch.Tensor:
        partials = self.launch(schedule, first, rows)
        total = partials[0]
        for partial in partials[1:]:
            total = total + partial
        return total


def measured(kernel: str, shape: LinearShape, recipe: Recipe, target: Target) -> list[Row]:
    """Error and time, one row per setting."""
    plain = replace(shape, swiglu=False)
    case = Settings(plain, recipe, Operands("cuda", copies=COPIES))
    listed = [s for schedule in schedules(plain, recipe, kernel, target.arch) for s in settings(plain, schedule, recipe)]
    rows = min(case.factors.x.shape[1], recipe.row_tile)
    right = case.reference(rows)
    candidates = tuple((s.name, s) for s in listed)
    task = TimeTask(Problem(kernel, plain, target.name, recipe.name, ""), candidates, "confirm", ROUNDS, 0, "")
    samples, states = rounds_of(task, Bench(case, COPIES, LAUNCHES), lambda name: None)
    batch, made = Batch("confirm", 0, samples, states), []
    for s in listed:
        y, times = case.output(s, 0, rows), distribution([batch], s.name)
        worst = float((y.double() - right).abs().max() / right.pow(2).mean().sqrt())
        made.append(Row(kernel, plain.N, plain.K, schedule_to_dict(s.schedule), s.every, s.own, relative_rms(y, right), worst,
                        times.median_us / 1e3 if times else None))
    return made


def line(row: Row) -> str:
    every = f"every {row.every}" if row.every else "never"
    took = f"{row.ms:.4f} ms" if row.ms else "throttled"
    return (f"{row.kernel:<8} {every:<10} RMS {row.rms_error:.2e}  max {row.max_error:.2e}  {took}  "
            f"{'recipe  ' if row.recipe else '        '}{describe_schedule(row.schedule)}")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--model", default="qwen2.5-7b", help="a model's shape")
    options.add_argument("--recipe", default="fp8-v1", help="precisions and limits")
    options.add_argument("--kernel", action="append", help="qkv, o, gate_up, down; repeat for several; without it down")
    given = options.parse_args()
    machine, recipe = gpu_state.this_machine(), load_recipe(given.recipe)
    target = sku_of(machine)
    shapes = load_model_shape(given.model).kernel_shapes(recipe.linear_dtype, recipe.terms)
    rows: list[Row] = []
    for kernel in given.kernel or ["down"]:
        shape = shapes.get(kernel)
        if not isinstance(shape, LinearShape) or shape.dtype != "e4m3":
            options.error(f"--kernel {kernel}: expected an FP8 linear of {given.model} under {recipe.name}")
        found = measured(kernel, shape, recipe, target)
        print("\n".join(map(line, found)))
        rows += found
    limit = recipe.max_rms_error.partials
    beyond = [row for row in rows if row.recipe and not row.rms_error <= limit]
    print(f"recipe {recipe.name}: RMS error at most {limit:.0e}: {f'EXCEEDED by {len(beyond)}' if beyond else 'held'}")
    publish({"schema": "tune-kernels/accumulation-error/1", **dataclasses.asdict(machine), "torch": torch.__version__,
             "triton": triton.__version__, "model": given.model, "recipe": recipe.name, "limit": limit,
             "passed": not beyond, "rows": [dataclasses.asdict(row) for row in rows]}, given.out)
    return 1 if beyond else 0


if __name__ == "__main__":
    run(main)
