"""A small model of the target's vocabulary as the drafter (Leviathan, Kalman, Matias 2023; Chen et al. 2023).

Its cache holds a prefix of the sequence; the next pass feeds the missing tokens. One rule covers a rollback, a full accept (the
drafter has never fed its last drafted token) and a branch hit: keep the accepted tokens, feed the rest.
"""

from typing import TYPE_CHECKING

from ..backend import Model
from ..drafter import Branch, Outcome, likely_outcomes
from ..rows import Appended, Branches, Cache
from ..sampling import Chooser, no_answer

if TYPE_CHECKING:
    import torch

FEED = 128  # rows of one pass over a prompt


def choose_rows(model: Model, final: "torch.Tensor", chooser: Chooser, indices: list[int]) -> list[int]:
    """The chooser's token for each row of final [rows, H], at these sequence indices. Raises NumericsError for a row without an
    answer."""
    if chooser.greedy:
        chosen = model.greedy(final)
        if min(chosen) < 0:
            raise no_answer("drafter")
        return chosen
    return [chooser.choose(row, index) for row, index in zip(model.logits(final).cpu().numpy(), indices)]


def feed(model: Model, cache: Cache, tokens: list[int]) -> "torch.Tensor":
    """Appends tokens to the cache, FEED rows per pass. Returns the final rows of the last pass."""
    final = None
    for start in range(0, len(tokens), FEED):
        part = tokens[start:start + FEED]
        run = model.forward if len(tokens) <= model.max_rows else model.prefill
        final = run(part, Appended(cache, len(part))).final
    assert final is not None
    return final


class SmallModelDrafter:
    """See drafter.Drafter. capacity: tokens of its cache."""

    name = "model"
    feature_layers: tuple[int, ...] = ()

    def __init__(self, model: Model, capacity: int) -> None:
        self.model, self.max_rows = model, model.max_rows
        self.cache = model.new_cache(capacity)
        self.chooser = Chooser()

    def start(self, tokens: list[int], features: "torch.Tensor | None", chooser: Chooser) -> None:
        """See Drafter. Feeds the prompt."""
        self.chooser = chooser
        self.cache.clear()
        feed(self.model, self.cache, tokens[:-1])

    def draft(self, tokens: list[int], length: int) -> list[int]:
        """See Drafter. Feeds the tokens that the cache lacks, then one token per pass."""
        drafted: list[int] = []
        rest = tokens[self.cache.cursor:]
        while len(drafted) < length:
            final = feed(self.model, self.cache, rest)[-1:]
            drafted += choose_rows(self.model, final, self.chooser, [len(tokens) + len(drafted)])
            rest = drafted[-1:]
        return drafted

    def accept(self, outcome: Outcome) -> None:
        """See Drafter. Keeps the keys of the accepted tokens that were fed."""
        self.cache.rollback(min(self.cache.cursor, outcome.base + outcome.accepted))

    def prepare(self, tokens: list[int], draft: list[int], branches: int, length: int) -> Branch:
        """See Drafter. One pass over the whole draft gives the likely outcomes. Then all branches draft in one batch, one pass
        per token."""
        base = len(tokens)
        self.cache.rollback(min(self.cache.cursor, base - 1))
        final = feed(self.model, self.cache, tokens[self.cache.cursor:] + draft)[-(len(draft) + 1):]
        rows = self.model.logits(final).cpu().numpy()
        outcomes = likely_outcomes([self.chooser.scores(row, base + i) for i, row in enumerate(rows)], draft, branches)
        if not outcomes or not length:
            return {}
        own = Branches(self.cache, [base + count for count, _ in outcomes], length)
        last = [token for _, token in outcomes]
        drafted: list[list[int]] = []
        while len(drafted) < length:
            final = self.model.forward(last, own).final
            last = choose_rows(self.model, final, self.chooser, own.positions)
            drafted.append(last)
        return {key: list(column) for key, column in zip(outcomes, zip(*drafted))}
