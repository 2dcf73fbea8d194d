"""Promoted rows for tests and for the synthetic stores: every number here is made up."""

from dataclasses import replace
from typing import Any

from tune_kernels.schedules.promoted import (
    Artefact,
    Checks,
    Distribution,
    Evidence,
    Paired,
    Previous,
    PromotedSchedule,
    PromotedTiming,
    Recorded,
    Toolchain,
)
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import LinearSchedule, Schedule, schedule_id
from tune_kernels.shapes.model import KernelShape, LinearShape
from tune_kernels.shapes.target import load_sku

MARK = "synthetic"
CHECKS = {"reference": Checks(1, 1), "rows": Checks(9, 9), "determinism": Checks(5, 5), "agreement": Checks(18, 18)}
ARTEFACT = Artefact(("QGMMA",), 90, 0, 0, 0, 65536, 0, 3, "ab" * 32)
TOOLCHAIN = Toolchain("3.6.0", "12.8", {"enable_fp_fusion": False, "max_num_imprecise_acc": 1 << 30})


def distribution(median_us: float) -> Distribution:
    quantiles = tuple(round(median_us * (0.985 + 0.0031 * i + 0.000009 * i**3), 3) for i in range(11))
    return Distribution(median_us, (round(median_us * 0.996, 3), round(median_us * 1.004, 3)), 160, quantiles)


def built(kernel: str, shape: KernelShape, schedule: Schedule, median_us: float, **changes: Any) -> PromotedSchedule:
    """A row for nvidia-h200, timed against the same knobs with eight warps. Not sealed. changes: other fields."""
    mine, before = schedule_id(schedule), replace(schedule, num_warps=8)
    previous = Previous(before, schedule_id(before), distribution(round(1.06 * median_us, 3)), Paired(0.943, (0.938, 0.949), 160))
    clocks = {"sm_mhz": 1980.0, "memory_mhz": 3201.0, "temperature_c": 45.0}
    made = PromotedSchedule(
        "nvidia-h200", "m", "fp8-v1", kernel, shape, schedule, mine, "0123456789abcdef", TOOLCHAIN, Recorded(MARK, MARK),
        ARTEFACT, "cd" * 32, PromotedTiming(mine, distribution(median_us), previous, MARK, clocks),
        Evidence(mine, CHECKS, 6, 2304, "ef" * 32, "random:0", None, {"ar": Paired(0.96, (0.955, 0.966), 5)}), MARK)
    return replace(made, **changes)


def row(kernel: str = "gate_up", N: int = 256, BLOCK_N: int = 64, **changes: Any) -> PromotedSchedule:
    return built(kernel, LinearShape(N, 512), LinearSchedule(BLOCK_N, 128, num_stages=3, num_warps=4), 10.8, **changes).sealed()


def promoted(kernel: str, shape: KernelShape, schedule: Schedule, model: str = "m") -> PromotedSchedule:
    """A row that a look-up finds here for nvidia-h200 and fp8-v1."""
    from tune_kernels.kernels.registry import store_key

    key = store_key(kernel, shape, load_sku("nvidia-h200"), load_recipe("fp8-v1"))
    return built(kernel, shape, schedule, 10.8, model=model, kernel_digest=key.kernel_digest, toolchain=key.toolchain).sealed()
