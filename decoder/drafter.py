"""The interface between the engine and a drafter, and the choice of likely outcomes for SSD.

A round begins with n tokens, the last of which (the pending one) is in no cache yet. The drafter proposes up to K tokens. The
target accepts the first `accepted` of them and adds its recovery token. An outcome is (accepted, recovery token). A drafter
changes the speed of a request and never its tokens: request/drafting.py checks every answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .sampling import Chooser, log_softmax, most_likely

if TYPE_CHECKING:
    import torch

OutcomeKey = tuple[int, int]
Branch = dict[OutcomeKey, list[int]]


@dataclass(frozen=True)
class Outcome:
    """One verified round. base: n; drafted: tokens of the draft; emitted: the accepted tokens and the recovery token; features
    [accepted + 1, n_layers * hidden_size]: the target's, for the pending token and each accepted one, or None."""

    base: int
    drafted: int
    accepted: int
    emitted: list[int]
    features: "torch.Tensor | None" = None

    @property
    def key(self) -> OutcomeKey:
        return self.accepted, self.emitted[-1]


class Drafter(Protocol):
    """Proposes tokens. feature_layers: indices of the target layers whose output it reads, or none. An attribute `max_rows` is
    optional: see `max_rows`. Methods are called one at a time, from a thread of the request."""

    name: str
    feature_layers: tuple[int, ...]

    def start(self, tokens: list[int], features: "torch.Tensor | None", chooser: Chooser) -> None:
        """Begins a request and forgets the last one. tokens: the prompt and the first emitted token; features [prompt rows,
        n_layers * hidden_size]: the target's, or None; chooser: the request's."""

    def draft(self, tokens: list[int], length: int) -> list[int]:
        """At most `length` tokens to follow `tokens`."""

    def accept(self, outcome: Outcome) -> None:
        """Learns the outcome of the last draft."""

    def prepare(self, tokens: list[int], draft: list[int], branches: int, length: int) -> Branch:
        """Next drafts, of at most `length` tokens each, for up to `branches` likely outcomes of `draft`, which follows `tokens`.
        Called while the target verifies `draft`."""


def name_of(drafter: Drafter) -> str:
    """A drafter's name for messages, cut at 40 characters; its type's if it has none."""
    try:
        return str(drafter.name)[:40]
    except BaseException:  # a missing attribute, or any error of a property
        return type(drafter).__name__


def max_rows(drafter: Drafter) -> int | None:
    """Rows of one pass over a drafter's network, if they bound its drafts: K + 1 <= max_rows. None if the drafter has no such
    attribute, or one that isn't an int above 1."""
    try:
        rows = getattr(drafter, "max_rows", None)
    except BaseException:  # a failing property must not end the request
        return None
    return rows if isinstance(rows, int) and rows > 1 else None


def likely_outcomes(scores: Sequence[np.ndarray], draft: Sequence[int], branches: int) -> list[OutcomeKey]:
    """The `branches` most likely outcomes by the drafter's distribution q, the best full accept first.

    scores: K + 1 rows of logits [vocabulary], row j for the token after j accepted ones. P(j, t) = product over i < j of
    q_i(draft_i), times q_j(t). For j < K the drafted token is no recovery token: the target would have accepted it. A full accept
    comes first because q underrates it: if drafter and target agree on each winner, it is certain.
    """
    found: list[tuple[float, int, int]] = []
    reach = 0.0
    for count, row in enumerate(scores):
        log_q = log_softmax(row)
        drafted = draft[count] if count < len(draft) else None
        tokens = [t for t in most_likely(log_q, branches + 1) if t != drafted][:branches]
        found += [(-(reach + float(log_q[t])), count, t) for t in tokens]
        reach += float(log_q[drafted]) if drafted is not None else 0.0
    ordered = [(count, token) for _, count, token in sorted(found)]
    full = next(key for key in ordered if key[0] == len(draft))
    return [full, *(key for key in ordered if key != full)][:branches]
