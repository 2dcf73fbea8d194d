"""The EAGLE-3 drafter (Li et al. 2025): one layer over the target's features.

Entry i pairs token i + 1 with the target's feature at i, at RoPE position i, and predicts token i + 2. For drafted tokens the
drafter's own output replaces the target's feature, which isn't known yet; after the verification the accepted entries are written
again from the target's features. Forward: normed = concat(input_layernorm(embedding), hidden_norm(feature)); the residual is the
feature; the recurrent feature is the layer's output before the last norm.
"""

import numpy as np
import torch

from ..backend import DraftNetwork, Step
from ..drafter import Branch, Outcome, likely_outcomes
from ..rows import Appended, Branches
from ..sampling import Chooser, no_answer

FEED = 128  # rows of one pass over a prompt


class Eagle3Drafter:
    """See drafter.Drafter. tip: the step of the last entry, valid once every entry is written.

    A drafter may have fewer positions than its target. Once a request has more than `max_position` tokens, it drafts no more."""

    name = "eagle3"

    def __init__(self, model: DraftNetwork, layers: tuple[int, ...], capacity: int) -> None:
        self.model, self.feature_layers, self.max_rows = model, layers, model.max_rows
        self.max_position = min(capacity, model.shape.max_position)
        self.cache = model.new_cache(self.max_position)
        self.beyond = False  # whether the request has outgrown max_position
        self.chooser = Chooser()
        self.pending = model.embedding.new_empty(0, model.shape.hidden_size)  # target features of entries not written yet
        self.tip = Step(self.pending, self.pending)

    def start(self, tokens: list[int], features: torch.Tensor | None, chooser: Chooser) -> None:
        """See Drafter. Writes the prompt's entries."""
        assert features is not None
        self.chooser = chooser
        self.cache.clear()
        self.beyond = False
        if self._outgrown(len(tokens)):
            return
        self.pending = self.model.reduce(features)
        self._catch_up(tokens)

    def _outgrown(self, tokens: int) -> bool:
        """Whether the request has, or had before, more than max_position tokens."""
        self.beyond = self.beyond or tokens > self.max_position
        return self.beyond

    def _catch_up(self, tokens: list[int]) -> None:
        """Writes the entries of the pending target features: the last ones before the end of `tokens`."""
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
        """See Drafter. Writes entries from the target's features first, then from the drafter's own."""
        if self._outgrown(len(tokens) + length):
            return []
        self._catch_up(tokens)
        step, drafted = self.tip, list[int]()
        while len(drafted) < length:
            drafted += self.choose(step.final, [len(tokens) + len(drafted)])
            if len(drafted) < length:
                step = self.model.forward(drafted[-1:], step.feature, Appended(self.cache, 1))
        return drafted

    def choose(self, final: torch.Tensor, indices: list[int]) -> list[int]:
        """The chooser's token for each row of final [rows, H], at these sequence indices. Raises NumericsError for a row without
        an answer."""
        if self.chooser.greedy:
            chosen = self.model.greedy(final)
            if min(chosen) < 0:
                raise no_answer("drafter")
            return chosen
        return [self.chooser.choose(row, i) for row, i in zip(self.rows_over_target(final), indices)]

    def rows_over_target(self, final: torch.Tensor) -> np.ndarray:
        """The logits of final [rows, H] over target ids, [rows, V] fp32; -inf at ids outside the draft vocabulary."""
        logits = self.model.logits(final)
        wide = logits.new_full((logits.shape[0], self.model.shape.vocab_size), -torch.inf)
        wide[:, self.model.ids] = logits
        return wide.cpu().numpy()

    def accept(self, outcome: Outcome) -> None:
        """See Drafter. Drops the entries made from the drafter's own features; the next call writes the accepted ones from the
        target's."""
        assert outcome.features is not None
        if self.beyond:
            return
        self.cache.rollback(min(self.cache.cursor, outcome.base - 1))
        self.pending = torch.cat([self.pending, self.model.reduce(outcome.features)])

    def prepare(self, tokens: list[int], draft: list[int], branches: int, length: int) -> Branch:
        """See Drafter. Writes the entries of the last verdict from the target's features, then those of the draft from the
        drafter's own. All branches draft in one batch."""
        base = len(tokens)
        if self._outgrown(base + len(draft) + length):
            return {}
        self._catch_up(tokens)
        self.cache.rollback(base - 1)
        steps = [self.tip]
        for token in draft:
            steps.append(self.model.forward([token], steps[-1].feature, Appended(self.cache, 1)))
        rows = self.rows_over_target(torch.cat([step.final for step in steps]))
        outcomes = likely_outcomes([self.chooser.scores(row, base + i) for i, row in enumerate(rows)], draft, branches)
        if not outcomes or not length:
            return {}
        own = Branches(self.cache, [base - 1 + count for count, _ in outcomes], length)
        feature = torch.cat([steps[count].feature for count, _ in outcomes])
        last = [token for _, token in outcomes]
        drafted: list[list[int]] = []
        while len(drafted) < length:
            step = self.model.forward(last, feature, own)
            last, feature = self.choose(step.final, [position + 1 for position in own.positions]), step.feature
            drafted.append(last)
        return {key: list(column) for key, column in zip(outcomes, zip(*drafted))}
