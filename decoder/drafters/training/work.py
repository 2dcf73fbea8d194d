"""The folder of a run: its settings, the time so far, its answers and its last checkpoint. An interrupted run resumes from
OUT/work. Every file is published by renaming, so a kill leaves the old file or the new one."""

import dataclasses
import json
import time
from dataclasses import dataclass

from ....shapes.fields import read_fields
from ....shapes.files import replace_text
from ...errors import LoadError
from .export import WEIGHTS
from .prompts import PromptSet
from .settings import Settings, Sizes

WORK, RUN = "work", "run.json"


@dataclass(frozen=True)
class Claim:
    """The run that a folder belongs to. weights: fingerprint of the target's; prompts: SHA-256 of their file; seconds: of the run
    so far."""

    weights: str
    prompts: str
    minutes: float
    draft_vocab: int
    seed: int
    sizes: Sizes
    seconds: float


class Work:
    """The folder of one run. folder: OUT/work; limit: seconds of the whole run."""

    def __init__(self, settings: Settings) -> None:
        """Makes the folder.

        Raises:
            LoadError: OUT holds a drafter already, or anything but an interrupted run.
        """
        out = settings.out
        if (out / WEIGHTS).exists():
            raise LoadError(f"{out} holds a drafter already", expected="a new folder", action="pass another --out, or remove it")
        if out.exists() and not (out / WORK / RUN).is_file() and (not out.is_dir() or any(out.iterdir())):
            raise LoadError(f"{out} is not empty and holds no interrupted run", expected="a new folder",
                            action="pass another --out")
        self.folder, self.settings = out / WORK, settings
        self.folder.mkdir(parents=True, exist_ok=True)
        self.limit, self.spent, self.started = 60 * settings.minutes, 0.0, time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of the run so far, those before an interruption included."""
        return self.spent + time.monotonic() - self.started

    def claim(self, sizes: Sizes, weights: str, prompts: PromptSet) -> None:
        """Records the run in the folder, or resumes the seconds of the interrupted one there.

        Raises:
            LoadError: the interrupted run has other settings, weights or prompts.
        """
        chosen = Claim(weights, prompts.digest, self.settings.minutes, self.settings.draft_vocab, self.settings.seed, sizes, 0.0)
        path = self.folder / RUN
        if not path.is_file():
            self._publish(chosen)
            return
        found = read_fields(path, LoadError).read(Claim)
        before, now = dataclasses.asdict(found), dataclasses.asdict(chosen)
        for name in before:
            if name != "seconds" and before[name] != now[name]:
                raise LoadError(f"{self.folder.parent} holds an interrupted run with {name} {before[name]}, not {now[name]}",
                                expected="the same settings", action="repeat its command, or pass another --out")
        self.spent = found.seconds

    def note_seconds(self) -> None:
        """Records the seconds so far, for a resumed run."""
        self._publish(dataclasses.replace(read_fields(self.folder / RUN, LoadError).read(Claim), seconds=round(self.seconds, 3)))

    def _publish(self, claim: Claim) -> None:
        replace_text(self.folder / RUN, json.dumps(dataclasses.asdict(claim), indent=2) + "\n")
