"""The store of promoted schedules: the only reader and writer of `SKU/MODEL.RECIPE.json` and, of a kernel of one's own,
`SKU/KERNEL.json`; and the one look-up.

A folder of schedules has a folder per SKU. A file has one row per kernel and shape. Look-up is by SKU, kernel, shape, recipe,
Triton, ptxas, flags and kernel source, never by the model's name. Files have one layout (sorted keys, sorted rows, a list of
numbers on one line): a diff shows changes only.

A writer takes a lock, reads the file, and renames a new file into place: concurrent writers lose nothing.
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..shapes.fields import Fields, parse_fields, read_fields, require_name, shown
from ..shapes.files import locked, replace_text
from ..shapes.model import KernelShape, dims_of, shape_to_dict
from .errors import NotPromoted, ScheduleError
from .promoted import PromotedSchedule, Toolchain, row_to_dict
from .recipe import OWN

SCHEMA = "tune-kernels/promoted-schedules/2"
UNSEALED = "tune-kernels/promoted-schedules/1"  # rows without row_digest: readable, but refused by look-up
FAMILY = "tune-kernels/promoted-schedules/"
SHIPPED = Path(__file__).parent
VARIABLE = "TUNE_KERNELS_SCHEDULES"
NUMBERS = re.compile(r'\[\n([^\[\]{}"]*?)\n\s*\]')  # a list without strings and lists; strings have no newline


@dataclass(frozen=True)
class Key:
    """The key of a look-up. target: the SKU."""

    target: str
    recipe: str
    kernel: str
    shape: KernelShape
    toolchain: Toolchain
    kernel_digest: str

    def parts(self) -> dict[str, object]:
        """Each part by display name."""
        return {"kernel": self.kernel, "shape": dict(dims_of(self.shape)), "target": self.target, "recipe": self.recipe,
                "Triton": self.toolchain.triton, "ptxas": self.toolchain.ptxas, "flags": dict(self.toolchain.flags),
                "kernel source": self.kernel_digest}


def key_of(row: PromotedSchedule) -> Key:
    return Key(row.target, row.recipe, row.kernel, row.shape, row.toolchain, row.kernel_digest)


@dataclass(frozen=True)
class PromotedFile:
    """One file: the rows of a model's shapes, for one SKU and recipe."""

    target: str
    model: str
    recipe: str
    rows: tuple[PromotedSchedule, ...]

    @property
    def name(self) -> str:
        """Its path in a folder of schedules."""
        return f"{self.target}/{self.model}.json" if self.recipe == OWN.name else f"{self.target}/{self.model}.{self.recipe}.json"


def search_path(schedules: Path | None = None) -> list[Path]:
    """The folders in search order: `schedules` or $TUNE_KERNELS_SCHEDULES, the user's, the shipped one. Promotion writes to the
    first.
    """
    named = schedules or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return [*([named] if named else []), data / "tune-kernels" / "schedules", SHIPPED]


def lookup(key: Key, folders: Sequence[Path]) -> PromotedSchedule:
    """The promoted schedule with exactly this key.

    Raises:
        NotPromoted: there is none. Says how the nearest row differs, and the command to run.
        ScheduleError: a file of this SKU and recipe is damaged.
    """
    refused: list[str] = []
    for folder in folders:
        for path in _files(folder / key.target, key):
            for row in read(path).rows:
                if key_of(row) == key:
                    if not (problems := row.problems()):
                        return row
                    refused.append(f"{path}: {row.kernel}: {problems[0].text}")
    raise _not_promoted(key, folders, refused)


def _files(folder: Path, key: Key) -> list[Path]:
    """The files that may hold a row. A kernel of one's own has a file of its own."""
    if key.recipe == OWN.name:
        return [path] if (path := folder / f"{key.kernel}.json").exists() else []
    return sorted(folder.glob(f"*.{key.recipe}.json"))


def rows_like(folders: Iterable[Path], wanted: Callable[[PromotedSchedule], bool]) -> list[PromotedSchedule]:
    """All rows of the folders for which `wanted` holds, in search order. Raises ScheduleError."""
    paths = [path for folder in folders for path in sorted(folder.glob("*/*.json"))]
    return [row for path in paths for row in read(path).rows if wanted(row)]


def read(path: Path) -> PromotedFile:
    """One file, with every field checked. `PromotedSchedule.problems` finds rows that were edited by hand.

    Raises:
        ScheduleError: the file is missing, incomplete or of another version; a field is wrong; two rows have one kernel and
        shape.
    """
    return parse(read_fields(path, ScheduleError))


def parse(fields: Fields) -> PromotedFile:
    """As `read`, for a table from elsewhere, such as a git revision."""
    where, schema = fields.where, fields.get("schema", str)
    if schema not in (SCHEMA, UNSEALED):
        newer = schema.startswith(FAMILY)
        raise ScheduleError(f"{where}: schema {shown(schema)}", expected=repr(SCHEMA), action="update tune-kernels: this file is "
                            "another version's" if newer else "name a file that tune-kernels --on-gpu --promote wrote")
    names = {n: require_name(fields.get(n, str), f"{where}: {n}", ScheduleError) for n in ("target", "model", "recipe")}
    rows = tuple(row.read(PromotedSchedule, **names) for row in fields.items("rows"))
    fields.done()
    seen: set[tuple[str, str]] = set()
    for i, row in enumerate(rows):
        if _place(row) in seen:
            raise ScheduleError(f"{where}: rows[{i}]: a second row of {row.kernel} {shape_to_dict(row.shape)}",
                                expected="one row per kernel and shape")
        seen.add(_place(row))
    return PromotedFile(**names, rows=rows)


