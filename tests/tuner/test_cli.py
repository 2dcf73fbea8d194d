"""The command line as a user meets it: help, wrong input, show, doctor."""

import io
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from tune_kernels.shapes.errors import UserError
from tune_kernels.shapes.model import load_model_shape
from tune_kernels.shapes.target import targets_named
from tune_kernels.tuner import cli
from tune_kernels.tuner.offline import sweep as sweep_module
from tune_kernels.tuner.offline.report import SCHEMA, find_variant, print_summary, read_report
from tune_kernels.tuner.offline.show import describe
from tune_kernels.tuner.offline.space import load_space
from tune_kernels.tuner.offline.sweep import Progress

ROOT = Path(__file__).parents[2]
SPACE = ('[[grid]]\nkernels = "down"\nBLOCK_N = 64\nBLOCK_K = 128\nnum_stages = 3\nnum_warps = 4\n'
         'orientation = ["activations_as_m", "weights_as_m"]\n')


def tune(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "tune_kernels.tuner", *arguments], capture_output=True, text=True,
                          env={**os.environ, **environment})


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "space.toml").write_text(SPACE)
    done = tune("--offline", "--space", str(folder / "space.toml"), "--target", "sm_103", "--target", "sm_90",
                "--kernel", "down", "--out", str(folder / "out"))
    assert done.returncode == 0, done.stderr
    assert "16 variants: 14 accepted" in done.stdout
    assert "tune-kernels show" in done.stdout
    assert re.search(r"^compiled 16 of 16: 14 accepted, 2 rejected; \d+ s$", done.stdout, re.MULTILINE), "plain lines in a pipe"
    assert "; 0 known from an earlier run" in done.stdout, "F36"
    assert "\x1b" not in done.stdout
    return folder / "out"


def test_help_imports_neither_triton_nor_torch() -> None:
    code = ("import sys; from tune_kernels.tuner.cli import cli; cli.main(['--help'], standalone_mode=False);"
            "sys.exit(any(m in sys.modules for m in ('triton', 'torch', 'numpy', 'jinja2')))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for flag in ("--offline", "--model", "--target", "--kernel", "--space", "--jobs", "--out", "--fresh", "--max-spill-bytes",
                 "--executor", "--json"):
        assert flag in done.stdout


def test_a_gpu_goes_by_each_of_its_names() -> None:
    """F33: `--target h100` was told to write sm_100, and one command wanted a SKU where another wanted an architecture."""
    for word in ("nvidia-b300", "b300", "B300", "sm_103", "sm_103a"):
        assert [t.name for t in targets_named(word)] == ["nvidia-b300"]
    for word in ("B300", "sm_103"):
        assert "nvidia-b300" in tune("roofline", "--target", word, "--json").stdout
    assert {t.arch for word in ("h100", "h200", "nvidia-h200", "sm_90") for t in targets_named(word)} == {"sm_90"}
    assert "expected: one of nvidia-h100, nvidia-h200" in tune("roofline", "--target", "sm_90").stderr


