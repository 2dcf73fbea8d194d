#!/usr/bin/env python
"""Times the offline sweep on this machine: rate, two workers against one, a plain loop, a second run, half the work, --help.

    python scripts/bench_offline.py [--target sm_103] [--baseline 48] [--out FILE.json]

The plain loop calls `triton.compile` with its cache, then `cuobjdump --dump-resource-usage` and `nvdisasm` as processes, one
variant after the other, over variants that reach a cubin. It must give the same verdicts. Times are wall seconds; the machine
should do nothing else. Prints a table, then one JSON line. Exit 1 if a verdict differs or the second run compiles anything.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import parser, publish, run
from tune_kernels.kernels import bundle, registry
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.shapes.target import ARCHES, load_arch
from tune_kernels.tuner.offline import compile as compilation
from tune_kernels.tuner.offline.inspection import blocks_per_sm
from tune_kernels.tuner.offline.report import Report, Variant, read_report

FAMILIES = re.compile(r"\b(HMMA|HGMMA|QGMMA|UTCHMMA|UTCQMMA)\b")


def timed_sweep(out: Path, target: str, jobs: int, **more: str) -> tuple[Report, float]:
    """(report, seconds) of a sweep in a process of its own, imports included. more: further options of the command."""
    started = time.perf_counter()
    arguments = [f"--{k}={v}" for k, v in more.items()]
    subprocess.run([sys.executable, "-m", "tune_kernels.tuner", "--offline", "--target", target, "--jobs", str(jobs), "--out",
                    str(out), "--json", *arguments], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    return read_report(out), seconds


def reached_cubin(report: Report) -> list[Variant]:
    """Every variant that was compiled to the end; fixed kernels too."""
    return [v for v in report.variants if v.stage == "sass"]


def space_of(variants: list[Variant], path: Path) -> str:
    """Writes a space of exactly the tuned variants among these. Fixed kernels are always compiled."""
    lines = []
    for v in (v for v in variants if v.kernel in registry.TUNABLE):
        lines.append("[[grid]]\nkernels = " + json.dumps(v.kernel))
        lines += [f"{k} = {json.dumps(value)}" for k, value in vars(v.schedule).items() if value is not None]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def plain_loop(variants: list[Variant], target: str, cache: Path) -> tuple[dict[str, bool], float]:
    """(id → accepted, seconds): triton.compile, cuobjdump, nvdisasm, one variant after the other."""
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    import triton
    from triton.backends.compiler import GPUTarget

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    numerics = load_recipe("fp8-v1").numerics
    capability = load_arch(target).capability
    found = {}
    started = time.perf_counter()
    for v in variants:
        launch = compilation.launch_of(v.kernel, v.shape, v.schedule, numerics)
        kernel = triton.compile(bundle.source_of(launch), target=GPUTarget("cuda", capability, 32), options=dict(launch.options))
        with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
            f.write(kernel.asm["cubin"])
            f.flush()
            usage = subprocess.run([tools / "cuobjdump", "--dump-resource-usage", f.name], capture_output=True, text=True).stdout
            sass = subprocess.run([tools / "nvdisasm", "-c", f.name], capture_output=True, text=True).stdout
        assert "EXIT" in sass, "this nvdisasm can't read the target; the comparison needs one that can"
        assert "REG:" in usage
        wanted = compilation.wanted_instructions(v.kernel, v.shape, target)
        families = set(FAMILIES.findall(sass))
        spills = bool(re.search(r"\b(STL|LDL)\b", sass))
        right = set(wanted.required) <= families and not families & set(wanted.forbidden)
        registers = int(re.findall(r"REG:(\d+)", usage)[-1])
        shared, tmem = kernel.metadata.shared, kernel.metadata.tmem_size or 0
        stay, _ = blocks_per_sm(registers, shared, tmem, kernel.metadata.num_warps, load_arch(target))
        fits = shared <= load_arch(target).shared_bytes_per_block and getattr(v.schedule, "blocks_per_sm", 0) <= stay
        found[v.id] = right and not spills and fits
    return found, time.perf_counter() - started


def help_seconds() -> float:
    """The median of five runs of `tune-kernels --help`."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "tune_kernels.tuner", "--help"], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    return sorted(times)[2]


def measure(target: str, baseline: int) -> dict[str, object]:
    """The record. baseline: the number of tuned variants that the plain loop compiles."""
    import triton

    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cold, cold_s = timed_sweep(folder / "cold", target, cores)
        second, second_s = timed_sweep(folder / "cold", target, cores)
        tuned = [v for v in reached_cubin(cold) if v.kernel in registry.TUNABLE]
        # The rate is taken over variants that reach a cubin, so that early rejects don't flatter it.
        full, full_s = timed_sweep(folder / "full", target, 2, space=space_of(tuned, folder / "inspected.toml"))
        inspected = reached_cubin(full)
        sample_space = space_of(tuned[:: max(1, len(tuned) // baseline)][:baseline], folder / "sample.toml")
        two, two_s = timed_sweep(folder / "two", target, 2, space=sample_space)
        sample = reached_cubin(two)
        _, one_s = timed_sweep(folder / "one", target, 1, space=sample_space)
        verdicts, plain_s = plain_loop(sample, target, folder / "cache")
        ours = {v.id: v.accepted for v in sample}
        differ = [i for i in ours if ours[i] != verdicts[i]]
        half_s = timed_sweep(folder / "half", target, 2, space=space_of(tuned[::2], folder / "half.toml"))[1]
        return {
            "target": target, "triton": triton.__version__, "python": platform.python_version(), "cores": cores,
            "machine": platform.machine(), "variants": cold.counts.variants, "inspected": len(inspected),
            "accepted": cold.counts.accepted, "accepted_cubins": cold.counts.accepted_cubins,
            "default_space_cold_s": round(cold_s, 2), "second_run_s": round(second_s, 2),
            "second_run_compiled": second.counts.variants - second.counts.cached,
            "inspected_per_s": round(len(inspected) / full_s, 2), "sample": len(sample),
            "sample_one_worker_s": round(one_s, 2), "sample_two_workers_s": round(two_s, 2),
            "sample_plain_loop_s": round(plain_s, 2),
            "two_workers_over_one": round(one_s / two_s, 2), "over_plain_loop": round(plain_s / two_s, 2),
            "verdicts_that_differ": differ, "half_of_the_variants_s": round(half_s, 2), "all_of_them_s": round(full_s, 2),
            "whole_over_half": round(full_s / half_s, 2), "help_s": round(help_seconds(), 3),
        }


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--target", default="sm_103", choices=ARCHES, help="an architecture")
    options.add_argument("--baseline", type=int, default=48, help="tuned variants that the plain loop compiles")
    given = options.parse_args()
    found = measure(given.target, given.baseline)
    for name, value in found.items():
        print(f"{name:<24} {value}")
    publish(found, given.out)
    return 1 if found["verdicts_that_differ"] or found["second_run_compiled"] else 0


if __name__ == "__main__":
    run(main)
