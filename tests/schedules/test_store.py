"""The store: written rows are found, unproven ones are not, and nothing is lost."""

import json
import multiprocessing
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from promoted_rows import row
from tune_kernels.schedules import migrate, store
from tune_kernels.schedules.errors import NotPromoted, ScheduleError
from tune_kernels.schedules.promoted import (
    Artefact,
    Checks,
    Distribution,
    Evidence,
    Paired,
    PromotedSchedule,
    PromotedTiming,
    Recorded,
    Toolchain,
    row_to_dict,
)
from tune_kernels.schedules.schedule import AttentionSchedule, HeadSchedule, LinearSchedule, MergeSchedule, schedule_id
from tune_kernels.schedules.store import PromotedFile
from tune_kernels.shapes.fields import Fields, parse_fields
from tune_kernels.shapes.model import AttentionShape, HeadShape, LinearShape, MergeShape

POSITIVE = st.floats(0.001, 1e6)
SIZES = st.integers(1, 512)
PAIRS = st.tuples(POSITIVE, POSITIVE).map(lambda pair: tuple(sorted(pair)))
PAIRED = st.builds(Paired, POSITIVE, PAIRS, st.integers(1, 99))
QUANTILES = st.lists(POSITIVE, max_size=9).map(lambda listed: tuple(sorted(listed)))
TIMES = st.builds(Distribution, POSITIVE, PAIRS, st.integers(1, 999), QUANTILES)
KINDS = st.one_of(
    st.tuples(st.builds(LinearShape, SIZES, SIZES, st.sampled_from(["e4m3", "bf16"]), st.booleans()),
              st.builds(LinearSchedule, SIZES, SIZES, SIZES, SIZES, maxnreg=st.none() | SIZES)),
    st.tuples(st.builds(HeadShape, SIZES, SIZES), st.builds(HeadSchedule, SIZES, SIZES, SIZES, SIZES)),
    st.tuples(st.builds(AttentionShape, SIZES, SIZES, SIZES), st.builds(AttentionSchedule, SIZES, SIZES, SIZES, SIZES, SIZES)),
    st.tuples(st.builds(MergeShape, SIZES, SIZES), st.builds(MergeSchedule, SIZES, SIZES, SIZES)))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAME = st.from_regex(r"[a-z_][a-z0-9_.-]{0,20}", fullmatch=True)
DIGEST = st.text("0123456789abcdef", min_size=8, max_size=64)


@st.composite
def rows(draw: st.DrawFn) -> PromotedSchedule:
    shape, schedule = draw(KINDS)
    mine = schedule_id(schedule)
    passed = draw(st.integers(1, 9))
    return PromotedSchedule(
        "nvidia-h200", "m", "fp8-v1", draw(NAME), shape, schedule, mine, draw(DIGEST),
        Toolchain(draw(TEXT), draw(TEXT), draw(st.dictionaries(TEXT, st.booleans() | st.integers(0, 2**30), max_size=3))),
        Recorded(draw(TEXT), draw(TEXT)),
        Artefact(tuple(draw(st.lists(TEXT, max_size=2))), *draw(st.tuples(*[st.integers(0, 2**40)] * 7)), draw(DIGEST)),
        draw(DIGEST),
        PromotedTiming(mine, draw(TIMES), None, draw(TEXT), draw(st.dictionaries(TEXT, st.floats(0, 9), max_size=2))),
        Evidence(mine, {"rows": Checks(passed, passed)}, 6, draw(st.integers(0, 2**40)), draw(st.none() | DIGEST),
                 "path:" + draw(TEXT), draw(st.none() | TEXT), draw(st.dictionaries(TEXT, PAIRED, max_size=2))),
        draw(TEXT)).sealed()


def parse(text: str) -> PromotedFile:
    return store.parse(parse_fields(text.encode(), "JSON", "test", ScheduleError))


@given(rows())
def test_a_row_survives_its_file(row: PromotedSchedule) -> None:
    """The runtime finds the tuner's rows."""
    text = store.text_of(PromotedFile("nvidia-h200", "m", "fp8-v1", (row,)))
    found = parse(text)
    assert found.rows == (row,) and row.row_digest == found.rows[0].digest()
    assert store.text_of(found) == text, "one layout"


