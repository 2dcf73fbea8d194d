"""The prompts for a drafter's training and evaluation: topics joined to tasks, or the user's own lines. There is no data set.

Held-out prompts have topics of their own, so a drafter isn't evaluated on a topic of its training.
"""

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

from ....shapes.fields import read_fields
from ...errors import LoadError

SHIPPED = Path(__file__).parent / "prompts.toml"
HELD_OUT = 20  # prompts of each kind
OWN_KIND = "own"  # kind of the user's prompts
FEWEST = 10  # lines in the user's file


@dataclass(frozen=True)
class TrainingPrompt:
    """kind: code, maths, prose, or own."""

    kind: str
    text: str


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a run. training and held_out share no topic; follow_ups: second questions on an answer; source: the file's
    name; digest: its SHA-256."""

    training: tuple[TrainingPrompt, ...]
    held_out: tuple[TrainingPrompt, ...]
    follow_ups: tuple[str, ...]
    source: str
    digest: str

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the held-out prompts, in the file's order."""
        return tuple(dict.fromkeys(p.kind for p in self.held_out))


@dataclass(frozen=True)
class Group:
    """Topics and tasks that fit together. Each task has a place `{topic}`."""

    kind: str
    topics: tuple[str, ...]
    held_out_topics: tuple[str, ...]
    tasks: tuple[str, ...]

    def prompts(self, topics: tuple[str, ...]) -> list[TrainingPrompt]:
        """Every topic joined to every task."""
        return [TrainingPrompt(self.kind, task.format(topic=topic)) for topic in topics for task in self.tasks]


@dataclass(frozen=True)
class PromptFile:
    """The shipped file."""

    group: tuple[Group, ...]
    follow_ups: tuple[str, ...]


def load_file() -> PromptFile:
    """The shipped prompts. Raises LoadError if their file can't be read."""
    return read_fields(SHIPPED, LoadError).read(PromptFile)


def load_prompts(path: Path | None, seed: int) -> PromptSet:
    """The shipped prompts in an order by seed; or those of a text file, one per line, one in ten held out.

    Raises:
        LoadError: the file can't be read or holds too few prompts.
    """
    shipped = load_file()
    shuffle = random.Random(seed)
    if path is None:
        training = [p for group in shipped.group for p in group.prompts(group.topics)]
        shuffle.shuffle(training)
        return PromptSet(tuple(training), _held_out(shipped.group), shipped.follow_ups, SHIPPED.name, _digest(SHIPPED))
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as e:
        raise LoadError(f"{path}: {e}", expected="a text file with one prompt per line") from None
    own = [TrainingPrompt(OWN_KIND, line) for line in dict.fromkeys(lines)]
    if len(own) < FEWEST:
        raise LoadError(f"{path}: {len(own)} different prompts", expected=f"at least {FEWEST}, one per line")
    shuffle.shuffle(own)
    count = min(max(len(own) // 10, 1), HELD_OUT)
    return PromptSet(tuple(own[count:]), tuple(own[:count]), shipped.follow_ups, path.name, _digest(path))


def _held_out(groups: tuple[Group, ...]) -> tuple[TrainingPrompt, ...]:
    """HELD_OUT prompts per kind, spread evenly over held-out topics and tasks. They don't depend on the seed."""
    found: list[TrainingPrompt] = []
    for kind in dict.fromkeys(group.kind for group in groups):
        prompts = [p for group in groups if group.kind == kind for p in group.prompts(group.held_out_topics)]
        found += [prompts[i * len(prompts) // HELD_OUT] for i in range(HELD_OUT)]
    return tuple(found)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
