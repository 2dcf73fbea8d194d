"""The interface between the engine and a drafter, and the choice of likely outcomes for SSD.

Words: a round begins with n tokens, the last of which (the pending one) is in no cache yet. The drafter proposes up to K
tokens; the target accepts the first `accepted` of them and adds its own recovery token. An outcome is (accepted, recovery
token). A drafter decides how fast tokens are emitted and never which: request/drafting.py checks every answer.
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
    """One verified round. base: n; emitted: the accepted drafted tokens and the recovery token; features: the
    target's, for the pending token and each accepted one [accepted + 1, n_layers * hidden_size], or None."""

    base: int
    drafted: int
    accepted: int
    emitted: list[int]
    features: "torch.Tensor | None" = None

    @property
    def key(self) -> OutcomeKey:
        return self.accepted, self.emitted[-1]


class Drafter(Protocol):
    """feature_layers: indices of the target layers whose output it reads, or none. It may have a `max_rows`: see there. Its
    methods are called one at a time, from a thread of the request's own."""

    name: str
    feature_layers: tuple[int, ...]

    def start(self, tokens: list[int], features: "torch.Tensor | None", chooser: Chooser) -> None:
        """A new request: the prompt's tokens and the first emitted one; features of the prompt's rows. Nothing of an earlier
        request is kept."""

    def draft(self, tokens: list[int], length: int) -> list[int]:
        """At most `length` tokens to follow `tokens`."""

    def accept(self, outcome: Outcome) -> None:
        """The verdict on the last draft."""

    def prepare(self, tokens: list[int], draft: list[int], branches: int, length: int) -> Branch:
        """While `draft`, which follows `tokens`, is being verified: next drafts for up to `branches` likely
        outcomes."""


def name_of(drafter: Drafter) -> str:
    """A drafter's name as messages show it: its type's where it has none."""
    try:
        return str(drafter.name)[:40]
    except BaseException:  # an attribute that is missing or fails, whatever it raises
        return type(drafter).__name__


def max_rows(drafter: Drafter) -> int | None:
    """Rows of one pass over a drafter's network, where that bounds its drafts: K + 1 must be at most as many. None for anything
    but an int."""
    try:
        rows = getattr(drafter, "max_rows", None)
    except BaseException:  # an attribute that fails is a fault of the drafter, not of the request
        return None
    return rows if isinstance(rows, int) and rows > 1 else None


def likely_outcomes(scores: Sequence[np.ndarray], draft: Sequence[int], branches: int) -> list[OutcomeKey]:
    """The `branches` most likely outcomes in the drafter's own eyes, the best one of a full accept first.

    scores: for accepted counts 0..K a row [vocabulary] over the token that comes next. P(j, t) = product over i < j of
    q_i(draft_i), times q_j(t). Below K the drafted token is no recovery token: the target would have accepted it. A full
    accept comes first because q_i underrates it: where drafter and target agree on the winner, it is certain.
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
