"""OLD and NEW of `tune-kernels diff`: files, folders and git revisions; what can't be read is said, and where."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic
from fake_gpu import candidates, write_bundle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from promoted_rows import row
from repository import git
from synthetic import promoted, with_row
from tune_kernels.schedules.errors import ScheduleError
from tune_kernels.schedules.store import PromotedFile
from tune_kernels.shapes.errors import UserError
from tune_kernels.tuner.errors import DiffError
from tune_kernels.tuner.review.as_json import render_json
from tune_kernels.tuner.review.command import difference
from tune_kernels.tuner.review.compare import Diff
from tune_kernels.tuner.review.source import MOST_ROWS

HOOK = Path(__file__).parents[3] / "scripts" / "pre-commit"
NAME = "nvidia-h200/qwen2.5-7b.fp8-v1.json"


def commit(folder: Path, tag: str, *files: PromotedFile) -> None:
    synthetic.write(folder / "schedules", *files)
    assert git(folder, "add", "-A").returncode == 0
    done = git(folder, "commit", "-q", "--allow-empty", "-m", tag)
    assert done.returncode == 0, done.stderr
    git(folder, "tag", tag)


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """A repository with three promotions: none, the first file, a faster `down`; and a side branch from the first file."""
    folder = tmp_path / "a répository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    commit(folder, "none")
    first = synthetic.file()
    commit(folder, "first", first)
    git(folder, "checkout", "-q", "-b", "side")
    commit(folder, "aside", with_row(first, "o", lambda r: promoted(r, 0.8, num_stages=4)))
    git(folder, "checkout", "-q", "main")
    commit(folder, "second", with_row(first, "down", lambda r: promoted(r, 0.9, num_stages=4)))
    return folder


def changed(diff: Diff) -> set[str]:
    return {r.entry.kernel for r in diff.rows if r.status != "unchanged"}


@pytest.mark.parametrize(("old", "new", "kernels"), [
    ("first..second", None, {"down"}), ("first..", None, {"down"}), ("first", "second", {"down"}), ("second", "first", {"down"}),
    ("HEAD~1..HEAD", None, {"down"}), ("first..aside", None, {"o"}), ("second..aside", None, {"o", "down"}),
    ("second...aside", None, {"o"}), ("first:schedules", "second:schedules/nvidia-h200", {"down"}),
    (f"first:schedules/{NAME}", f"side:schedules/{NAME}", {"o"}), ("second..second", None, set()),
])
def test_git_history(history: Path, old: str, new: str | None, kernels: set[str]) -> None:
    assert changed(difference(old, new, history)) == kernels


def test_the_first_promotion_adds_all(history: Path) -> None:
    diff = difference("none..first", None, history)
    assert (diff.count("added"), diff.findings) == (7, ())
    assert difference("none..none", None, history).rows == ()


def test_a_revision_alone_is_compared_with_the_disk(history: Path) -> None:
    assert changed(difference("first", None, history)) == {"down"}
    synthetic.write(history / "schedules", synthetic.file())
    assert changed(difference("first", None, history)) == set()
    assert changed(difference(f"HEAD:schedules/{NAME}", None, history)) == {"down"}
    assert changed(difference("HEAD", f"schedules/{NAME}", history)) == {"down"}
    shutil.rmtree(history / "schedules")
    assert difference("first", None, history).count("removed") == 7


def test_a_revision_from_a_folder_inside(history: Path) -> None:
    assert changed(difference("first..second", None, history / "schedules")) == {"down"}


def test_the_same_rows_in_a_file_a_folder_and_a_store(tmp_path: Path) -> None:
    folder = synthetic.write(tmp_path / "s", synthetic.file())
    for other in (folder / "nvidia-h200", folder / NAME):
        diff = difference(str(folder), str(other), tmp_path)
        assert (diff.count("unchanged"), len(diff.rows)) == (7, 7)


def test_a_path_that_exists_is_no_revision(history: Path) -> None:
    git(history, "branch", "schedules", "first")
    assert changed(difference("schedules", "first", history)) == {"down"}


@pytest.mark.parametrize(("old", "new", "said"), [
    ("nowhere", None, "nowhere is no file, folder or git revision"), ("first", "nowhere", "nowhere is no file"),
    ("first..nowhere", None, "git knows no revision 'nowhere'"), ("--output=x..HEAD", None, "git knows no revision '--output=x'"),
    ("first:nothing/here", "second", "no nothing/here in that revision"),
    ("schedules", None, "schedules is a path without another side"),
    (f"first:schedules/{NAME}x", "second", "no schedules/nvidia-h200"), ("second...none^", None, "git knows no revision 'none^'"),
])
def test_what_is_not_there_is_named(history: Path, old: str, new: str | None, said: str) -> None:
    with pytest.raises(DiffError) as caught:
        difference(old, new, history)
    assert said in str(caught.value)
    assert "expected:" in str(caught.value)


def test_outside_a_repository(tmp_path: Path) -> None:
    with pytest.raises(DiffError, match="no git repository"):
        difference("A..B", None, tmp_path)
    with pytest.raises(DiffError, match="no file, folder or git revision"):
        difference("HEAD", None, tmp_path)


def test_a_folder_without_schedules(tmp_path: Path) -> None:
    with pytest.raises(DiffError, match="a folder without schedules or a report"):
        difference(str(tmp_path), str(tmp_path), tmp_path)


# ---- files that are wrong ----

def both(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> tuple[str, str]:
    """A right store, and one whose table was changed."""
    old = synthetic.write(tmp_path / "old", synthetic.file())
    new = synthetic.write(tmp_path / "new", synthetic.file())
    table = json.loads((new / NAME).read_text())
    change(table)
    (new / NAME).write_text(json.dumps(table))
    return str(old), str(new)


@pytest.mark.parametrize(("change", "said"), [
    (lambda t: t.update(schema="tune-kernels/promoted-schedules/3"), "update tune-kernels"),
    (lambda t: t["rows"][3].pop("evidence"), "rows[3]: evidence: missing"),
    (lambda t: t["rows"][0]["evidence"].update(weights="real"), "random:SEED, path:NAME or none"),
    (lambda t: t["rows"].append(t["rows"][0]), "a second row of attention"),
    (lambda t: t.update(rows=5), "rows: 5 is a int"),
])
def test_a_wrong_field_is_named(tmp_path: Path, change: Any, said: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        difference(*both(tmp_path, change), tmp_path)
    assert said in str(caught.value)
    assert NAME in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", '{"schema": 5}', "[" * 100_000, '{"schema": "x", "rows": NaN}'])
def test_a_file_that_is_no_schedule(tmp_path: Path, text: str) -> None:
    old = synthetic.write(tmp_path / "old", synthetic.file())
    (tmp_path / "bad.json").write_text(text)
    for sides in ((str(old), "bad.json"), ("bad.json", str(old))):
        with pytest.raises(UserError) as caught:
            difference(*sides, tmp_path)
        assert "bad.json" in str(caught.value)
        assert "expected:" in str(caught.value)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 20_000), st.integers(0, 40), st.text(st.sampled_from('{}[]",:\n019.-etrufalsn_b'), max_size=6))
def test_damaged_files_are_an_error_or_a_difference(tmp_path: Path, at: int, length: int, new: str) -> None:
    whole = synthetic.DATA / NAME
    text = whole.read_text()
    (tmp_path / "damaged.json").write_text(text[:at] + new + text[at + length:])
    said = "damaged.json"
    try:
        render_json(difference(str(whole), "damaged.json", tmp_path))
    except UserError as e:
        said = str(e)
    assert "damaged.json" in said, "an error names the file"


def test_one_sku_twice_in_a_folder(tmp_path: Path) -> None:
    folder = synthetic.write(tmp_path / "s", synthetic.file())
    shutil.copy(folder / NAME, folder / "nvidia-h200" / "copy.json")
    with pytest.raises(ScheduleError, match="the same SKU, model and recipe as"):
        difference(str(folder), str(folder), tmp_path)


def test_schedules_and_a_report_do_not_compare(tmp_path: Path) -> None:
    folder = synthetic.write(tmp_path / "s", synthetic.file())
    shutil.copy(write_bundle(tmp_path / "bundle", {"down": candidates()}) / "report.json", tmp_path)
    with pytest.raises(DiffError, match=r"holds promoted schedules, report\.json an offline report"):
        difference(str(folder), "report.json", tmp_path)


def test_ten_thousand_rows(tmp_path: Path) -> None:
    """A clear error, before each of them is checked."""
    many = PromotedFile("nvidia-h200", "m", "fp8-v1", tuple(row(N=16 * i) for i in range(1, 10_001)))
    path = str(synthetic.write(tmp_path / "s", many) / many.name)
    with pytest.raises(ScheduleError) as caught:
        difference(path, path, tmp_path)
    assert "10,000 promoted rows" in str(caught.value)
    assert "to do:" in str(caught.value)


def test_as_many_rows_as_there_may_be(tmp_path: Path) -> None:
    many = PromotedFile("nvidia-h200", "m", "fp8-v1", tuple(row(N=16 * i) for i in range(1, MOST_ROWS + 1)))
    path = str(synthetic.write(tmp_path / "s", many) / many.name)
    assert len(difference(path, path, tmp_path).rows) == MOST_ROWS


# ---- the hook ----

def test_the_pre_commit_hook(history: Path) -> None:
    """It refuses a schedule that was edited by hand, passes one that was promoted, and has no opinion on other files."""
    bin_folder = history.parent / "bin"
    bin_folder.mkdir()
    (bin_folder / "tune-kernels").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tune_kernels.tuner "$@"\n')
    (bin_folder / "tune-kernels").chmod(0o755)
    (history / ".git" / "hooks").mkdir(exist_ok=True)
    shutil.copy(HOOK, history / ".git" / "hooks" / "pre-commit")
    path = {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    here = with_row(synthetic.file(), "down", lambda r: promoted(r, 0.9, num_stages=4))
    good = with_row(here, "o", lambda r: promoted(r, 0.8, num_stages=4))
    edited = with_row(good, "qkv", lambda r: replace(r, schedule=replace(r.schedule, num_stages=2)))
    synthetic.write(history / "schedules", edited)
    git(history, "add", "-A")
    refused = git(history, "commit", "-m", "edited", **path)
    assert refused.returncode == 1
    assert "refused: edited" in refused.stdout + refused.stderr and "schedule_id" in refused.stdout + refused.stderr
    synthetic.write(history / "schedules", good)
    (history / "notes.txt").write_text("x")
    git(history, "add", "-A")
    done = git(history, "commit", "-m", "promoted", **path)
    assert done.returncode == 0, done.stdout + done.stderr
