#!/usr/bin/env python
"""On a GPU: what the FP8 accumulator costs. The error of a linear against fp64, and its time, for each distance along K after
which its products are added to fp32 (the recipe's `promote_every`).

    python scripts/accumulation_error.py [--model qwen2.5-7b] [--kernel down]... [--out FILE.json]

Each schedule gives fp32 partials, so that no rounding to bf16 hides the accumulator: the recipe's default, its preloaded form or
the form without, and the longest chain, two splits that aren't preloaded; SwiGLU is left out. A dot promotes at its own end, so a
distance beyond it is the same artefact; `never` leaves it all to the compiler (on sm_90 the whole range of a split, on sm_100 and
sm_103 fp32 anyway). Operands are those of the tuner's reference check; what is compared are exact e4m3 values, multiplied and
summed in fp64. Error: RMS and maximum of the difference, over the RMS of the output, fp32 partials added in index order.

Every setting is compiled here. Prints a line each, then one JSON line. Exit 1 where the recipe's own setting breaks its limit.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from tune_kernels.kernels.linear import linear_contract
from tune_kernels.kernels.registry import default_schedule
from tune_kernels.schedules.recipe import Numerics, Recipe, load_recipe
from tune_kernels.schedules.schedule import LinearSchedule, schedule_to_dict
from tune_kernels.shapes.model import LinearShape, load_model_shape
from tune_kernels.shapes.target import Target
from tune_kernels.tuner.offline.record import write_json
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
    """every: products along K after which they are promoted, as the artefact has it; own: whether the recipe says so."""

    schedule: LinearSchedule
    every: int
    own: bool

    @property
    def name(self) -> str:
        return f"{describe_schedule(schedule_to_dict(self.schedule))}, {self.every}"


def schedules(shape: LinearShape, recipe: Recipe, kernel: str, arch: str) -> list[LinearSchedule]:
    """The default, the other of preloaded and not, and the longest chain: those of them that the kernel can run."""
    default = default_schedule(recipe, kernel, arch, shape)
    assert isinstance(default, LinearSchedule)
    split = replace(default, split_k=max(2, default.split_k))
    steps = -(-shape.K // default.BLOCK_K)
    preloaded = [replace(split, split_k=n, preload=True) for n in range(2, steps + 1)]
    other = [replace(split, preload=False)] if split.preload else [s for s in preloaded if not linear_contract(shape, s)][:1]
    chosen = [split, *other, replace(split, split_k=2, preload=False)]
    return [s for s in dict.fromkeys(chosen) if linear_contract(shape, s) is None]


def settings(shape: LinearShape, schedule: LinearSchedule, recipe: Recipe) -> Iterator[Setting]:
    """One of each artefact: distances beyond a dot's own length are one."""
    dot = -(-shape.K // schedule.BLOCK_K) // schedule.split_k * schedule.BLOCK_K if schedule.preload else schedule.BLOCK_K
    own = recipe.numerics.promote_every
    for every in dict.fromkeys(min(e, dot) for e in sorted({*EVERY, own})):
        yield Setting(schedule, every, every == min(own, dot))


class Settings(LinearCase):
    """A linear whose schedules come with their own distance."""

    numerics: Numerics

    def launch(self, schedule: Any, first: int, rows: int, copy: int = 0) -> torch.Tensor:
        self.numerics = replace(self.numerics, promote_every=schedule.every)
        return super().launch(schedule.schedule, first, rows, copy)

    def output(self, schedule: Any, first: int, rows: int) -> torch.Tensor:
        partials = self.launch(schedule, first, rows)
        total = partials[0]
        for partial in partials[1:]:
            total = total + partial
        return total


def measured(kernel: str, shape: LinearShape, recipe: Recipe, target: Target) -> list[dict[str, Any]]:
    """Error and time of every setting, one row each."""
    plain = replace(shape, swiglu=False)
    case = Settings(plain, recipe, Operands("cuda", copies=COPIES))
    listed = [s for schedule in schedules(plain, recipe, kernel, target.arch) for s in settings(plain, schedule, recipe)]
    rows = min(case.factors.x.shape[1], recipe.row_tile)
    right = case.reference(rows)
    candidates: Any = tuple((s.name, s) for s in listed)
    task = TimeTask(Problem(kernel, plain, target.name, recipe.name, ""), candidates, "confirm", ROUNDS, 0, "")
    samples, states = rounds_of(task, Bench(case, COPIES, LAUNCHES), lambda name: None)
    batch, made = Batch("confirm", 0, samples, states), []
    for s in listed:
        y, times = case.output(s, 0, rows), distribution([batch], s.name)
        worst = float((y.double() - right).abs().max() / right.pow(2).mean().sqrt())
        made.append({"kernel": kernel, "N": plain.N, "K": plain.K, "schedule": schedule_to_dict(s.schedule), "every": s.every,
                     "recipe": s.own, "rms_error": relative_rms(y, right), "max_error": worst,
                     "ms": times and times.median_us / 1e3})
    return made


def line(row: dict[str, Any]) -> str:
    every = f"every {row['every']}" if row["every"] else "never"
    took = f"{row['ms']:.4f} ms" if row["ms"] else "throttled"
    return (f"{row['kernel']:<8} {every:<10} RMS {row['rms_error']:.2e}  max {row['max_error']:.2e}  {took}  "
            f"{'recipe  ' if row['recipe'] else '        '}{describe_schedule(row['schedule'])}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--recipe", default="fp8-v1")
    parser.add_argument("--kernel", action="append", default=[], help="qkv, o, gate_up, down; repeat for several; default: down")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine, recipe = gpu_state.this_machine(), load_recipe(options.recipe)
    target = sku_of(machine)
    shapes = load_model_shape(options.model).kernel_shapes(recipe.linear_dtype, recipe.terms)
    rows: list[dict[str, Any]] = []
    for kernel in options.kernel or ["down"]:
        shape = shapes.get(kernel)
        if not isinstance(shape, LinearShape) or shape.dtype != "e4m3":
            parser.error(f"--kernel {kernel}: expected an FP8 linear of {options.model} under {recipe.name}")
        rows += measured(kernel, shape, recipe, target)
        print("\n".join(line(row) for row in rows if row["kernel"] == kernel))
    limit = recipe.max_rms_error.partials
    beyond = [row for row in rows if row["recipe"] and not row["rms_error"] <= limit]
    print(f"recipe {recipe.name}: RMS error at most {limit:.0e}: {f'BROKEN by {len(beyond)}' if beyond else 'held'}")
    result = {"schema": "tune-kernels/accumulation-error/1", **dataclasses.asdict(machine), "torch": torch.__version__,
              "triton": triton.__version__, "model": options.model, "recipe": recipe.name, "limit": limit,
              "passed": not beyond, "rows": rows}
    if options.out:
        write_json(options.out, result)
    print(json.dumps(result, sort_keys=True))
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
