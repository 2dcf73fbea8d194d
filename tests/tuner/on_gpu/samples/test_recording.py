"""Recordings from outside (F18, F21): whatever a field is changed to, the file is read, or refused by name."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import H200_RUN
from tune_kernels.shapes.errors import UserError
from tune_kernels.tuner.errors import RecordingError
from tune_kernels.tuner.on_gpu import run as on_gpu
from tune_kernels.tuner.on_gpu.report import make_report, report_to_dict
from tune_kernels.tuner.on_gpu.report_html import render_gpu_report
from tune_kernels.tuner.on_gpu.samples import recording

SMALL = H200_RUN.with_name("h200-smollm2-135m.json")
VALUES: tuple[Any, ...] = (None, True, -1, 0, 1, 0.5, 2**70, 1e308, 10**400, "", "x", "../../../up", "[/b]", "\x1b[2J",
                           "\ud800", [], [1], ["a", "b"], {}, {"a": 1}, {"a": {"a": {}}}, "nvidia-b300", "qwen2.5-7b")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of every field."""
    found = [path] if path else []
    inner = value.items() if isinstance(value, dict) else list(enumerate(value))[:3] if isinstance(value, list) else ()
    for key, one in inner:
        found += places(one, (*path, key))
    return found


def mutated(table: Any, path: tuple[Any, ...], draw: random.Random) -> Any:
    """One field dropped, or given another value."""
    changed = copy.deepcopy(table)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    if draw.random() < 0.2:
        del parent[path[-1]]
    else:
        parent[path[-1]] = draw.choice(VALUES)
    return changed


@pytest.fixture(scope="module")
def table() -> Any:
    """A real recording with two of its kernels, which keeps a replay short."""
    found = json.loads(SMALL.read_text())
    found["contests"] = {k: found["contests"][k] for k in ("gate_up", "merge")}
    found["gate"] = {**found["gate"], "accepted": {k: v for k, v in found["gate"]["accepted"].items() if k in found["contests"]}}
    return found


def replayed(path: Path) -> None:
    """All that a replay reads, ranks and shows."""
    report = make_report(on_gpu.replay(path))
    json.dumps(report_to_dict(report), allow_nan=False)
    render_gpu_report(report).encode()


def test_a_changed_field_is_read_or_refused_by_name(table: Any, tmp_path: Path) -> None:
    """F21: 357 tracebacks in 4,979 changed recordings. A seeded part; this file as a script runs as many as it is told."""
    refused, read = fuzz(table, tmp_path, count=150, seed=5)
    assert refused > 60
    assert read > 10


def fuzz(table: Any, folder: Path, count: int, seed: int) -> tuple[int, int]:
    """(refused, read) of so many changed recordings. Anything else than a UserError is raised."""
    draw = random.Random(seed)
    paths = places(table)
    refused = 0
    for _ in range(count):
        (folder / "recording.json").write_text(json.dumps(mutated(table, draw.choice(paths), draw)))
        try:
            replayed(folder)
        except UserError:
            refused += 1
    return refused, count - refused


@pytest.mark.parametrize(("change", "said"), [
    ({"model": "../../../up"}, "model"), ({"target": "../../../up"}, "unknown GPU"), ({"recipe": "../fp8-v1"}, "recipe"),
    ({"target": "nvidia-h100"}, "target: is nvidia-h100, but 'NVIDIA H200' is nvidia-h200"),
    ({"machine": {"gpu": "NVIDIA H200 NVL", "driver": "1", "cuda": "1"}}, "NVIDIA H200 NVL"),
    ({"weights": "elsewhere"}, "weights"),
])
def test_names_are_checked_before_any_path_is_made(table: Any, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """F18: a forged recording wrote outside --schedules. F10: a target that isn't its GPU's."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "recording.json").write_text(json.dumps({**table, **change}))
    with pytest.raises(RecordingError) as refused:
        on_gpu.replay(tmp_path / "in")
    assert said in str(refused.value)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("path", sorted(H200_RUN.parent.rglob("*.json")), ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_what_is_read_is_what_was_written(path: Path) -> None:
    """Also of runs that were recorded before processes were."""
    found, first = recording.load(path), json.loads(path.read_text())["schema"] == recording.FIRST_SCHEMA
    assert found.processes == (1 if first else recording.PROCESSES)
    again = json.loads(json.dumps(recording.to_dict(found)))
    assert recording.recording_of(recording.Fields(again, "again", RecordingError)) == found


if __name__ == "__main__":
    import sys
    import tempfile

    whole = json.loads(SMALL.read_text())
    with tempfile.TemporaryDirectory() as name:
        print(fuzz(whole, Path(name), int(sys.argv[1]), 0))
