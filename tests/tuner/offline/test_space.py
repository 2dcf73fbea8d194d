"""Spaces: the shipped ones, one's own, and everything that can be wrong with a file."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from promoted_rows import promoted
from tune_kernels.kernels import registry
from tune_kernels.schedules import store
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import HeadSchedule, LinearSchedule, Schedule
from tune_kernels.schedules.store import PromotedFile
from tune_kernels.shapes.errors import UserError
from tune_kernels.shapes.model import NormShape, load_model_shape
from tune_kernels.shapes.target import ARCHES, load_arch, load_sku
from tune_kernels.tuner.errors import SpaceError
from tune_kernels.tuner.offline.space import (
    Candidate,
    Subject,
    candidates,
    load_space,
    reject,
    schedules,
    with_fixed,
    with_those_in_place,
)

RECIPE = load_recipe("fp8-v1")
SHAPES = load_model_shape("qwen2.5-7b").kernel_shapes(RECIPE.linear_dtype, RECIPE.terms)


def subject(*arches: str, kernels: Sequence[str] = tuple(SHAPES), model: str = "qwen2.5-7b") -> Subject:
    return Subject(load_model_shape(model), RECIPE, kernels, [load_arch(arch) for arch in arches])
GRID = 'kernels = "down"\nBLOCK_N = [64, 128]\nBLOCK_K = 128\nnum_stages = 3\nnum_warps = 4\n'


def space_file(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("arch", ARCHES)
def test_the_default_space_is_large_enough(arch: str) -> None:
    found = candidates(load_space("default"), subject(arch))
    assert sum(c.problem is None for c in found) >= 384
    eight = [c for c in found if getattr(c.schedule, "row_tile", 16) == 8]
    assert eight


def test_the_wide_space_has_thousands() -> None:
    found = candidates(load_space("wide"), subject("sm_103"))
    legal = Counter(c.kernel for c in found if c.problem is None)
    assert sum(legal.values()) >= 3000
    assert set(legal) >= set(SHAPES)


def test_every_knob_of_the_design_is_explored() -> None:
    """Each knob takes at least two values somewhere in the two shipped spaces."""
    for kernel in ("gate_up", "lm_head", "attention", "merge"):
        found = [s for name in ("default", "wide") for s in schedules(load_space(name), kernel, "sm_103")]
        for knob in vars(found[0]):
            if kernel == "attention" and knob == "chunk":
                continue  # the recipe fixes it
            if (kernel, knob) in {("lm_head", "pdl"), ("gate_up", "preload"), ("gate_up", "early")} or knob == "maxnreg":
                continue
            assert len({getattr(s, knob) for s in found}) > 1, (kernel, knob)


def test_a_space_of_ones_own(tmp_path: Path) -> None:
    path = space_file(tmp_path, f"[[grid]]\n{GRID}\n[[grid]]\n{GRID.replace('128]', '256]')}")
    found = schedules(load_space(path), "down", "sm_90")
    assert found == [LinearSchedule(n, 128, 3, 4) for n in (64, 128, 256)], "a union, each once, in order"


def test_targets_of_a_grid(tmp_path: Path) -> None:
    space = load_space(space_file(tmp_path, f'[[grid]]\ntargets = ["sm_90"]\n{GRID}'))
    assert schedules(space, "down", "sm_90")
    assert not schedules(space, "down", "sm_103")


@pytest.mark.parametrize(("text", "named"), [
    (GRID.replace("BLOCK_N", "BLOCK_M"), "did you mean 'BLOCK_N'"),
    (GRID.replace('"down"', '"dwon"'), "did you mean 'down'"),
    (GRID.replace('"down"', "3"), "kernels: is 3"),
    (GRID.replace('"down"', "[]"), r"kernels: is \[\]"),
    (GRID.replace("[64, 128]", "[]"), "BLOCK_N is an empty list"),
    (GRID.replace("[64, 128]", '"64"'), "a whole number"),
    (GRID.replace("[64, 128]", "[64, [128]]"), "a whole number"),
    (GRID.replace("num_warps = 4\n", ""), "num_warps is missing"),
    (GRID + 'targets = ["sm_80"]\n', "unknown 'sm_80'"),
    (GRID + "orientation = 'up'\n", "weights_as_m"),
    (GRID.replace("BLOCK_K = 128", f"BLOCK_K = {list(range(1, 400))}") + f"split_k = {list(range(1, 400))}\n", "candidates"),
])
def test_a_wrong_grid_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        load_space(space_file(tmp_path, f"[[grid]]\n{text}"))


@pytest.mark.parametrize("text", ["", "grid = 3", "grid = [3]", "name = 4", "[[grids]]\nBLOCK_N = 3", "[[grid"])
def test_a_file_that_is_no_space_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpaceError) as refused:
        load_space(space_file(tmp_path, text))
    assert "mine.toml" in str(refused.value)


def test_unknown_space() -> None:
    with pytest.raises(SpaceError, match="did you mean 'default'"):
        load_space("defualt")


def test_a_space_in_which_nothing_is_legal_says_why(tmp_path: Path) -> None:
    space = load_space(space_file(tmp_path, f"[[grid]]\n{GRID.replace('[64, 128]', '100')}"))
    with pytest.raises(SpaceError, match="BLOCK_N 100 is not a power of two"):
        candidates(space, subject("sm_90", kernels=["down"]))


@pytest.mark.parametrize(("change", "problem"), [
    ("num_warps = 3", "num_warps 3"), ("num_warps = 32", "num_warps 32"), ("BLOCK_K = 100", "BLOCK_K 100"),
    ("row_tile = 12", "row_tile 12"), ("split_k = 200", "split_k 200 is more than the 148 steps"),
    ("maxnreg = 25", "maxnreg 25"), ("num_stages = 9", "num_stages 9"), ("blocks_per_sm = 9", "blocks_per_sm 9"),
])
def test_illegal_combinations_are_rejected_by_rule(tmp_path: Path, change: str, problem: str) -> None:
    knob = change.split(" ")[0]
    lines = [line for line in GRID.splitlines() if not line.startswith(knob)]
    space = load_space(space_file(tmp_path, "[[grid]]\n" + "\n".join([*lines, change]) + f"\n[[grid]]\n{GRID}"))
    found = candidates(space, subject("sm_90", kernels=["down"]))
    wrong = [c for c in found if c.problem]
    assert wrong
    assert all(c.code == "contract" and problem in str(c.problem) for c in wrong)


def test_shared_memory_over_the_limit_is_known_before_compiling(tmp_path: Path) -> None:
    text = GRID.replace("[64, 128]", "256").replace("BLOCK_K = 128", "BLOCK_K = 512")
    text = text.replace("num_stages = 3", "num_stages = [2, 4]")
    found = candidates(load_space(space_file(tmp_path, f"[[grid]]\n{text}")), subject("sm_90", kernels=["down"]))
    assert [c.code for c in found if c.problem] == ["resource_limit"]


@pytest.mark.parametrize(("model", "kernel", "fixed"), [
    ("qwen2.5-7b", "lm_head", {"lm_head_reduce", "accept", "draft_token", "ngram", "select_branch"}),
    ("qwen2.5-7b", "lm_head_logits", set()),
    ("qwen2.5-7b", "lm_head_certified", {"head_digits", "head_rescore", "lm_head_reduce"}),
    ("qwen2.5-7b", "down", {"norm", "quantise_row", "prefill_linear", "prefill_narrow"}),
    ("qwen2.5-7b", "merge", {"quantise", "fold"}),
    ("qwen2.5-7b", "attention", {"attention_persistent", "prefill_attention"}),
    ("qwen2.5-7b-eagle3", "lm_head", {"lm_head_reduce", "quantise_row"}),
    ("qwen2.5-7b-eagle3", "qkv", {"draft_norm", "rope", "quantise_row", "prefill_linear", "prefill_narrow"}),
])
def test_fixed_kernels_come_with_the_kernels_they_serve(model: str, kernel: str, fixed: set[str]) -> None:
    mine = subject("sm_90", kernels=[kernel], model=model)
    found = with_fixed(candidates(load_space("default"), mine), mine)
    assert {c.kernel for c in found} == {kernel} | fixed
    assert not [c.problem for c in found if c.kernel in fixed and c.problem]


def test_fixed_kernels_have_a_shape_for_every_neighbours_schedule() -> None:
    """What a neighbour that can't be would leave isn't compiled for; the 1 is a prompt's pass."""
    made = [LinearSchedule(64, 128, 3, 4, split_k=split_k) for split_k in (3, 200)]
    found = with_fixed([reject(Candidate("down", SHAPES["down"], s, load_arch("sm_90"))) for s in made], subject("sm_90"))
    norms = [c.shape for c in found if c.kernel == "norm"]
    assert {shape.split_k for shape in norms if isinstance(shape, NormShape)} == {1, 3}
    assert len(norms) == len(set(norms)) == 6, "two counts of partials: for the next layer, with a feature, for the head"


