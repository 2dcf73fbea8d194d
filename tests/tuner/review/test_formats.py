"""A difference in each format, and the command: what is said, where it stays silent, exit codes, the same bytes."""

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic
from rich.console import Console
from synthetic import promoted, with_row
from tune_kernels.schedules.promoted import PromotedSchedule
from tune_kernels.tuner.review.as_html import render_html
from tune_kernels.tuner.review.as_json import SCHEMA, diff_to_dict, render_json
from tune_kernels.tuner.review.as_markdown import render_markdown
from tune_kernels.tuner.review.as_text import print_diff, render_text, show_promotion
from tune_kernels.tuner.review.command import difference
from tune_kernels.tuner.review.compare import Diff

FORMATS = {"text": render_text, "markdown": render_markdown, "html": render_html, "json": render_json}
HOSTILE = "</script><img src=x onerror=alert(1)> | `x` [red]y[/red] @someone **b** \x1b[31m\n# t"


@pytest.fixture
def stores(tmp_path: Path) -> Path:
    """old; new: `down` faster, `gate_up` slower; path: as new, with evidence of a real model."""
    old = synthetic.file()
    new = with_row(old, "down", lambda row: promoted(row, 0.91, BLOCK_N=128))
    slower = with_row(new, "gate_up", lambda row: promoted(row, 1.03, num_stages=4))
    synthetic.write(tmp_path / "old", old)
    synthetic.write(tmp_path / "new", slower)
    synthetic.write(tmp_path / "good", new)
    return tmp_path


def made(folder: Path, new: str = "new") -> Diff:
    return difference("old", new, folder)


