"""Schedules as they were in a git revision, read with `git` itself: nothing is checked out, nothing is written."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..errors import DiffError

FOLDER = "schedules"  # where a checkout of this project keeps its promoted schedules


@dataclass(frozen=True)
class Revision:
    """A commit, or a tree such as `git write-tree` makes of the index, of the repository at `top`. name: as it was written."""

    top: Path
    name: str
    tree: str


def top_of(here: Path) -> Path:
    """The top folder of the repository that `here` lies in. Raises DiffError."""
    said = _git(here, "rev-parse", "--show-toplevel")
    if said is None:
        raise DiffError(f"{here} is in no git repository", expected="to run inside the checkout whose revisions are compared")
    return Path(said.decode(errors="surrogateescape").rstrip("\n"))


def resolve(top: Path, name: str) -> Revision | None:
    """The commit or tree that a name means (branch, tag, hash, HEAD~2), or None if git knows no such name."""
    for kind in ("commit", "tree"):
        if said := _git(top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{{kind}}}"):
            return Revision(top, name, said.decode().strip())
    return None


def merge_base(old: Revision, new: Revision) -> Revision:
    """The commit at which two revisions part, as in `A...B`. Raises DiffError."""
    said = _git(old.top, "merge-base", old.tree, new.tree)
    if said is None:
        raise DiffError(f"{old.name} and {new.name} have no common commit", expected="two commits of one history",
                        action=f"write {old.name}..{new.name} to compare them as they are")
    return Revision(old.top, f"{old.name}...{new.name}", said.decode().strip())


def files(revision: Revision, path: str, suffix: str = ".json") -> dict[str, bytes]:
    """The content of the file at `path`, or of every file below it with this suffix, by name from the top. Empty where there is
    none."""
    said = _git(revision.top, "ls-tree", "-r", "-z", "--name-only", "--full-tree", revision.tree, "--", path or ".")
    names = [os.fsdecode(n) for n in (said or b"").split(b"\0") if n]
    return {n: _blob(revision, n) for n in names if n == path or n.endswith(suffix)}


def _blob(revision: Revision, name: str) -> bytes:
    data = _git(revision.top, "cat-file", "blob", f"{revision.tree}:{name}")
    if data is None:
        raise DiffError(f"{revision.name}:{name} can't be read", expected="a whole repository",
                        action="fetch what is missing: git fetch --unshallow, or git fsck to see the damage")
    return data


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Git's output, or None after a failure. Raises DiffError if there is no git."""
    try:
        done = subprocess.run(["git", "--literal-pathspecs", *arguments], cwd=folder, capture_output=True)
    except FileNotFoundError:
        raise DiffError("git is not on PATH", expected="git, to read revisions", action="install git, or name files and "
                        "folders instead of revisions") from None
    return done.stdout if done.returncode == 0 else None
