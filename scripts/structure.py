#!/usr/bin/env python
"""Measures the source tree: files per folder, circles of imports, lines, `Any`, the longest functions and parameter lists.

    python scripts/structure.py              # this checkout
    python scripts/structure.py --repo DIR   # another one, for before and after
"""

import argparse
import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("shapes", "schedules", "kernels", "tuner", "decoder")
# Entry points import from everywhere: in the graph of folders each is a separate node.
ENTRIES = ("tuner/cli.py", "tuner/__main__.py", "decoder/cli.py", "decoder/__init__.py")


@dataclass
class Tree:
    """Measurements. functions, parameters: (count, place). imports: files by importing file, with lazy and typing imports."""

    files: dict[str, int] = field(default_factory=dict)
    any_lines: int = 0
    functions: list[tuple[int, str]] = field(default_factory=list)
    parameters: list[tuple[int, str]] = field(default_factory=list)
    imports: dict[str, set[str]] = field(default_factory=dict)

    @property
    def folders(self) -> Counter[str]:
        """Files per folder."""
        return Counter(str(Path(name).parent) for name in self.files)


def sources(root: Path) -> Iterator[Path]:
    for room in ROOMS:
        yield from sorted((root / room).rglob("*.py"))


def imported(root: Path, path: Path, node: ast.ImportFrom) -> Iterator[str]:
    """The files of the project that a relative import names."""
    base = path.parent
    for _ in range(node.level - 1):
        base = base.parent
    target = base.joinpath(*(node.module or "").split(".")) if node.module else base
    for alias in node.names:
        for candidate in ((target / alias.name).with_suffix(".py"), target.with_suffix(".py"), target / "__init__.py"):
            if candidate.is_file() and candidate.is_relative_to(root):
                yield str(candidate.relative_to(root))
                break


def jitted(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is a jitted function, whose parameters are a kernel's arguments."""
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def measure(root: Path) -> Tree:
    """Reads every source file of the rooms."""
    tree = Tree()
    for path in sources(root):
        name, text = str(path.relative_to(root)), path.read_text()
        tree.files[name] = text.count("\n")
        tree.any_lines += sum(bool(re.search(r"\bAny\b", line)) for line in text.splitlines())
        module = ast.parse(text)
        tree.imports[name] = {found for node in ast.walk(module) if isinstance(node, ast.ImportFrom) and node.level
                              for found in imported(root, path, node)} - {name}
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not jitted(node):
                place, given = f"{name}:{node.name}", node.args
                count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
                command = any("option" in ast.unparse(d) for d in node.decorator_list)  # click needs one parameter per option
                tree.functions.append(((node.end_lineno or node.lineno) - node.lineno + 1, place))
                if not command:
                    tree.parameters.append((count, place))
    return tree


def folder_graph(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """The imports between folders. An entry point is a separate node, and so is each file of a folder with subfolders."""
    parents = {str(Path(name).parent) for name in imports}
    holds_folders = {parent for parent in parents if any(other.startswith(parent + "/") for other in parents)}

    def node(name: str) -> str:
        folder = str(Path(name).parent)
        return name if name in ENTRIES or folder in holds_folders else folder

    graph: dict[str, set[str]] = defaultdict(set)
    for name, targets in imports.items():
        graph[node(name)] |= {node(t) for t in targets} - {node(name)}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in order:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], order[target])
        if low[node] == order[node]:
            component = stack[stack.index(node):]
            del stack[stack.index(node):]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return found


def rows(pairs: Iterable[tuple[int, str]], count: int) -> str:
    return "\n".join(f"  {n:5d}  {place}" for n, place in sorted(pairs, reverse=True)[:count])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", type=Path, default=ROOT)
    parser.add_argument("--most", type=int, default=5, help="rows of each list")
    options = parser.parse_args()
    tree = measure(options.repo.resolve())
    if not tree.files:
        sys.exit(f"error: no source files below {options.repo}: expected a checkout of tune-kernels")
    file_circles, folder_circles = circles(tree.imports), circles(folder_graph(tree.imports))
    print("files per folder")
    print("\n".join(f"  {n:5d}  {folder}" for folder, n in sorted(tree.folders.items())))
    print("longest functions, lines")
    print(rows(tree.functions, options.most))
    print("longest parameter lists, jitted kernels and commands aside")
    print(rows(tree.parameters, options.most))
    for name, found in (("files", file_circles), ("folders", folder_circles)):
        print(f"circles of {name}: {len(found)}")
        print("".join(f"  {' '.join(circle)}\n" for circle in found), end="")
    print(json.dumps({"files": len(tree.files), "lines": sum(tree.files.values()), "any_lines": tree.any_lines,
                      "longest_function": max(tree.functions), "longest_parameters": max(tree.parameters),
                      "file_circles": len(file_circles), "folder_circles": len(folder_circles)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
