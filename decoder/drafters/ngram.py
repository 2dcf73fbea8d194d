"""n-gram look-up (prompt lookup decoding, Saxena 2023): the draft is the continuation of the last occurrence of the same tokens.

There is no model and no cache. The longest ending of the sequence, of at most LONGEST tokens, that occurred before gives the
draft. A text without repetition gives a shorter draft, or none. kernels/ngram.py is the same rule on a GPU.
"""

from typing import TYPE_CHECKING

from ...kernels.layout import LONGEST
from ..drafter import Branch, Outcome
from ..sampling import Chooser

if TYPE_CHECKING:
    import torch

SHORTEST = 1  # tokens of the ending that is searched last


class NGramDrafter:
    """See drafter.Drafter."""

    name = "ngram"
    feature_layers: tuple[int, ...] = ()

    def start(self, tokens: list[int], features: "torch.Tensor | None", chooser: Chooser) -> None:
        """Keeps nothing: every look-up reads its arguments alone."""

    def draft(self, tokens: list[int], length: int) -> list[int]:
        """The continuation of the latest earlier occurrence, at most `length` tokens."""
        return next(iter(continuations(tokens, length)), []) if length else []

    def accept(self, outcome: Outcome) -> None:
        """Does nothing."""

    def prepare(self, tokens: list[int], draft: list[int], branches: int, length: int) -> Branch:
        """See Drafter. Outcomes in order of accepted tokens, the full accept first; recovery tokens are continuations of earlier
        occurrences."""
        ready: Branch = {}
        for count in range(len(draft), -1, -1):
            context = tokens + draft[:count]
            drafted = draft[count] if count < len(draft) else None
            for continuation in continuations(context, 1):
                token = continuation[0]
                if token != drafted and (count, token) not in ready and len(ready) < branches:
                    ready[count, token] = self.draft([*context, token], length)
        return ready


def continuations(tokens: list[int], length: int) -> list[list[int]]:
    """Up to `length` tokens after each earlier occurrence of the longest ending that has one, latest occurrence first."""
    for size in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        ending = tokens[-size:]
        found = [tokens[at + size:at + size + length] for at in range(len(tokens) - size - 1, -1, -1)
                 if tokens[at:at + size] == ending]
        if found:
            return found
    return []
