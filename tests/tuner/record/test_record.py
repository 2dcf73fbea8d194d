"""`tune-kernels record` on programs of the tests' own: a GPU is played, every kernel is compiled and judged, none is executed."""

import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tune_kernels.kernels.loading import kernels_in, source_of
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.tuner.cli import cli
from tune_kernels.tuner.inspect.judge import Demands
from tune_kernels.tuner.record.command import record as record_program
from tune_kernels.tuner.record.program import Plan

pytest.importorskip("triton")
pytest.importorskip("torch")
pytestmark = pytest.mark.compiles

KERNELS = """
import torch, triton, triton.language as tl

@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, at < n) + tl.load(y_ptr + at, at < n), at < n)

@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def scale(x_ptr, out_ptr, factor, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at) if EVEN else tl.load(x_ptr + at, at < n)
    tl.store(out_ptr + at, x * factor, at < n)

@triton.autotune([triton.Config({"BLOCK_N": n}, num_warps=w) for n in (16, 32) for w in (2, 4)], key=["N"])
@triton.jit
def product(x_ptr, w_ptr, y_ptr, N, K: tl.constexpr, BLOCK_N: tl.constexpr):
    m, n, k = tl.arange(0, 16), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, K)
    y = tl.dot(tl.load(x_ptr + m[:, None] * K + k), tl.load(w_ptr + n[None, :] * K + k[:, None], n[None, :] < N, 0.0))
    tl.store(y_ptr + m[:, None] * N + n[None, :], y.to(tl.bfloat16), n[None, :] < N)
"""
PROGRAM = KERNELS + """
x, y = torch.ones(1000, device="cuda"), torch.ones(1000).cuda()
out = torch.empty_like(x)
assert out.is_cuda and out.device == torch.device("cuda", 0) and torch.cuda.get_device_capability() == (10, 3)
for _ in range(3):
    add[(triton.cdiv(1000, 256),)](x, y, out, 1000, BLOCK=256)
scale[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](out, out, 2.0, 1000, BLOCK=128)
a, w = torch.ones(16, 64, device="cuda", dtype=torch.bfloat16), torch.ones(96, 64, device="cuda", dtype=torch.bfloat16)
b = torch.empty(16, 96, device="cuda", dtype=torch.bfloat16)
product[lambda meta: (triton.cdiv(96, meta["BLOCK_N"]),)](a, w, b, 96, K=64)
torch.cuda.synchronize()
assert torch.compile(fullgraph=True)(len)([1]) == torch.compile(len)([1]) == 1
print("sums", out.sum().item(), x.sum().item())
"""


def record(tmp_path: Path, program: str, *options: str, target: str = "sm_103") -> Result:
    """Runs `tune-kernels record` on the program's text."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(program))
    return CliRunner().invoke(cli, ["record", "--target", target, "--out", str(tmp_path / "out"), *options, "--", sys.executable,
                                    str(script)])


def recording(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "out" / "recording.json").read_text())
    return found


def test_a_program_is_compiled_judged_and_written_down(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = record(tmp_path, PROGRAM)
    assert done.exit_code == 0, done.output + capfd.readouterr().err
    assert "sums 0.0 1000.0" in capfd.readouterr().out  # no kernel ran; what torch computes is there
    assert "6 kernels: 6 accepted, 0 rejected" in done.output and "product: 4 of 4 configs compiled" in done.output
    found = recording(tmp_path)
    kernels = {kernel["hash"]: kernel for kernel in found["kernels"]}
    assert sorted(kernel["function"] for kernel in kernels.values()) == ["add", *["product"] * 4, "scale"]
    launches = {kernels[one["kernel"]]["function"]: one for one in found["launches"] if not one["trial"]}
    assert set(launches) == {"add", "scale", "product"}
    tensor = {"dtype": "float32", "shape": [1000], "strides": [1]}
    assert launches["add"] == {"kernel": launches["add"]["kernel"], "grid": [4, 1, 1], "trial": False, "reads": [], "count": 3,
                               "arguments": [tensor, tensor, tensor, 1000, 256]}
    assert launches["scale"]["grid"] == [8, 1, 1] and launches["scale"]["arguments"][2:] == [2.0, 1000, 128, False]
    add = kernels[launches["add"]["kernel"]]
    assert add["outputs"] == ["out_ptr"] and add["signature"][3] == ["n", "i32"] and add["options"]["num_warps"] == 4
    assert found["target"] == "sm_103" and found["code"] == 0 and len([one for one in found["launches"] if one["trial"]]) == 4


def test_the_folder_is_a_cache_for_inspect(tmp_path: Path) -> None:
    assert record(tmp_path, PROGRAM.replace("(10, 3)", "(9, 0)"), target="h200").exit_code == 0
    done = CliRunner().invoke(cli, ["inspect", str(tmp_path / "out" / "cache"), "--json"])
    kernels = json.loads(done.output)["kernels"]
    assert {one["arch"] for one in kernels} == {"sm_90"} and len(kernels) == 6
    assert json.loads((tmp_path / "out" / "inspection.json").read_text())["worst"] == json.loads(done.output)["worst"]


def test_configs_are_limited_with_a_message(tmp_path: Path) -> None:
    done = record(tmp_path, PROGRAM, "--max-configs", "2")
    assert done.exit_code == 0 and "product: 2 of 4 configs compiled; --max-configs compiles more" in done.output


def test_launches_after_a_read_are_named(tmp_path: Path) -> None:
    program = KERNELS + """
