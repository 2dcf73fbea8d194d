"""One request on one target: its tokens, its cache, and the verification of a draft.

Between rounds the cache holds every token but the last one, which is pending. A round feeds the pending token and
the draft in one pass; row i chooses the token after them, and the draft is right as far as it equals those choices.
"""

import time
from collections.abc import Sequence

import torch

from ..backend import Hidden, Model
from ..drafter import Outcome
from ..errors import NumericsError
from ..rows import Appended, Cache
from ..sampling import Chooser, log_softmax, most_likely
from ..stats import Stats
from .output import Output


class Session:
    """layers: target layers whose output the drafter wants. logprobs: alternatives recorded beside each token, 0 for
    none; None records no log-probabilities."""

    def __init__(self, model: Model, cache: Cache, prompt: list[int], output: Output, chooser: Chooser, stats: Stats,
                 layers: tuple[int, ...] = (), logprobs: int | None = None) -> None:
        self.model, self.cache, self.output, self.chooser, self.stats = model, cache, output, chooser, stats
        self.layers, self.logprobs = layers, logprobs
        self.tokens = list(prompt)

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.output.remaining

    def room(self, length: int) -> int:
        """Tokens worth drafting: the recovery token takes one of those that may still come."""
        return max(min(length, self.remaining - 1), 0)

    def prefill(self) -> torch.Tensor | None:
        """Feeds the prompt and emits the first token; the features of the prompt's rows, if any are wanted."""
        started = time.perf_counter()
        self.cache.clear()
        kept: list[torch.Tensor] = []
        for start in range(0, len(self.tokens), self.model.prefill_rows):
            part = self.tokens[start:start + self.model.prefill_rows]
            hidden = self.model.prefill(part, Appended(self.cache, len(part)), self.layers)
            if hidden.features is not None:
                kept.append(hidden.features)
        chosen, entries = self._choose(Hidden(hidden.final[-1:]), [])
        self.push(chosen, entries)
        self.stats.prompt_tokens = self.cache.cursor
        self.stats.prefill_s = time.perf_counter() - started
        return torch.cat(kept) if kept else None

    def verify(self, draft: list[int]) -> Outcome:
        """One pass over the pending token and the draft; keeps what is right and forgets the rest."""
        started = time.perf_counter()
        assert all(0 <= token < self.model.shape.vocab_size for token in draft), f"drafted {draft}"
        base = len(self.tokens)
        hidden = self.model.forward([self.tokens[-1], *draft], Appended(self.cache, 1 + len(draft)), self.layers)
        emitted, self._entries = self._choose(hidden, draft)
        accepted = len(emitted) - 1
        self.cache.rollback(base + accepted)
        features = None if hidden.features is None else hidden.features[:accepted + 1]
        self.stats.verify_s += time.perf_counter() - started
        return Outcome(base, len(draft), accepted, emitted, features)

    def emit(self, outcome: Outcome) -> None:
        """Hands the round's tokens out one by one until the request ends."""
        kept = self.push(outcome.emitted, self._entries)
        self.stats.count_round(outcome.drafted, outcome.accepted, kept)

    def push(self, tokens: list[int], entries: Sequence[dict[str, object]] = ()) -> int:
        """Hands tokens out until the request ends; how many went out."""
        for count, token in enumerate(tokens):
            self.tokens.append(token)
            if entries:
                self.output.logprobs.append(entries[count])
            self.output.push(token)
            if self.finished:
                return count + 1
        return len(tokens)

    def _choose(self, hidden: Hidden, draft: list[int]) -> tuple[list[int], list[dict[str, object]]]:
        """The target's tokens for this pass: as many as drafted ones are right, and one more; and their
        log-probabilities."""
        if self.chooser.greedy and self.logprobs is None:
            winners = self.model.greedy(hidden.final)
            right = next((i for i, token in enumerate(draft) if token != winners[i]), len(draft))
            return winners[:right + 1], []
        chosen: list[int] = []
        entries: list[dict[str, object]] = []
        for row in self.model.logits(hidden.final).cpu().numpy():
            if row.max() != row.max():
                raise NumericsError("the model's logits hold NaN", expected="finite logits")
            chosen.append(self.chooser.choose(row, len(self.tokens) + len(chosen)))
            if self.logprobs is not None:
                log_p = log_softmax(row)
                top = [{"token_id": t, "logprob": float(log_p[t])} for t in most_likely(log_p, self.logprobs)] \
                    if self.logprobs else []
                entries.append({"token_id": chosen[-1], "logprob": float(log_p[chosen[-1]]), "top": top})
            if len(chosen) > len(draft) or chosen[-1] != draft[len(chosen) - 1]:
                break
        return chosen, entries
