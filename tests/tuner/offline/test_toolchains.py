"""A small sweep on the Triton that is installed; `make test` runs it on 3.6.0, 3.7.1 and 3.9.0, each in its own environment
(Triton alone, no torch). What is known to differ must differ."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton
from tune_kernels.kernels import bundle
from tune_kernels.kernels.fixed import FIXED
from tune_kernels.kernels.toolchain import ToolchainError, check_numerics, disassemble
from tune_kernels.schedules.recipe import load_recipe, recipe_names
from tune_kernels.schedules.schedule import LinearSchedule
from tune_kernels.shapes.model import LinearShape
from tune_kernels.shapes.target import ARCHES, load_arch
from tune_kernels.tuner.offline.compile import compile_task, make_task, wanted_instructions
from tune_kernels.tuner.offline.inspection import verdict_on
from tune_kernels.tuner.offline.sweep import SweepRequest, sweep

pytestmark = pytest.mark.compiles
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
SPACE = """
[[grid]]
kernels = "down"
BLOCK_N = 64
BLOCK_K = 128
num_stages = 3
num_warps = 4
split_k = 4
[[grid]]
kernels = "down"
BLOCK_N = 64
BLOCK_K = 128
num_stages = 3
num_warps = 4
load = "tma"
pdl = true
[[grid]]
kernels = "attention"
chunk = 256
TILE = 64
BLOCK_N = 32
num_stages = 2
num_warps = 4
[[grid]]
kernels = "merge"
BLOCK_D = [32, 128]
splits = 8
num_warps = 4
[[grid]]
kernels = ["lm_head", "lm_head_logits"]
BLOCK_N = 128
BLOCK_K = 64
num_stages = 3
num_warps = 4
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("toolchain")
    (folder / "space.toml").write_text(SPACE)
    found = sweep(SweepRequest(targets=ARCHES, space=str(folder / "space.toml"), out=folder / "out", jobs=2))
    return {**found.to_dict(), "folder": folder / "out"}


def one(report: dict[str, Any], kernel: str, arch: str, **knobs: Any) -> dict[str, Any]:
    found = [v for v in report["variants"] if v["kernel"] == kernel and v["target"] == arch
             and all(v["schedule"][k] == value for k, value in knobs.items())]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("arch", ARCHES)
def test_eight_rows_reach_the_fp8_instruction_from_triton_39(tmp_path: Path, arch: str) -> None:
    """Of one term: two terms of eight rows are sixteen columns, which always do."""
    shape, schedule = LinearShape(3584, 18944), LinearSchedule(64, 128, 3, 4, split_k=4, row_tile=8)
    record = compile_task(make_task("down", arch, shape, schedule, load_recipe("fp8-v1").numerics, tmp_path))
    verdict = verdict_on(record, wanted_instructions("down", shape, arch), schedule, load_arch(arch), 0)
    if VERSION < (3, 8):
        assert [r.code for r in verdict.reasons] == ["wrong_instruction"]
        assert "found HMMA" in verdict.reasons[0].detail
    elif VERSION >= (3, 9):
        assert verdict.accepted
        assert verdict.facts and list(verdict.facts.instructions) == ["QGMMA" if arch == "sm_90" else "UTCQMMA"]


@pytest.mark.parametrize("arch", ARCHES)
def test_what_all_versions_agree_on(report: dict[str, Any], arch: str) -> None:
    fp8, bf16 = ("QGMMA", "HGMMA") if arch == "sm_90" else ("UTCQMMA", "UTCHMMA")
    assert one(report, "down", arch, load="pointer")["instructions"] == (fp8,)
    assert one(report, "down", arch, load="tma")["instructions"] == (fp8,)
    assert one(report, "attention", arch)["instructions"] == (bf16,)
    assert one(report, "lm_head", arch)["instructions"] == (bf16,)
    assert {one(report, "merge", arch, BLOCK_D=n)["verdict"] for n in (32, 128)} == {"accepted"}
    assert report["audit"]["disagreed"] == ()


def test_no_kernel_that_is_not_tuned_spills(report: dict[str, Any]) -> None:
    """They have one schedule for every version."""
    fixed = [v for v in report["variants"] if v["kernel"] in FIXED]
    assert len({v["kernel"] for v in fixed}) > 10
    assert [(v["kernel"], v["target"]) for v in fixed if v["spill_store_bytes"] or v["spill_load_bytes"]] == []


def test_sm_103_is_truly_inspected(report: dict[str, Any]) -> None:
    """The nvdisasm of Triton 3.6 prints nothing for sm_103: its silence must not read as 'no spills'."""
    for variant in report["variants"]:
        if variant["target"] == "sm_103" and variant["verdict"] == "accepted":
            assert variant["registers"] > 0
            files = bundle.read(report["folder"] / "artefacts" / variant["artefact"])
            sass = disassemble(next(data for name, data in files.items() if name.endswith(".cubin")))
            for family in variant["instructions"]:
                assert family in sass


def test_the_toolchain_is_recorded(report: dict[str, Any]) -> None:
    chain = report["toolchain"]
    assert chain["triton"] == triton.__version__
    assert set(chain["ptxas"]) == set(ARCHES)
    assert chain["flags"]["enable_fp_fusion"] is False


@pytest.mark.parametrize("recipe", [name for name in recipe_names() if load_recipe(name).defaults])
def test_every_recipe_with_kernels_sweeps(recipe: str, tmp_path: Path) -> None:
    """One without FP8 pins no accumulator, and must not be refused for that."""
    found = sweep(SweepRequest(targets=ARCHES, kernels=("merge",), space="small", recipe=recipe, out=tmp_path, jobs=2))
    assert {v.verdict for v in found.variants if v.kernel == "merge"} == {"accepted"}


def test_another_accumulator_than_the_recipes_is_refused() -> None:
    numerics = load_recipe("fp8-v1").numerics
    with pytest.raises(ToolchainError, match="5, as in the recipe"):
        check_numerics(load_arch("sm_90"), replace(numerics, max_num_imprecise_acc={"sm_90": 5}))


def test_metadata_that_the_code_does_not_hold_travels(report: dict[str, Any]) -> None:
    """launch_pdl lives in the metadata alone."""
    for arch in ARCHES:
        folder = Path(report["folder"]) / "artefacts" / one(report, "down", arch, load="tma")["artefact"]
        metadata = json.loads((folder / "linear_kernel.json").read_text())
        assert metadata["launch_pdl"] is True
        assert "tensordesc_meta" in metadata


def test_a_sweeps_workers_end_without_a_word(tmp_path: Path) -> None:
    """F37: Triton 3.9's bindings reported 25 lines of leaks when the fork server ended."""
    code = ("import sys; from pathlib import Path; from tune_kernels.tuner import pool\n"
            "executor = pool.LocalExecutor(1, Path(sys.argv[1]))\n"
            "assert executor.submit(len, 'ab').result() == 2\n"
            "executor.shutdown()\n")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
