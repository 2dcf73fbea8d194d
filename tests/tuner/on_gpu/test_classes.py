"""`verify --classes`: which knobs change bits, from a bundle on a GPU that isn't there and from a run on one that was."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton
from click.testing import CliRunner
from fake_gpu import H200, H200_RUN, RECIPE, FakeMeasurer, candidates, split_class, write_bundle
from hypothesis import given
from hypothesis import strategies as st
from tune_kernels.kernels import registry
from tune_kernels.schedules import store
from tune_kernels.schedules.schedule import AttentionSchedule, Schedule, schedule_to_dict
from tune_kernels.shapes.errors import UserError
from tune_kernels.tuner.cli import cli
from tune_kernels.tuner.errors import GpuError, SpaceError
from tune_kernels.tuner.on_gpu import run as on_gpu
from tune_kernels.tuner.on_gpu.classes import NO, NOT_VARIED, YES, Request, changes_bits, classify, make_report, sizes
from tune_kernels.tuner.on_gpu.classes_report import report_to_dict
from tune_kernels.tuner.on_gpu.samples.gate import Failure

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(triton.knobs.runtime.interpret, reason="interpreting")]
DEFAULT = registry.default_schedule(RECIPE, "down", "sm_90")
SCHEDULES = st.builds(AttentionSchedule, *[st.integers(1, 2)] * 5)


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(cli, ["verify", "--classes", *map(str, arguments)])


@pytest.fixture
def classified(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The report on a bundle of `down`; options of FakeMeasurer."""
    made = write_bundle(tmp_path / "bundle", {"down": candidates()})

    def report(**options: Any) -> dict[str, Any]:
        request = Request(made, None, None, (), tmp_path / "schedules", tmp_path / "out")
        found = classify(request, H200, FakeMeasurer(lambda s: 1.0, **options), lambda line: None)
        return report_to_dict(make_report(found, store.search_path(tmp_path / "schedules")))
    return report


@given(st.dictionaries(SCHEDULES, st.sampled_from("ab"), max_size=12))
def test_what_is_said_of_a_knob_is_what_pairs_show(classes: dict[Schedule, str]) -> None:
    """Against every pair: `yes` where one that differs in this knob alone has two classes, `no` where all such have one."""
    for knob, effect in changes_bits(classes).items():
        alone = [(a, b) for a in classes for b in classes if a != b and replace(a, **{knob: getattr(b, knob)}) == b]
        differ = [pair for pair in alone if classes[pair[0]] != classes[pair[1]]]
        assert effect.says == (YES if differ else NO if alone else NOT_VARIED)
        assert effect.pair is None if not alone else effect.pair in (differ or alone)
    assert sum(size.candidates for size in sizes(classes)) == len(classes)


def test_every_variant_of_a_bundle_is_classified(classified: Callable[..., dict[str, Any]]) -> None:
    report = classified()
    [down] = report["kernels"]
    assert report["passed"]
    assert (report["model"], report["recipe"], report["target"]) == ("qwen2.5-7b", "fp8-v1", "nvidia-h200")
    assert (down["variants"], len(down["classes"])) == (len(candidates()), 2)
    assert (down["origin"], down["schedule"]) == ("recipe default", schedule_to_dict(DEFAULT))
    assert down["class"] == split_class(DEFAULT)
    said = {knob: found["changes_bits"] for knob, found in down["knobs"].items()}
    assert (said["split_k"], said["BLOCK_K"], said["preload"]) == (YES, NO, NOT_VARIED)
    first, second = down["knobs"]["split_k"]["pair"]
    assert first["class"] != second["class"]
    assert {k for k, v in first["schedule"].items() if second["schedule"][k] != v} == {"split_k"}
    assert down["promoted"] == []


def test_a_variant_that_dies_costs_itself_alone(classified: Callable[..., dict[str, Any]]) -> None:
    """Unless it is the recipe's, whose class is what matters; where all die, it is not the candidates."""
    died = Failure("crash", "an illegal memory access")
    victim = candidates()[1]
    report = classified(does=lambda s: died if s == victim else None)
    assert report["passed"]
    assert list(report["kernels"][0]["without_class"].values()) == ["crash: an illegal memory access"]
    assert not classified(does=lambda s: died if s == DEFAULT else None)["passed"]
    with pytest.raises(GpuError, match="the first 4 candidates all died"):
        classified(does=lambda s: died)


def test_a_recipes_schedule_that_is_not_in_the_bundle_is_told(tmp_path: Path) -> None:
    made = write_bundle(tmp_path / "bundle", {"down": [s for s in candidates() if s != DEFAULT]})
    request = Request(made, None, None, (), tmp_path / "schedules", tmp_path / "out")
    report = make_report(classify(request, H200, FakeMeasurer(lambda s: 1.0), lambda line: None), [])
    assert not report.passed
    assert "is not among" in report.skipped["down"]
    with pytest.raises(SpaceError, match=r"bundle is of qwen2\.5-7b"):
        classify(replace(request, model="qwen2.5-0.5b"), H200, FakeMeasurer(lambda s: 1.0), lambda line: None)


