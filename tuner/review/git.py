"""Files of a git revision, read with `git`. Nothing is checked out or written."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..errors import DiffError

FOLDER = "schedules"  # the promoted schedules in a checkout of this project


@dataclass(frozen=True)
class Revision:
    """A commit or tree (as from `git write-tree`) of the repository at `top`. name: as the user wrote it."""

    top: Path
    name: str
    tree: str


def top_of(here: Path) -> Path:
    """The top folder of the repository that contains `here`. Raises DiffError."""
    output = _git(here, "rev-parse", "--show-toplevel")
    if output is None:
        raise DiffError(f"{here} is in no git repository", expected="a folder of the checkout whose revisions are compared")
    return Path(output.decode(errors="surrogateescape").rstrip("\n"))


def resolve(top: Path, name: str) -> Revision | None:
    """The commit or tree of a name (branch, tag, hash, HEAD~2), or None if git knows no such name."""
    for kind in ("commit", "tree"):
        if output := _git(top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{{kind}}}"):
            return Revision(top, name, output.decode().strip())
    return None


def merge_base(old: Revision, new: Revision) -> Revision:
    """The merge base of two revisions, as in `A...B`. Raises DiffError."""
    output = _git(old.top, "merge-base", old.tree, new.tree)
    if output is None:
        raise DiffError(f"{old.name} and {new.name} have no common commit", expected="two commits of one history",
                        action=f"write {old.name}..{new.name} to compare them as they are")
    return Revision(old.top, f"{old.name}...{new.name}", output.decode().strip())


def files(revision: Revision, path: str, suffix: str = ".json") -> dict[str, bytes]:
    """Content by path from the top: of the file at `path`, or of every file below it with this suffix. Empty if there is none."""
    output = _git(revision.top, "ls-tree", "-r", "-z", "--name-only", "--full-tree", revision.tree, "--", path or ".")
    names = [os.fsdecode(n) for n in (output or b"").split(b"\0") if n]
    return {n: _blob(revision, n) for n in names if n == path or n.endswith(suffix)}


def _blob(revision: Revision, name: str) -> bytes:
    data = _git(revision.top, "cat-file", "blob", f"{revision.tree}:{name}")
    if data is None:
        raise DiffError(f"{revision.name}:{name} can't be read", expected="a whole repository",
                        action="fetch missing objects with git fetch --unshallow, or find the damage with git fsck")
    return data


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Git's output, or None after a failure. Raises DiffError if there is no git."""
    try:
        done = subprocess.run(["git", "--literal-pathspecs", *arguments], cwd=folder, capture_output=True)
    except FileNotFoundError:
        raise DiffError("git is not on PATH", expected="git, to read revisions",
                        action="install git, or name files and folders instead of revisions") from None
    return done.stdout if done.returncode == 0 else None