@pytest.mark.parametrize("model", ["qwen2.5-7b", "qwen2.5-7b-eagle3"])
@pytest.mark.parametrize("arch", ARCHES)
def test_a_recipes_defaults_are_candidates_once(arch: str, model: str) -> None:
    """They are the incumbents of a first promotion, which are timed from the same bundle."""
    mine = subject(arch, kernels=tuple(registry.TUNABLE), model=model)
    found = with_those_in_place(candidates(load_space("default"), mine), mine, [])
    for kernel, shape in mine.shapes:
        default = registry.default_schedule(RECIPE, kernel, arch, shape)
        [one] = [c for c in found if (c.kernel, c.schedule) == (kernel, default)]
        assert one.problem is None, kernel


def test_what_is_promoted_is_a_candidate(tmp_path: Path) -> None:
    """For the SKU that it was promoted on; the head's schedule also without the argmax, which the decoder runs under it."""
    sku = load_sku("nvidia-h200")
    mine: dict[str, Schedule] = {"down": LinearSchedule(32, 512, 2, 8, split_k=5), "lm_head": HeadSchedule(16, 16, 2, 1)}
    for kernel, schedule in mine.items():
        store.promote(tmp_path, PromotedFile(sku.name, "m", RECIPE.name, (promoted(kernel, SHAPES[kernel], schedule),)))
    found = with_those_in_place([], subject("sm_90", "sm_103"), [tmp_path])
    new = [(c.kernel, c.target.arch, c.schedule) for c in found if c.schedule in mine.values()]
    assert new == [("down", "sm_90", mine["down"]), ("lm_head", "sm_90", mine["lm_head"]),
                   ("lm_head_logits", "sm_90", mine["lm_head"])]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("name", ["qwen3-8b", "mistral-7b-v0.3", "llama-3.1-8b", "qwen2.5-14b"])
def test_every_kernel_of_a_published_model_has_legal_candidates(name: str) -> None:
    """From its config.json, for three architectures, the kernels that aren't tuned included."""
    model = str(Path(__file__).parents[2] / "data" / "configs" / name)
    about = subject(*ARCHES, model=model)
    for space in ("small", "default"):
        found = with_fixed(candidates(load_space(space), about), about)
        legal = Counter((c.target.arch, c.kernel) for c in found if c.problem is None)
        assert set(legal) == {(c.target.arch, c.kernel) for c in found}
