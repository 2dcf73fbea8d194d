"""The shipped promoted rows are current: `tune-kernels diff --check` over `schedules/`, as a reviewer runs it.

Needs neither torch nor hypothesis, so that it runs in the environment of the rows' own toolchain as well.
"""

import pytest
import triton
from tune_kernels.kernels import registry
from tune_kernels.schedules import store
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.store import SHIPPED
from tune_kernels.shapes.target import load_sku
from tune_kernels.tuner.review import command

ROWS = [row for path in sorted(SHIPPED.glob("*/*.json")) for row in store.read(path).rows]


def test_check_refuses_no_shipped_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(str(SHIPPED), str(SHIPPED), form="text", out=None, check=True, bundles=()) == 0
    assert "--check refuses nothing" in capsys.readouterr().out
    assert len(ROWS) >= 29


def test_the_files_are_as_the_store_writes_them() -> None:
    for path in SHIPPED.glob("*/*.json"):
        assert store.text_of(store.read(path)) == path.read_text(encoding="utf-8")


@pytest.mark.skipif(triton.__version__ != "3.6.0", reason="the rows are of Triton 3.6.0: their environment looks them up")
def test_look_up_finds_each_row_under_its_toolchain() -> None:
    """The rows of the ptxas that this Triton brings."""
    for row in ROWS:
        key = registry.store_key(row.kernel, row.shape, load_sku(row.target), load_recipe(row.recipe))
        assert key.toolchain == row.toolchain and store.lookup(key, [SHIPPED]).schedule == row.schedule