def test_every_part_of_a_row_survives_its_dict() -> None:
    fields = Fields(json.loads(json.dumps(row_to_dict(row()))), "test", ScheduleError)
    assert fields.read(PromotedSchedule, target="nvidia-h200", model="m", recipe="fp8-v1") == row()


def promote(folder: Path, *promoted: PromotedSchedule, model: str = "some-model") -> Path:
    rows = tuple(replace(row, model=model).sealed() for row in promoted)
    return store.promote(folder, PromotedFile("nvidia-h200", model, "fp8-v1", rows))


def test_what_is_promoted_is_found_whatever_the_model_is_called(tmp_path: Path) -> None:
    promote(tmp_path, row(), model="another.name")
    assert store.lookup(store.key_of(row()), [tmp_path / "nothing", tmp_path]) == row(model="another.name")


@pytest.mark.parametrize(("change", "said"), [
    ({"target": "nvidia-h100"}, "target nvidia-h200"), ({"recipe": "fp8-v2"}, "recipe fp8-v1"),
    ({"kernel_digest": "f" * 16}, "kernel source 0123456789abcdef"), ({"shape": LinearShape(272, 512)}, "'N': 256"),
    ({"toolchain": replace(row().toolchain, triton="3.7.1")}, "Triton 3.6.0"),
    ({"toolchain": replace(row().toolchain, ptxas="13.1")}, "ptxas 12.8"),
    ({"toolchain": replace(row().toolchain, flags={"enable_fp_fusion": True})}, "flags {'enable_fp_fusion': False"),
])
def test_what_differs_in_one_part_is_refused_and_the_part_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """Each part of the key decides."""
    promote(tmp_path, row())
    with pytest.raises(NotPromoted, match="nearest has") as caught:
        store.lookup(replace(store.key_of(row()), **change), [tmp_path])
    nearest = caught.value.found.split("the nearest has ")[1]
    assert said in nearest
    assert [n for n, v in store.key_of(row()).parts().items() if f"{n} {v}" in nearest] == list(
        n for n, v in store.key_of(row()).parts().items() if replace(store.key_of(row()), **change).parts()[n] != v)
    assert "tune-kernels --on-gpu --kernel gate_up --promote" in caught.value.action


def test_another_kernel_is_refused(tmp_path: Path) -> None:
    promote(tmp_path, row())
    with pytest.raises(NotPromoted, match="none of this kernel"):
        store.lookup(replace(store.key_of(row()), kernel="down"), [tmp_path])


def test_the_first_folder_wins(tmp_path: Path) -> None:
    promote(tmp_path / "shipped", row(BLOCK_N=64))
    promote(tmp_path / "mine", row(BLOCK_N=128))
    found = store.lookup(store.key_of(row()), [tmp_path / "mine", tmp_path / "shipped"])
    assert found.schedule == row(BLOCK_N=128).schedule


def test_the_search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv("TUNE_KERNELS_SCHEDULES", raising=False)
    assert store.search_path() == [tmp_path / "tune-kernels" / "schedules", store.SHIPPED]
    monkeypatch.setenv("TUNE_KERNELS_SCHEDULES", "from-environment")
    assert store.search_path()[0] == Path("from-environment")
    assert store.search_path(Path("named"))[0] == Path("named")


def test_promotion_replaces_the_row_of_its_kernel_and_shape_alone(tmp_path: Path) -> None:
    promote(tmp_path, row("gate_up"), row("down"))
    path = promote(tmp_path, row("down", BLOCK_N=128), row("down", N=512))
    found = {(r.kernel, r.shape.N, r.schedule.BLOCK_N) for r in store.read(path).rows}  # type: ignore[union-attr]
    assert found == {("gate_up", 256, 64), ("down", 256, 128), ("down", 512, 64)}


