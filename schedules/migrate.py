"""`python -m tune_kernels.schedules.migrate FOLDER...`: adds the digest of schema 2 to rows of schema 1.

Schema 1 digested the knobs alone: it didn't detect hand edits of other values. Migration seals the rows unchanged, so run it on
files with a trusted history. A row with problems is refused, and its file stays unchanged.
"""

import sys
from dataclasses import replace
from pathlib import Path

from ..shapes.errors import UserError
from ..shapes.files import replace_text
from .errors import ScheduleError
from .store import PromotedFile, read, text_of


def sealed(file: PromotedFile, where: str) -> PromotedFile:
    """The file with a digest in every row. Raises ScheduleError for a row with problems."""
    rows = tuple(row if row.row_digest else row.sealed() for row in file.rows)
    for row in rows:
        if problems := row.problems():
            raise ScheduleError(f"{where}: {row.kernel}: {problems[0].text}", expected="a row as it was measured",
                                action="take the row from the commit that promoted it, or measure it again")
    return replace(file, rows=rows)


def main(folders: list[str]) -> int:
    """Migrate every file of the folders. Returns the exit code."""
    if not folders:
        print("usage: python -m tune_kernels.schedules.migrate FOLDER...", file=sys.stderr)
        return 2
    for path in (path for folder in folders for path in sorted(Path(folder).glob("*/*.json"))):
        try:
            old = read(path)
            new = sealed(old, str(path))
            if text_of(new) != path.read_text(encoding="utf-8"):
                replace_text(path, text_of(new))
                print(f"{path}: {sum(row.row_digest is None for row in old.rows)} rows sealed")
        except (UserError, OSError) as e:
            print(f"error: {e}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
