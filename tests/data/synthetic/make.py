#!/usr/bin/env python
"""Writes the synthetic stores beside this file: run it again where a row or shape gets another field. No number is measured."""

import hashlib
from dataclasses import replace
from pathlib import Path

from tune_kernels.schedules import store
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
from tune_kernels.schedules.schedule import AttentionSchedule, HeadSchedule, LinearSchedule, MergeSchedule, Schedule, schedule_id
from tune_kernels.shapes.model import KernelShape, load_model_shape

MARK = "synthetic"
MODEL, RECIPE = "qwen2.5-7b", "fp8-v1"
SHARED: dict[str, tuple[Schedule, str, str]] = {  # schedule, instruction on H200 and on B300
    "qkv": (LinearSchedule(64, 128, 4, 4, split_k=4), "QGMMA", "UTCQMMA"),
    "attention": (AttentionSchedule(256, 64, 64, 2, 4), "HGMMA", "UTCHMMA"),
    "merge": (MergeSchedule(64, 1, 1), "", ""),
    "lm_head": (HeadSchedule(128, 64, 4, 4), "HGMMA", "UTCHMMA"),
}
OWN: dict[str, tuple[Schedule, Schedule]] = {  # on H200 and on B300
    "o": (LinearSchedule(64, 128, 6, 4, split_k=4), LinearSchedule(64, 128, 4, 4, split_k=4)),
    "gate_up": (LinearSchedule(128, 128, 3, 4, blocks_per_sm=3), LinearSchedule(128, 256, 3, 4)),
    "down": (LinearSchedule(64, 128, 6, 4, split_k=4, blocks_per_sm=2), LinearSchedule(64, 128, 3, 4, split_k=4)),
}
TIMES_US = {"qkv": (6.7, 4.4), "o": (5.5, 3.7), "gate_up": (34.9, 21.6), "down": (18.9, 12.2), "attention": (8.3, 6.9),
            "merge": (2.1, 1.8), "lm_head": (262.0, 151.0)}
SKUS = ("nvidia-h200", "nvidia-b300")


def times(median_us: float) -> Distribution:
    quantiles = tuple(round(median_us * (0.985 + 0.0031 * i + 0.000009 * i**3), 3) for i in range(11))
    return Distribution(median_us, (round(median_us * 0.996, 3), round(median_us * 1.004, 3)), 160, quantiles)


def row(sku: str, kernel: str, shape: KernelShape) -> PromotedSchedule:
    at = SKUS.index(sku)
    schedule = OWN[kernel][at] if kernel in OWN else SHARED[kernel][0]
    instruction = ("QGMMA", "UTCQMMA")[at] if kernel in OWN else SHARED[kernel][1 + at]
    mine, before = schedule_id(schedule), replace(schedule, num_warps=8)
    digest = hashlib.sha256(f"{MARK} {kernel} {sku}".encode()).hexdigest()
    slower_us = round(1.06 * TIMES_US[kernel][at], 3)
    previous = Previous(before, schedule_id(before), times(slower_us), Paired(0.943, (0.938, 0.949), 160))
    toolchain = Toolchain("3.6.0", ("12.8", "12.9")[at], {"enable_fp_fusion": False, "max_num_imprecise_acc": (1 << 30, 0)[at]})
    merge = kernel == "merge"
    artefact = Artefact((instruction,) if instruction else (), 32 if merge else 90, 0, 0, 0, 0 if merge else 65536,
                        32 if at and not merge else 0, 3, digest)
    checks = {"reference": Checks(1, 1), "rows": Checks(9, 9), "determinism": Checks(5, 5), "agreement": Checks(18, 18)}
    clocks = {"sm_mhz": 1980.0, "memory_mhz": 3201.0, "temperature_c": 45.0}
    return PromotedSchedule(
        sku, MODEL, RECIPE, kernel, shape, schedule, mine, digest[:16], toolchain, Recorded(MARK, MARK), artefact, digest[::-1],
        PromotedTiming(mine, times(TIMES_US[kernel][at]), previous, MARK, clocks),
        Evidence(mine, checks, 6, 2304, digest, "random:0", None, {"ar": Paired(0.96, (0.955, 0.966), 5)}), MARK).sealed()


def main() -> None:
    shapes = load_model_shape(MODEL).kernel_shapes()
    for sku in SKUS:
        file = store.PromotedFile(sku, MODEL, RECIPE, tuple(row(sku, kernel, shapes[kernel]) for kernel in TIMES_US))
        path = Path(__file__).parent / file.name
        path.parent.mkdir(exist_ok=True)
        path.write_text(store.text_of(file), encoding="utf-8")


if __name__ == "__main__":
    main()
