"""The installed toolchain: its switches, and its part in an artefact's key. Runs on each Triton."""

from pathlib import Path

import pytest
from tune_kernels.kernels import bundle, registry, toolchain
from tune_kernels.kernels.bundle import artefact_key
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import MergeSchedule
from tune_kernels.shapes.model import load_model_shape
from tune_kernels.tuner.offline.compile import compile_task, make_task

pytestmark = pytest.mark.compiles
NUMERICS = load_recipe("fp8-v1").numerics
SHAPE = load_model_shape("qwen2.5-7b").kernel_shapes()["merge"]
SCHEDULE = MergeSchedule(BLOCK_D=32, splits=8, num_warps=4)


# Read by native code alone: no knob knows them. The product asks Triton for those that are set.
NATIVE = {"DISABLE_MMA_V3", "DISABLE_MMA_V5", "DISABLE_LLVM_OPT", "LLVM_PASS_PLUGIN_PATH", "ALLOW_LHS_TMEM_LAYOUT_CONVERSION",
          "TRITON_ENABLE_EXPERIMENTAL_CONSAN", "LLVM_IR_ENABLE_DUMP"}


def key() -> str:
    return artefact_key(registry.operation("merge").launch(SHAPE, SCHEDULE, NUMERICS), 90)


def knob_keys() -> set[str]:
    """Every environment variable that triton.knobs reads for an NVIDIA kernel's code."""
    from triton import knobs

    groups = {n: g for n, g in vars(knobs).items() if isinstance(g, knobs.base_knobs) and n not in toolchain.OTHER_KNOBS}
    return {knob.key for group in groups.values() for knob in group.knob_descriptors.values()}


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert toolchain.switches() == {}
    return monkeypatch


def test_every_switch_that_changes_code_is_in_the_key_and_refused(unset: pytest.MonkeyPatch) -> None:
    """F13: DISABLE_MMA_V3=1 left HMMA verdicts in the folder. The list is the toolchain's own, native code and knobs."""
    plain, known = key(), knob_keys()
    assert {"PTXAS_OPTIONS", "TRITON_F32_DEFAULT", "DISABLE_PTXAS_OPT"} <= known
    passed = {*toolchain.SILENT, *toolchain.PATHS, *toolchain.SET_HERE}
    tried = 0
    for name in sorted(NATIVE | known):
        if name in passed or name.startswith(toolchain.OTHER_BACKENDS):
            continue
        for value in ("1", "0"):  # one of them isn't the default
            with unset.context() as patch:
                patch.setenv(name, "sm80" if name == "TRITON_OVERRIDE_ARCH" else value)
                if toolchain.switches():
                    assert key() != plain, name
                    with pytest.raises(toolchain.ToolchainError, match=name):
                        toolchain.check_switches()
                    break
        else:
            pytest.fail(f"{name} passes unseen")
        tried += 1
    assert tried >= 15
    assert key() == plain


def test_what_is_let_pass_leaves_the_code_as_it_is(unset: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """F13: each switch that no key holds, set while a kernel is compiled: the same cubin."""
    def cubin(folder: Path) -> str:
        record = compile_task(make_task("merge", "sm_90", SHAPE, SCHEDULE, NUMERICS, folder))
        assert record.artefact
        files = bundle.read(folder / "artefacts" / record.artefact)
        return bundle.sha256(next(data for name, data in files.items() if name.endswith(".cubin")))

    plain = cubin(tmp_path / "plain")
    for name in (*toolchain.SILENT, *toolchain.SET_HERE):
        with unset.context() as patch:
            patch.setenv(name, "1")
            assert cubin(tmp_path / name) == plain, name


def test_the_key_holds_the_assemblers_digest(unset: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """F14: a wrapper with the same --version made another cubin under the same key; and a wrapper's own program may change."""
    real, plain = toolchain.ptxas_path(90), key()
    copy, wrapper = tmp_path / "ptxas-copy", tmp_path / "ptxas"
    copy.write_bytes(Path(real).read_bytes())
    copy.chmod(0o755)
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):  # Triton 3.9 uses the second for sm_90 too
        unset.setenv(name, str(copy))
    assert key() == plain, "the same program under another name"
    wrapper.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        unset.setenv(name, str(wrapper))
    first = key()
    assert first != plain
    wrapper.write_text(f'#!/bin/sh\nexec {real} --opt-level 1 "$@"\n')
    second = key()
    assert second not in (first, plain)
    wrapper.write_text(f'#!/bin/sh\nexec {copy} "$@"\n')
    third = key()
    with copy.open("ab") as f:
        f.write(b"\0")
    assert len({first, second, third, key()}) == 4, "the program that the wrapper runs"
