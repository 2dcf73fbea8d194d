"""What a recorded process says: one JSON line per event, in a file per process, written at once so that a crash loses nothing."""

import json
import os
from pathlib import Path
from typing import TextIO


class Events:
    """Writes lines. A forked process goes on in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = 0
        self.file: TextIO | None = None

    def write(self, kind: str, **fields: object) -> None:
        """One event. The fields are JSON already, but for paths and the like, which become their text."""
        if self.file is None or self.process != os.getpid():
            self.process = os.getpid()
            self.file = open(self.folder / f"{self.process}.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self.file.write(json.dumps({"event": kind, **fields}, default=str) + "\n")