def text_of(file: PromotedFile) -> str:
    """The file's text. Raises ValueError for a number that JSON doesn't have."""
    table = {"schema": SCHEMA, "target": file.target, "model": file.model, "recipe": file.recipe,
             "rows": [row_to_dict(row) for row in sorted(file.rows, key=_place)]}
    text = json.dumps(table, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return NUMBERS.sub(lambda m: f"[{' '.join(m.group(1).split())}]", text) + "\n"


def with_rows(old: PromotedFile | None, new: PromotedFile) -> PromotedFile:
    """The old file with the new one's rows, which replace those of the same kernel and shape."""
    replaced = {_place(row): row for row in (*(old.rows if old else ()), *new.rows)}
    return dataclasses.replace(new, rows=tuple(replaced[place] for place in sorted(replaced)))


def promote(folder: Path, new: PromotedFile, instead_of: Iterable[PromotedSchedule] | None = None) -> Path:
    """Write rows to their file in a folder of schedules, under a lock; other rows stay. Returns the file.

    instead_of: if given, the only rows of the same key that may be replaced.

    Raises:
        ScheduleError: the old file is unreadable, the folder isn't writable, a row has problems, or it would replace a row that
        isn't
            in `instead_of`.
    """
    for row in new.rows:
        if problems := row.problems():
            raise ScheduleError(f"{row.kernel}: {problems[0].text}", expected="a row with its own evidence",
                                action="measure it again: tune-kernels --on-gpu")
    for name in (new.target, new.model, new.recipe):
        require_name(name, "promoted file", ScheduleError)
    assert all((row.target, row.model, row.recipe) == (new.target, new.model, new.recipe) for row in new.rows)
    path = folder / new.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent / f".{path.name}.lock"):
            old = read(path) if path.exists() else None
            if old and (old.model, old.recipe) != (new.model, new.recipe):
                raise ScheduleError(f"{path} holds rows of {old.model}, {old.recipe}", expected=f"of {new.model}, {new.recipe}",
                                    action="give the kernel another name")
            if instead_of is not None:
                _require_same(path, old, new, list(instead_of))
            text = text_of(with_rows(old, new))
            parse(parse_fields(text.encode(), "JSON", str(path), ScheduleError))  # never write an unreadable file
            replace_text(path, text, durable=True)
    except OSError as e:
        raise ScheduleError(f"{path}: {e.strerror or e}", expected="a writable folder",
                            action="name another one with --schedules") from None
    return path


def _require_same(path: Path, old: PromotedFile | None, new: PromotedFile, instead_of: list[PromotedSchedule]) -> None:
    """Raises ScheduleError if a row of the same key would be replaced that isn't in `instead_of`. A row of another toolchain or
    source may be replaced: it was never loaded."""
    keys = {_place(row): key_of(row) for row in new.rows}
    for row in old.rows if old else ():
        if keys.get(_place(row)) == key_of(row) and row not in instead_of:
            raise ScheduleError(f"{path}: {row.kernel}: the row has changed to {row.schedule_id}, {row.date}",
                                expected="the row that was loaded", action="run it again: it then starts from this row")


def _place(row: PromotedSchedule) -> tuple[str, str]:
    """Kernel and shape, which are unique in a file."""
    return row.kernel, json.dumps(shape_to_dict(row.shape), sort_keys=True)


def _not_promoted(key: Key, folders: Sequence[Path], refused: list[str]) -> NotPromoted:
    wanted = key.parts()
    own = key.recipe == OWN.name
    what = f"no promoted schedule of {key.kernel} {wanted['shape']} for {key.target}" + ("" if own else f", recipe {key.recipe}")
    run = (f"tune-kernels --on-gpu --kernel {'FILE.py' if own else key.kernel} --promote on a {key.target}, or "
           + ("tuned(kernel, default={...})" if own else "--allow-untuned for the recipe's default"))
    if refused:
        return NotPromoted(f"{what}: {refused[0]}", expected="a row as it was measured", action=run)
    near = _nearest(wanted, folders)
    if near is None:
        return NotPromoted(f"{what}, and none of this kernel", action=run,
                           expected=f"a row in one of {', '.join(map(str, folders))}")
    found, differ = near
    return NotPromoted(f"{what}: the nearest has {', '.join(f'{name} {found[name]}' for name in differ)}", action=run,
                       expected=", ".join(f"{name} {wanted[name]}" for name in differ))


def _nearest(wanted: Mapping[str, object], folders: Sequence[Path]) -> tuple[dict[str, object], list[str]] | None:
    """(parts, names of the different parts) of this kernel's row with the fewest differences."""
    try:
        rows = rows_like(folders, lambda row: row.kernel == wanted["kernel"])
    except ScheduleError:
        return None  # a damaged file of another SKU or recipe must not replace this error
    found = [key_of(row).parts() for row in rows]
    differing = [(parts, [name for name in wanted if parts[name] != wanted[name]]) for parts in found]
    return min(differing, key=lambda pair: len(pair[1]), default=None)
