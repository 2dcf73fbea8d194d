"""F32: two kernels that compilers spoil; one of them is checked against the oracle, too."""

from pathlib import Path

import numpy as np
import oracles
import pytest
import triton
from tune_kernels.kernels import registry
from tune_kernels.kernels.findings import FINDINGS, one_block_launch
from tune_kernels.kernels.layout import ROWS
from tune_kernels.kernels.merge import merge_contract
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import LinearSchedule, MergeSchedule
from tune_kernels.shapes.model import MergeShape, load_model_shape

RECIPE, MODEL = load_recipe("fp8-v1"), load_model_shape("qwen2.5-7b")
ONE_BLOCK = MergeSchedule(BLOCK_D=128, splits=512, num_warps=4)
NARROW = LinearSchedule(BLOCK_N=128, BLOCK_K=128, num_stages=4, num_warps=4, row_tile=8)
KNOBS = {"merge_one_block": ("splits", "BLOCK_D"), "gate_up_one_term": ("row_tile",)}
compiles = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="interpreting")


def test_both_have_a_shape_in_a_model_and_a_name_in_spaces() -> None:
    assert set(FINDINGS) == set(registry.IN_SPACES) - set(registry.TUNABLE)
    for name, schedule in (("merge_one_block", ONE_BLOCK), ("gate_up_one_term", NARROW)):
        operation = registry.operation(name)
        assert isinstance(schedule, operation.schedule_type)
        assert operation.contract(FINDINGS[name].shape(MODEL), schedule) is None
    assert merge_contract(MODEL.merge_shape, ONE_BLOCK) is not None, "the decoder's merge never holds so many at once"


@compiles
@pytest.mark.compiles
def test_a_merge_of_512_partials_in_one_block_spills(tmp_path: Path) -> None:
    from tune_kernels.tuner.offline.compile import compile_task, make_task

    shape = FINDINGS["merge_one_block"].shape(MODEL)
    found = compile_task(make_task("merge_one_block", "sm_90", shape, ONE_BLOCK, RECIPE.numerics, tmp_path))
    assert found.stage == "sass"
    assert found.facts is not None and found.facts.spill_store_bytes is not None and found.facts.spill_store_bytes > 1000


@compiles
@pytest.mark.compiles
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_one_term_in_8_rows_falls_back_where_two_terms_do_not(arch: str, tmp_path: Path) -> None:
    """Read from the artefact: a version of Triton that doesn't fall back fails this, and the finding is history."""
    from dataclasses import replace

    from tune_kernels.tuner.offline.compile import compile_task, make_task

    shape = FINDINGS["gate_up_one_term"].shape(MODEL)
    fallen = compile_task(make_task("gate_up_one_term", arch, shape, NARROW, RECIPE.numerics, tmp_path))
    assert fallen.dots == ("HMMA",)
    two = compile_task(make_task("gate_up_one_term", arch, replace(shape, terms=2), NARROW, RECIPE.numerics, tmp_path))
    assert "HMMA" not in two.dots


@compiles
@pytest.mark.compiles
def test_the_findings_are_one_command_away(tmp_path: Path) -> None:
    """`tune-kernels --offline --space findings --target sm_90`: both findings rejected with their codes, and beside each the same
    kernel without it; nothing else is compiled."""
    from tune_kernels.tuner.offline.sweep import SweepRequest, sweep

    report = sweep(SweepRequest(model="qwen2.5-7b", targets=("sm_90",), space="findings", out=tmp_path, jobs=1))
    found = {(v.kernel, *(getattr(v.schedule, knob) for knob in KNOBS[v.kernel])): v for v in report.variants}
    assert {kernel for kernel, *_ in found} == set(FINDINGS)
    assert [r.code for r in found["merge_one_block", 512, 128].reasons] == ["register_spill"]
    assert [r.code for r in found["gate_up_one_term", 8].reasons] == ["wrong_instruction"]
    assert found["merge_one_block", 16, 16].accepted and found["gate_up_one_term", 16].accepted


@pytest.mark.interpreter
@pytest.mark.parametrize("chunks", [2, 5])
def test_the_one_block_merge_against_its_oracle(chunks: int, device: str) -> None:
    import torch

    rows, heads, dim, chunk = 2, 3, 32, 16
    gen = torch.Generator().manual_seed(chunks)
    acc = torch.randn(chunks, ROWS, heads, dim, generator=gen).to(device)
    m, l = (torch.randn(chunks, ROWS, heads, generator=gen).abs().to(device) * 4 + 0.5 for _ in range(2))
    o = torch.full((rows, heads, dim), float("nan"), dtype=torch.bfloat16, device=device)
    length = chunks * chunk - rows
    schedule = MergeSchedule(BLOCK_D=16, splits=8, num_warps=1)
    one_block_launch(MergeShape(heads, dim), schedule, RECIPE.numerics)(
        (rows, heads, dim // 16), acc_ptr=acc, m_ptr=m, l_ptr=l, o_ptr=o, chunk=chunk,
        length_ptr=torch.tensor([length], dtype=torch.int32, device=device))
    expected = oracles.merge(*(t.double().cpu().numpy() for t in (acc, m, l)), length, rows, chunk)
    assert np.abs(o.double().cpu().numpy() - expected).max() <= np.abs(expected).max() * 2.0**-7
