"""The examples and the tutorial compile as written, for three targets, without a GPU."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from tune_kernels.shapes.target import ARCHES
from tune_kernels.tuner.cli import cli
from tune_kernels.tuner.offline.report import read_report
from tune_kernels.tuner.offline.sweep import SweepRequest, sweep

pytestmark = pytest.mark.compiles
ROOT = Path(__file__).parents[1]
# Of each file, a few of its knobs.
RESTRICTED = {
    "layer_norm": "num_warps = [8, 16]", "scaled_matmul": "BLOCK_M = 64\nBLOCK_N = [64, 128]\nnum_warps = 4\nnum_stages = 3",
    "attention": "BLOCK_M = 64\nBLOCK_N = [32, 64]\nnum_warps = 4\nnum_stages = 2",
}


@pytest.mark.parametrize(("name", "knobs"), RESTRICTED.items(), ids=RESTRICTED.keys())
def test_an_example_compiles_for_each_target(name: str, knobs: str, tmp_path: Path) -> None:
    path = ROOT / "examples" / f"{name}.py"
    space = tmp_path / "space.toml"
    space.write_text(f'[[grid]]\nkernels = "{name}.{name}"\n{knobs}\n')
    report = sweep(SweepRequest(kernels=(str(path),), space=str(space), out=tmp_path / "out", jobs=1))
    assert {v.target for v in report.variants if v.accepted} == set(ARCHES), [v.reasons for v in report.variants]


def test_the_tutorials_offline_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as written, in a folder of their own."""
    text = (ROOT / "docs" / "your-own-kernel.md").read_text()
    commands = [line for block in re.findall(r"```bash\n(.*?)```", text.split("## On a GPU")[0], re.DOTALL)
                for line in block.splitlines() if line.startswith("tune-kernels")]
    assert len(commands) >= 3
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for line in commands:
        words = shlex.split(line, comments=True)[1:]
        if "ID" in words:
            words[words.index("ID")] = read_report(Path("build/my-norm")).variants[0].id
        done = CliRunner().invoke(cli, words, catch_exceptions=False, standalone_mode=False)
        assert done.return_value in (0, None), (line, done.output)
    assert {v.target for v in read_report(Path("build/my-norm")).variants if v.accepted} == set(ARCHES)
