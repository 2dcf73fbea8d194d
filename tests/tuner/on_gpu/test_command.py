"""`tune-kernels --on-gpu` on a machine without a GPU: replay, dry run, refusals; and a B300 run up to the launch."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton
from click.testing import CliRunner
from fake_gpu import B300, H200, H200_RUN, RECIPE, SPLIT, FakeMeasurer, FakeProbe, candidates, write_bundle
from stand_in_driver import Driver, Tensor
from triton.runtime import driver
from tune_kernels.kernels import bundle, registry
from tune_kernels.kernels.linear import linear_grid, linear_kernel, linear_launch
from tune_kernels.schedules import store
from tune_kernels.schedules.schedule import LinearSchedule, Schedule
from tune_kernels.shapes.errors import UserError
from tune_kernels.shapes.model import LinearShape
from tune_kernels.tuner.cli import cli
from tune_kernels.tuner.on_gpu import command as gpu_command
from tune_kernels.tuner.on_gpu import run as on_gpu
from tune_kernels.tuner.on_gpu.run import Request
from tune_kernels.tuner.on_gpu.samples.gate import Checked
from tune_kernels.tuner.on_gpu.worker.checks import require_artefact
from tune_kernels.tuner.on_gpu.worker.tasks import Problem

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(triton.knobs.runtime.interpret, reason="interpreting")]
BEST = LinearSchedule(128, 256, 4, 4, split_k=SPLIT, pdl=True)


def time_us(schedule: Schedule) -> float:
    return 18.0 if schedule == BEST else 20.0


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """The folder of a run that was recorded."""
    made = write_bundle(tmp_path / "bundle", {"down": candidates()})
    request = Request(bundle=made, schedules=tmp_path / "nothing", out=tmp_path / "run")
    on_gpu.tune(request, H200, FakeMeasurer(time_us), lambda _: FakeProbe(time_us), lambda line: None)
    return tmp_path / "run"


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def test_a_recorded_run_is_ranked_and_promoted_without_a_gpu(recorded: Path, tmp_path: Path) -> None:
    done = invoke("--on-gpu", "--replay", recorded, "--out", tmp_path / "out", "--schedules", tmp_path / "s", "--promote",
                  "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert said["promotable"] == ["down"]
    [row] = store.read(Path(*said["written"])).rows
    assert row.schedule == BEST
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["schema"] == "tune-kernels/on-gpu-report/2"
    assert report["kernels"][0]["places"][0]["status"] == "winner"
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()


def test_a_dry_run_shows_the_change_and_writes_nothing(recorded: Path, tmp_path: Path) -> None:
    done = invoke("--on-gpu", "--replay", recorded, "--out", tmp_path / "out", "--schedules", tmp_path / "s", "--dry-run")
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "before → after" in said and "1 added" in said and "BLOCK_K 256" in said and "RANDOM WEIGHTS" in said
    assert "--promote would write 1 rows" in done.output
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(("arguments", "code", "said"), [
    (["--on-gpu", "--offline"], 2, "don't go together"), (["--on-gpu", "--promote", "--dry-run"], 2, "don't go together"),
    (["--offline", "--budget", "5"], 2, "--offline takes no --budget"),
    (["--on-gpu", "--fresh"], 2, "--on-gpu takes no --fresh"), (["--on-gpu", "--budget", "0"], 2, "--budget"),
    (["--on-gpu", "doctor"], 2, "don't go together"),
])
def test_wrong_usage_is_named(arguments: list[str], code: int, said: str) -> None:
    done = invoke(*arguments)
    assert (done.exit_code, said in done.output) == (code, True), done.output


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tune_kernels.tuner.on_gpu.worker.gpu_state._nvml", lambda: None)
    monkeypatch.setenv("PATH", "")
    done = invoke("--on-gpu", "--out", tmp_path)
    assert isinstance(done.exception, UserError)
    assert "no GPU on this machine" in str(done.exception)
    assert "--replay" in str(done.exception)


def test_weights_are_named_without_where_they_lie(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert gpu_command.weights_name("random:3") == "random:3"
    assert gpu_command.fingerprint("random:3") is None
    assert gpu_command.weights_name(str(tmp_path)) == f"path:{tmp_path.name}"
    one = gpu_command.fingerprint(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"others!")
    assert gpu_command.fingerprint(str(tmp_path)) != one


class Rehearsal(FakeMeasurer):
    """Each candidate is launched from the bundle, under a driver that stops short of the GPU."""

    def check(self, problem: Problem, name: str, schedule: Schedule) -> Checked:
        assert isinstance(problem.shape, LinearShape)
        assert isinstance(schedule, LinearSchedule)
        require_artefact(problem, schedule)
        bundle.install(linear_kernel, Path(problem.bundle))
        shape = problem.shape
        stride = -(-shape.N // 16) * 16
        linear_launch(shape, schedule, RECIPE.numerics)(
            linear_grid(shape, schedule, 148), x_ptr=Tensor("float8_e4m3fn"), w_ptr=Tensor("float8_e4m3fn"),
            x_scale_ptr=Tensor("float32"), w_scale_ptr=Tensor("float32"),
            out_ptr=Tensor("float32" if schedule.split_k > 1 else "bfloat16"), rows=5, stride_xm=shape.K, stride_xt=16,
            stride_wn=shape.K,
            stride_om=stride, stride_os=5 * stride)
        return super().check(problem, name, schedule)


def test_a_b300_run_launches_every_survivor_from_its_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An offline bundle for sm_103, then --on-gpu for nvidia-b300 up to the launch: nothing is compiled there."""
    from tune_kernels.tuner.offline.sweep import SweepRequest as Offline
    from tune_kernels.tuner.offline.sweep import sweep

    space = tmp_path / "space.toml"
    space.write_text('[[grid]]\nkernels = "o"\nBLOCK_N = [64, 128]\nBLOCK_K = 128\nnum_stages = 4\nnum_warps = 4\n'
                     'split_k = 4\npdl = true\n')
    report = sweep(Offline(model="smollm2-135m", targets=("sm_103",), kernels=("o",), space=str(space), jobs=1,
                           out=tmp_path / "bundle"))
    assert [v.verdict for v in report.variants if v.kernel == "o"] == ["accepted"] * 2
    gpu = Driver(103)
    monkeypatch.setattr(driver, "_active", gpu)
    linear_kernel.device_caches.clear()
    default = registry.default_schedule(RECIPE, "o", "sm_103")
    request = Request(model="smollm2-135m", bundle=tmp_path / "bundle", schedules=tmp_path / "schedules", out=tmp_path / "out")
    measurer = Rehearsal(lambda s: 10.0 if s == default else 9.0)
    try:
        outcome = on_gpu.tune(request, B300, measurer, lambda _: FakeProbe(measurer.time_us), lambda line: None)
    finally:
        linear_kernel.device_caches.clear()
    assert gpu.launched == ["linear_kernel"] * 2
    [written] = on_gpu.promote(outcome, request.schedules)
    assert written == tmp_path / "schedules" / "nvidia-b300" / "smollm2-135m.fp8-v1.json"
    [row] = outcome.promoted.rows
    assert (row.kernel, row.artefact.instructions) == ("o", ("UTCQMMA",))
    assert row.timing.previous and row.timing.previous.schedule == default


