"""A user's kernels in a sweep: bad ones are contained and named; restricted, resized, mixed with the step's."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tune_kernels.kernels.arguments import KernelError
from tune_kernels.shapes.errors import ShapeError
from tune_kernels.shapes.model import load_model_shape
from tune_kernels.tuner.errors import SpaceError
from tune_kernels.tuner.offline.report import find_variant, read_report
from tune_kernels.tuner.offline.show import code_of
from tune_kernels.tuner.offline.sweep import SweepRequest, sweep

pytestmark = pytest.mark.compiles
HEAD = """
import os, sys, time
import triton, triton.language as tl
from tune_kernels import Kernel, Scalar, Tensor

@triton.jit
def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) * 2, mask=offs < n)

ARGUMENTS = {"x_ptr": Tensor("fp32", "n"), "y_ptr": Tensor("fp32", "n", output=True), "n": Scalar("i32", "n")}

def described(fn=double, **changed):
    return Kernel(fn, **{"arguments": ARGUMENTS, "shapes": [{"n": 4096}], "knobs": {"BLOCK": [128, 256]},
                         "grid": lambda shape, knobs: (triton.cdiv(shape["n"], knobs["BLOCK"]),), **changed})
"""


def run(folder: Path, body: str, **changed: Any) -> dict[str, Any]:
    """The report of a sweep of one file."""
    path = folder / "mine.py"
    path.write_text(HEAD + body)
    return sweep(SweepRequest(**{"targets": ("sm_90",), "kernels": (str(path),), "out": folder / "out", "jobs": 1,
                                 **changed})).to_dict()


FATAL = {
    "raises": ("raise ValueError('no such thing')", "mine.py: the import failed: line 16: ValueError: no such thing"),
    "exits": ("sys.exit(3)", "SystemExit: 3"),
    "kills its process": ("os.abort()", "the import failed: the worker died: SIGABRT"),
    "never ends": ("while True: pass", "the import failed: the worker exceeded its processor time"),
    "isn't Python": ("def f(:", "SyntaxError"),
    "has no kernel": ("", "no Kernel"),
    "has a path for a name": ("k = described(name='../../evil')", "line 14: kernel '../../evil'"),
    "lacks an argument": ("k = described(arguments={'x_ptr': Tensor('fp32', 'n')})", "argument y_ptr has no value"),
    "sets a switch of the compiler": ("os.environ['DISABLE_PTXAS_OPT'] = '1'\nk = described()", "sets DISABLE_PTXAS_OPT"),
    "takes a built-in kernel's name": ("k = described(name='merge')", "merge is the name of a built-in kernel"),
    "has one name twice": ("k = described()\nl = described(knobs={'BLOCK': 64})", "two kernels are called mine.double"),
}


@pytest.mark.parametrize(("body", "message"), FATAL.values(), ids=FATAL.keys())
def test_a_file_that_cannot_be_read(body: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(KernelError) as caught:
        run(tmp_path, body, timeout=5.0)
    assert message in str(caught.value)
    assert not list(tmp_path.parent.glob("evil*"))


COMPILING = """
from triton.compiler import code_generator
make = code_generator.ast_to_ttir

def dying(fn, src, *rest, **named):
    if "crash" in src.constants.values():
        os.abort()
    return make(fn, src, *rest, **named)

code_generator.ast_to_ttir = dying