def test_progress_lines_say_the_time_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """F35."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with cli._Watcher(Console(), quiet=False) as watch:
        now[0] = 30.0
        watch(Progress(total=120, done=30, accepted=29, rejected=1))
    assert capsys.readouterr().out == "compiled 30 of 120: 29 accepted, 1 rejected; 30 s, about 90 s left\n"


def test_a_variant_against_a_contract_can_be_shown(tmp_path: Path) -> None:
    """F36: KeyError; and 26 such were called known before, in a first run."""
    space = SPACE.replace("BLOCK_N = 64", "BLOCK_N = [64, 100]").replace('["activations_as_m", ', "[")
    (tmp_path / "space.toml").write_text(space)
    done = tune("--offline", "--space", str(tmp_path / "space.toml"), "--target", "h200", "--kernel", "down", "--out",
                str(tmp_path / "out"), "--jobs", "1")
    assert "1 against a kernel's contract; 0 known from an earlier run" in done.stdout, done.stderr
    variant = next(v for v in read_report(tmp_path / "out").variants if v.stage == "contract")
    shown = tune("show", variant.id, "--out", str(tmp_path / "out"))
    assert shown.returncode == 0, shown.stderr
    assert "contract: BLOCK_N" in shown.stdout and "no code:" in shown.stdout


@pytest.mark.parametrize("name", ["[/b]", "[/usr/lib/x]", "日本 é", "[bold]x"])
def test_text_from_a_report_is_neither_markup_nor_an_error(swept: Path, tmp_path: Path, name: str) -> None:
    """F22, F23: a traceback for a name like a closing tag, and for a letter that the terminal has not."""
    table = json.loads((swept / "report.json").read_text())
    table["model"] = name
    table["variants"][0]["warnings"] = [name]
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.json").write_text(json.dumps(table))
    shown = io.StringIO()
    print_summary(read_report(out), Console(file=shown, width=200), out)
    assert f"{name} on sm_103" in shown.getvalue()
    done = tune("show", table["variants"][0]["id"], "--out", str(out), "--no-sass", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    spelled = name.encode("ascii", "backslashreplace").decode()  # click writes UTF-8 to an ASCII terminal, rich does this
    assert f"warning: {name}\n" in done.stdout or f"warning: {spelled}\n" in done.stdout


@pytest.mark.parametrize(("change", "says"), [
    ('"seconds": 1e400', "infinite"), ('"toolchain": {"flags": null}', "toolchain"), ('"seconds": NaN', "NaN"),
    ('"model": "\\ud800"', "surrogate"), ('"model": "a", "model": "b"', "twice"), ('"counts": {"variants": -1}', "counts"),
    ('"variants": [{"artefact": "' + "a" * 5000 + '"}]', "variants[0]")], ids=lambda text: text[:30])
def test_a_wrong_field_of_a_report_is_named(swept: Path, tmp_path: Path, change: str, says: str) -> None:
    """F21."""
    table = {**json.loads((swept / "report.json").read_text()), "variants": []}
    name = change.split('"')[1]
    rest = json.dumps({key: value for key, value in table.items() if key != name})
    (tmp_path / "report.json").write_text(f"{rest[:-1]}, {change}}}")
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        read_report(tmp_path)
    assert "report.json" in str(caught.value)


def test_help_is_quick() -> None:
    """The best of three, with room for a loaded machine; `scripts/bench_offline.py` measures it."""
    times = []
    for _ in range(3):
        started = time.monotonic()
        assert tune("--help").returncode == 0
        times.append(time.monotonic() - started)
    assert min(times) < 2.0


WRONG: list[tuple[list[str], list[str]]] = [
    (["--model", "qwen2.5-7B"], ["unknown model", "did you mean 'qwen2.5-7b'", "expected:"]),
    (["--model", "nowhere/config.json"], ["nowhere/config.json", "No such file"]),
    (["--target", "sm_80"], ["unknown target 'sm_80'", "expected: one of sm_103"]),
    (["--target", "h1000"], ["unknown target 'h1000' (did you mean 'h100'?)"]),
    (["--kernel", "gateup"], ["unknown kernel 'gateup'", "did you mean 'gate_up'"]),
    (["--kernel", "fc"], ["unknown kernel 'fc'", "qwen2.5-7b"]),
    (["--space", "defualt"], ["unknown space", "did you mean 'default'"]),
    (["--recipe", "fp8"], ["unknown recipe", "fp8-v1"]),
    (["--recipe", "fp32"], ["recipe fp32 has no default schedules", "choose one of bf16, fp8-v1"]),
    (["--executor", "nowhere:make", "--kernel", "merge", "--target", "sm_90"], ["executor 'nowhere:make'"]),  # F38: was exit 1
    (["--jobs", "0"], ["--jobs"]),
    (["--max-spill-bytes", "-1"], ["--max-spill-bytes"]),
    (["--no-such-flag"], ["No such option"]),
    (["--out", "/dev/null/x"], ["/dev/null/x", "--out"]),
    (["--model", "m" * 300], ["unknown model"]),
    (["--space", "s" * 300], ["unknown space"]),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG, ids=lambda a: " ".join(a)[:50])
def test_wrong_input_is_a_message_not_a_traceback(arguments: list[str], says: list[str], tmp_path: Path) -> None:
    out = [] if "--out" in arguments else ["--out", str(tmp_path)]
    done = tune("--offline", *arguments, *out)
    assert done.returncode == (1 if "--out" in arguments else 2), done.stdout
    assert "Traceback" not in done.stderr
    for text in says:
        assert text in done.stderr, done.stderr


def test_no_command_shows_help_and_is_wrong_usage() -> None:
    done = tune()
    assert done.returncode == 2
    assert "Usage:" in done.stdout
    assert tune("--offline", "doctor").returncode == 2
    assert tune("dcotor").returncode == 2


@pytest.fixture
def old_ptxas(tmp_path: Path) -> str:
    """An assembler that doesn't know sm_103a."""
    old = tmp_path / "ptxas"
    old.write_text("#!/bin/sh\nif [ \"$1\" = --version ]; then echo 'Cuda compilation tools, release 12.4, V12.4.1'; exit 0; fi\n"
                   "echo \"ptxas fatal   : Value 'sm_103a' is not defined for option 'gpu-name'\" >&2; exit 255\n")
    old.chmod(0o755)
    return str(old)