x, out = torch.ones(64, device="cuda"), torch.empty(64, device="cuda")
n = int(x.sum().item())
add[(1,)](x, x, out, n, BLOCK=64)
n = int(x.sum().item())  # of an input
scale[(1,)](x, out, 2.0, n, BLOCK=64)
doubled = out * 2
n = 32 + int(doubled.max().item())
add[(1,)](x, x, out, n, BLOCK=32)
"""
    done = record(tmp_path, program)
    assert done.exit_code == 0, done.output
    [line] = [line for line in done.output.splitlines() if line.startswith("may depend on data")]
    place = next(i for i, text in enumerate((tmp_path / "script.py").read_text().splitlines(), 1) if "doubled.max" in text)
    assert "__main__:add" in line and f"script.py:{place} " in line


def test_processes_of_the_program_are_recorded(tmp_path: Path) -> None:
    """A forked one, which ends without Python's own clean-up, and one that is started."""
    program = KERNELS + """
import os, subprocess, sys
x, out = torch.ones(64, device="cuda"), torch.empty(64, device="cuda")
def launch():
    for _ in range(100):
        add[(1,)](x, x, out, 64, BLOCK=64)
launch()
if len(sys.argv) == 1:
    if (child := os.fork()) == 0:
        launch()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    subprocess.run([sys.executable, __file__, "again"], check=True)
"""
    assert record(tmp_path, program).exit_code == 0
    [launch] = recording(tmp_path)["launches"]
    assert 264 <= launch["count"] <= 300 and len(recording(tmp_path)["kernels"]) == 1


def test_a_program_that_fails_keeps_its_launches(tmp_path: Path) -> None:
    done = record(tmp_path, PROGRAM + "raise SystemExit(3)")
    assert done.exit_code == 1 and "exit code 3" in done.output and len(recording(tmp_path)["kernels"]) == 6


def test_a_kernel_that_does_not_compile_is_named(tmp_path: Path) -> None:
    done = record(tmp_path, KERNELS + """
@triton.jit
def wrong(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), tl.zeros((BLOCK, 2), tl.float32))
try:
    wrong[(1,)](torch.ones(64, device="cuda"), BLOCK=64)
except triton.CompilationError:
    pass
""")
    assert done.exit_code == 1 and "not compiled: __main__:wrong: CompilationError" in done.output
    [failure] = recording(tmp_path)["failures"]
    assert (failure["function"], failure["error"]) == ("wrong", "CompilationError")


@pytest.mark.parametrize(("program", "words"), [
    ("import triton", "launched no Triton kernel"),
    ("import triton; raise SystemExit(4)", "launched no Triton kernel and ended with exit code 4"),
    ("print(1)", "never imported triton"),
    ("import torch; raise ValueError('early')", "never imported triton and ended with exit code 1")])
def test_a_program_that_launches_nothing(tmp_path: Path, program: str, words: str) -> None:
    done = record(tmp_path, program)
    assert done.exit_code == 1 and words in str(done.exception)