@pytest.fixture
def promoted(tmp_path: Path) -> Path:
    """The folder that the recorded run is promoted to."""
    [file] = on_gpu.replay(H200_RUN).promoted.files()
    store.promote(tmp_path / "promoted", file)
    return tmp_path / "promoted"


def test_a_run_on_an_h200_says_which_knobs_change_bits(promoted: Path, tmp_path: Path) -> None:
    """Without a GPU, and every promoted class is met."""
    done = invoke("--replay", H200_RUN, "--schedules", promoted, "--out", tmp_path / "classes.json", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "classes.json").read_text())
    assert json.loads(done.stdout) == report
    assert report["schema"] == "tune-kernels/classes/1"
    kernels = {k["kernel"]: k for k in report["kernels"]}
    assert set(kernels) == set(registry.TUNABLE) - {"fc", "lm_head_certified"}
    yes = {name: {k for k, found in kernel["knobs"].items() if found["changes_bits"] == YES} for name, kernel in kernels.items()}
    split = {"BLOCK_K", "split_k"}
    assert yes == {"qkv": {*split, "preload"}, "o": {*split, "preload"}, "down": split, "gate_up": {"BLOCK_K"},
                   "attention": {"BLOCK_N"}, "merge": set(), "lm_head": set(), "lm_head_logits": set()}
    assert {name: len(kernel["classes"]) for name, kernel in kernels.items()} == {
        "qkv": 8, "o": 8, "gate_up": 2, "down": 10, "attention": 2, "merge": 1, "lm_head": 1, "lm_head_logits": 1}
    assert kernels["lm_head"]["class"] == kernels["lm_head_logits"]["class"]
    assert [row["verdict"] for k in report["kernels"] for row in k["promoted"]] == ["same class"] * 8


def test_the_terminal_shows_the_same(promoted: Path, tmp_path: Path) -> None:
    done = invoke("--replay", H200_RUN, "--kernel", "down", "--schedules", promoted, "--out", tmp_path / "classes.json")
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.replace("│", " ").split())
    assert "10 classes of 91 variants" in said and "2 and 4 give" in said and "both give" in said
    assert "promoted classes: 1 of 1 met here" in said
    assert "attention on" not in said


def test_a_promoted_class_that_is_not_met_fails(promoted: Path, tmp_path: Path) -> None:
    """As after an update of the driver that changed bits."""
    [path] = promoted.glob("*/*.json")
    file = store.read(path)
    store.promote(promoted, replace(file, rows=tuple(replace(r, numerics_class="0" * 64).sealed() if r.kernel == "down" else r
                                                     for r in file.rows)))
    done = invoke("--replay", H200_RUN, "--schedules", promoted, "--out", tmp_path / "classes.json")
    assert done.exit_code == 1
    assert f"class {'0' * 12}, here" in done.output and "another class" in done.output
    assert "promoted classes: 7 of 8 met here" in done.output


@pytest.mark.parametrize(("arguments", "said"), [
    (["verify", "--kernel", "down"], "--kernel has no effect without --classes"),
    (["verify", "--replay", "x"], "--replay has no effect without --classes"),
    (["verify", "--classes", "--kind", "quality"], "--kind has no effect with --classes"),
    (["verify", "--classes", "--context", "9"], "--context has no effect with --classes"),
    (["verify", "--classes", "--promote"], "--promote has no effect with --classes"),
    (["verify", "--classes", "--replay", "x", "--bundle", "y"], "--bundle has no effect with --replay"),
    (["verify", "--classes", "--replay", "x", "--recipe", "bf16"], "--recipe has no effect with --replay"),
])
def test_wrong_usage_is_named(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(cli, arguments)
    assert (done.exit_code, said in done.output) == (2, True), done.output


@pytest.mark.parametrize(("arguments", "said"), [
    (["--replay", "nowhere"], "no recording at nowhere"), (["--replay", H200_RUN, "--kernel", "dwn"], "did you mean 'down'"),
    (["--out", "x/classes.json"], "no GPU on this machine"),
])
def test_a_users_mistake_is_told(arguments: list[Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tune_kernels.tuner.on_gpu.worker.gpu_state._nvml", lambda: None)
    monkeypatch.setenv("PATH", "")
    done = invoke(*arguments)
    assert isinstance(done.exception, UserError)
    assert said in str(done.exception)


def test_verify_without_classes_is_the_decoders(tmp_path: Path) -> None:
    """All of its options go through, and its errors are told as its own command does."""
    done = CliRunner().invoke(cli, ["verify", "--weights", "/nowhere", "--context", "9"])
    assert (done.exit_code, "no such file or folder" in done.output) == (2, True), done.output
