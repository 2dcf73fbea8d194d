"""A seeded part of scripts/fuzz_decoder.py, which runs 10,000 requests."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "fuzz_decoder.py"


@pytest.mark.parametrize(("recipe", "requests"), [("fp32", 150), ("bf16", 50), ("fp8-v1", 50)])
def test_seeded_requests_differ_in_no_byte(recipe: str, requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random requests, one after another on one decoder."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("fuzz_decoder", SCRIPT)
    assert spec
    assert spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    fuzz = script.Fuzz(11, recipe)
    kinds = set()
    for _ in range(requests):
        what, problem = fuzz.one()
        kinds.add(what)
        assert not problem, what
    assert len(kinds) > 8
