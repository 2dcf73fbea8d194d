"""`tune-kernels record` on a program that has no torch, on every Triton that there is."""

import json
import sys
from pathlib import Path

import pytest
from tune_kernels.shapes.target import load_arch
from tune_kernels.tuner.inspect.judge import Demands
from tune_kernels.tuner.record.command import record
from tune_kernels.tuner.record.program import Plan

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.compiles

PROGRAM = """
import sys
sys.path.insert(0, {support!r})
import triton, triton.language as tl
from stand_in_driver import Tensor

@triton.autotune([triton.Config({{"BLOCK": size}}) for size in (128, 256)], key=["n"])
@triton.jit
def copy(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, at < n), at < n)

for _ in range(3):
    copy[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](Tensor("float32"), Tensor("float32"), 1000)
"""


def test_launches_are_recorded(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(support=str(Path(__file__).parents[2] / "support")))
    done = record(Plan((sys.executable, str(script)), tmp_path / "out", load_arch("sm_103"), 10), Demands())
    assert done.code == 0 and [process.triton for process in done.recording.processes] == [triton.__version__]
    assert [one.name for one in done.inspection.kernels] == ["copy"] * 2
    assert {kernel.outputs for kernel in done.recording.kernels} == {("out_ptr",)}
    launches = json.loads((tmp_path / "out" / "recording.json").read_text())["launches"]
    assert [(one["grid"], one["count"]) for one in launches if not one["trial"]] == [([8, 1, 1], 3)]
