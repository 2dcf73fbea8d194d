"""Reads OLD and NEW of `tune-kernels diff` into collections: files, folders, offline reports or git revisions.

An existing path is that path. Otherwise `A..B` means two revisions, and `A...B` their merge base and B, each at `schedules/`;
`REVISION:PATH` is a file or folder in a revision; `REVISION` alone is its `schedules/`. A revision without NEW is compared with
the files on disk.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from ...schedules import store
from ...schedules.errors import ScheduleError
from ...shapes.fields import Fields, Table, parse_table
from ..errors import DiffError, ReportError
from ..offline.report import read_report, report_from
from . import git as diff_git
from .compare import PROMOTED, REPORT, Collection, Entry, promoted_entries, report_entries
from .evidence import INSTALLED, Kernels, installed_kernels, kernels_from, kernels_in
from .git import FOLDER, Revision
from .kernel_sources import REGISTRY

ACCEPTED_NAMES = "a file or folder of promoted schedules, an offline report or its folder, a git revision, REVISION:PATH or A..B"
MOST_ROWS = 2_000  # promoted rows per side: about a second to check; a SKU's store has about ten per model


def collections(old: str, new: str | None, here: Path) -> tuple[Collection, Collection]:
    """The collections of OLD and NEW. here: the folder that relative paths start from, inside the repository of revisions.

    Raises:
        DiffError: no such path or revision; a lone path; a report against schedules.
        ScheduleError, ReportError: a file that is damaged, of a newer version, or of another kind.
    """
    before, after = _both(old, new, here)
    if before.kind and after.kind and before.kind != after.kind:
        raise DiffError(f"{before.name} holds {_named(before.kind)}, {after.name} {_named(after.kind)}",
                        expected="two sides of one kind")
    return before, after


def _named(kind: str) -> str:
    return "an offline report" if kind == REPORT else "promoted schedules"


def _both(old: str, new: str | None, here: Path) -> tuple[Collection, Collection]:
    if new is not None:
        return _one(old, here), _one(new, here)
    if os.path.exists(here / old):  # unlike Path.exists, False for a name that is too long
        raise DiffError(f"{old} is a path without another side", expected="OLD and NEW, or a git revision alone",
                        action=f"name the other side, for example HEAD:{old} {old}")
    if ".." in old and (found := _range(old, here)):
        return found
    found_revision = _revision(old, here)
    if found_revision is None:
        raise DiffError(f"{old[:200]} is no file, folder or git revision", expected=ACCEPTED_NAMES)
    revision, path = found_revision
    on_disk = revision.top / path
    if not on_disk.exists():
        return _at(revision, path, old), Collection(path, "", ())
    return _at(revision, path, old), _on_disk(on_disk, path)


def _one(name: str, here: Path) -> Collection:
    if os.path.exists(here / name):
        return _on_disk(here / name, name)
    found = _revision(name, here)
    if found is None:
        raise DiffError(f"{name[:200]} is no file, folder or git revision", expected=ACCEPTED_NAMES)
    return _at(*found, name)


def _range(name: str, here: Path) -> tuple[Collection, Collection] | None:
    """Both sides of `A..B` or `A...B`; an empty A or B is HEAD."""
    dots = "..." if "..." in name else ".."
    first, _, last = name.partition(dots)
    top = diff_git.top_of(here)
    old, new = (diff_git.resolve(top, side or "HEAD") for side in (first, last))
    for side, revision in ((first, old), (last, new)):
        if revision is None:
            raise DiffError(f"{name}: git knows no revision {side or 'HEAD'!r}", expected="A..B of two revisions",
                            action="run git fetch if it is another machine's")
    assert old and new
    start = diff_git.merge_base(old, new) if dots == "..." else old
    return _at(start, FOLDER, start.tree[:12] if dots == "..." else _shown(old)), _at(new, FOLDER, _shown(new))


def _shown(revision: Revision) -> str:
    """Its name; a full hash is shortened."""
    return revision.name[:12] if revision.name == revision.tree else revision.name


def _revision(name: str, here: Path) -> tuple[Revision, str] | None:
    """(revision, path from the repository's top) of a name, or None."""
    try:
        top = diff_git.top_of(here)
    except DiffError:
        return None
    first, colon, path = name.partition(":")
    revision = diff_git.resolve(top, first) if first else None
    return (revision, path.strip("/") if colon else FOLDER) if revision else None


def _at(revision: Revision, path: str, name: str) -> Collection:
    found = diff_git.files(revision, path)
    if not found and path != FOLDER:
        raise DiffError(f"{name}: no {path or 'schedules'} in that revision", expected="a file or folder that is in it",
                        action=f"list them: git ls-tree -r --name-only {revision.name} {FOLDER}")
    where = {f"{revision.name}:{n}": data for n, data in found.items()}
    if len(where) == 1 and path in found:
        made = _from_table(_table(*next(iter(where.items()))), name, next(iter(where)), None)
    elif f"{path}/report.json" in found:
        place = f"{revision.name}:{path}/report.json"
        made = _from_table(_table(place, where[place]), name, place, None)
    else:
        places = {f"{revision.name}:{n}": f"/{n}" for n in found}
        made = _promoted({n: _table(n, data) for n, data in where.items()}, name, places)
    return replace(made, kernels=_kernels_at(revision)) if made.kind != REPORT else made


def _kernels_at(revision: Revision) -> Kernels:
    """The kernels of a revision of this project; the installed ones for a repository without kernel sources."""
    found = {PurePosixPath(n).stem: data for n, data in diff_git.files(revision, "kernels", ".py").items()}
    if REGISTRY not in found:
        return installed_kernels()
    name = f"the kernels of {_shown(revision)}"
    try:
        return kernels_from({stem: data.decode("utf-8") for stem, data in found.items()}, name)
    except UnicodeDecodeError as e:
        return Kernels(name, {}, str(e))


def _kernels_of_checkout(path: Path) -> Kernels:
    """The kernels of the checkout that contains a file or folder; the installed ones outside of a checkout."""
    for folder in path.resolve().parents:
        if (folder / "kernels" / f"{REGISTRY}.py").is_file():
            mine = folder / "kernels"
            return installed_kernels() if mine == INSTALLED.resolve() else kernels_in(mine, f"the kernels of {folder}")
    return installed_kernels()


def _on_disk(path: Path, name: str) -> Collection:
    if not path.is_dir():
        made = _from_table(_table(str(path), _read(path)), name, str(path), path.parent)
        return replace(made, kernels=_kernels_of_checkout(path))
    if (path / "report.json").exists():
        return Collection(name, REPORT, report_entries(read_report(path)), path)
    files = sorted([*path.glob("*.json"), *path.glob("*/*.json")])
    if not files and not (path / "recipes").is_dir():
        raise DiffError(f"{name}: a folder without schedules or a report", expected=ACCEPTED_NAMES)
    made = _promoted({str(p): _table(str(p), _read(p)) for p in files}, name, {str(p): str(p.resolve()) for p in files})
    return replace(made, kernels=_kernels_of_checkout(path / "schedules"))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise DiffError(f"{path}: {e.strerror}", expected="a readable file") from None


def _table(where: str, data: bytes) -> Table:
    return parse_table(data, "JSON", where, ScheduleError)


def _from_table(table: Table, name: str, where: str, folder: Path | None) -> Collection:
    """The collection of one file: an offline report or promoted schedules, by its schema."""
    schema = table.get("schema")
    if isinstance(schema, str) and schema.startswith(store.FAMILY):
        return _promoted({where: table}, name)
    try:
        return Collection(name, REPORT, report_entries(report_from(table, where)), folder)
    except ReportError as e:
        if isinstance(schema, str) and "/" in schema:
            raise
        raise DiffError(f"{where}: schema {schema!r}", expected=ACCEPTED_NAMES) from e


def _promoted(tables: Mapping[str, Table], name: str, places: Mapping[str, str] | None = None) -> Collection:
    """The collection of all promoted rows of some files. places: path by file, to find files that look-up doesn't read. Raises
    ScheduleError."""
    count = sum(len(table["rows"]) for table in tables.values() if isinstance(table.get("rows"), list))
    if count > MOST_ROWS:
        raise ScheduleError(f"{name}: {count:,} promoted rows", expected=f"at most {MOST_ROWS:,}",
                            action="compare one file at a time")
    files = [store.parse(Fields(table, where, ScheduleError)) for where, table in sorted(tables.items())]
    seen: dict[str, str] = {}
    for where, file in zip(sorted(tables), files):
        if file.name in seen:
            raise ScheduleError(f"{where}: the same SKU, model and recipe as {seen[file.name]}", expected="one file of each")
        seen[file.name] = where
    entries: list[Entry] = []
    for where, file in zip(sorted(tables), files):
        astray = places is not None and not places[where].endswith(f"/{file.name}")
        misplaced = f"{where} has rows of {file.name}: look-up never reads them there" if astray else ""
        entries += (replace(entry, misplaced=misplaced) for entry in promoted_entries([file]))
    return Collection(name, PROMOTED if entries else "", tuple(entries))
