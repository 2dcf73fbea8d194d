"""The EAGLE-3 drafter (Li et al. 2025): one layer over the target's features.

Entry i pairs token i + 1 with the target's feature at i, at RoPE position i, and predicts token i + 2. Where the
target's feature isn't there yet, the drafter's own output stands for it; after a verification the accepted entries
are written again from the target's features. Forward: normed = concat(input_layernorm(embedding),
hidden_norm(feature)); the residual is the feature itself; the recurrent feature is the layer's output before the
last norm.
"""

import torch

from ..backend import DraftNetwork, Step
from ..drafter import Branch, Outcome, likely_outcomes
from ..rows import Appended, Branches
from ..sampling import Chooser, no_answer

FEED = 128  # rows of one pass over a prompt


class Eagle3Drafter:
    """See drafter.Drafter. `tip` is the step of the entry before the next token, known once the cache is caught up.

    A head may have fewer positions than its target: it drafts up to `max_position` tokens and then no more of this request."""

    name = "eagle3"

    def __init__(self, model: DraftNetwork, layers: tuple[int, ...], capacity: int) -> None:
        self.model, self.feature_layers, self.max_rows = model, layers, model.max_rows
        self.max_position = min(capacity, model.shape.max_position)
        self.cache = model.new_cache(self.max_position)
        self.beyond = False  # the request has outgrown max_position
        self.chooser = Chooser()
        self.pending = model.embedding.new_empty(0, model.shape.hidden_size)  # target features of entries not written yet
        self.tip = Step(self.pending, self.pending)

    def start(self, tokens: list[int], features: torch.Tensor | None, chooser: Chooser) -> None:
        """The prompt's features; feeds all its entries."""
        assert features is not None
        self.chooser = chooser
        self.cache.clear()
        self.beyond = False
        if self._outgrown(len(tokens)):
            return
        self.pending = self.model.reduce(features)
        self._catch_up(tokens)

    def _outgrown(self, tokens: int) -> bool:
        """Whether the request is past its last draft: so many tokens, now or before, are more than max_position."""
        self.beyond = self.beyond or tokens > self.max_position
        return self.beyond

    def _catch_up(self, tokens: list[int]) -> None:
        """Writes the entries whose target features have arrived: the last ones before the end of `tokens`."""
        done = 0
        while done < len(self.pending):
            part = self.pending[done:done + FEED]
            first = self.cache.cursor + 1  # entry i holds token i + 1
            step = self.model.forward(tokens[first:first + len(part)], part, Appended(self.cache, len(part)))
            self.tip = step.last()
            done += len(part)
        self.pending = self.pending[:0]
        assert self.cache.cursor >= len(tokens) - 1

    def draft(self, tokens: list[int], length: int) -> list[int]:
        """Entries from the target's features first, then the drafter's own."""
        if self._outgrown(len(tokens) + length):
            return []
        self._catch_up(tokens)
        step, drafted = self.tip, list[int]()
        while len(drafted) < length:
            drafted += self._choose(step.final, [len(tokens) + len(drafted)])
            if len(drafted) < length:
                step = self.model.forward(drafted[-1:], step.feature, Appended(self.cache, 1))
        return drafted

    def _choose(self, final: torch.Tensor, indices: list[int]) -> list[int]:
        if self.chooser.greedy:
            chosen = self.model.greedy(final)
            if min(chosen) < 0:
                raise no_answer("drafter")
            return chosen
        return [self.chooser.choose(row, i) for row, i in zip(self.model.rows_over_target(final), indices)]

    def accept(self, outcome: Outcome) -> None:
        """Forgets the entries that stand on the drafter's own features; the accepted ones come back from the
        target's."""
        assert outcome.features is not None
        if self.beyond:
            return
        self.cache.rollback(min(self.cache.cursor, outcome.base - 1))
        self.pending = torch.cat([self.pending, self.model.reduce(outcome.features)])

    def prepare(self, tokens: list[int], draft: list[int], branches: int, length: int) -> Branch:
        """Repairs first: the entries whose target features came with the last verdict. Then walks the draft, its
        last token included, on the drafter's own features, and drafts all likely branches in one batch."""
        base = len(tokens)
        if self._outgrown(base + len(draft) + length):
            return {}
        self._catch_up(tokens)
        self.cache.rollback(base - 1)
        steps = [self.tip]
        for token in draft:
            steps.append(self.model.forward([token], steps[-1].feature, Appended(self.cache, 1)))
        rows = self.model.rows_over_target(torch.cat([step.final for step in steps]))
        outcomes = likely_outcomes([self.chooser.scores(row, base + i) for i, row in enumerate(rows)], draft, branches)
        if not outcomes or not length:
            return {}
        own = Branches(self.cache, [base - 1 + count for count, _ in outcomes], length)
        feature = torch.cat([steps[count].feature for count, _ in outcomes])
        last = [token for _, token in outcomes]
        drafted: list[list[int]] = []
        while len(drafted) < length:
            step = self.model.forward(last, feature, own)
            last, feature = self._choose(step.final, [position + 1 for position in own.positions]), step.feature
            drafted.append(last)
        return {key: list(column) for key, column in zip(outcomes, zip(*drafted))}
