#!/usr/bin/env python
"""On a GPU: launches every accepted variant of an offline bundle without compiling, and checks what comes out.

    python scripts/check_bundle.py --bundle build/offline [--out FILE.json]

For each variant, on random operands from a seed: the output against fp64; 1 to 9 rows, each alone and among others, byte for
byte; the same launch again, with poisoned outputs. Nothing is compiled: a missing artefact is an error. Prints a line a
kernel, then one JSON line. Needs the Triton that made the bundle.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from tune_kernels.kernels import attention, bundle, linear, lm_head, merge, registry
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import schedule_from_dict
from tune_kernels.shapes.model import AttentionShape, HeadShape, LinearShape, MergeShape
from tune_kernels.tuner.report import read_report
from tune_kernels.tuner.show import shape_from_dict

ROWS = 9
RMS_LIMIT = 6e-3  # relative, against fp64: one rounding to bf16 is 1.7e-3, the narrow FP8 accumulator adds up to 3e-3
CAPACITY = 4096
Run = Callable[[int, int], torch.Tensor]  # (first row, rows) → output of those rows


def random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda")


def linear_case(shape: LinearShape, schedule: Any, numerics: Any) -> tuple[Run, torch.Tensor, int]:
    most = min(ROWS, schedule.row_tile)
    x = random(most, shape.K, seed=1).to(torch.float8_e4m3fn)
    w = random(shape.N, shape.K, seed=2).to(torch.float8_e4m3fn)
    x_scale = random(most, seed=3).abs() + 0.1
    w_scale = random(shape.N, seed=4).abs() + 0.1
    bias = random(shape.N, seed=5).bfloat16() if shape.bias else None

    def run(first: int, rows: int) -> torch.Tensor:
        part = slice(first, first + rows)
        y = linear.linear(x[part], w, x_scale=x_scale[part].clone(), w_scale=w_scale, bias=bias, schedule=schedule,
                          numerics=numerics)
        if schedule.split_k == 1:
            return y
        total = y[0]
        for partial in y[1:]:
            total = total + partial
        return total

    return run, linear.linear_reference(x, w, x_scale, w_scale, bias), most


def head_case(shape: HeadShape, schedule: Any, numerics: Any, logits: bool) -> tuple[Run, torch.Tensor, int]:
    most = min(ROWS, schedule.row_tile)
    x = random(most, shape.K, seed=1).bfloat16()
    w = random(shape.N, shape.K, seed=2).bfloat16()
    reference = lm_head.lm_head_reference(x, w)

    def run(first: int, rows: int) -> torch.Tensor:
        call = lm_head.lm_head_logits if logits else lm_head.lm_head
        return call(x[first:first + rows], w, schedule=schedule, numerics=numerics)

    return run, reference if logits else reference.argmax(1), most


def attention_case(shape: AttentionShape, schedule: Any, numerics: Any, merging: Any,
                   length: int) -> tuple[Run, torch.Tensor, int]:
    """With the recipe's merge after it: partials alone have no reference."""
    most = min(ROWS, attention.max_rows(shape, schedule))
    q = random(most, shape.num_heads, shape.head_dim, seed=1).bfloat16()
    k = random(CAPACITY, shape.num_kv_heads, shape.head_dim, seed=2).bfloat16()
    v = random(CAPACITY, shape.num_kv_heads, shape.head_dim + 16, seed=3).bfloat16()[:, :, : shape.head_dim]
    k[length + most:], v[length + most:] = float("nan"), float("nan")

    def run(first: int, rows: int) -> torch.Tensor:
        where = torch.tensor([length + first], dtype=torch.int32, device="cuda")
        chunks = (length + first + rows - 1) // schedule.chunk + 1
        partials = attention.attention(q[first:first + rows], k, v, where, chunks=chunks, schedule=schedule, numerics=numerics)
        return merge.merge(*partials, where, rows=rows, chunk=schedule.chunk, schedule=merging, numerics=numerics)

    return run, attention.attention_reference(q, k, v, length), most


