#!/usr/bin/env python
"""Measures the offline sweep on this machine: rate, gain of workers, gain over a plain loop, second run, --help, linearity.

    python scripts/bench_offline.py [--target sm_103] [--baseline 48] [--out FILE.json]

The plain loop is what one writes first: `triton.compile` with its cache, `cuobjdump --dump-resource-usage` and `nvdisasm` as
processes, one variant after the other, over variants that reach a cubin; it must come to the same verdicts. Prints a table,
then one JSON line. Timings are wall seconds of this process tree; run it on a machine that does nothing else.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tune_kernels.kernels import bundle, registry
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import schedule_from_dict
from tune_kernels.shapes.model import shape_from_dict
from tune_kernels.shapes.target import ARCHES, load_arch
from tune_kernels.tuner.offline import compile as compilation
from tune_kernels.tuner.offline.inspection import blocks_per_sm

FAMILIES = re.compile(r"\b(HMMA|HGMMA|QGMMA|UTCHMMA|UTCQMMA)\b")


def timed_sweep(out: Path, target: str, jobs: int, **more: Any) -> tuple[dict[str, Any], float]:
    """A sweep in a process of its own, cold imports included, as a user runs it."""
    started = time.perf_counter()
    arguments = [f"--{k}={v}" for k, v in more.items()]
    subprocess.run([sys.executable, "-m", "tune_kernels.tuner", "--offline", "--target", target, "--jobs", str(jobs), "--out",
                    str(out), "--json", *arguments], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    return json.loads((out / "report.json").read_text()), seconds


def reached_cubin(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Every variant that was compiled to the end, with those kernels that come with the tuned ones."""
    return [v for v in report["variants"] if v["stage"] == "sass"]


def space_of(variants: list[dict[str, Any]], path: Path) -> str:
    """A space that holds just the tuned ones of these variants; the kernels that serve them come with them."""
    lines = []
    for v in (v for v in variants if v["kernel"] in registry.TUNABLE):
        lines.append("[[grid]]\nkernels = " + json.dumps(v["kernel"]))
        lines += [f"{k} = {json.dumps(value)}" for k, value in v["schedule"].items() if value is not None]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def plain_loop(variants: list[dict[str, Any]], target: str, cache: Path) -> tuple[dict[str, bool], float]:
    """id → accepted, and the seconds it took: triton.compile, cuobjdump, nvdisasm, one variant after the other."""
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    import triton
    from triton.backends.compiler import GPUTarget

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    numerics = load_recipe("fp8-v1").numerics
    capability = load_arch(target).capability
    found = {}
    started = time.perf_counter()
    for v in variants:
        shape = shape_from_dict(v["shape"], v["id"])
        schedule = schedule_from_dict(registry.operation(v["kernel"]).schedule_type, v["schedule"], v["id"])
        launch = compilation.launch_of(v["kernel"], shape, schedule, numerics)
        kernel = triton.compile(bundle.source_of(launch), target=GPUTarget("cuda", capability, 32), options=dict(launch.options))
        with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
            f.write(kernel.asm["cubin"])
            f.flush()
            usage = subprocess.run([tools / "cuobjdump", "--dump-resource-usage", f.name], capture_output=True, text=True).stdout
            sass = subprocess.run([tools / "nvdisasm", "-c", f.name], capture_output=True, text=True).stdout
        assert "EXIT" in sass, "this nvdisasm can't read the target; the comparison needs one that can"
        assert "REG:" in usage
        wanted = compilation.wanted_instructions(v["kernel"], shape, target)
        families = set(FAMILIES.findall(sass))
        spills = bool(re.search(r"\b(STL|LDL)\b", sass))
        right = set(wanted.required) <= families and not families & set(wanted.forbidden)
        registers = int(re.findall(r"REG:(\d+)", usage)[-1])
        shared, tmem = kernel.metadata.shared, kernel.metadata.tmem_size or 0
        stay, _ = blocks_per_sm(registers, shared, tmem, kernel.metadata.num_warps, load_arch(target))
        fits = shared <= load_arch(target).shared_bytes_per_block and v["schedule"].get("blocks_per_sm", 0) <= stay
        found[v["id"]] = right and not spills and fits
    return found, time.perf_counter() - started


def help_seconds() -> float:
    times = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "tune_kernels.tuner", "--help"], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    return sorted(times)[2]


def measure(target: str, baseline: int) -> dict[str, Any]:
    import triton

    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cold, cold_s = timed_sweep(folder / "cold", target, cores)
        second, second_s = timed_sweep(folder / "cold", target, cores)
        tuned = [v for v in reached_cubin(cold) if v["kernel"] in registry.TUNABLE]
        # The rate is taken over variants that reach a cubin, so that early rejects don't flatter it.
        full, full_s = timed_sweep(folder / "full", target, 2, space=space_of(tuned, folder / "inspected.toml"))
        inspected = reached_cubin(full)
        sample_space = space_of(tuned[:: max(1, len(tuned) // baseline)][:baseline], folder / "sample.toml")
        two, two_s = timed_sweep(folder / "two", target, 2, space=sample_space)
        sample = reached_cubin(two)
        _, one_s = timed_sweep(folder / "one", target, 1, space=sample_space)
        verdicts, plain_s = plain_loop(sample, target, folder / "cache")
        ours = {v["id"]: v["verdict"] == "accepted" for v in sample}
        differ = [i for i in ours if ours[i] != verdicts[i]]
        half_s = timed_sweep(folder / "half", target, 2, space=space_of(tuned[::2], folder / "half.toml"))[1]
        return {
            "target": target, "triton": triton.__version__, "python": platform.python_version(), "cores": cores,
            "machine": platform.machine(), "variants": cold["counts"]["variants"], "inspected": len(inspected),
            "accepted": cold["counts"]["accepted"], "accepted_cubins": cold["counts"]["accepted_cubins"],
            "default_space_cold_s": round(cold_s, 2), "second_run_s": round(second_s, 2),
            "second_run_compiled": second["counts"]["variants"] - second["counts"]["cached"],
            "inspected_per_s": round(len(inspected) / full_s, 2), "sample": len(sample),
            "sample_one_worker_s": round(one_s, 2), "sample_two_workers_s": round(two_s, 2),
            "sample_plain_loop_s": round(plain_s, 2),
            "two_workers_over_one": round(one_s / two_s, 2), "over_plain_loop": round(plain_s / two_s, 2),
            "verdicts_that_differ": differ, "half_of_the_variants_s": round(half_s, 2), "all_of_them_s": round(full_s, 2),
            "whole_over_half": round(full_s / half_s, 2), "help_s": round(help_seconds(), 3),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="sm_103", choices=ARCHES)
    parser.add_argument("--baseline", type=int, default=48, help="tuned variants that the plain loop compiles too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = measure(options.target, options.baseline)
    for name, value in found.items():
        print(f"{name:<24} {value}")
    line = json.dumps(found)
    if options.out:
        options.out.write_text(line + "\n")
    print(line)
    return 1 if found["verdicts_that_differ"] or found["second_run_compiled"] else 0


if __name__ == "__main__":
    sys.exit(main())
