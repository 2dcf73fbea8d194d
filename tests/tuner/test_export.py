"""Promoted schedules as triton.Config by key, and as JSON, of built-in kernels and of one's own."""

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton
from click.testing import CliRunner
from promoted_rows import row
from tune_kernels.schedules import store
from tune_kernels.schedules.promoted import PromotedSchedule
from tune_kernels.schedules.recipe import OWN
from tune_kernels.schedules.schedule import OwnSchedule, schedule_id
from tune_kernels.schedules.store import PromotedFile
from tune_kernels.shapes.own import Frozen, OwnShape
from tune_kernels.tuner.cli import cli

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="interpreting")


def own_row(rows: int, **knobs: Any) -> PromotedSchedule:
    schedule, made = OwnSchedule(Frozen(knobs)), row()
    mine = schedule_id(schedule)
    return replace(made, model="my.norm", recipe=OWN.name, kernel="my.norm", shape=OwnShape(Frozen({"rows": rows, "H": 64})),
                   schedule=schedule, schedule_id=mine, timing=replace(made.timing, schedule_id=mine),
                   evidence=replace(made.evidence, schedule_id=mine, weights="none")).sealed()


@pytest.fixture
def schedules(tmp_path: Path) -> Path:
    rows = (own_row(5, BLOCK=64, num_warps=4, num_stages=2), own_row(16, BLOCK=128, MODE="fast", num_warps=8, launch_pdl=True))
    store.promote(tmp_path, PromotedFile("nvidia-h200", "my.norm", OWN.name, rows))
    store.promote(tmp_path, PromotedFile("nvidia-h200", "m", "fp8-v1", (row("down"),)))
    return tmp_path


def invoke(*words: Any) -> Any:
    return CliRunner().invoke(cli, ["export", *map(str, words)])


def test_configs_by_sku_and_sizes(schedules: Path, tmp_path: Path) -> None:
    """The printed source runs, and its configs hold just the promoted knobs."""
    done = invoke("my.norm", "--schedules", schedules)
    assert done.exit_code == 0
    file = tmp_path / "configs.py"
    file.write_text(done.output)
    found = runpy.run_path(str(file))
    configs = found["CONFIGS"]["nvidia-h200"]
    assert sorted(found["KEY"]) == ["H", "rows"]
    by_rows = {key[found["KEY"].index("rows")]: config for key, config in configs.items()}
    assert by_rows[5].all_kwargs() == {"BLOCK": 64, "num_warps": 4, "num_stages": 2, "num_ctas": 1}
    assert (by_rows[16].kwargs, by_rows[16].num_warps) == ({"BLOCK": 128, "MODE": "fast", "launch_pdl": True}, 8)


def test_a_built_in_kernel_exports_its_launch(schedules: Path) -> None:
    """Its constants are those of the jitted function, not the schedule's words."""
    from tune_kernels.kernels.linear import linear_kernel

    [found] = json.loads(invoke("down", "--format", "json", "--schedules", schedules).output)["rows"]
    assert set(found["constants"]) - {"enable_fp_fusion", "launch_pdl"} <= set(linear_kernel.arg_names)
    assert (found["constants"]["BLOCK_N"], found["options"]["num_warps"]) == (64, 4)
    assert invoke("down", "--json", "--schedules", schedules).output == invoke(
        "down", "--format", "json", "--schedules", schedules).output


def test_an_unknown_kernel_and_an_edited_row_are_refused(schedules: Path) -> None:
    done = invoke("my.nrom", "--schedules", schedules)
    assert done.exit_code == 1 and "did you mean 'my.norm'" in str(done.exception)
    path = schedules / "nvidia-h200" / "my.norm.json"
    path.write_text(path.read_text().replace('"BLOCK": 64', '"BLOCK": 32'))
    done = invoke("my.norm", "--schedules", schedules)
    assert done.exit_code == 1 and "edited since it was measured" in str(done.exception)
