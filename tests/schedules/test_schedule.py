"""Schedules and recipes."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tune_kernels.kernels import registry
from tune_kernels.schedules import recipe as recipe_module
from tune_kernels.schedules.errors import ScheduleError
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import (
    AttentionSchedule,
    LinearSchedule,
    check_knob,
    knobs,
    schedule_from_dict,
    schedule_id,
    schedule_to_dict,
    step_schedules,
)
from tune_kernels.shapes.model import load_model_shape, shipped_names
from tune_kernels.shapes.target import ARCHES

RECIPE = load_recipe("fp8-v1")


@given(st.builds(LinearSchedule, *[st.integers(1, 512)] * 4, split_k=st.integers(1, 8),
                 orientation=st.sampled_from(["weights_as_m", "activations_as_m"]), row_tile=st.sampled_from([8, 16]),
                 blocks_per_sm=st.integers(0, 8), load=st.sampled_from(["pointer", "tma"]), pdl=st.booleans(),
                 maxnreg=st.none() | st.integers(24, 255)))
def test_a_schedule_survives_its_dict(schedule: LinearSchedule) -> None:
    again = schedule_from_dict(LinearSchedule, schedule_to_dict(schedule), "test")
    assert again == schedule
    assert schedule_id(again) == schedule_id(schedule)


@given(st.sampled_from(knobs(LinearSchedule)), st.integers(1, 512))
def test_the_id_changes_with_every_knob(knob: str, value: int) -> None:
    """So that a hand edit shows."""
    one = LinearSchedule(64, 128, 4, 4)
    other = replace(one, **{knob: value})
    assert (schedule_id(one) == schedule_id(other)) == (one == other)


@pytest.mark.parametrize(("knob", "value", "problem"), [
    ("BLOCK_M", 64, "did you mean"), ("BLOCK_N", "64", "a whole number"), ("BLOCK_N", 0, "positive"),
    ("BLOCK_N", True, "a whole number"), ("pdl", 1, "true or false"), ("load", "texture", "pointer, tma"),
    ("orientation", "swapped", "weights_as_m"), ("BLOCK_N", None, "a whole number"), ("BLOCK_N", 64.0, "a whole number"),
    ("split_k", 2**40, "positive number"),
])
def test_a_wrong_knob_is_named(knob: str, value: object, problem: str) -> None:
    found = check_knob(LinearSchedule, knob, value)
    assert found is not None
    assert problem in found


def test_a_missing_knob_is_named() -> None:
    with pytest.raises(ScheduleError, match="BLOCK_N is missing"):
        schedule_from_dict(AttentionSchedule, {"chunk": 256, "TILE": 64, "num_stages": 2, "num_warps": 4}, "test")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("model", shipped_names())
def test_recipe_defaults_fit_every_shipped_model(model: str, arch: str) -> None:
    shapes = load_model_shape(model).kernel_shapes()
    for kernel, shape in shapes.items():
        schedule = registry.default_schedule(RECIPE, kernel, arch, shape)
        assert registry.operation(kernel).contract(shape, schedule) is None, kernel


@pytest.mark.parametrize("arch", ARCHES)
def test_recipe_defaults_keep_the_recipe(arch: str) -> None:
    """Row tile and KV chunk are the recipe's: they set the order of the sums."""
    for table in RECIPE.defaults[arch].values():
        assert table.get("row_tile", RECIPE.row_tile) == RECIPE.row_tile
        assert table.get("chunk", RECIPE.kv_chunk) == RECIPE.kv_chunk


def test_an_unknown_recipe_says_what_there_is() -> None:
    with pytest.raises(ScheduleError, match="fp8-v1"):
        load_recipe("fp8-v0")


def test_recipes_are_called_what_their_files_are() -> None:
    folder = Path(__file__).parents[2] / "schedules" / "recipes"
    for path in folder.glob("*.toml"):
        assert load_recipe(path.stem).name == path.stem


def test_a_recipe_of_kernels_says_how_wrong_they_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a limit is no part of a promoted schedule's key."""
    monkeypatch.setattr(recipe_module, "SHIPPED", tmp_path)
    text = (Path(recipe_module.__file__).parent / "recipes" / "fp8-v1.toml").read_text()
    (tmp_path / "fp8-v1.toml").write_text(text.replace("partials = 4e-4", "partials = 3e-4"))
    stricter = load_recipe("fp8-v1")
    assert (stricter.max_rms_error.partials, RECIPE.max_rms_error.partials) == (3e-4, 4e-4)
    assert stricter.numerics.flags("sm_90") == RECIPE.numerics.flags("sm_90")
    for wrong, said in (("", "partials: missing"), ("partials = 0.0", "partials: is 0.0"), ("partial = 1", "partials: missing")):
        (tmp_path / "fp8-v1.toml").write_text(text.replace("partials = 4e-4", wrong))
        with pytest.raises(ScheduleError, match=f"max_rms_error: {said}"):
            load_recipe("fp8-v1")


@pytest.mark.parametrize(("old", "new", "said"), [
    ('kv_cache = "bf16"', 'kv_cache = "fp32"', "mixes bf16 and fp32"), ('linear = "e4m3"', 'linear = "bf16"', "e4m3 with e4m3x2"),
    ('linear = "e4m3"', 'linear = "fp8"', "precision: linear: is 'fp8'"),
    ('lm_head = "bf16"\n', "", "precision: lm_head: missing"),
    ("sm_100 = 0\n", "", "no max_num_imprecise_acc for sm_100"), ('"fp8-v1"', '"fp8-v2"', "'fp8-v1', the file's name"),
])
def test_a_recipe_that_contradicts_itself_is_refused(old: str, new: str, said: str, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    text = (recipe_module.SHIPPED / "fp8-v1.toml").read_text()
    monkeypatch.setattr(recipe_module, "SHIPPED", tmp_path)
    (tmp_path / "fp8-v1.toml").write_text(text.replace(old, new))
    with pytest.raises(ScheduleError, match=said):
        load_recipe("fp8-v1")


def test_the_schedules_of_a_step_are_each_of_their_kernels_kind() -> None:
    chosen = {name: registry.default_schedule(load_recipe("fp8-v1"), name, "sm_90")
              for name in ("qkv", "o", "gate_up", "down", "attention", "merge", "lm_head")}
    step = step_schedules(chosen)
    assert step.qkv == chosen["qkv"] and step.linear("down") == chosen["down"] and step.fc is None
    assert step_schedules({**chosen, "fc": replace(chosen["o"], row_tile=8)}).row_tile == 8  # type: ignore[type-var]
    wrong_ones = ({**chosen, "o": chosen["merge"]}, "o has a MergeSchedule"), ({"qkv": chosen["qkv"]}, "o has no schedule")
    for wrong, said in wrong_ones:
        with pytest.raises(ScheduleError, match=said):
            step_schedules(wrong)