def test_a_toolchain_too_old_for_the_target_is_said_before_the_sweep(tmp_path: Path, old_ptxas: str) -> None:
    """An assembler that doesn't know sm_103a crashed in the middle of a sweep."""
    done = tune("--offline", "--target", "sm_103", "--out", str(tmp_path / "out"), TRITON_PTXAS_BLACKWELL_PATH=old_ptxas)
    assert done.returncode == 1
    assert "can't assemble for sm_103" in done.stderr
    assert "Value 'sm_103a' is not defined" in done.stderr
    assert "to do:" in done.stderr
    assert not (tmp_path / "out" / "records").exists()


@pytest.mark.parametrize("name", ["DISABLE_PTXAS_OPT", "TRITON_INTERPRET", "DISABLE_LLVM_OPT"])
def test_a_switch_that_no_key_holds_is_refused(tmp_path: Path, name: str) -> None:
    done = tune("--offline", "--target", "sm_90", "--out", str(tmp_path), **{name: "1"})
    assert done.returncode == 1
    assert f"unset {name}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_with_odd_characters(tmp_path: Path, swept: Path) -> None:
    out = tmp_path / "a b [red]é[/x]"
    done = tune("--offline", "--space", str(swept.parent / "space.toml"), "--target", "sm_90", "--kernel", "down", "--out",
                str(out))
    assert done.returncode == 0, done.stderr
    assert "a b [red]é[/x]/report.html" in done.stdout
    assert (out / "report.json").is_file()


@pytest.mark.parametrize("change", [{"kernel": "nothing"}, {"artefact": 5}, {"lines": 5}, {"shape": {"N": "4"}}, {"shape": {}},
                                    {"schedule": {}}, {"spill_store_bytes": None, "shared_bytes": None}, {"reasons": ["x"]},
                                    {"artefact": None, "kernel": "merge"}], ids=str)
def test_show_on_a_damaged_entry(tmp_path: Path, swept: Path, change: dict[str, Any]) -> None:
    report = json.loads((swept / "report.json").read_text())
    variant = next(v for v in report["variants"] if v["verdict"] == "accepted")
    variant.update(change)
    (tmp_path / "report.json").write_text(json.dumps(report))
    done = tune("show", variant["id"], "--out", str(tmp_path))
    assert "Traceback" not in done.stderr
    assert "can't be read" in done.stdout + done.stderr or "expected" in done.stdout + done.stderr


