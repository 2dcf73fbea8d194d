"""A seeded part of scripts/fuzz_decoder.py, which runs 10,000 requests."""

import pytest
from script_modules import load_script


@pytest.mark.parametrize(("recipe", "requests"), [("fp32", 150), ("bf16", 50), ("fp8-v1", 50)])
def test_seeded_requests_differ_in_no_byte(recipe: str, requests: int) -> None:
    """Random requests, one after another on one decoder."""
    fuzz = load_script("fuzz_decoder").Fuzz(11, recipe)
    kinds = set()
    for _ in range(requests):
        what, problem = fuzz.one()
        kinds.add(what)
        assert not problem, what
    assert len(kinds) > 8
