"""A drafter that replays a recorded AR run: a scripted number of right tokens, then wrong ones.

It gives tests and benchmarks any pattern of acceptance and of branch hits. An inner drafter does its full work, and the script
overwrites its proposals. Verification is unchanged.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..drafter import Branch, Drafter, Outcome, max_rows
from ..sampling import Chooser

if TYPE_CHECKING:
    import torch


class ScriptedDrafter:
    """See drafter.Drafter. reference: the recorded sequence, prompt included; accepted: right drafted tokens per round, repeated;
    vocab_size: wrong tokens stay below it; hits: whether the branch of the true outcome is ready, per round, repeated; inner: a
    real drafter that works as well."""

    name = "scripted"

    def __init__(self, reference: Sequence[int], accepted: Sequence[int], vocab_size: int,
                 hits: Sequence[bool] = (True,), inner: Drafter | None = None) -> None:
        self.reference, self.accepted, self.vocab_size = list(reference), list(accepted), vocab_size
        self.hits, self.inner = list(hits), inner
        self.feature_layers: tuple[int, ...] = inner.feature_layers if inner else ()
        self.max_rows = max_rows(inner) if inner else None
        self.round_of: dict[int, int] = {}  # tokens at the start of a round -> its number

    def start(self, tokens: list[int], features: "torch.Tensor | None", chooser: Chooser) -> None:
        """See Drafter. Round 0 begins after `tokens`."""
        self.round_of = {len(tokens): 0}
        if self.inner:
            self.inner.start(tokens, features, chooser)

    def draft(self, tokens: list[int], length: int) -> list[int]:
        """See Drafter. The script's tokens for this round."""
        if self.inner:
            self.inner.draft(tokens, length)
        return self._script(len(tokens), length)

    def _script(self, base: int, length: int) -> list[int]:
        number = self.round_of.setdefault(base, max(self.round_of.values(), default=0) + 1)
        right = min(self.accepted[number % len(self.accepted)], length)
        self.round_of[base + right + 1] = number + 1
        known = self.reference[base:base + length]
        return known[:right] + [(token + 1) % self.vocab_size for token in known[right:]]

    def accept(self, outcome: Outcome) -> None:
        """See Drafter. For the inner drafter alone."""
        if self.inner:
            self.inner.accept(outcome)

    def prepare(self, tokens: list[int], draft: list[int], branches: int, length: int) -> Branch:
        """See Drafter. The branch of the true outcome if the script hits; the others are for wrong outcomes."""
        base = len(tokens)
        if self.inner:
            self.inner.prepare(tokens, draft, branches, length)
        truth = self.reference[base:]
        count = next((i for i, token in enumerate(draft) if i >= len(truth) or token != truth[i]), len(draft))
        ready: Branch = {}
        number = self.round_of.get(base, 0)
        if count < len(truth):
            if self.hits[number % len(self.hits)] and branches:
                ready[count, truth[count]] = self._script(base + count + 1, length)
            for offset in range(1, branches - len(ready) + 1):
                ready[count, (truth[count] + offset) % self.vocab_size] = [0] * length
        return ready
