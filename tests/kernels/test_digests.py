"""Promoted rows carry the digest of their kernel's jitted source: a change of that source makes them stale."""

import json
from pathlib import Path

import pytest
from tune_kernels.kernels import bundle, registry

ROWS = [(path.stem, row["kernel"], row["kernel_digest"])
        for path in sorted((Path(__file__).parents[2] / "schedules").glob("*/*.json"))
        for row in json.loads(path.read_text())["rows"]]


@pytest.mark.parametrize(("file", "kernel", "digest"), ROWS)
def test_shipped_rows_are_of_the_kernels_that_are_here(file: str, kernel: str, digest: str) -> None:
    assert bundle.kernel_digest(registry.operation(kernel).kernel) == digest


def test_every_tunable_kernel_has_a_shipped_row() -> None:
    assert {kernel for _, kernel, _ in ROWS} == set(registry.TUNABLE)
