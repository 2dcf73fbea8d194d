"""Promoted rows for tests: every number here is made up."""

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

BEFORE = LinearSchedule(BLOCK_N=128, BLOCK_K=128, num_stages=3, num_warps=4)


def distribution(median_us: float) -> Distribution:
    quantiles = tuple(median_us * (0.95 + i / 100) for i in range(11))
    return Distribution(median_us, (median_us * 0.99, median_us * 1.01), 64, quantiles)


def row(kernel: str = "gate_up", N: int = 256, BLOCK_N: int = 64, **changes: Any) -> PromotedSchedule:
    schedule = LinearSchedule(BLOCK_N=BLOCK_N, BLOCK_K=128, num_stages=3, num_warps=4)
    mine = schedule_id(schedule)
    previous = Previous(BEFORE, schedule_id(BEFORE), distribution(12.0), Paired(0.9, (0.88, 0.92), 64))
    made = PromotedSchedule(
        "nvidia-h200", "m", "fp8-v1", kernel, LinearShape(N, 512), schedule, mine, "0123456789abcdef",
        Toolchain("3.6.0", "12.8", {"enable_fp_fusion": False, "max_num_imprecise_acc": 1 << 30}), Recorded("580.1", "13.0"),
        Artefact(("QGMMA",), 80, 0, 0, 0, 65536, 0, 3, "ab" * 32), "cd" * 32,
        PromotedTiming(mine, distribution(10.8), previous, "580.1", {"sm_mhz": 1980.0}),
        Evidence(mine, {"rows": Checks(9, 9), "reference": Checks(1, 1)}, 6, 768, "ef" * 32, "random:0", None,
                 {"ar": Paired(0.99, (0.985, 0.995), 5)}),
        "2026-11-30")
    return replace(made, **changes).sealed()


def promoted(kernel: str, shape: KernelShape, schedule: Schedule, model: str = "m") -> PromotedSchedule:
    """A row that a look-up finds here for nvidia-h200 and fp8-v1."""
    from tune_kernels.kernels.registry import store_key

    key, mine, made = store_key(kernel, shape, load_sku("nvidia-h200"), load_recipe("fp8-v1")), schedule_id(schedule), row()
    return replace(made, model=model, kernel=kernel, shape=shape, schedule=schedule, schedule_id=mine,
                   kernel_digest=key.kernel_digest, toolchain=key.toolchain, timing=replace(made.timing, schedule_id=mine),
                   evidence=replace(made.evidence, schedule_id=mine)).sealed()
