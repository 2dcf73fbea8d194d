"""The examples and the tutorial compile as written, for three targets, without a GPU."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from tune_kernels.shapes.own import own_shape
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


@pytest.mark.parametrize(("name", "sizes"), [
    ("my_norm.rms_norm", {"rows": 3, "H": 64}), ("layer_norm.layer_norm", {"rows": 3, "H": 64}),
    ("attention.attention", {"heads": 2, "T": 40, "D": 64}), ("scaled_matmul.scaled_matmul", {"M": 64, "N": 128, "K": 256})])
def test_an_examples_reference_takes_its_arguments(name: str, sizes: dict[str, int]) -> None:
    """Those that are computed from the sizes included; the outputs have the declared sizes."""
    import torch
    from tune_kernels.kernels.loading import kernels_in, source_of
    from tune_kernels.tuner.on_gpu.worker.own import reference_outputs

    found = kernels_in(source_of(str(ROOT / "examples" / f"{name.partition('.')[0]}.py"))).values()
    kernel = next(kernel for kernel in found if kernel.name == name)
    outputs = reference_outputs(kernel, own_shape(sizes, name), lambda n, described, values: torch.full(
        described.sizes(values), 1.0))
    assert all(output.dtype == torch.float64 and output.isfinite().all() for output in outputs)


def test_an_argument_that_raises_is_named() -> None:
    """An argument that the user computes from the sizes."""
    import torch
    from tune_kernels.kernels.arguments import KernelError
    from tune_kernels.kernels.loading import kernels_in, source_of
    from tune_kernels.tuner.on_gpu.worker.own import reference_outputs

    kernel = kernels_in(source_of(str(ROOT / "examples" / "attention.py")))["kernel"]
    raising = replace(kernel, arguments={**kernel.arguments, "scale": lambda shape, knobs: shape["D"] / 0})
    with pytest.raises(KernelError, match=r"attention: argument scale raised ZeroDivisionError"):
        reference_outputs(raising, own_shape({"heads": 1, "T": 8, "D": 64}, "attention"),
                          lambda n, described, values: torch.ones(described.sizes(values)))


def commands_in(text: str) -> list[str]:
    """The tune-kernels lines of a page's bash blocks."""
    return [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
            for line in block.splitlines() if line.startswith("tune-kernels")]


def test_the_findings_are_one_command_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F32: run as written, with this Triton: the fallback of 8 rows, the spilling merge, the fusion's shared memory."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    fallback, merge, fusion = commands_in((ROOT / "examples" / "worklog" / "README.md").read_text())
    reports = []
    for line in (fallback, merge, fusion):
        words = shlex.split(line)[1:]
        CliRunner().invoke(cli, [*words, "--jobs", "1"], catch_exceptions=False, standalone_mode=False)
        reports.append(read_report(Path(words[words.index("--out") + 1])))
    rows = {vars(v.schedule)["row_tile"]: v for v in reports[0].variants if v.kernel == "gate_up_one_term"}
    assert [reason.code for reason in rows[8].reasons] == ["wrong_instruction"] and "found HMMA" in rows[8].reasons[0].detail
    assert rows[16].accepted
    merges = {(vars(v.schedule)["splits"], vars(v.schedule)["BLOCK_D"]): v for v in reports[1].variants
              if v.kernel == "merge_one_block"}
    assert [reason.code for reason in merges[512, 128].reasons] == ["register_spill"] and merges[16, 16].accepted
    blocks = {tuple(dict(v.schedule.knobs)[name] for name in ("BLOCK_N", "num_stages")): v for v in reports[2].variants}
    assert blocks[64, 2].facts.blocks_per_sm == 5 and blocks[128, 3].facts.blocks_per_sm == 1
    assert "274,432 B of shared memory" in blocks[256, 3].reasons[0].detail


def test_the_tutorials_offline_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as written, in a folder of their own."""
    commands = commands_in((ROOT / "docs" / "your-own-kernel.md").read_text().split("## On a GPU")[0])
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