def test_the_example_of_a_sweep_from_python_runs(tmp_path: Path) -> None:
    text = textwrap.dedent((sweep_module.__doc__ or "").split("From Python:\n\n")[1])
    script = tmp_path / "example.py"
    text = text.replace('kernels=("down",)', 'kernels=("merge",), space="small"')
    script.write_text(text.replace("build/down", str(tmp_path / "out")))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{read_report(tmp_path / 'out').counts}\n"


def test_nothing_survived_is_exit_1(tmp_path: Path) -> None:
    space = tmp_path / "space.toml"
    space.write_text(SPACE.replace('["activations_as_m", "weights_as_m"]', '"activations_as_m"'))
    done = tune("--offline", "--space", str(space), "--target", "sm_90", "--kernel", "down", "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "nothing survived" in done.stderr


def test_json_is_one_line(swept: Path) -> None:
    done = tune("--offline", "--space", str(swept.parent / "space.toml"), "--target", "sm_90", "--kernel", "down", "--out",
                str(swept), "--json")
    found = json.loads(done.stdout)
    assert found["counts"]["cached"] == 8
    tune("--offline", "--space", str(swept.parent / "space.toml"), "--target", "sm_103", "--target", "sm_90", "--kernel", "down",
         "--out", str(swept), "--json")


def test_show_an_accepted_variant_with_its_sass(swept: Path) -> None:
    for variant in read_report(swept).variants:
        if variant.verdict != "accepted" or variant.kernel != "down":
            continue
        done = tune("show", variant.id, "--out", str(swept))
        assert done.returncode == 0, done.stderr
        assert "accepted at sass" in done.stdout
        assert "BLOCK_N 64" in done.stdout
        assert ("QGMMA" if variant.target == "sm_90" else "UTCQMMA") in done.stdout
        assert "EXIT" in done.stdout, "the whole SASS"
        short = tune("show", variant.id[:8], "--out", str(swept), "--no-sass").stdout
        assert "EXIT" not in short
        assert "QGMMA" in short or "UTCQMMA" in short


def test_show_an_early_reject_compiles_it_to_the_end(swept: Path) -> None:
    variant = next(v for v in read_report(swept).variants if v.verdict == "rejected")
    done = tune("show", variant.id, "--out", str(swept))
    assert done.returncode == 0, done.stderr
    assert "wrong_instruction: expected" in done.stdout
    assert "tt.dot" in done.stdout
    assert "HMMA" in done.stdout
    assert "compiled now, to the end" in done.stdout
    as_json = json.loads(tune("show", variant.id, "--out", str(swept), "--json").stdout)
    assert "HMMA" in as_json["sass"]


@pytest.mark.parametrize(("wrong", "says"), [("ffffffffffff", "no variant"), ("zz", "no variant"), ("", "16 variants begin")])
def test_show_an_unknown_id(swept: Path, wrong: str, says: str) -> None:
    done = tune("show", wrong, "--out", str(swept))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert says in done.stderr
    assert "expected:" in done.stderr


def test_show_where_an_artefact_is_damaged(swept: Path, tmp_path: Path) -> None:
    import shutil

    out = tmp_path / "copy"
    shutil.copytree(swept, out)
    variant = next(v for v in read_report(out).variants if v.verdict == "accepted")
    cubin = next((out / "artefacts" / variant.artefact).glob("*.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:100])
    done = tune("show", variant.id, "--out", str(out))
    assert "has changed since it was written" in done.stdout
    assert "Traceback" not in done.stderr


def test_doctor_says_what_works(old_ptxas: str) -> None:
    done = tune("doctor", "--json")
    assert done.returncode == 0, done.stdout
    found = {f["what"]: f["ok"] for f in json.loads(done.stdout)}
    assert all(found[f"offline for {arch}"] for arch in ("sm_90", "sm_100", "sm_103"))
    assert "gpu" in found
    old = tune("doctor", TRITON_PTXAS_BLACKWELL_PATH=old_ptxas)
    assert old.returncode == 1
    assert "NO  offline for sm_103" in old.stdout


@pytest.mark.parametrize(("text", "says"), [
    ("", "not valid JSON"), ("{", "not valid JSON"), ("[]", "holds a list"), ('{"schema": "x"}', "schema 'x'"),
    ('{"schema": "tune-kernels/offline-report/2"}', "update tune-kernels"),
    (json.dumps({"schema": SCHEMA}), "variants: missing"),
    (json.dumps({"schema": SCHEMA, "model": "m", "variants": []}), ": missing"),
    (json.dumps({"schema": SCHEMA, "model": 3, "variants": []}), "model: 3 is a int"),
    (json.dumps({"schema": SCHEMA, "toolchain": {}, "model": "", "targets": [], "space": "", "seconds": 0, "counts": {},
                 "variants": [3]}), "variants[0]: 3 is a int"),
])
def test_a_report_that_is_wrong_or_newer(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "report.json").write_text(text)
    done = tune("show", "abc", "--out", str(tmp_path))
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def damage(text: str, cuts: list[tuple[int, int, str]]) -> str:
    for at, length, new in cuts:
        at = at % (len(text) + 1)
        text = text[:at] + new + text[at + length:]
    return text


CUTS = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 30),
                          st.text(st.sampled_from('{}[]",:=\n0159.-etrufalsn_"abN\x00é'), max_size=8)), min_size=1, max_size=4)
