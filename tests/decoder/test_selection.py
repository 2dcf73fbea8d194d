"""The certified head runs where it is promoted and was timed as the faster one, or where a caller asks for it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from promoted_rows import distribution, promoted
from tune_kernels.decoder.selection import CERTIFIED, Options, select_schedules
from tune_kernels.kernels.registry import default_schedule
from tune_kernels.schedules import store
from tune_kernels.schedules.promoted import PromotedSchedule
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import ScreenSchedule
from tune_kernels.schedules.store import PromotedFile
from tune_kernels.shapes.model import load_model_shape

RECIPE, SHAPE = load_recipe("fp8-v1"), load_model_shape("qwen2.5-0.5b")
UNTUNED = Options(allow_untuned=True)
SHAPES = SHAPE.kernel_shapes(RECIPE.linear_dtype, RECIPE.terms)


def row(kernel: str, median_us: float) -> PromotedSchedule:
    made = promoted(kernel, SHAPES[kernel], default_schedule(RECIPE, kernel, "sm_90", SHAPES[kernel]))
    return replace(made, timing=replace(made.timing, times=distribution(median_us))).sealed()


def selected(folder: Path, *rows: PromotedSchedule, options: Options = UNTUNED) -> ScreenSchedule | None:
    if rows:
        store.promote(folder, PromotedFile("nvidia-h200", "m", RECIPE.name, rows))
    found = select_schedules(RECIPE, SHAPE, torch.device("cpu"), replace(options, schedules=str(folder)))
    assert (found.schedules.lm_head_certified is None) == (CERTIFIED not in {row["kernel"] for row in found.rows})
    assert (CERTIFIED in {row.kernel for row in found.promoted}) <= (found.schedules.lm_head_certified is not None)
    return found.schedules.lm_head_certified


@pytest.mark.parametrize(("plain_us", "certified_us", "runs"), [(250, 160, True), (19, 20, False), (20, 20, False)])
def test_the_faster_head_runs(plain_us: float, certified_us: float, runs: bool, tmp_path: Path) -> None:
    found = selected(tmp_path, row("lm_head", plain_us), row(CERTIFIED, certified_us))
    assert (found is not None) == runs


def test_defaults_never_bring_it(tmp_path: Path) -> None:
    """Untuned schedules may be allowed, and it may be promoted while the plain head isn't: no time says which is faster."""
    assert selected(tmp_path) is None
    assert selected(tmp_path, row("lm_head", 250)) is None
    assert selected(tmp_path / "alone", row(CERTIFIED, 160)) is None


def test_a_caller_may_ask_for_it(tmp_path: Path) -> None:
    asked = ScreenSchedule(64, 128, 3, 4)
    assert selected(tmp_path, options=replace(UNTUNED, overrides={CERTIFIED: asked})) == asked
