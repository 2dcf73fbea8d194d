"""F16: `diff --check` and look-up refuse a promoted row that was edited by hand, whichever field it was."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tune_kernels.schedules import store
from tune_kernels.schedules.errors import NotPromoted, ScheduleError
from tune_kernels.schedules.store import SHIPPED
from tune_kernels.shapes.errors import UserError
from tune_kernels.tuner.review.command import difference

NAME = "nvidia-h200/smollm2-135m.fp8-v1.json"
FILE = json.loads((SHIPPED / NAME).read_text())
Place = tuple[str | int, ...]


def leaves(value: object, place: Place = ()) -> Iterator[tuple[Place, object]]:
    if isinstance(value, dict | list) and value:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*place, key))
    else:
        yield place, value


def another(value: object) -> object:
    """A value of the same kind, such as the hand of a person who wants the row to pass would put there."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value[:-1] + ("0" if value[-1:] != "0" else "1") if value else "x"
    if isinstance(value, int):
        return value + 1
    return value * 1.0001 + 1e-6 if isinstance(value, float) else None if value else 7


EDITS = [place for place, _ in leaves(FILE["rows"][0])] + [("target",), ("model",), ("recipe",)]


def with_edit(place: Place) -> dict[str, Any]:
    """The shipped file, one value of its first row or of its head changed."""
    file: dict[str, Any] = copy.deepcopy(FILE)
    parent: Any = file if len(place) == 1 and place[0] in ("target", "model", "recipe") else file["rows"][0]
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = another(parent[place[-1]])
    return file


def write(folder: Path, file: dict[str, Any]) -> Path:
    path = folder / NAME
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(file))
    return folder


def refused(folder: Path, tmp_path: Path) -> list[str]:
    """What `--check` says of the folder."""
    try:
        return [finding.detail for finding in difference(str(folder), str(folder), tmp_path).findings]
    except UserError as e:
        return [str(e)]


def test_the_shipped_row_passes(tmp_path: Path) -> None:
    assert refused(write(tmp_path / "s", FILE), tmp_path) == []
    assert len(EDITS) >= 40


@pytest.mark.parametrize("place", EDITS, ids=lambda place: ".".join(map(str, place)))
def test_one_edited_field_is_refused(tmp_path: Path, place: Place) -> None:
    folder = write(tmp_path / "s", with_edit(place))
    assert refused(folder, tmp_path)
    try:
        for row in store.read(folder / NAME).rows[:1]:
            with pytest.raises(NotPromoted):
                store.lookup(store.key_of(row), [folder])
    except ScheduleError:
        pass  # not even read


@pytest.mark.parametrize(("place", "value", "said"), [
    (("timing", "times", "median_us"), 1e-3, "outside its interval"),
    (("evidence", "checks", "anything"), {"run": 1, "passed": 1}, "unknown kind"),
    (("evidence", "checks", "rows", "passed"), 10**6, "as many passed as ran"),
    (("evidence", "checks", "rows", "run"), 0, "as many passed as ran"),
    (("artefact", "cubin_sha256"), "0" * 64, "row_digest"), (("toolchain", "triton"), "3.7.1", "row_digest"),
    (("artefact", "registers"), 10**400, "a number that is"), (("timing", "clocks"), {"sm_mhz": 10**400}, "a number that is"),
])
def test_what_can_not_be_is_refused_by_name(tmp_path: Path, place: Place, value: object, said: str) -> None:
    file = copy.deepcopy(FILE)
    parent = file["rows"][0]
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = value
    assert any(said in text for text in refused(write(tmp_path / "s", file), tmp_path))


def test_an_impossible_row_is_refused_whatever_its_digest_says(tmp_path: Path) -> None:
    """Somebody who knows how rows are digested still can't promote a median outside its interval or a check of their own."""
    for outer, inner, changes, said in (("timing", "times", {"median_us": 1e-3}, "median"),
                                        ("evidence", "checks", {"mine": {"run": 1, "passed": 1}}, "mine")):
        file = copy.deepcopy(FILE)
        file["rows"][0][outer][inner].update(changes)
        folder = write(tmp_path / said, file)
        row = store.read(folder / NAME).rows[0].sealed()
        assert [said in problem.text for problem in row.problems()] == [True] * len(row.problems()) and row.problems()
