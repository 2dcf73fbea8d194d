"""The house's own rules: no circles of imports, every file ships, every link of the documentation leads somewhere."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from script_modules import load_script

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)|(?:srcset|src)=\"([^\"]+)\"")


@pytest.fixture(scope="module")
def structure() -> ModuleType:
    return load_script("structure")


def test_no_circles_of_imports(structure: ModuleType) -> None:
    """Lazy imports and those for type checkers count."""
    tree = structure.measure(ROOT)
    assert len(tree.files) > 100
    assert structure.circles(tree.imports) == []
    assert structure.circles(structure.folder_graph(tree.imports)) == []


def test_a_circle_is_found(structure: ModuleType) -> None:
    imports = {"a/x.py": {"b/y.py"}, "b/y.py": {"a/z.py"}, "a/z.py": set[str]()}
    assert structure.circles(imports) == []
    assert structure.circles(structure.folder_graph(imports)) == [["a", "b"]]
    assert structure.circles({**imports, "a/z.py": {"a/x.py"}}) == [["a/x.py", "a/z.py", "b/y.py"]]


def test_every_file_ships() -> None:
    """Each tracked file of a room belongs to a package, or to its data."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {name: ROOT.joinpath(*name.split(".")[1:]) for name in table["packages"]}
    shipped = {path for folder in folders.values() for path in folder.glob("*.py")}
    shipped |= {path for name, patterns in table["package-data"].items() for pattern in patterns
                for path in folders[name].glob(pattern)}
    rooms = ["shapes", "kernels", "schedules", "tuner", "decoder"]
    tracked = subprocess.run(["git", "ls-files", *rooms], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert len(tracked) > 100
    assert [name for name in tracked if ROOT / name not in shipped] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    links = [a or b for a, b in LINK.findall(prose)]
    local = [link for link in links if not link.startswith(("http:", "https:"))]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_the_figures_are_those_of_the_records() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "figures.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_decisions_have_numbers_of_their_own() -> None:
    names = [path.name for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))]
    assert [name[:3] for name in names] == [f"{number:03d}" for number in range(1, len(names) + 1)]
    for name in names:
        assert (ROOT / "docs" / "decisions" / name).read_text().startswith(f"# {name[:3]}. ")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
