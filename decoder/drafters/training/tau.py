"""tau on held-out answers without an engine: the rounds of greedy SD on each answer, counted as in Stats.

A round begins with n tokens and drafts from entry n - 2 on. It accepts the drafted tokens that equal the answer's next ones, and
emits these and one more. tau = emitted / rounds, over all answers of a kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .answers import Answer
from .batches import Batch, collate
from .network import DrafterNetwork
from .target import Target

ROWS = 24  # answers per batch


@dataclass(frozen=True)
class Tau:
    """Sums over requests. draft_length: K; accepted_at[j]: rounds whose first j + 1 drafted tokens were right."""

    draft_length: int
    emitted: int
    rounds: int
    accepted_at: tuple[int, ...]

    @property
    def tokens_per_round(self) -> float:
        """tau; 1 without a round."""
        return self.emitted / self.rounds if self.rounds else 1.0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """The share of rounds that accepted each drafted position, 0..1."""
        return tuple(count / max(self.rounds, 1) for count in self.accepted_at)


@torch.no_grad()
def measure_tau(network: DrafterNetwork, target: Target, answers: Sequence[Answer], draft_length: int) -> dict[str, Tau]:
    """tau by kind of prompt, and over all under `all`. answers: the target's greedy ones."""
    counted: dict[str, list[tuple[int, list[int]]]] = {}
    for first in range(0, len(answers), ROWS):
        group = answers[first:first + ROWS]
        right = right_drafts(network, target, collate(group, target.device), draft_length).tolist()
        for answer, row in zip(group, right):
            counted.setdefault(answer.kind, []).append(rounds_of(answer, row, draft_length))
    found = {kind: _pooled(requests, draft_length) for kind, requests in counted.items()}
    return {"all": _pooled([r for requests in counted.values() for r in requests], draft_length), **found}


def right_drafts(network: DrafterNetwork, target: Target, batch: Batch, draft_length: int) -> torch.Tensor:
    """[B, T]: the number of right tokens before the first wrong one, in the draft that begins at each row."""
    length = batch.ids.shape[1]
    rows = torch.arange(length, device=target.device)
    chain = torch.ones_like(batch.ids, dtype=torch.bool)
    right = torch.zeros_like(batch.ids)
    observed = target.observe(batch.ids)
    with target.autocast():
        for step, feature in enumerate(network.unroll(observed.features, observed.embedded, draft_length)):
            drafted = network.ids[network.logits(feature).argmax(-1)]
            inside = rows[None] + 2 < batch.lengths[:, None]
            correct = (drafted == batch.ids.roll(-2, 1)) & inside
            chain = chain & correct.roll(-step, 1) & (rows + step < length)[None]
            right += chain
    return right


def rounds_of(answer: Answer, right: Sequence[int], draft_length: int) -> tuple[int, list[int]]:
    """(tokens emitted by rounds, accepted tokens per round) of one request. The prompt's pass emits the first token. right: a row
    of right_drafts."""
    end, known, accepted = len(answer.ids), answer.start + 1, list[int]()
    while known < end:
        room = min(draft_length, end - known - 1)
        accepted.append(min(right[known - 2], room))
        known += accepted[-1] + 1
    return end - answer.start - 1, accepted


def _pooled(requests: Sequence[tuple[int, list[int]]], draft_length: int) -> Tau:
    rounds = [count for _, accepted in requests for count in accepted]
    return Tau(draft_length, sum(emitted for emitted, _ in requests), len(rounds),
               tuple(sum(count > place for count in rounds) for place in range(draft_length)))