FUZZ = settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def only_user_errors(read: Any, path: Path) -> None:
    message = path.name
    try:
        read(path)
    except UserError as e:
        message = str(e)
    assert path.name in message or "variant" in message, "an error names the file or the entry"


@FUZZ
@given(CUTS)
def test_broken_space_files(tmp_path: Path, cuts: list[tuple[int, int, str]]) -> None:
    path = tmp_path / "space.toml"
    path.write_text(damage((ROOT / "tuner/offline/spaces/default.toml").read_text()[:1500], cuts))
    only_user_errors(lambda p: load_space(str(p)), path)


@FUZZ
@given(CUTS)
def test_broken_shape_files(tmp_path: Path, cuts: list[tuple[int, int, str]]) -> None:
    path = tmp_path / "shape.toml"
    path.write_text(damage((ROOT / "shapes/llama-3.1-8b.toml").read_text(), cuts))
    only_user_errors(lambda p: load_model_shape(str(p)).kernel_shapes(), path)


CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
          "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "rms_norm_eps": 1e-5,
          "max_position_embeddings": 8192, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
JSON_VALUES = st.recursive(st.none() | st.booleans() | st.integers(-10**400, 10**400) | st.floats() | st.text(max_size=5),
                           lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3))


@FUZZ
@given(CUTS)
def test_broken_configs(tmp_path: Path, cuts: list[tuple[int, int, str]]) -> None:
    path = tmp_path / "config.json"
    path.write_text(damage(json.dumps(CONFIG), cuts))
    only_user_errors(lambda p: load_model_shape(str(p)).kernel_shapes(), path)


@FUZZ
@given(st.sampled_from([*CONFIG, "head_dim", "rope_theta", "rope_parameters", "tie_word_embeddings"]), JSON_VALUES)
def test_configs_with_a_wrong_value(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, name: value}))
    only_user_errors(lambda p: load_model_shape(str(p)).kernel_shapes(), path)


@FUZZ
@given(CUTS)
def test_broken_reports(tmp_path: Path, swept: Path, cuts: list[tuple[int, int, str]]) -> None:
    path = tmp_path / "report.json"
    path.write_text(damage((swept / "report.json").read_text(), cuts))

    def look(path: Path) -> None:
        report = read_report(path)
        for variant in report.variants:
            list(describe(find_variant(report, variant.id), None, ""))

    only_user_errors(look, path)
