"""The artefacts' facts: the silent FP16 fallback, spills, limits that nobody checks offline, and every kernel's default.

Nothing here is assumed from the source or from a list of bad blocks.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton
from tune_kernels.kernels import registry
from tune_kernels.kernels.fixed import FIXED
from tune_kernels.schedules.recipe import Recipe, load_recipe
from tune_kernels.schedules.schedule import LinearSchedule, MergeSchedule, Schedule
from tune_kernels.shapes.model import LinearShape, load_model_shape
from tune_kernels.shapes.target import ARCHES, load_arch
from tune_kernels.tuner.offline.compile import compile_task, make_task, wanted_instructions
from tune_kernels.tuner.offline.inspection import Verdict, verdict_on
from tune_kernels.tuner.offline.record import Facts, Record

pytestmark = pytest.mark.compiles
RECIPE = load_recipe("fp8-v1")
SHAPES = load_model_shape("qwen2.5-7b").kernel_shapes()
DRAFTER = load_model_shape("qwen2.5-7b-eagle3").kernel_shapes()


def verdict_of(kernel: str, arch: str, schedule: Schedule, folder: Path, shape: Any = None, *,
               to_the_end: bool = False) -> tuple[Verdict, Record]:
    shape = shape or SHAPES.get(kernel) or DRAFTER[kernel]
    record = compile_task(make_task(kernel, arch, shape, schedule, RECIPE.numerics, folder), to_the_end=to_the_end)
    return verdict_on(record, wanted_instructions(kernel, shape, arch), schedule, load_arch(arch)), record


def facts_of(record: Record) -> Facts:
    assert record.facts is not None
    return record.facts


def codes(verdict: Verdict) -> set[str]:
    return {r.code for r in verdict.reasons}


@pytest.mark.parametrize("arch", ARCHES)
def test_eight_rows_fall_back_to_fp16_until_triton_39(arch: str, tmp_path: Path) -> None:
    """The operands go to FP16 silently; the fallback is in TTGIR, in PTX and in the machine code."""
    schedule = replace(registry.default_schedule(RECIPE, "down", arch), row_tile=8)  # type: ignore[type-var]
    verdict, record = verdict_of("down", arch, schedule, tmp_path, to_the_end=True)
    if triton.__version__.startswith(("3.6.", "3.7.")):
        assert codes(verdict) == {"wrong_instruction"}
        assert facts_of(record).instructions.keys() == {"HMMA"}
        assert record.dots == ("HMMA",)
        assert any("cvt.rn.f16x2.e4m3x2" in line for line in record.conversions)
        early, _ = verdict_of("down", arch, schedule, tmp_path)
        assert codes(early) == {"wrong_instruction"}
    else:
        assert verdict.accepted
        assert facts_of(record).instructions.keys() == {"QGMMA" if arch == "sm_90" else "UTCQMMA"}


@pytest.mark.parametrize("arch", ARCHES)
def test_activations_as_m_fall_back_at_16_rows(arch: str, tmp_path: Path) -> None:
    found = [verdict_of("o", arch, LinearSchedule(128, 128, stages, 4, orientation="activations_as_m"), tmp_path)[0]
             for stages in (3, 4)]
    assert all(codes(verdict) == {"wrong_instruction"} for verdict in found)
    assert "ttgir" in {verdict.stage for verdict in found}, "known before the dear half of the compilation, audits apart"


@pytest.mark.parametrize("arch", ARCHES)
def test_what_does_not_fit_the_registers_spills(arch: str, tmp_path: Path) -> None:
    """Attention's sums in 96 registers a thread, and in as many as it wants."""
    default = registry.default_schedule(RECIPE, "attention", arch)
    capped, record = verdict_of("attention", arch, replace(default, maxnreg=96), tmp_path)  # type: ignore[type-var]
    assert codes(capped) == {"register_spill"}
    assert facts_of(record).spill_store_bytes // 4 > 50, "many values"
    assert facts_of(record).stack_bytes > 200
    free, record = verdict_of("attention", arch, default, tmp_path)
    assert free.accepted
    assert (facts_of(record).spill_store_bytes, facts_of(record).spill_load_bytes, facts_of(record).stack_bytes) == (0, 0, 0)


@pytest.mark.parametrize("arch", ARCHES)
def test_too_much_shared_memory_is_a_resource_limit(arch: str, tmp_path: Path) -> None:
    """278,528 B compile without a word."""
    schedule = LinearSchedule(256, 256, 4, 4)
    verdict, record = verdict_of("gate_up", arch, schedule, tmp_path, to_the_end=True)
    assert "resource_limit" in codes(verdict)
    assert facts_of(record).shared_bytes >= 278_528
    early, _ = verdict_of("gate_up", arch, schedule, tmp_path)
    assert codes(early) == {"resource_limit"}


WINNERS = {
    "gate_up on B300": ("gate_up", LinearSchedule(128, 256, 3, 4), ("sm_103",)),
    "down on B300": ("down", LinearSchedule(64, 128, 3, 4, split_k=4), ("sm_103",)),
    "qkv on H200": ("qkv", LinearSchedule(64, 128, 4, 4, split_k=4), ("sm_90",)),
    "o on H200": ("o", LinearSchedule(64, 128, 6, 4, split_k=4), ("sm_90",)),
    "gate_up on H200": ("gate_up", LinearSchedule(128, 128, 3, 4, blocks_per_sm=3), ("sm_90",)),
    "down on H200": ("down", LinearSchedule(64, 128, 6, 4, split_k=4, blocks_per_sm=2), ("sm_90",)),
}


