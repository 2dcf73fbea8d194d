"""n-gram lookup (prompt lookup decoding, Saxena 2023): the continuation of the last occurrence of the same tokens.

No model, no cache: the longest ending of at most LONGEST tokens that occurred before gives the draft. A text without
repetition gives fewer tokens than asked, or none.
"""

from typing import TYPE_CHECKING

from ..drafter import Branch, Outcome
from ..sampling import Chooser

if TYPE_CHECKING:
    import torch

LONGEST = 3  # tokens of context that are searched first; longer ones match less often and guess hardly better
SHORTEST = 1


class NGramDrafter:
    """See drafter.Drafter."""

    name = "ngram"
    feature_layers: tuple[int, ...] = ()

    def start(self, tokens: list[int], features: "torch.Tensor | None", chooser: Chooser) -> None:
        """Nothing to keep: every look-up reads the tokens it is given."""

    def draft(self, tokens: list[int], length: int) -> list[int]:
        """The continuation of the latest earlier occurrence."""
        return next(iter(continuations(tokens, length)), []) if length else []

    def accept(self, outcome: Outcome) -> None:
        """Nothing to repair."""

    def prepare(self, tokens: list[int], draft: list[int], branches: int, length: int) -> Branch:
        """Outcomes: the whole draft accepted first, then ever earlier cuts; recovery tokens are continuations
        of earlier occurrences."""
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
    """Up to `length` tokens after each earlier occurrence of the longest ending that has one, latest occurrence
    first."""
    for size in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        ending = tokens[-size:]
        found = [tokens[at + size:at + size + length] for at in range(len(tokens) - size - 1, -1, -1)
                 if tokens[at:at + size] == ending]
        if found:
            return found
    return []
