"""A simulated GPU: candidates with true times, drifting noise, and candidates' faults."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tune_kernels import Kernel
from tune_kernels.kernels import bundle, registry, toolchain
from tune_kernels.kernels.loading import Source
from tune_kernels.schedules.promoted import Checks
from tune_kernels.schedules.recipe import OWN, Recipe, load_recipe
from tune_kernels.schedules.schedule import LinearSchedule, Schedule, schedule_id, schedule_to_dict
from tune_kernels.shapes.model import KernelShape, load_model_shape, shape_to_dict
from tune_kernels.shapes.own import OwnShape
from tune_kernels.shapes.target import load_sku
from tune_kernels.tuner.offline import own
from tune_kernels.tuner.offline.own import OwnKernel
from tune_kernels.tuner.on_gpu.samples.gate import Checked, Failure
from tune_kernels.tuner.on_gpu.samples.machine import Machine
from tune_kernels.tuner.on_gpu.samples.timing import Batch, State
from tune_kernels.tuner.on_gpu.samples.usage import Usage
from tune_kernels.tuner.on_gpu.worker.tasks import Problem

H200 = Machine("NVIDIA H200", "580.0", "13.0")
B300 = Machine("NVIDIA B300 SXM6 AC", "580.0", "13.0")
RECIPE = load_recipe("fp8-v1")
H200_RUN = Path(__file__).parents[1] / "data" / "recordings" / "h200-qwen2.5-7b.json"  # a real one
PASSED = {"reference": Checks(1, 1), "rows": Checks(17, 17), "determinism": Checks(8, 8)}


def candidates(kernel: str = "down", sku: str = "nvidia-h200") -> list[Schedule]:
    """The recipe's default, and some others of the recipe's split and of another."""
    default = registry.default_schedule(RECIPE, kernel, load_sku(sku).arch)
    assert isinstance(default, LinearSchedule)
    more = [LinearSchedule(n, k, stages, 4, split_k=split, pdl=True) for n in (64, 128) for k in (128, 256) for stages in (3, 4)
            for split in (default.split_k, 2)]
    return list(dict.fromkeys([default, *more]))


def write_bundle(folder: Path, schedules: Mapping[str, Sequence[Schedule]], sku: str = "nvidia-h200",
                 model: str = "qwen2.5-7b", **changes: Any) -> Path:
    """report.json of a bundle in which all of these were accepted; no artefacts."""
    shapes = load_model_shape(model).kernel_shapes(RECIPE.linear_dtype, RECIPE.terms)
    listed = [(kernel, bundle.kernel_digest(registry.operation(kernel).kernel), shapes[kernel], s)
              for kernel, mine in schedules.items() for s in mine]
    return _write_report(folder, listed, RECIPE, sku, {"model": model, "model_digest": load_model_shape(model).digest, **changes})


def write_own_bundle(folder: Path, kernel: Kernel, sku: str = "nvidia-h200", **changes: Any) -> Path:
    """As write_bundle, of all schedules and shapes of a kernel of one's own."""
    digest = bundle.kernel_digest(kernel.jitted)
    listed = [(kernel.name, digest, shape, s) for shape in kernel.own_shapes for s in kernel.schedules]
    return _write_report(folder, listed, OWN, sku, {"model": "own", "model_digest": None, **changes})


def _write_report(folder: Path, listed: Sequence[tuple[str, str, KernelShape, Schedule]], recipe: Recipe, sku: str,
                  changes: Mapping[str, Any]) -> Path:
    target = load_sku(sku)
    here = toolchain.installed(target, recipe.numerics)
    variants = [
        {"id": variant_id(shape, s), "kernel": kernel, "kernel_digest": digest,
         "target": target.arch, "shape": shape_to_dict(shape), "schedule": schedule_to_dict(s), "verdict": "accepted",
         "stage": "sass", "reasons": [], "warnings": [], "lines": [], "instructions": ["QGMMA"], "registers": 80,
         "spill_store_bytes": 0, "spill_load_bytes": 0, "stack_bytes": 0, "shared_bytes": 1000, "tmem_columns": 0,
         "blocks_per_sm": 2, "cubin_sha256": "ab" * 32, "compile_ms": 1.0, "artefact": "0a" * 16}
        for kernel, digest, shape, s in listed]
    report = {"schema": "tune-kernels/offline-report/1", "targets": [target.arch], "space": "default",
              "recipe": recipe.name, "max_spill_bytes": 0, "seconds": 1.0,
              "counts": {"variants": len(variants), "contract": 0, "accepted": len(variants), "rejected": 0, "cached": 0,
                         "cubins": 1, "accepted_cubins": 1}, "audit": {"one_in": 16, "sampled": 0, "disagreed": []},
              "toolchain": {"triton": here.triton, "ptxas": {target.arch: here.ptxas}, "nvdisasm": "13",
                            "flags": {"enable_fp_fusion": recipe.numerics.enable_fp_fusion,
                                      "promote_every": recipe.numerics.promote_every,
                                      "max_num_imprecise_acc": dict(recipe.numerics.max_num_imprecise_acc)}},
              "variants": variants, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report))
    return folder


