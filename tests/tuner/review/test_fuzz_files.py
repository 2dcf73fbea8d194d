"""F21: a short seeded run of scripts/fuzz_files.py over every kind of file; the script goes on for as long as one likes."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from script_modules import load_script

fuzz_files = load_script("fuzz_files")


def test_no_mutated_file_ends_in_a_fault() -> None:
    found = fuzz_files.fuzz(fuzz_files.KINDS, seed=7, count=12)
    assert {name: dict(tally.faults) for name, tally in found.items()} == {name: {} for name in found}
    assert all(sum(tally.exits.values()) == 13 for tally in found.values())
    refused = sum(tally.exits[1] + tally.exits[2] for tally in found.values())
    assert refused > sum(tally.exits[0] for tally in found.values()), "most mutations are refused"


def crash(at: Path) -> int:
    raise KeyError(json.loads((at / "f").read_text()))


def stray(at: Path) -> int:
    (at.parent / "stray").write_text("x")
    return 0


def silent(at: Path) -> int:
    return 2


@pytest.mark.parametrize(("run", "said"), [(crash, "traceback: KeyError"), (stray, "outside: "), (silent, "without a message")])
def test_the_fuzzer_sees_a_fault(run: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "f").write_text("1")
    kind = fuzz_files.Kind("k", "f", json.loads, fuzz_files.as_json, run)
    assert said in fuzz_files.run_one(kind, tmp_path / "run", fuzz_files.Tally(), fuzz_files.Watch())


def test_a_mutation_changes_the_file() -> None:
    rng = random.Random(1)
    value = {"a": {"b": [1, 2.5, "x"]}, "c": None}
    written = {fuzz_files.as_json(fuzz_files.mutated(json.loads(json.dumps(value)), rng)) for _ in range(1000)}
    assert len(written) > 50 and any(b"1e400" in w for w in written) and any(w.count(b'"c"') == 2 for w in written)