def _write_rows(folder: str, kernel: str, count: int) -> None:
    for i in range(count):
        promote(Path(folder), row(kernel, N=16 * (i + 1)))


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_rows, args=(str(tmp_path), kernel, 15)) for kernel in ("gate_up", "down")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(store.read(tmp_path / "nvidia-h200" / "some-model.fp8-v1.json").rows) == 30


def edited(folder: Path, change: Any) -> Path:
    path = promote(folder, row())
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))
    return path


def test_a_schedule_edited_by_hand_is_read_but_not_found(tmp_path: Path) -> None:
    path = edited(tmp_path, lambda table: table["rows"][0]["schedule"].update(num_stages=4))
    problems = store.read(path).rows[0].problems()
    assert [p.text.split()[0] for p in problems] == ["row_digest", "schedule_id", "timing.schedule_id", "evidence.schedule_id"]
    with pytest.raises(NotPromoted, match="edited since it was measured"):
        store.lookup(store.key_of(row()), [tmp_path])


@pytest.mark.parametrize("checks", [{"rows": Checks(9, 8)}, {}])
def test_a_row_without_its_evidence_is_not_found(tmp_path: Path, checks: dict[str, Checks]) -> None:
    path = promote(tmp_path, row())
    unproven = row(evidence=replace(row().evidence, checks=checks))
    path.write_text(store.text_of(PromotedFile("nvidia-h200", "m", "fp8-v1", (unproven,))))
    with pytest.raises(NotPromoted, match=r"evidence\.checks"):
        store.lookup(store.key_of(row()), [tmp_path])


def test_a_row_of_another_toolchain_is_not_found_after_an_edit_of_its_key(tmp_path: Path) -> None:
    """F16: an edited `triton` made look-up find the row."""
    edited(tmp_path, lambda table: table["rows"][0]["toolchain"].update(triton="3.7.1"))
    wanted = replace(store.key_of(row()), toolchain=replace(row().toolchain, triton="3.7.1"))
    with pytest.raises(NotPromoted, match=r"row_digest is .* edited since it was measured"):
        store.lookup(wanted, [tmp_path])


def test_names_that_stand_twice_are_refused(tmp_path: Path) -> None:
    """F16: Python's JSON takes the last one."""
    path = promote(tmp_path, row())
    path.write_text(path.read_text().replace('"kernel": ', '"kernel": "other", "kernel": '))
    with pytest.raises(ScheduleError, match="'kernel' is twice"):
        store.read(path)


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "", "a b", "x" * 101, "n\u00e4me", "a\n"])
@pytest.mark.parametrize("field", ["target", "model", "recipe"])
def test_names_are_no_paths(tmp_path: Path, field: str, name: str) -> None:
    """F18: checked on load, and before a promotion makes a path."""
    path = edited(tmp_path, lambda table: table.update({field: name}))
    with pytest.raises(ScheduleError, match=f"{field}.*\n.*expected: a name"):
        store.read(path)
    made = replace(PromotedFile("nvidia-h200", "m", "fp8-v1", (row(**{field: name}),)), **{field: name})
    with pytest.raises(ScheduleError, match="expected: a name"):
        store.promote(tmp_path / "inside", made)
    assert not (tmp_path / "inside").exists() and not (tmp_path / "up").exists()