def variant_id(shape: KernelShape, schedule: Schedule) -> str:
    """Of the schedule alone; of one's own kernel also of the shape, as it has several."""
    mine = schedule_id(schedule)
    return f"{mine[:6]}{abs(hash(shape)) % 16**6:06x}" if isinstance(shape, OwnShape) else mine


SPLIT = candidates()[0].split_k  # type: ignore[union-attr] # of the recipe's default for `down`


def split_class(schedule: Any) -> str:
    """Bits follow split-K alone, as on an H200."""
    return f"{getattr(schedule, 'split_k', 1):064x}"


@dataclass
class FakeMeasurer:
    """time_us: the true time; does: a candidate's failure in its checks, or None; kills: those that die when timed;
    throttled: by round; flags: whether NVML is there to say so."""

    time_us: Callable[[Schedule], float]
    does: Callable[[Schedule], Failure | None] = lambda schedule: None
    class_of: Callable[[Schedule], str] = split_class
    kills: Callable[[Schedule], bool] = lambda schedule: False
    noise: float = 0.005
    seed: int = 0
    throttled: Callable[[int], bool] = lambda index: False
    flags: bool = True
    checks: int = 0
    process: int = 0
    timed: list[tuple[str, int, int]] = field(default_factory=list)

    def describe(self, source: Source) -> tuple[OwnKernel, ...]:
        return own.describe(source)

    def fresh_process(self) -> None:
        self.process += 1

    def usage(self) -> Usage:
        return Usage()

    def check(self, problem: Problem, name: str, schedule: Schedule) -> Checked:
        self.checks += 1
        if failure := self.does(schedule):
            return Checked({"reference": Checks(1, 0)}, 1.0, None, failure)
        return Checked(PASSED, 0.002, self.class_of(schedule))

    def time(self, problem: Problem, candidates: Mapping[str, Schedule], phase: str, rounds: int,
             seed: int) -> tuple[Batch | None, dict[str, Failure]]:
        dead = {n: Failure("crash", "AcceleratorError: an illegal memory access") for n, s in candidates.items() if self.kills(s)}
        alive = {n: s for n, s in candidates.items() if n not in dead}
        self.timed.append((phase, len(alive), rounds))
        random = np.random.default_rng([self.seed, seed, len(self.timed)])
        drift = 1 + 0.05 * np.sin(np.arange(rounds) / 7 + random.random())
        samples = {n: [float(t) for t in self.time_us(s) * drift * random.lognormal(0, self.noise, rounds)]
                   for n, s in alive.items()}
        slow = [self.throttled(i) for i in range(rounds)]
        states = [State(1980, 3201, 45, 500.0, 0x40 if s else 0) if self.flags else State() for s in slow]
        for n in samples:
            samples[n] = [t * 10 if s else t for t, s in zip(samples[n], slow)]
        return (Batch(phase, seed, samples, states, f"{self.seed}-{self.process}") if alive else None), dead


@dataclass
class FakeProbe:
    """A full model whose step is the sum of its kernels' times, and whose tokens follow its numerics."""

    time_us: Callable[[Schedule], float]
    tokens_of: Callable[[Mapping[str, Schedule]], list[int]] = lambda schedules: [1, 2, 3]
    modes_differ: bool = False
    asked: list[str] = field(default_factory=list)

    def tokens(self, schedules: Mapping[str, Schedule]) -> Mapping[str, Sequence[Sequence[int]]]:
        self.asked.append("tokens")
        found = [self.tokens_of(schedules)] * 2
        return {"ar": found, "sd": found, "ssd": [[9, *found[0][1:]]] * 2 if self.modes_differ else found}

    def time_step(self, old: Mapping[str, Schedule], new: Mapping[str, Schedule],
                  repeats: int) -> Mapping[str, Sequence[tuple[float, float]]]:
        self.asked.append("time")
        a, b = (1000 + sum(map(self.time_us, s.values())) for s in (old, new))
        jitter = np.random.default_rng(0).lognormal(0, 0.0005, (2, repeats))
        return {mode: [(a * x, b * y) for x, y in jitter.T] for mode in ("ar", "sd")}
