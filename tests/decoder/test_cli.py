"""The commands as a user meets them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tune_kernels.decoder.cli import bench, generate, main, roofline, verify


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


def last_json(text: str) -> dict:
    return json.loads(text.strip().splitlines()[-1])


def test_help_imports_no_torch() -> None:
    code = ("import sys; from click.testing import CliRunner; from tune_kernels.decoder.cli import main\n"
            "r = CliRunner().invoke(main, ['generate', '--help']); assert r.exit_code == 0, r.output\n"
            "assert not {'torch', 'triton', 'transformers', 'numba'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", ["generate", "verify", "bench", "roofline", "train-drafter"])
def test_every_command_has_help_and_json(command: str, runner: CliRunner) -> None:
    result = runner.invoke(main, [command, "--help"])
    assert result.exit_code == 0
    assert "--json" in result.output


def test_generate_compares_and_streams(runner: CliRunner, tiny_folders: dict[str, Path]) -> None:
    options = ["hi", "--weights", str(tiny_folders["llama"]), "--max-new-tokens", "20"]
    compared = runner.invoke(generate, [*options, "--compare", "--json"])
    assert compared.exit_code == 0, compared.output
    record = last_json(compared.stdout)
    assert record["same"]
    assert record["ar"]["token_ids"] == record["ssd"]["token_ids"]
    table = runner.invoke(generate, [*options, "--compare"])
    assert "the same tokens" in table.stdout
    streamed = runner.invoke(generate, [*options, "--mode", "ssd"])
    assert streamed.stdout == record["ar"]["text"] + "\n"


def test_generate_on_random_weights_takes_ids(runner: CliRunner) -> None:
    result = runner.invoke(generate, ["1 2 3", "--weights", "random:0", "--model", "smollm2-135m", "--max-new-tokens", "2"])
    assert result.exit_code == 0, result.output
    assert len(result.stdout.split()) == 2


@pytest.mark.parametrize(("arguments", "message"), [
    (["generate", "x", "--weights", "/nowhere"], "to do|expected"),
    (["generate", "x", "--weights", "random:0"], "need a model shape"),
    (["generate", "x", "--mode", "fast"], "fast"),
    (["verify", "--weights", "random:0", "--model", "smollm2-135m", "--text", "/nowhere"], "/nowhere"),
    (["generate", "x", "--weights", "random:0", "--model", "smollm2-135m", "--drafter-device", "cuda:99"], "cuda:99"),
    (["bench", "--prompts", "/nowhere"], "/nowhere"),
    (["bench", "--scripted-tau", "9"], "at most K"),
    (["bench", "--draft-length", "0"], "1<=x<=15"),
    (["roofline", "--target", "nvidia-b301"], "did you mean"),
    (["roofline", "--tau", "2"], "exactly one"),
    (["roofline", "--bandwidth", "0"], "above 0"),
    (["roofline", "--measured", "/nowhere"], "/nowhere"),
    (["roofline", "--model", "qwen"], "unknown model"),
    (["roofline", "--recipe", "fp9"], "unknown recipe"),
])
def test_wrong_usage_is_told_and_exits_with_2(arguments: list[str], message: str, runner: CliRunner) -> None:
    result = runner.invoke(main, arguments)
    assert result.exit_code == 2
    assert re.search(message, result.output)
    assert "Traceback" not in result.output


def test_verify_writes_evidence_and_fails_on_a_fault(runner: CliRunner, tiny_folders: dict[str, Path], tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts by kind, the weights' fingerprint, a hash of the tokens; exit code 1 where a check fails."""
    out = tmp_path / "deep" / "evidence.json"
    options = ["--weights", str(tiny_folders["qwen2"]), "--kind", "reference", "--context", "300", "--out", str(out)]
    result = runner.invoke(verify, options)
    assert result.exit_code == 0, result.output
    evidence = json.loads(out.read_text())
    assert evidence["checks"]["reference"] == {"run": 4, "passed": 4}
    assert evidence["checks"]["agreement"] == {"run": 0, "passed": 0}
    assert len(evidence["fingerprint"]) == 64
    from tune_kernels.decoder.on_torch import layer as model

    rotate = model.rotate
    monkeypatch.setattr(model, "rotate", lambda x, cos, sin: rotate(x, cos, -sin) if x.shape[1] > 2 else rotate(x, cos, sin))
    failed = runner.invoke(verify, [*options, "--json"])
    assert failed.exit_code == 1
    assert not last_json(failed.stdout)["passed"]


