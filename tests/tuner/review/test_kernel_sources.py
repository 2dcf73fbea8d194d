"""F31: `diff A...B --check` judges rows by the kernels of revision B, which it reads and never runs."""

import shutil
from pathlib import Path

import pytest
from repository import git
from tune_kernels.kernels import registry
from tune_kernels.kernels.bundle import kernel_digest
from tune_kernels.schedules.store import SHIPPED
from tune_kernels.tuner.review import command
from tune_kernels.tuner.review.command import difference
from tune_kernels.tuner.review.evidence import INSTALLED
from tune_kernels.tuner.review.kernel_sources import Unreadable, digests

TEXTS = {path.stem: path.read_text() for path in INSTALLED.glob("*.py")}


def with_change(module: str, old: str, new: str) -> dict[str, str]:
    assert TEXTS[module].count(old) >= 1, f"{module} has no {old!r}"
    return {**TEXTS, module: TEXTS[module].replace(old, new, 1)}


def stale(texts: dict[str, str]) -> set[str]:
    return {kernel for kernel, digest in digests(texts).items() if digest != digests(TEXTS)[kernel]}


def test_sources_read_have_the_digests_of_sources_imported() -> None:
    imported = {name: kernel_digest(registry.operation(name).kernel) for name in (*registry.TUNABLE, *registry.FIXED)}
    assert digests(TEXTS) == imported


LINEARS = {"qkv", "o", "gate_up", "down", "fc"}


def test_a_change_stales_the_kernels_that_have_it() -> None:
    assert stale(with_change("linear", "acc = ", "acc = 0 + ")) == LINEARS
    assert stale(with_change("linear", "acc = ", "acc  =  ")) == set()
    assert stale(with_change("registry", '"down": linear.OPERATION', '"down": merge.OPERATION')) == {"down"}


@pytest.mark.parametrize(("module", "old", "new"), [
    ("registry", ' = {\n    "qkv"', ' = made() or {\n    "qkv"'),
    ("registry", '"down": linear.OPERATION', '"down": made(linear)'),
    ("linear", "OPERATION = Operation(", "OPERATION = made("),
    ("linear", "OPERATION = ", "if __name__:\n    OPERATION = None\n_ = "),
    ("merge", "@triton.jit", "@triton.jit)("), ("linear", "import triton", "from elsewhere import tl, triton\nimport triton"),
])
def test_sources_that_only_running_would_tell_are_said(module: str, old: str, new: str) -> None:
    texts = with_change(module, old, new)
    if "elsewhere" in new:  # the last binding of a name counts
        texts[module] = texts[module].replace("import triton.language as tl\n", "")
    with pytest.raises(Unreadable, match=f"kernels/{module}.py"):
        digests(texts)


def test_reading_runs_nothing(tmp_path: Path) -> None:
    texts = {**TEXTS, "linear": f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n" + TEXTS["linear"]}
    assert digests(texts) == digests(TEXTS) and not (tmp_path / "ran").exists()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with the shipped schedules and these kernels; `pr` changes a kernel, `odd` makes one unreadable."""
    folder = tmp_path / "project"
    shutil.copytree(SHIPPED / "nvidia-h200", folder / "schedules" / "nvidia-h200")
    shutil.copytree(INSTALLED, folder / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    git(folder, "init", "-q", "-b", "main")
    changes = ("main", "", ""), ("pr", "acc = ", "acc = 0 + "), ("odd", "OPERATION = Operation(", "OPERATION = made(")
    for branch, old, new in changes:
        git(folder, "checkout", "-q", "-B", branch, *(["main"] if branch != "main" else []))
        text = (folder / "kernels" / "linear.py").read_text()
        (folder / "kernels" / "linear.py").write_text(text.replace(old, new) if old else text)
        git(folder, "add", "-A")
        assert git(folder, "commit", "-q", "-m", branch).returncode == 0
    return folder


def codes(folder: Path, old: str, new: str | None = None) -> set[str]:
    return {finding.code for finding in difference(old, new, folder).findings}


@pytest.mark.parametrize("checked_out", ["main", "pr"])
def test_the_revision_that_is_named_is_judged(project: Path, checked_out: str) -> None:
    git(project, "checkout", "-q", checked_out)
    diff = difference("main...pr", None, project)
    assert {f.code for f in diff.findings} == {"stale"}
    assert {row.entry.kernel for row in diff.rows if row.findings} == LINEARS
    assert all("in the kernels of pr: changed since it was measured" in f.detail for f in diff.findings)
    assert codes(project, "pr..main") == codes(project, "main", "main") == set()
    assert codes(project, "main", "schedules") == codes(project, "main") == ({"stale"} if checked_out == "pr" else set())


def test_kernels_that_can_not_be_read_fail_the_check(project: Path, capsys: pytest.CaptureFixture[str],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    assert codes(project, "main...odd") == {"not_judged"}
    monkeypatch.chdir(project)
    assert command.run("main...odd", None, form="text", out=None, check=True, bundles=()) == 1
    said = capsys.readouterr().out
    assert "--check refuses nothing" not in said and "the kernels of odd can't be read" in " ".join(said.split())


def test_a_folder_named_otherwise_than_its_sku_is_refused(project: Path) -> None:
    """F16: `NVIDIA-H200/` was never looked up and passed."""
    git(project, "checkout", "-q", "main")
    (project / "schedules" / "nvidia-h200").rename(project / "schedules" / "NVIDIA-H200")
    assert codes(project, "main", "schedules") == codes(project, "main", "schedules/NVIDIA-H200") == {"misplaced"}
    git(project, "add", "-A")
    git(project, "commit", "-q", "-m", "renamed")
    assert codes(project, "HEAD~1..HEAD") == {"misplaced"}