def merge_case(shape: MergeShape, schedule: Any, numerics: Any) -> tuple[Run, torch.Tensor, int]:
    chunks, chunk, length = 9, 256, 8 * 256 - 4
    acc = random(chunks, attention.ROWS, shape.num_heads, shape.head_dim, seed=1)
    m = random(chunks, attention.ROWS, shape.num_heads, seed=2) * 8
    l = random(chunks, attention.ROWS, shape.num_heads, seed=3).abs() + 0.5

    def run(first: int, rows: int) -> torch.Tensor:
        where = torch.tensor([length + first], dtype=torch.int32, device="cuda")
        part = [t[:, first:].contiguous() if first else t for t in (acc, m, l)]
        padded = [torch.cat([t, t[:, :attention.ROWS - t.shape[1]]], 1) for t in part]
        return merge.merge(padded[0], padded[1], padded[2], where, rows=rows, chunk=chunk, schedule=schedule, numerics=numerics)

    return run, merge.merge_reference(acc, m, l, length, rows=ROWS, chunk=chunk), ROWS


def case_of(variant: dict[str, Any], recipe: Any) -> tuple[Run, torch.Tensor, int]:
    shape = shape_from_dict(variant["shape"])
    schedule: Any = schedule_from_dict(registry.operation(variant["kernel"]).schedule_type, variant["schedule"], variant["id"])
    merging: Any = registry.default_schedule(recipe, "merge", variant["target"])
    if isinstance(shape, LinearShape):
        return linear_case(shape, schedule, recipe.numerics)
    if isinstance(shape, HeadShape):
        return head_case(shape, schedule, recipe.numerics, variant["kernel"] == "lm_head_logits")
    if isinstance(shape, AttentionShape):
        return attention_case(shape, schedule, recipe.numerics, merging, length=2040)
    return merge_case(shape, schedule, recipe.numerics)


def check(variant: dict[str, Any], recipe: Any) -> dict[str, Any]:
    """What one variant does: error against fp64, rows that differ, runs that differ, digest of its bytes."""
    run, reference, most = case_of(variant, recipe)
    whole = run(0, most)
    error = float((whole.double() - reference.double()).pow(2).mean().sqrt() / reference.double().pow(2).mean().sqrt())
    differ = [f"{rows} rows" for rows in range(1, most) if not same(run(0, rows), whole[:rows])]
    differ += [f"row {r} alone" for r in range(most) if not same(run(r, 1), whole[r:r + 1])]
    poison = torch.full((1 << 24,), float("nan"), device="cuda")  # what the allocator hands out next holds NaN
    del poison
    again = sum(not same(run(0, most), whole) for _ in range(5))
    raw = whole.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return {"id": variant["id"], "kernel": variant["kernel"], "schedule": variant["schedule"], "rms_error": error,
            "rows_that_differ": differ, "runs_that_differ": again, "bits": hashlib.sha256(raw).hexdigest()[:16],
            "ok": error <= RMS_LIMIT and not differ and not again}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=Path("build/offline"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = read_report(options.bundle)
    recipe = load_recipe(report["recipe"])
    capability = torch.cuda.get_device_capability()
    arch = f"sm_{capability[0]}{capability[1]}"
    for kernel in (linear.linear_kernel, lm_head.head_kernel, lm_head.head_reduce_kernel, attention.attention_kernel,
                   merge.merge_kernel):
        bundle.install(kernel, options.bundle)
    variants = [v for v in report["variants"]
                if v["target"] == arch and v["verdict"] == "accepted" and v["kernel"] in registry.TUNABLE]
    started = time.perf_counter()
    found = []
    for variant in variants:
        try:
            found.append(check(variant, recipe))
        except Exception as e:  # a candidate that fails is a finding; the others still count
            said = f"{type(e).__name__}: {e}"[:500]
            print(f"{variant['id']} {variant['kernel']}: {said}")
            found.append({"id": variant["id"], "kernel": variant["kernel"], "ok": False, "error": said})
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    result = {"gpu": torch.cuda.get_device_name(), "driver": driver.stdout.strip().splitlines()[0], "torch": torch.__version__,
              "triton": triton.__version__, "target": arch, "variants": len(variants), "ok": sum(f["ok"] for f in found),
              "compiled": 0, "seconds": round(time.perf_counter() - started, 1), "found": found}
    for kernel in dict.fromkeys(f["kernel"] for f in found):
        mine = [f for f in found if f["kernel"] == kernel]
        good = [f for f in mine if f["ok"]]
        worst = max((f["rms_error"] for f in mine if "rms_error" in f), default=float("nan"))
        print(f"{kernel:<16} {len(good)} of {len(mine)} right and row-invariant, worst error {worst:.2e}, "
              f"{len({f['bits'] for f in good})} numerics classes on these operands")
    if options.out:
        options.out.write_text(json.dumps(result, sort_keys=True) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "found"}))
    return 0 if result["ok"] == len(variants) and variants else 1


if __name__ == "__main__":
    sys.exit(main())
