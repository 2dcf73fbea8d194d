#!/usr/bin/env python
"""Writes the synthetic stores beside this file: run it again where a row or shape gets another field. No number is measured."""

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

from tune_kernels.schedules import store
from tune_kernels.schedules.promoted import PromotedSchedule, Toolchain
from tune_kernels.schedules.schedule import AttentionSchedule, HeadSchedule, LinearSchedule, MergeSchedule, Schedule
from tune_kernels.shapes.model import KernelShape, load_model_shape

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from promoted_rows import ARTEFACT, MARK, built

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


def row(sku: str, kernel: str, shape: KernelShape) -> PromotedSchedule:
    at = SKUS.index(sku)
    schedule = OWN[kernel][at] if kernel in OWN else SHARED[kernel][0]
    instruction = ("QGMMA", "UTCQMMA")[at] if kernel in OWN else SHARED[kernel][1 + at]
    digest = hashlib.sha256(f"{MARK} {kernel} {sku}".encode()).hexdigest()
    merge = kernel == "merge"
    artefact = replace(ARTEFACT, instructions=(instruction,) if instruction else (), registers=32 if merge else 90,
                       shared_bytes=0 if merge else 65536, tmem_columns=32 if at and not merge else 0, cubin_sha256=digest)
    toolchain = Toolchain("3.6.0", ("12.8", "12.9")[at], {"enable_fp_fusion": False, "max_num_imprecise_acc": (1 << 30, 0)[at]})
    made = built(kernel, shape, schedule, TIMES_US[kernel][at], target=sku, model=MODEL, kernel_digest=digest[:16],
                 toolchain=toolchain, artefact=artefact, numerics_class=digest[::-1])
    return replace(made, evidence=replace(made.evidence, tokens_sha256=digest)).sealed()


def main() -> None:
    shapes = load_model_shape(MODEL).kernel_shapes()
    for sku in SKUS:
        file = store.PromotedFile(sku, MODEL, RECIPE, tuple(row(sku, kernel, shapes[kernel]) for kernel in TIMES_US))
        path = Path(__file__).parent / file.name
        path.parent.mkdir(exist_ok=True)
        path.write_text(store.text_of(file), encoding="utf-8")


if __name__ == "__main__":
    main()