@triton.jit
def bad(x_ptr, y_ptr, n, BLOCK: tl.constexpr, WHAT: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WHAT == "hang":
        for i in tl.static_range(1_000_000_000):
            offs += i
    if WHAT == "raise":
        offs += undefined
    tl.store(y_ptr + offs, tl.load(x_ptr + offs))

@triton.jit
def huge(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs[:, None] * BLOCK + offs[None, :])
    tl.store(y_ptr + offs[:, None] * BLOCK + offs[None, :], tl.trans(tl.dot(x, x)))

k = described(bad, name="bad", knobs=[{"BLOCK": 128, "WHAT": what} for what in ("fine", "crash", "hang", "raise")])
m = described(huge, name="huge", knobs={"BLOCK": 256, "num_warps": 8},
              arguments={**ARGUMENTS, "x_ptr": Tensor("fp32", "n", "n")}, shapes=[{"n": 256}])
g = described(name="grids", grid=lambda shape, knobs: (128 // (knobs["BLOCK"] - 128),))
"""


def test_kernels_that_cannot_be_compiled_cost_themselves_alone(tmp_path: Path) -> None:
    report = run(tmp_path, COMPILING, timeout=8.0)
    found = {(v["kernel"], *v["schedule"]["knobs"].values()): v for v in report["variants"]}
    codes = {key: (v["verdict"], [r["code"] for r in v["reasons"]]) for key, v in found.items()}
    assert codes["bad", 128, "fine"] == ("accepted", [])
    assert codes["bad", 128, "crash"] == ("rejected", ["compile_error"])
    assert codes["bad", 128, "hang"] == ("rejected", ["timeout"])
    assert codes["bad", 128, "raise"] == ("rejected", ["compile_error"])
    assert codes["huge", 256, 8] == ("rejected", ["resource_limit"])
    assert codes["grids", 128] == ("rejected", ["contract"]) and codes["grids", 256] == ("accepted", [])
    assert "grid raised ZeroDivisionError" in found["grids", 128]["reasons"][0]["detail"]
    assert "undefined" in found["bad", 128, "raise"]["reasons"][0]["detail"]


def test_ten_thousand_configs_are_planned_and_the_illegal_ones_named(tmp_path: Path) -> None:
    report = run(tmp_path, "k = described(knobs={'BLOCK': [128], 'num_warps': [4], 'maxnreg': range(10_000)},\n"
                           "              contract=lambda shape, knobs: None if knobs['maxnreg'] == 64 else 'not this one')")
    assert report["counts"] | {"cubins": 1, "cached": 0} == {
        "variants": 10_000, "contract": 9_999, "accepted": 1, "rejected": 0, "cached": 0, "cubins": 1, "accepted_cubins": 1}


def test_what_it_prints_and_changes_stays_in_its_processes(tmp_path: Path) -> None:
    """With --json, stdout is one JSON line; the next file's kernel has the key that it has alone."""
    (tmp_path / "loud.py").write_text(HEAD + "print('loud')\nos.write(1, b'louder')\n"
                                      "tl.load = None\nos.chdir('/')\nk = described(name='loud')")
    (tmp_path / "mine.py").write_text(HEAD + "k = described()")
    words = [arg for name in ("loud.py", "mine.py") for arg in ("--kernel", str(tmp_path / name))]
    done = subprocess.run([sys.executable, "-m", "tune_kernels.tuner", "--offline", *words, "--target", "sm_90", "--out",
                           str(tmp_path / "out"), "--json"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["counts"]["accepted"] == 2 and "loud" in done.stderr
    both = {v.kernel: v for v in read_report(tmp_path / "out").variants}
    assert not any(v.accepted for v in read_report(tmp_path / "out").variants if v.kernel == "loud")
    [alone, _] = run(tmp_path, "k = described()")["variants"]
    assert alone["kernel"] == "mine.double" and both["mine.double"].accepted


def test_knobs_restricted_by_a_file_and_sizes_by_words(tmp_path: Path) -> None:
    space = tmp_path / "space.toml"
    space.write_text('[[grid]]\nkernels = ["mine.double"]\nBLOCK = 256\n')
    report = run(tmp_path, "k = described()", space=str(space), shapes=("n=1000", "n=48"))
    assert [(v["shape"], v["schedule"]) for v in report["variants"]] == [
        ({"dims": {"n": n}}, {"knobs": {"BLOCK": 256}}) for n in (1000, 48)]
    assert report["model"] == "mine.double" and report["recipe"] == "own"
    assert "</html>" in (tmp_path / "out" / "report.html").read_text()
    space.write_text('[[grid]]\nkernels = ["mine.double"]\nBLOCK = 512\n')
    with pytest.raises(SpaceError, match=r"BLOCK is 512; expected one of 128, 256"):
        run(tmp_path, "k = described()", space=str(space))
    with pytest.raises(KernelError, match=r"mine\.double has no m"):
        run(tmp_path, "k = described()", shapes=("m=4",))


def test_show_compiles_a_rejected_variant_in_a_worker(tmp_path: Path) -> None:
    run(tmp_path, "k = described(knobs={'BLOCK': 128}, instructions={'sm_90': {'required': ['HGMMA']}})")
    report = read_report(tmp_path / "out")
    [variant] = report.variants
    assert variant.stage == "ttgir" and variant.reasons[0].code == "wrong_instruction"
    assert "EXIT" in code_of(report, find_variant(report, variant.id), tmp_path / "out").sass


def test_built_in_kernels_in_other_sizes(tmp_path: Path) -> None:
    space = tmp_path / "space.toml"
    space.write_text('[[grid]]\nkernels = "down"\nBLOCK_N = 64\nBLOCK_K = 128\nnum_stages = 3\nnum_warps = 4\n')
    asked = {"targets": ("sm_90",), "kernels": ("down",), "space": str(space), "out": tmp_path / "out", "jobs": 1}
    [variant] = sweep(SweepRequest(**asked, shapes=("N=4608,K=3584",))).variants
    assert (variant.shape.N, variant.shape.K, variant.accepted) == (4608, 3584, True)  # type: ignore[union-attr]
    for word, message in (("M=4", "down has no M"), ("N=0", "N is '0'"), ("N", "shape 'N'"), ("dtype=fp4", "e4m3 or bf16")):
        with pytest.raises(SpaceError, match=message):
            sweep(SweepRequest(**asked, shapes=(word,)))


def test_a_model_shared_by_two_gpus() -> None:
    whole = load_model_shape("qwen2.5-7b")
    half = whole.shared_by(2)
    linears = {name: (shape.N, shape.K) for name, shape in half.linear_shapes().items()}
    assert half.name == "qwen2.5-7b-tp2" and half.digest != whole.digest and whole.shared_by(1) is whole
    assert linears == {"qkv": (2304, 3584), "o": (3584, 1792), "gate_up": (18944, 3584), "down": (3584, 9472)}
    assert half.kernel_shapes()["lm_head"].N == 76032  # type: ignore[union-attr]
    with pytest.raises(ShapeError, match=r"num_heads 28 of qwen2\.5-7b can't be shared by 3 GPUs"):
        whole.shared_by(3)