def test_wrong_usage(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    unknown = CliRunner().invoke(cli, ["record", "--target", "sm_104", *out, "--", sys.executable])
    assert getattr(unknown.exception, "exit_code", 0) == 2 and "did you mean" in str(unknown.exception)
    missing = CliRunner().invoke(cli, ["record", "--target", "sm_103", *out, "--", "no-such-program"])
    assert getattr(missing.exception, "exit_code", 0) == 2 and "no program 'no-such-program'" in str(missing.exception)
    assert CliRunner().invoke(cli, ["record", "--target", "sm_103", *out]).exit_code == 2
    no_site = CliRunner().invoke(cli, ["record", "--target", "sm_103", *out, "--", sys.executable, "-I", "-c", "import triton"])
    assert "no Python that could be recorded" in str(no_site.exception)


def test_json_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done = record(tmp_path, KERNELS + "x = torch.ones(64).cuda()\nadd[(1,)](x, x, x, 64, BLOCK=64)\nprint('hello')", "--json")
    told = json.loads(done.stdout)
    assert (told["kernels"], told["rejected"], told["failed"], told["program_exit_code"]) == (1, [], [], 0)
    out, err = capfd.readouterr()
    assert "hello" in err and "hello" not in out


def test_another_sitecustomize_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("print('the other one')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    record(tmp_path, "print(1)")
    assert "the other one" in capfd.readouterr().out


def test_its_launches_are_a_kernel_file(tmp_path: Path) -> None:
    """With the program's sizes and compiled-in values; an autotuned function brings its configs. Each launch is legal and finds
    the specialisation that was recorded."""
    done = record(tmp_path, KERNELS + "if __name__ == '__main__':\n" + textwrap.indent(PROGRAM.removeprefix(KERNELS), "    "))
    assert done.exit_code == 0, done.output
    [path] = (tmp_path / "out" / "kernels").iterdir()
    assert path.name == "script_kernels.py"
    kernels = kernels_in(source_of(str(path)))
    assert list(kernels) == ["add_0", "scale_1", "product_2"]
    assert kernels["add_0"].knobs == [{"BLOCK": 256, "num_warps": 4, "num_stages": 3}]
    assert len(kernels["product_2"].schedules) == 4
    recorded = {(one["function"], repr(sorted(map(tuple, one["signature"])))) for one in recording(tmp_path)["kernels"]}
    numerics = load_recipe("fp8-v1").numerics
    for kernel in kernels.values():
        [shape] = kernel.own_shapes
        for schedule in kernel.schedules:
            assert kernel.operation.contract(shape, schedule) is None
            launch = kernel.operation.launch(shape, schedule, numerics)
            assert (kernel.jitted.fn.__name__, repr(sorted(launch.signature().items()))) in recorded
    add = kernels["add_0"]
    assert add.operation.grid and add.operation.grid(add.own_shapes[0], add.schedules[0]) == (4,)
    sweep = CliRunner().invoke(cli, ["--offline", "--kernel", str(path), "--target", "sm_103", "--jobs", "1", "--json",
                                     "--out", str(tmp_path / "sweep")])
    assert sweep.exit_code == 0 and json.loads(sweep.stdout)["counts"]["accepted"] == 6


def test_launches_on_the_real_gpu_are_recorded_and_done(tmp_path: Path) -> None:
    """Here the "real" driver is one that counts. Nothing of torch is touched."""
    support = Path(__file__).parents[2] / "support"
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(support)!r})\n" + KERNELS + """
from stand_in_driver import Driver
from triton.runtime import driver
driver.set_active(Driver(90))
assert not torch.cuda.is_available()
x = torch.ones(64)
assert x.device.type == "cpu"
for _ in range(3):
    add[(1,)](x, x, x, 64, BLOCK=64)
assert driver.active.launched == ["add"] * 3
""")
    done = record_program(Plan((sys.executable, str(script)), tmp_path / "out", None, 10), Demands())
    assert done.recording.code == 0 and done.recording.target is None
    [launch] = done.recording.launches
    assert launch.count == 3 and done.inspection.kernels[0].arch == "sm_90"


def test_a_read_says_nothing_of_another_process(tmp_path: Path) -> None:
    done = record(tmp_path, KERNELS + """
import subprocess, sys
x, out = torch.ones(64, device="cuda"), torch.empty(64, device="cuda")
if len(sys.argv) == 1:
    add[(1,)](x, x, out, 64, BLOCK=64)
    n = 64 + int(out.sum().item())
    subprocess.run([sys.executable, __file__, "again"], check=True)
else:
    scale[(1,)](x, out, 2.0, 64, BLOCK=64)
""")
    assert done.exit_code == 0 and "may depend on data" not in done.output and len(recording(tmp_path)["reads"]) == 1
