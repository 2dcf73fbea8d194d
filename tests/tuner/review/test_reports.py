"""Real offline reports compared: two toolchains (the 8-row fallback that disappears in Triton 3.9), two targets, a changed
kernel, another spill policy; and the lines of code that changed, from the artefacts."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import synthetic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import promoted, with_row
from tune_kernels.shapes.errors import UserError
from tune_kernels.tuner.offline.sweep import SweepRequest, sweep
from tune_kernels.tuner.review.as_json import render_json
from tune_kernels.tuner.review.as_markdown import render_markdown
from tune_kernels.tuner.review.as_text import render_text
from tune_kernels.tuner.review.command import difference
from tune_kernels.tuner.review.compare import Diff, RowDiff
from tune_kernels.tuner.review.summary import summarise

pytestmark = pytest.mark.compiles
ROOT = Path(__file__).parents[3]
OTHER = ROOT / ".venv-triton-3.9.0" / "bin" / "tune-kernels"
SPACE = """
[[grid]]
kernels = "down"
BLOCK_N = 64
BLOCK_K = 128
num_stages = 3
num_warps = 4
split_k = 4
row_tile = [4, 16]
[[grid]]
kernels = "attention"
chunk = 256
TILE = 128
BLOCK_N = 64
num_stages = 2
num_warps = 4
maxnreg = 128
[[grid]]
kernels = "merge"
BLOCK_D = 32
splits = 1
num_warps = 4
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sm_103 and sm_90, of the Triton that is installed."""
    folder = tmp_path_factory.mktemp("reports")
    (folder / "space.toml").write_text(SPACE)
    for target in ("sm_103", "sm_90"):
        sweep(SweepRequest(targets=(target,), space=str(folder / "space.toml"), out=folder / target, jobs=1))
    return folder


def row(diff: Diff, kernel: str, **knobs: Any) -> RowDiff:
    found = [r for r in diff.rows
             if r.entry.kernel == kernel and all(getattr(r.entry.schedule, k) == v for k, v in knobs.items())]
    assert len(found) == 1
    return found[0]


def facts(found: RowDiff) -> dict[str, tuple[Any, Any]]:
    return {c.name: (c.old, c.new) for c in found.facts}


@pytest.fixture(scope="module")
def toolchains(reports: Path) -> Diff:
    if not OTHER.exists():
        pytest.skip("no environment with Triton 3.9.0: make .venv-triton-3.9.0/ready")
    subprocess.run([str(OTHER), "--offline", "--space", str(reports / "space.toml"), "--target", "sm_103", "--jobs", "1",
                    "--out", str(reports / "3.9")], check=True, capture_output=True)
    return difference("sm_103", "3.9", reports)


def test_the_eight_row_fallback_disappears_in_triton_39(toolchains: Diff) -> None:
    fallback = row(toolchains, "down", row_tile=4)
    assert toolchains.rows[0] is fallback, "a verdict that changed comes first"
    assert facts(fallback)["verdict"] == ("rejected", "accepted")
    assert facts(fallback)["reasons"] == (("wrong_instruction",), ())
    assert fallback.code
    assert any("tt.dot" in line or "mma.sync" in line for line in fallback.code.old_lines), "TTGIR, or PTX where it was audited"
    assert any("tcgen05.mma" in line for line in fallback.code.new_lines), "PTX, from the report"
    assert any(line.startswith("UTCQMMA") for line in fallback.code.new_lines), "SASS, from the artefact"
    assert toolchains.findings == ()


def test_the_toolchain_is_said_once(toolchains: Diff) -> None:
    assert [(c.name, c.old.rsplit(".", 1)[0], c.new.rsplit(".", 1)[0]) for c in toolchains.everywhere] == [
        ("Triton", "3.7", "3.9"), ("ptxas", "13", "13")]
    text = render_text(toolchains)
    assert text.count("Triton 3.7.1 → 3.9.0") == 1
    assert "rejected (wrong_instruction) →" in text
    assert dict(summarise(toolchains).verdicts)[("rejected", "accepted")] == 1


def test_spills_change_by_count_and_line(toolchains: Diff) -> None:
    spilling = row(toolchains, "attention")
    assert {"spill_store_bytes", "spill_load_bytes"} <= facts(spilling).keys()
    assert spilling.code and {c.name for c in spilling.code.counts} == {"STL", "LDL"}
    assert any(line.startswith("STL") for line in spilling.code.old_lines)
    assert "spill stores" in render_markdown(toolchains)


def test_the_way_back_is_refused(reports: Path, toolchains: Diff) -> None:
    back = difference("3.9", "sm_103", reports)
    assert [(f.code, f.detail) for f in back.findings] == [("falls_back", "accepted before, rejected now: wrong_instruction")]
    assert "row_tile 4" in render_text(back)


def test_two_targets(reports: Path) -> None:
    diff = difference("sm_103", "sm_90", reports)
    assert next((c.name, c.old, c.new) for c in diff.everywhere) == ("target", "sm_103", "sm_90")
    swapped = row(diff, "down", row_tile=16)
    assert facts(swapped)["instructions"] == (("UTCQMMA",), ("QGMMA",))
    assert swapped.code and {c.name for c in swapped.code.counts} == {"UTCQMMA", "QGMMA"}
    assert row(diff, "down", row_tile=4).status == "unchanged", "rejected on both, for one reason"


def test_a_report_against_itself(reports: Path) -> None:
    diff = difference("sm_103", "sm_103/report.json", reports)
    assert (diff.count("unchanged"), len(diff.rows), diff.findings) == (16, 16, ()), "four of the space, twelve that serve them"


def test_a_changed_kernel_source(reports: Path, tmp_path: Path) -> None:
    report = json.loads((reports / "sm_103" / "report.json").read_text())
    for variant in report["variants"]:
        if variant["kernel"] == "merge":
            variant["kernel_digest"] = "0" * 16
    (tmp_path / "report.json").write_text(json.dumps(report))
    diff = difference(str(reports / "sm_103"), str(tmp_path), tmp_path)
    assert {r.entry.kernel for r in diff.rows if r.kernel_changed} == {"merge"} == set(summarise(diff).kernels_changed)
    assert "kernel source changed" in render_text(diff)


def test_without_artefacts_the_report_has_lines_all_the_same(reports: Path, tmp_path: Path) -> None:
    for target in ("sm_103", "sm_90"):
        (tmp_path / target).mkdir()
        shutil.copy(reports / target / "report.json", tmp_path / target)
    swapped = row(difference("sm_103", "sm_90", tmp_path), "down", row_tile=16)
    assert swapped.code and swapped.code.counts == ()
    assert any("wgmma" in line for line in swapped.code.new_lines)


def test_a_damaged_artefact_is_a_note(reports: Path, tmp_path: Path) -> None:
    shutil.copytree(reports / "sm_90", tmp_path / "sm_90")
    for cubin in (tmp_path / "sm_90" / "artefacts").rglob("*.cubin"):
        cubin.unlink()
        cubin.write_bytes(b"x")
    swapped = row(difference(str(reports / "sm_103"), "sm_90", tmp_path), "down", row_tile=16)
    assert swapped.code and len(swapped.code.notes) == 1
    assert "has changed since it was written" in swapped.code.notes[0]


def test_promoted_rows_find_their_code_in_a_bundle(reports: Path, tmp_path: Path) -> None:
    variants = json.loads((reports / "sm_90" / "report.json").read_text())["variants"]
    cubins = list(dict.fromkeys(v["cubin_sha256"] for v in variants if v["artefact"]))[:2]
    file = synthetic.file()

    def of(name: str, cubin: str, stages: int) -> str:
        def change(r: Any) -> Any:
            from dataclasses import replace

            return replace(promoted(r, 0.9, num_stages=stages), artefact=replace(r.artefact, cubin_sha256=cubin))

        return str(synthetic.write(tmp_path / name, with_row(file, "down", change)))

    sides = of("old", cubins[0], 3), of("new", cubins[1], 4)
    with_bundle = row(difference(*sides, tmp_path, [reports / "sm_90"]), "down")
    assert with_bundle.code and with_bundle.code.counts
    assert row(difference(*sides, tmp_path), "down").code is None


ANY = st.recursive(st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
                   lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2))
FIELDS = st.sampled_from(["id", "kernel", "shape", "schedule", "reasons", "registers", "spill_store_bytes", "instructions",
                          "verdict", "lines", "artefact", "cubin_sha256", "target", "blocks_per_sm", "stage"])


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FIELDS, ANY, st.integers(0, 3))
def test_a_damaged_report_is_an_error_or_a_difference(reports: Path, tmp_path: Path, name: str, value: Any, at: int) -> None:
    report = json.loads((reports / "sm_103" / "report.json").read_text())
    report["variants"][at][name] = value
    (tmp_path / "report.json").write_text(json.dumps(report))
    renderers: list[Callable[[Diff], str]] = [render_text, render_markdown, render_json]
    said = "report.json"
    try:
        for render in renderers:
            render(difference(str(reports / "sm_103"), "report.json", tmp_path))
    except UserError as e:
        said = str(e)
    assert "report.json" in said or "variant" in said