def flat(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_says_what_matters(stores: Path, form: str) -> None:
    text = flat(FORMATS[form](made(stores)))
    wanted = ["down", "gate_up", "BLOCK_N", "slower", "faster", "−9.0%", "same class", "random:0"]
    if form == "json":
        wanted[5] = "0.91"
    for word in wanted:
        assert word in text or word.replace("−", "\\u2212") in text, word


@pytest.mark.parametrize("form", FORMATS)
def test_the_same_inputs_give_the_same_bytes(stores: Path, form: str) -> None:
    code = ("import sys; from pathlib import Path; from tune_kernels.tuner.review.command import difference, _renderer; "
            f"sys.stdout.buffer.write(_renderer({form!r})(difference('old', 'new')).encode())")
    said = {subprocess.run([sys.executable, "-c", code], cwd=stores, capture_output=True, check=True,
                           env={**os.environ, "PYTHONHASHSEED": seed, "COLUMNS": columns, "TZ": zone}).stdout
            for seed, columns, zone in (("1", "60", "UTC"), ("2", "200", "Asia/Tokyo"))}
    assert said == {FORMATS[form](made(stores)).encode()}


@pytest.mark.parametrize("form", FORMATS)
def test_random_weights_are_marked_and_real_ones_not(stores: Path, form: str) -> None:
    file = synthetic.file()
    real = replace(file, rows=tuple(replace(r, evidence=replace(r.evidence, weights="path:model-x", weights_fingerprint="f"))
                                    for r in file.rows))
    synthetic.write(stores / "real", real)
    marked = FORMATS[form](difference("old", "new", stores))
    unmarked = FORMATS[form](difference("real", "real", stores))
    mark = '"random": true' if form == "json" else "RANDOM WEIGHTS"
    assert mark in marked
    assert mark not in unmarked.replace('"RANDOM WEIGHTS" in said', "")
    assert "model-x" in unmarked


def test_rows_are_marked_one_by_one(stores: Path) -> None:
    """Each row of evidence that is shown carries its mark, not the summary alone."""
    diff = made(stores)
    assert render_text(diff).count("RANDOM WEIGHTS") == 1 + 2
    assert render_markdown(diff).count("RANDOM WEIGHTS") == 1 + 2 + 7
    assert sum(row["evidence"]["random"] for row in diff_to_dict(diff)["rows"]) == 7


def hostile(row: PromotedSchedule) -> PromotedSchedule:
    """Wherever a file may hold any text: names and digests may not."""
    return replace(row, date=HOSTILE, recorded=replace(row.recorded, driver=HOSTILE, cuda=HOSTILE),
                   artefact=replace(row.artefact, instructions=(HOSTILE,)),
                   evidence=replace(row.evidence, weights="path:" + HOSTILE))


def test_markdown_stays_one_table_whatever_the_text(stores: Path) -> None:
    synthetic.write(stores / "hostile", with_row(synthetic.file(), "down", hostile))
    text = render_markdown(made(stores, "hostile"))
    assert "<img" not in text and "</script" not in text and "@someone" not in text
    for line in text.splitlines():
        if line.startswith("|"):
            bars = line.replace("\\|", "").count("|")
            assert bars in (8, 9), line
    assert "\n# t" not in text


def test_the_terminal_takes_no_markup_or_escapes(stores: Path) -> None:
    synthetic.write(stores / "hostile", with_row(synthetic.file(), "down", hostile))
    text = render_text(made(stores, "hostile"))
    assert "[red]" in flat(text)
    assert "\x1b" not in text


def test_a_terminal_without_the_characters_shows_all_the_same(stores: Path) -> None:
    """F23: rich writes to a terminal as it is, whatever its encoding has."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tune_kernels.tuner", "diff", "old", "new"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    with subprocess.Popen(command, cwd=stores, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # the terminal is gone when the command is
            while part := os.read(ours, 65536):
                said += part
    os.close(ours)
    assert process.returncode == 0 and b"Traceback" not in said and b"old \\u2192 new" in said


def test_no_format_sends_an_escape_code_to_a_terminal(stores: Path) -> None:
    """F22: nor a character that turns the direction of text."""
    def change(row: PromotedSchedule) -> PromotedSchedule:
        return replace(row, date="\x1b[31m\x9b\u202e", evidence=replace(row.evidence, weights="path:\x1b[31m\x9b\u202e\t"))

    synthetic.write(stores / "codes", with_row(synthetic.file(), "down", change))
    diff = made(stores, "codes")
    for render in (render_text, render_markdown, render_json):
        assert not set("\x1b\x9b\u202e") & set(render(diff)), render
    assert json.loads(render_json(diff))["rows"][0]["new"]["promoted"]["date"] == "\x1b[31m\x9b\u202e"


def test_markdown_is_short_before_its_fold(stores: Path) -> None:
    before = render_markdown(made(stores)).split("<details>")[0]
    assert len(before.splitlines()) < 25
    assert "attention" not in before.split("| --- |")[1], "unchanged rows are in the fold"


def test_json_has_every_value(stores: Path) -> None:
    table = json.loads(render_json(made(stores)))
    assert (table["schema"], table["kind"], table["old"], table["new"]) == (SCHEMA, "promoted", "old", "new")
    down = next(row for row in table["rows"] if row["kernel"] == "down")
    assert down["knobs"] == [{"name": "BLOCK_N", "old": 64, "new": 128}]
    assert down["time"]["ratio"] == 0.91 and down["time"]["interval"] == [pytest.approx(0.904), pytest.approx(0.916)]
    assert down["new"]["facts"]["registers"] == 90
    assert down["evidence"]["checks"]["rows"] == {"run": 9, "passed": 9}
    assert down["time"]["new"]["quantiles_us"]
    assert table["summary"]["steps"][0]["layers"] == 28
    assert [f["code"] for f in table["findings"]] == ["slower"]


def test_a_promotion_shows_what_it_changes() -> None:
    """What `--on-gpu --promote` and `--dry-run` end with: two stores in memory."""
    old = synthetic.file()
    file = io.StringIO()
    new = with_row(old, "down", lambda row: promoted(row, 0.91, BLOCK_N=128))
    diff = show_promotion([old], [new], Console(file=file, width=80))
    assert "before → after" in file.getvalue() and "BLOCK_N 64 → 128" in file.getvalue()
    assert diff.findings == ()
    first = show_promotion([], [old], Console(file=file, width=120))
    assert first.count("added") == 7


def test_colours_on_a_terminal_alone(stores: Path) -> None:
    file = io.StringIO()
    print_diff(made(stores), Console(file=file, width=100, force_terminal=True, color_system="standard"))
    assert "\x1b[" in file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 130, 140, 200])
@pytest.mark.parametrize("new", ["new", "other"])
def test_nothing_is_lost_on_a_narrow_terminal(stores: Path, width: int, new: str) -> None:
    other = synthetic.file(synthetic.B300)
    other = with_row(other, "down", lambda row: replace(row, recorded=replace(row.recorded, cuda="13.9")))
    synthetic.write(stores / "other", other)
    file = io.StringIO()
    diff = made(stores, new)
    print_diff(diff, Console(file=file, width=width))
    text = file.getvalue()
    shown = sum(row.status == "changed" for row in diff.rows)
    for word in ("agreement", "WEIGHTS", "schedule", "evidence", "bits", *(["CUDA", "13.9"] if new == "other" else ["slower"])):
        assert word in text, word
    assert text.count("agreement") == shown and text.count("WEIGHTS") == shown + 1, "each word whole"
    assert all(len(line) <= width for line in text.splitlines())


# ---- the command ----

def tune(folder: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "tune_kernels.tuner", "diff", *arguments], capture_output=True, text=True,
                          cwd=folder, env={**os.environ, **environment})


def test_check_decides_the_exit_code(stores: Path) -> None:
    assert tune(stores, "old", "new").returncode == 0
    refused = tune(stores, "old", "new", "--check")
    assert refused.returncode == 1
    assert "refused: slower" in refused.stdout and "refused: 1 finding in 1 row" in refused.stderr
    assert tune(stores, "old", "good", "--check").returncode == 0


@pytest.mark.parametrize("form", ["markdown", "html", "json"])
def test_check_says_why_beside_a_file(stores: Path, form: str) -> None:
    done = tune(stores, "old", "new", "--check", "--format", form, "--out", "out/x")
    assert done.returncode == 1
    assert "wrote out/x" in done.stdout and "slower  gate_up" in done.stderr
    assert (stores / "out" / "x").read_text() == FORMATS[form](made(stores))


def edited(stores: Path, change: Any) -> None:
    path = next((stores / "good").rglob("*.json"))
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def test_a_schedule_edited_by_hand_is_refused_with_the_field(stores: Path) -> None:
    edited(stores, lambda t: t["rows"][1]["schedule"].update(num_stages=5))
    done = tune(stores, "old", "good", "--check", "--format", "markdown")
    assert done.returncode == 1
    assert "schedule_id is" in done.stderr and "edited since it was measured" in done.stderr and "down" in done.stderr


def test_a_row_whose_evidence_was_removed_is_refused_with_the_field(stores: Path) -> None:
    edited(stores, lambda t: t["rows"][1].pop("evidence"))
    assert tune(stores, "old", "good").returncode == 2
    done = tune(stores, "old", "good", "--check")
    assert done.returncode == 1
    assert "refused:" in done.stderr and "rows[1]: evidence: missing" in done.stderr


@pytest.mark.parametrize(("arguments", "said"), [
    (["nowhere", "new"], "nowhere is no file"), (["old"], "without another side"),
    (["old", "new", "--format", "pdf"], "--format"),
    (["old", "new", "--bundle", "nowhere"], "nowhere"), (["old", "new", "--out", "old"], "old"), ([], "OLD"),
    (["old", "new", "--out", "/dev/null/x"], "/dev/null/x"), (["o" * 5000, "new"], "no file"), (["old", "new", "more"], "more"),
])
def test_wrong_usage_is_a_message(stores: Path, arguments: list[str], said: str) -> None:
    done = tune(stores, *arguments)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_json_is_one_line_of_the_same_value(stores: Path) -> None:
    done = tune(stores, "old", "new", "--json")
    assert done.stdout.count("\n") == 1
    assert json.loads(done.stdout) == json.loads(tune(stores, "old", "new", "--format", "json").stdout)


def test_a_pipe_that_closes_is_no_traceback(stores: Path) -> None:
    command = f"{sys.executable} -m tune_kernels.tuner diff old new --format html | head -c 10"
    done = subprocess.run(command, shell=True, cwd=stores, capture_output=True, text=True)
    assert "Traceback" not in done.stderr


def test_comparing_needs_no_torch(stores: Path) -> None:
    code = ("import sys; from pathlib import Path; from tune_kernels.tuner.review.command import difference; "
            "difference('old', 'new'); sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], cwd=stores).returncode == 0