def test_verify_counts_at_least_161_agreement_checks(runner: CliRunner, tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "evidence.json"
    result = runner.invoke(verify, ["--weights", str(tiny_folders["llama"]), "--kind", "agreement", "--out", str(out)])
    assert result.exit_code == 0, result.output
    evidence = json.loads(out.read_text())
    count = evidence["checks"]["agreement"]["run"]
    assert re.search(rf"agreement \(1 of {count}, \d+ (s|min) left\) ok", result.stderr)  # F35
    assert f"agreement ({count} of {count}, 0 s left) ok" in result.stderr
    assert evidence["checks"]["agreement"]["passed"] == evidence["checks"]["agreement"]["run"] >= 161
    assert len({r["name"] for r in evidence["results"]}) == len(evidence["results"])
    assert evidence["prompts"] > 1


def test_a_place_that_cannot_be_written_costs_no_figure(runner: CliRunner, tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """The figures are printed before the file is tried; the error is the user's. train-drafter says the same."""
    (tmp_path / "file").write_text("")
    prompts = tmp_path / "prompts.toml"
    prompts.write_text('repeats = 1\n[[tuning]]\nname = "a"\nkind = "code"\ntext = "x = x + x"\n')
    weights = ["--weights", str(tiny_folders["llama"]), "--out", str(tmp_path / "file" / "x")]
    measured = runner.invoke(bench, [*weights, "--prompts", str(prompts), "--set", "tuning", "--mode", "ar",
                                     "--max-new-tokens", "2"])
    assert last_json(measured.stdout)["rows"]
    trained = runner.invoke(main, ["train-drafter", *weights, "--device", "cpu", "--minutes", "0.01"])
    for result in (measured, trained):
        assert result.exit_code == 2
        assert "expected: a place that can be written" in result.stderr, result.stderr


def test_bench_prints_a_table_and_one_json_line(runner: CliRunner, tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.toml"
    prompts.write_text('repeats = 1\n[[tuning]]\nname = "a"\nkind = "code"\ntext = "x = x + x + x"\n')
    options = ["--weights", str(tiny_folders["llama"]), "--prompts", str(prompts), "--set", "tuning", "--draft-length", "2",
               "--draft-length", "4", "--max-new-tokens", "16", "--scripted-tau", "2.5"]
    result = runner.invoke(bench, [*options, "--out", str(tmp_path / "bench.json")])
    assert result.exit_code == 0, result.output
    record = last_json(result.stdout)
    assert record["same"]
    assert [r["config"] for r in record["rows"] if r["kind"] == "all"] == ["ar", "sd K=2", "sd K=4", "ssd K=2", "ssd K=4"]
    taus = [r["tokens_per_round"] for r in record["rows"] if r["kind"] == "all" and r["mode"] != "ar"]
    assert all(abs(tau - 2.5) < 0.3 for tau in taus)
    predicted = runner.invoke(roofline, ["--measured", str(tmp_path / "bench.json"), "--json"])
    assert predicted.exit_code == 0, predicted.output
    assert [(r["draft_length"], r["tau"]) for r in last_json(predicted.stdout)["rows"]] == list(zip((2, 4), taus))


@pytest.mark.parametrize("drafter", ["ngram", "itself"])
def test_bench_runs_the_naive_decoders_in_turn(drafter: str, runner: CliRunner, tiny_folders: dict[str, Path],
                                               tmp_path: Path) -> None:
    """In fp32 they make AR's tokens on a tiny model, rounds and acceptance included where the drafter is the model."""
    prompts = tmp_path / "prompts.toml"
    prompts.write_text('repeats = 1\n[[evaluation]]\nname = "a"\nkind = "code"\ntext = "x = x + x + x"\n')
    folder = str(tiny_folders["llama"])
    result = runner.invoke(bench, ["--weights", folder, "--prompts", str(prompts), "--naive", "--json", "--max-new-tokens", "15",
                                   "--drafter", folder if drafter == "itself" else drafter])
    assert result.exit_code == 0, result.output
    record = last_json(result.stdout)
    rows = {r["mode"]: r for r in record["rows"] if r["kind"] == "all"}
    assert list(rows) == ["ar", "sd", "ssd", "naive-ar", "naive-sd", "naive-ssd"]
    assert record["naive_dtype"] == "float32"
    assert all(r["same_as_ar"] == r["requests"] == 1 for r in rows.values())
    if drafter == "itself":
        for mode in ("sd", "ssd"):
            assert rows[f"naive-{mode}"]["acceptance"] == rows[mode]["acceptance"] == 1
            assert rows[f"naive-{mode}"]["tokens_per_round"] == rows[mode]["tokens_per_round"]


def test_roofline_json_is_one_object(runner: CliRunner) -> None:
    record = json.loads(runner.invoke(roofline, ["--json"]).stdout)
    assert record["best_sd"] in range(1, 9)
    assert record["floor_ms"] == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize(("name", "sku"), [("nvidia-b300", "nvidia-b300"), ("b300", "nvidia-b300"), ("sm_103", "nvidia-b300"),
                                           ("h100", "nvidia-h100")])
def test_roofline_takes_a_gpu_by_any_of_its_names(name: str, sku: str, runner: CliRunner) -> None:
    """F33: a SKU, its short name, an architecture."""
    assert json.loads(runner.invoke(roofline, ["--target", name, "--json"]).stdout)["target"] == sku
    assert runner.invoke(roofline, ["--target", "sm_90"]).exit_code == 2  # two GPUs


def test_text_from_outside_is_no_markup(runner: CliRunner, tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """F22: a prompt's name and kind are shown as they are."""
    prompts = tmp_path / "prompts.toml"
    prompts.write_text('repeats = 1\n[[evaluation]]\nname = "[/usr/lib/x]"\nkind = "[/b][red]"\ntext = "x"\n')
    result = runner.invoke(bench, ["--weights", str(tiny_folders["llama"]), "--prompts", str(prompts), "--max-new-tokens", "2"])
    assert result.exit_code == 0, result.output
    assert "[/b][red]" in result.stdout
    assert "[/usr/lib/x], ar (1 of 3, " in result.stderr


def test_an_output_that_knows_only_ascii(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """F23: a character that it can't encode is escaped; the JSON line after the table comes out."""
    prompts = tmp_path / "prompts.toml"
    prompts.write_text('repeats = 1\n[[evaluation]]\nname = "a"\nkind = "caf\u00e9"\ntext = "x"\n', encoding="utf-8")
    code = "from tune_kernels.decoder.cli import main; main()"
    options = ["bench", "--weights", str(tiny_folders["llama"]), "--prompts", str(prompts), "--max-new-tokens", "2"]
    done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "caf\\xe9" in done.stdout
    assert last_json(done.stdout)["same"]