def test_where_the_report_cant_be_written_nothing_is_promoted(recorded: Path, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """F12: a full disk under --out."""
    def full(path: Path, text: str, *, durable: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tune_kernels.tuner.offline.record.replace_text", full)
    done = invoke("--on-gpu", "--replay", recorded, "--out", tmp_path / "out", "--schedules", tmp_path / "s", "--promote")
    assert isinstance(done.exception, UserError)
    assert "No space left" in str(done.exception)
    assert not (tmp_path / "s").exists()


def test_a_terminal_without_the_characters_shows_all_the_same(recorded: Path, tmp_path: Path) -> None:
    """F23: a traceback after the promotion."""
    command = [sys.executable, "-m", "tune_kernels.tuner", "--on-gpu", "--replay", recorded, "--out", tmp_path / "out",
               "--schedules", tmp_path / "s", "--promote"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True,
                          env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "100"})
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "promoted: " in done.stdout.splitlines()[-1]
    [path] = (tmp_path / "s").glob("*/*.json")
    assert store.read(path).rows


def test_text_from_outside_is_no_markup(recorded: Path, tmp_path: Path) -> None:
    """F22: a dead candidate's last words."""
    path = recorded / "recording.json"
    table = json.loads(path.read_text())
    contest = table["contests"]["down"]
    dead = next(n for n in contest["order"] if n != contest["incumbent"] and n not in table["gate"]["accepted"].values())
    contest["dead"][dead] = ["crash", "[/b] in [/usr/lib/x] [red]"]
    contest["origin"] = "promoted"
    table["machine"]["driver"] = "[/nothing]"
    path.write_text(json.dumps(table))
    for columns in (80, 200):
        done = CliRunner().invoke(cli, ["--on-gpu", "--replay", str(path), "--out", str(tmp_path / "out"), "--schedules",
                                        str(tmp_path / "s"), "--dry-run"], env={"COLUMNS": str(columns)})
        assert done.exit_code == 0, done.exception
        assert "crash: [/b] in [/usr/lib/x] [red]" in done.output


def test_an_incumbent_without_times(recorded: Path, tmp_path: Path) -> None:
    """F21: its page ended in a traceback."""
    path = recorded / "recording.json"
    table = json.loads(path.read_text())
    contest = table["contests"]["down"]
    for batch in contest["batches"]:
        batch["samples_us"].pop(contest["incumbent"], None)
    path.write_text(json.dumps(table))
    done = invoke("--on-gpu", "--replay", path, "--out", tmp_path / "out", "--schedules", tmp_path / "s", "--dry-run", "--json")
    assert done.exit_code == 0, done.exception
    assert json.loads(done.stdout)["promotable"] == []


def test_json_and_a_kernel_that_passed_no_gate(recorded: Path, tmp_path: Path) -> None:
    """F21: exit code 1 came without a message."""
    path = recorded / "recording.json"
    table = json.loads(path.read_text())
    table["gate"]["accepted"] = {}
    path.write_text(json.dumps(table))
    done = invoke("--on-gpu", "--replay", path, "--out", tmp_path / "out", "--schedules", tmp_path / "s", "--dry-run", "--json")
    assert done.exit_code == 1, done.output
    assert json.loads(done.stdout)["promotable"] == []
    assert "not every kernel has a schedule that passed the gate: down: " in done.stderr


def test_the_terminal_begins_with_the_decisions(tmp_path: Path) -> None:
    """F38: at 80 columns the summary was 521 lines, and nothing said which model was the full one."""
    runner = CliRunner(env={"COLUMNS": "80"})
    done = runner.invoke(cli, ["--on-gpu", "--replay", str(H200_RUN), "--out", str(tmp_path), "--schedules", str(tmp_path / "s")])
    lines = done.output.splitlines()
    assert lines[0].startswith("lm_head_logits: gain: ")
    assert lines[3].startswith("o: refused: slower in the full model")
    assert lines.index("1 gain (lm_head_logits), 2 refused (o, qkv), 5 unchanged") < 25
    assert "full model qwen2.5-7b, weights random:0: 1728 tokens compared" in done.output
    table = runner.invoke(cli, ["--on-gpu", "--replay", str(H200_RUN), "--out", str(tmp_path)], env={"COLUMNS": "150"}).output
    assert "decision and why" in table and table.index("refused") < table.index("candidates")


@pytest.mark.parametrize("options", [["--storage", "x"], ["--budget", "5"], ["--weights", "random:1"], ["--kernel", "down"]])
def test_what_a_replay_would_ignore_is_refused(recorded: Path, options: list[str]) -> None:
    """F38: --storage with --replay was ignored, unsaid."""
    done = invoke("--on-gpu", "--replay", recorded, *options)
    assert (done.exit_code, f"--replay takes no {options[0]}" in done.output) == (2, True), done.output