@pytest.mark.parametrize("name", WINNERS)
def test_schedules_that_won_on_hardware_are_accepted_and_in_the_default_space(name: str, tmp_path: Path) -> None:
    from tune_kernels.tuner.offline.space import load_space, schedules

    kernel, schedule, arches = WINNERS[name]
    for arch in arches:
        verdict, _ = verdict_of(kernel, arch, schedule, tmp_path)
        assert verdict.accepted, verdict.reasons
        assert schedule in schedules(load_space("default"), kernel, arch)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kernel", registry.TUNABLE)
def test_every_tunable_kernel_compiles_with_its_default_and_does_not_spill(kernel: str, arch: str, tmp_path: Path) -> None:
    """A kernel joins this test by being registered."""
    verdict, record = verdict_of(kernel, arch, registry.default_schedule(RECIPE, kernel, arch), tmp_path)
    assert verdict.accepted, verdict.reasons
    assert facts_of(record).spill_store_bytes == facts_of(record).spill_load_bytes == 0


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("recipe", [RECIPE, load_recipe("bf16")], ids=lambda r: r.name)
@pytest.mark.parametrize("kernel", FIXED)
def test_every_fixed_kernel_compiles_in_each_of_its_shapes_and_does_not_spill(kernel: str, recipe: Recipe, arch: str,
                                                                              tmp_path: Path) -> None:
    """Those of a target and of a drafter; a kernel joins this test by being registered."""
    fixed = FIXED[kernel]
    for model in (load_model_shape("qwen2.5-7b"), load_model_shape("qwen2.5-7b-eagle3")):
        beside = {name: [registry.default_schedule(recipe, name, arch, shape)]
                  for name, shape in model.kernel_shapes(recipe.linear_dtype, recipe.terms).items()}
        for shape in fixed.shapes(model, recipe, beside):
            record = compile_task(make_task(kernel, arch, shape, fixed.schedule, recipe.numerics, tmp_path))
            verdict = verdict_on(record, wanted_instructions(kernel, shape, arch), fixed.schedule, load_arch(arch))
            assert verdict.accepted, (shape, verdict.reasons)
            assert fixed.operation.contract(shape, fixed.schedule) is None


def test_a_k_tail_compiles_to_the_fp8_instruction(tmp_path: Path) -> None:
    """SmolLM2's hidden size: 576 = 4.5 x 128."""
    for arch in ARCHES:
        verdict, _ = verdict_of("qkv", arch, LinearSchedule(64, 128, 3, 4), tmp_path, LinearShape(960, 576))
        assert verdict.accepted, verdict.reasons


def test_equal_intermediate_code_is_assembled_once(tmp_path: Path) -> None:
    """num_stages beyond the steps of a loop changes the key, not the code."""
    shape = LinearShape(512, 128)
    records = [verdict_of("o", "sm_90", LinearSchedule(64, 128, stages, 4), tmp_path, shape)[1] for stages in (3, 4, 5)]
    assert len({facts_of(r).cubin_sha256 for r in records}) == 1
    assert len({r.artefact for r in records}) == 3, "each can be found under its own key"
    inodes = {(tmp_path / "artefacts" / str(r.artefact) / "linear_kernel.cubin").stat().st_ino for r in records}
    assert len(inodes) == 1


def test_a_register_cap_that_cannot_hold_is_the_assemblers_error(tmp_path: Path) -> None:
    verdict, _ = verdict_of("down", "sm_90", LinearSchedule(64, 128, 3, 4, maxnreg=24), tmp_path)
    assert codes(verdict) <= {"assembler_error", "register_spill"}
    assert not verdict.accepted
    assert "/" not in verdict.reasons[0].detail, "no path of this machine"


def test_two_readings_that_differ_are_not_inspectable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader and ptxas -v must agree on spills; a cubin that can't be read is never a pass."""
    from tune_kernels.tuner.offline import compile as compilation
    from tune_kernels.tuner.offline.cubin import Unreadable

    original = compilation.read_cubin
    monkeypatch.setattr(compilation, "read_cubin", lambda cubin: replace(original(cubin), spill_store_bytes=8))
    verdict, _ = verdict_of("merge", "sm_90", MergeSchedule(32, 1, 1), tmp_path / "a")
    assert codes(verdict) == {"not_inspectable"}

    def unreadable(cubin: bytes) -> None:
        raise Unreadable("nothing came out")

    monkeypatch.setattr(compilation, "read_cubin", unreadable)
    verdict, _ = verdict_of("merge", "sm_90", MergeSchedule(32, 1, 1), tmp_path / "b")
    assert codes(verdict) == {"not_inspectable"}
    assert not verdict.accepted


def test_artefacts_do_not_depend_on_the_checkouts_path(tmp_path: Path) -> None:
    """Line information would put the path into the cubin: the same kernel, in two places, must give the same bytes."""
    import importlib.util

    digests = set()
    for place in ("one", "elsewhere"):
        path = tmp_path / place / "double.py"
        path.parent.mkdir()
        path.write_text("import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef double(x_ptr):\n"
                        "    i = tl.arange(0, 128)\n    tl.store(x_ptr + i, tl.load(x_ptr + i) * 2)\n")
        spec = importlib.util.spec_from_file_location("double", path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        digests.add(_compile_double(module.double, tmp_path / place))
    assert len(digests) == 1


def _compile_double(kernel: Any, folder: Path) -> str:
    from tune_kernels.kernels.bundle import artefact_key
    from tune_kernels.kernels.operation import Instructions, Launch
    from tune_kernels.tuner.offline.compile import _Compilation

    launch = Launch(kernel, {"x_ptr": "*fp32"}, {}, {"num_warps": 4, "enable_fp_fusion": False})
    record = _Compilation(launch, load_arch("sm_90"), Instructions(), artefact_key(launch, 90), folder).run()
    return str(facts_of(record).cubin_sha256)