def test_rows_of_schema_1_are_read_and_refused_until_they_are_migrated(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def old(table: Any) -> None:
        table["schema"] = store.UNSEALED
        del table["rows"][0]["row_digest"]

    path = edited(tmp_path, old)
    assert [found.row_digest for found in store.read(path).rows] == [None]
    with pytest.raises(NotPromoted, match=r"rows of schema 1 have none; python -m tune_kernels.schedules.migrate FOLDER"):
        store.lookup(store.key_of(row()), [tmp_path])
    assert migrate.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{path}: 1 rows sealed\n"
    assert store.lookup(store.key_of(row()), [tmp_path]) == row(model="some-model")
    assert migrate.main([str(tmp_path)]) == 0 and not capsys.readouterr().out, "nothing is left to do"


def test_an_edited_row_is_not_migrated(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = edited(tmp_path, lambda table: table["rows"][0]["evidence"].update(prompts=99))
    before = path.read_bytes()
    assert migrate.main([str(tmp_path)]) == 2 and "row_digest is" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_file_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    """A row made in memory is of its types as far as mypy sees: a digest may be any text."""
    with pytest.raises(ScheduleError, match="numerics_class: is 'ab'"):
        promote(tmp_path, row(numerics_class="ab"))
    assert not list(tmp_path.rglob("*.json"))


def test_a_row_with_problems_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="edited since"):
        promote(tmp_path, row(schedule_id="0" * 12))
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(("change", "said"), [
    (lambda t: t.update(schema="tune-kernels/promoted-schedules/3"), "update tune-kernels"),
    (lambda t: t.update(schema="something/else"), "name a file"),
    (lambda t: t.update(rows={}), "rows: {} is a dict"),
    (lambda t: t.update(extra=1), "unknown field"),
    (lambda t: t["rows"].append(t["rows"][0]), "a second row of gate_up"),
    (lambda t: t["rows"].append(5), "rows[1]: 5 is a int"),
    (lambda t: t["rows"][0].pop("evidence"), "evidence: missing"),
    (lambda t: t["rows"][0].update(evidense=1), "did you mean 'evidence'"),
    (lambda t: t["rows"][0]["shape"].update(N="256"), "unknown shape"),
    (lambda t: t["rows"][0]["schedule"].pop("BLOCK_N"), "exactly the knobs of one type"),
    (lambda t: t["rows"][0]["schedule"].update(BLOCK_N=-1), "positive number"),
    (lambda t: t["rows"][0]["artefact"].update(registers=-1), "0 or more"),
    (lambda t: t["rows"][0]["artefact"].update(instructions=[1]), "instructions[0]: 1 is a int"),
    (lambda t: t["rows"][0]["timing"]["times"].update(interval_us=[2, 1]), "[low, high]"),
    (lambda t: t["rows"][0]["timing"]["times"].update(interval_us=[1]), "has 1 values"),
    (lambda t: t["rows"][0]["timing"].update(clocks={"sm_mhz": "fast"}), "clocks: sm_mhz: 'fast' is a str"),
    (lambda t: t["rows"][0]["evidence"].update(weights="real"), "random:SEED, path:NAME or none"),
    (lambda t: t["rows"][0]["evidence"]["checks"]["rows"].update(passed=99), "at most as many passed as ran"),
])
def test_a_wrong_file_is_named_with_its_field(tmp_path: Path, change: Any, said: str) -> None:
    path = edited(tmp_path, change)
    with pytest.raises(ScheduleError) as caught:
        store.read(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    before = path.read_bytes()
    with pytest.raises(ScheduleError):
        promote(tmp_path, row("down"))
    assert path.read_bytes() == before, "a file that can't be read is never overwritten"


@pytest.mark.parametrize("keep", [0, 1, 100, 1500, -3])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    path = promote(tmp_path, row())
    path.write_text(path.read_text()[:keep])
    with pytest.raises(ScheduleError, match="not valid JSON"):
        store.lookup(store.key_of(row()), [tmp_path])


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "nvidia-h200").write_text("a file")
    with pytest.raises(ScheduleError, match="--schedules"):
        promote(tmp_path, row())


def test_numbers_stand_on_one_line_and_strings_are_left_alone() -> None:
    odd = replace(row(), date="[ 1 ]\n[\n 2\n]")
    text = store.text_of(PromotedFile("nvidia-h200", "m", "fp8-v1", (odd,)))
    assert json.loads(text)["rows"][0]["date"] == odd.date
    assert '"interval": [0.938, 0.949]' in text


def test_ten_thousand_rows_are_read() -> None:
    file = PromotedFile("nvidia-h200", "m", "fp8-v1", tuple(row(N=16 * i) for i in range(1, 10_001)))
    assert len(parse(store.text_of(file)).rows) == 10_000


def test_the_store_needs_neither_torch_nor_triton() -> None:
    code = ("import sys; from tune_kernels.schedules import store, promoted; "
            "sys.exit(any(m.split('.')[0] in ('torch', 'triton') for m in sys.modules))")
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
