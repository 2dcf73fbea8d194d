"""The package installed from its wheel, away from the repository: every command starts, and the data that they read is there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPACE = '[[grid]]\nkernels = "merge"\nBLOCK_D = 64\nsplits = 8\nnum_warps = 4\n'


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package. The checkout is copied first: a build leaves files beside the sources."""
    folder = tmp_path_factory.mktemp("installed")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        if not name.startswith(("tests/", "docs/")) and (ROOT / name).is_file():
            place = folder / "source" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(folder / "source")], check=True)
    wheel, = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    return folder


def run(installed: Path, script: str, *arguments: str) -> str:
    """Standard output of a script that finds the installed package first, in a folder of its own."""
    home = installed / "home"
    home.mkdir(exist_ok=True)
    first = f"import sys; sys.path.insert(0, {str(installed / 'site')!r}); "
    done = subprocess.run([sys.executable, "-c", first + script, *arguments], cwd=home, capture_output=True, text=True,
                          env=os.environ | {"HOME": str(home)})
    assert done.returncode == 0, done.stderr
    return done.stdout


def command(installed: Path, *arguments: str) -> str:
    """Standard output of tune-kernels."""
    return run(installed, "from tune_kernels.tuner.cli import main; main()", *arguments)


def test_the_package_is_the_installed_one_and_brings_no_tests(installed: Path) -> None:
    script = "import tune_kernels.tuner.cli as cli, tune_kernels.decoder as decoder; print(cli.__file__, decoder.__file__)"
    assert all(path.startswith(str(installed / "site")) for path in run(installed, script).split())
    assert not list((installed / "site").rglob("test_*.py")) and not (installed / "site" / "scripts").exists()


def test_every_command_has_help(installed: Path) -> None:
    text = command(installed, "--help")
    names = [line.split()[0] for line in text.split("Commands:")[1].splitlines() if line.strip()]
    assert {"diff", "doctor", "generate", "inspect", "record", "roofline", "show", "train-drafter", "verify"} <= set(names)
    for name in names:
        assert "Usage:" in command(installed, name, "--help")


def test_the_version_names_the_toolchain(installed: Path) -> None:
    line = command(installed, "--version")
    assert line.startswith("tune-kernels ") and "Triton 3." in line and "for sm_103" in line and "Python 3." in line


def test_shapes_targets_recipes_spaces_and_pages_ship(installed: Path) -> None:
    """A sweep with a space of one's own; its page; an answer from `show`; the physics of a shipped model."""
    (installed / "home").mkdir(exist_ok=True)
    (installed / "home" / "mine.toml").write_text(SPACE)
    out = json.loads(command(installed, "--offline", "--kernel", "merge", "--target", "sm_90", "--jobs", "1",
                             "--space", "mine.toml", "--out", "swept", "--json"))
    assert out["counts"]["accepted"] >= 1 and (installed / "home" / "swept" / "report.html").stat().st_size > 10_000
    first = json.loads((installed / "home" / "swept" / "report.json").read_text())["variants"][0]["id"]
    assert "merge" in command(installed, "show", first, "--out", "swept")
    assert "tokens/s" in command(installed, "roofline", "--model", "qwen2.5-7b", "--target", "h200")


def test_promoted_rows_prompts_and_the_shipped_drafter_are_there(installed: Path) -> None:
    script = ("from tune_kernels.schedules import store; from tune_kernels.shapes.model import load_model_shape; "
              "from tune_kernels.decoder.bench.bench import load_prompts; "
              "from tune_kernels.decoder.drafters.shipped import FOLDER; "
              "import tune_kernels.decoder.checks.verify; from pathlib import Path; "
              "print(len(list(Path(store.__file__).parent.glob('nvidia-*/*.json'))), len(list(FOLDER.rglob('*.safetensors'))))")
    rows, drafters = map(int, run(installed, script).split())
    assert rows >= 4 and drafters == 1
