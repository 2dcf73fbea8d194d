"""Synthetic stores for tests of `tune-kernels diff`: the files of tests/data/synthetic, and rows changed as promotions do."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tune_kernels.schedules import store
from tune_kernels.schedules.promoted import Distribution, Paired, Previous, PromotedSchedule
from tune_kernels.schedules.schedule import schedule_id
from tune_kernels.schedules.store import PromotedFile
from tune_kernels.tuner.review.evidence import installed_kernels

DATA = Path(__file__).parents[1] / "data" / "synthetic"
H200, B300 = "nvidia-h200", "nvidia-b300"


def file(sku: str = H200) -> PromotedFile:
    """The SKU's file, with evidence of the kernels as they are now."""
    found = store.read(DATA / sku / "qwen2.5-7b.fp8-v1.json")
    digests = installed_kernels().digests
    return replace(found, rows=tuple(replace(row, kernel_digest=digests[row.kernel]).sealed() for row in found.rows))


def with_row(old: PromotedFile, kernel: str, change: Callable[[PromotedSchedule], PromotedSchedule]) -> PromotedFile:
    return replace(old, rows=tuple(change(row).sealed() if row.kernel == kernel else row for row in old.rows))


def scaled(times: Distribution, by: float) -> Distribution:
    return replace(times, median_us=times.median_us * by, interval_us=tuple(t * by for t in times.interval_us),
                   quantiles_us=tuple(t * by for t in times.quantiles_us))


def promoted(row: PromotedSchedule, ratio: float = 0.9, **knobs: Any) -> PromotedSchedule:
    """The row that a promotion puts in its place: other knobs, timed against it in the same rounds."""
    schedule = replace(row.schedule, **knobs)
    mine = schedule_id(schedule)
    before = Previous(row.schedule, row.schedule_id, row.timing.times, Paired(ratio, (ratio - 0.006, ratio + 0.006), 160))
    timing = replace(row.timing, schedule_id=mine, times=scaled(row.timing.times, ratio), previous=before)
    return replace(row, schedule=schedule, schedule_id=mine, timing=timing, evidence=replace(row.evidence, schedule_id=mine))


def in_recipe(old: PromotedFile, recipe: str) -> PromotedFile:
    return replace(old, recipe=recipe, rows=tuple(replace(row, recipe=recipe).sealed() for row in old.rows))


def write(folder: Path, *files: PromotedFile) -> Path:
    """As a store writes them, whatever is wrong with the rows."""
    for one in files:
        path = folder / one.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(store.text_of(one), encoding="utf-8")
    return folder
