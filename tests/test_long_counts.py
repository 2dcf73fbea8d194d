"""scripts/long_counts.py: parts of several machines add up, and a fault in any of them fails the whole."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from script_modules import load_script
from tune_kernels.shapes.errors import UserError

ROW = "0% throttled, process effect 1.0%: "


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("long_counts")


def write(script: ModuleType, path: Path, *seeds: int, name: str = "fuzz_files", cpu: str = "here", **changes: Any) -> Path:
    """A file of parts."""
    found = script.Found(0, {"mutated": 10, "hangs": 0}, (), 2.0)
    machine = replace(script.this_machine(), cpu=cpu)
    parts = [script.Part(name, machine, replace(found, seed=seed, **changes)) for seed in seeds]
    path.write_text("".join(json.dumps(asdict(p)) + "\n" for p in parts))
    return path


def test_parts_of_two_machines_add_up(script: ModuleType, tmp_path: Path) -> None:
    files = [write(script, tmp_path / "a", 1, 2), write(script, tmp_path / "b", 7, cpu="there")]
    record = script.totals("fuzz_files", script.read_parts(files))
    assert record["counts"] == {"mutated": 30, "hangs": 0}
    assert [(m["cpu"], m["seeds"], m["seconds"]) for m in record["machines"]] == [("here", [1, 2], 4), ("there", [7], 2)]
    assert script.held("fuzz_files", record)


def test_a_seed_counts_once(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="seed 2 stands twice"):
        script.read_parts([write(script, tmp_path / "a", 1, 2), write(script, tmp_path / "b", 2)])


def test_a_fault_fails(script: ModuleType, tmp_path: Path) -> None:
    path = write(script, tmp_path / "a", 1, faults=("hang",))
    assert not script.held("fuzz_files", script.totals("fuzz_files", script.read_parts([path])))


@pytest.mark.parametrize(("wins", "held"), [(2, True), (3, False)])
def test_false_wins_are_counted_over_all_parts(script: ModuleType, tmp_path: Path, wins: int, held: bool) -> None:
    """One part of 25 runs may have more than 5% by chance; 50 runs have at most 2."""
    name = "throttled_wins"
    one = write(script, tmp_path / "a", 1, name=name, counts={f"{ROW}runs": 25, f"{ROW}false wins": wins})
    other = write(script, tmp_path / "b", 2, name=name, counts={f"{ROW}runs": 25, f"{ROW}false wins": 0})
    assert script.held(name, script.totals(name, script.read_parts([one, other]))) is held


def test_parts_are_shared_out(script: ModuleType, tmp_path: Path) -> None:
    """Each part once, with a seed of its own; a part that would not end in time is not started."""
    works = [script.Work("fuzz_decoder", ("--requests", "1"), 2, 1.0), script.Work("fuzz_files", (), 1, 1e6)]
    script.shared_out(works, 2, 40, 600, tmp_path / "parts")
    parts = script.read_parts([tmp_path / "parts"])
    assert {(p.script, p.found.seed) for p in parts} == {("fuzz_decoder", 40), ("fuzz_decoder", 41)}
    assert all(p.found.counts["fp32 requests"] == 1 for p in parts)


def test_a_run_without_a_record_is_a_fault(script: ModuleType) -> None:
    found = script.found_by(script.Work("fuzz_decoder", ("--no-such-option",), 1, 1.0), 4)
    assert "exit 2" in found.faults[0] and not found.counts
