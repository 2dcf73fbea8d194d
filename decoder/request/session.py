"""One request on one target: its tokens, its cache, and the verification of a draft.

Between rounds the cache holds every token but the last one, which is pending. A round feeds the pending token and the draft in
one pass. Row i chooses the token after its own; a drafted token is right if it equals the choice of the row before it.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch

from ..backend import Hidden, Model
from ..drafter import Outcome
from ..rows import Appended, Cache
from ..sampling import log_softmax, most_likely, no_answer
from ..stats import Stats
from .output import Alternative, Output, TokenLogprob
from .prefix import Prefix
from .request import Request


class Session:
    """One request's tokens and rounds. layers: target layers whose features the drafter reads."""

    def __init__(self, model: Model, cache: Cache, request: Request, output: Output, stats: Stats,
                 layers: tuple[int, ...] = ()) -> None:
        self.model, self.cache, self.output, self.stats, self.layers = model, cache, output, stats, layers
        self.chooser, self.logprobs = request.chooser, request.logprobs
        self.tokens = list(request.prompt)

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.output.remaining

    def room(self, length: int) -> int:
        """Tokens worth drafting, at most `length`: the recovery token takes one of the remaining tokens."""
        return max(min(length, self.remaining - 1), 0)

    def prefill(self, prefix: Prefix) -> torch.Tensor | None:
        """Feeds the prompt, but for the tokens of `prefix` that begin it, and emits the first token. Returns the features of the
        prompt's rows [rows, n_layers * hidden_size], None without `layers`."""
        started = time.perf_counter()
        self.cache.clear()
        self.cache.cursor = self.stats.reused_tokens = prefix.keep(self.tokens, self.layers)
        for start in range(self.cache.cursor, len(self.tokens), self.model.prefill_rows):
            part = self.tokens[start:start + self.model.prefill_rows]
            hidden = self.model.prefill(part, Appended(self.cache, len(part)), self.layers)
            prefix.add(part, hidden.features)
        chosen, entries = self._choose(Hidden(hidden.final[-1:]), [])
        self.push(chosen, entries)
        self.stats.prompt_tokens = self.cache.cursor
        self.stats.prefill_s = time.perf_counter() - started
        return torch.cat(prefix.features) if prefix.features else None

    def leave(self, prefix: Prefix) -> None:
        """The request has ended. Where decoding and prefill are one path, its tokens are a prefix of the next turn, too; not with
        a drafter that reads features, which decoding keeps for the round alone."""
        if self.model.prefill_is_decode and not self.layers and prefix.tokens:
            prefix.tokens = self.tokens[:min(self.cache.cursor, len(self.tokens) - 1)]

    def verify(self, draft: list[int]) -> Outcome:
        """One pass over the pending token and the draft. The cache keeps the right tokens alone.

        A pass without an answer is repeated without the draft, and the outcome's `drafted` is 0: a drafted token on which the
        target's own numbers overflow reaches the rows beside it (0 x NaN is NaN), and AR never sees that token.
        """
        started = time.perf_counter()
        assert all(0 <= token < self.model.vocab_limit for token in draft), f"drafted {draft}"
        base = len(self.tokens)
        hidden = self.model.forward([self.tokens[-1], *draft], Appended(self.cache, 1 + len(draft)), self.layers)
        emitted, self._entries = self._choose(hidden, draft)
        if emitted[-1] < 0 and draft:
            self.cache.rollback(base - 1)
            return self.verify([])
        accepted = len(emitted) - 1
        self.cache.rollback(base + accepted)
        features = None if hidden.features is None else hidden.features[:accepted + 1]
        self.stats.verify_s += time.perf_counter() - started
        return Outcome(base, len(draft), accepted, emitted, features)

    def emit(self, outcome: Outcome) -> None:
        """Emits the round's tokens one by one until the request ends."""
        kept = self.push(outcome.emitted, self._entries)
        self.stats.count_round(outcome.drafted, outcome.accepted, kept)

    def push(self, tokens: list[int], entries: Sequence[TokenLogprob] = ()) -> int:
        """Emits tokens until the request ends. Returns the number of emitted tokens. -1 marks a row of logits without an answer.

        Raises:
            NumericsError: the request reaches a -1.
        """
        for count, token in enumerate(tokens):
            if token < 0:
                raise no_answer()
            self.tokens.append(token)
            if entries:
                self.output.logprobs.append(entries[count])
            self.output.push(token)
            if self.finished:
                return count + 1
        return len(tokens)

    def _choose(self, hidden: Hidden, draft: list[int]) -> tuple[list[int], list[TokenLogprob]]:
        """(the target's tokens, their log-probabilities): one token per right drafted token and one more; -1 for a row without an
        answer. Later rows aren't judged: AR never computes them."""
        chosen: list[int] = []
        entries: list[TokenLogprob] = []
        if self.chooser.greedy and self.logprobs is None:
            chosen = self.model.greedy(hidden.final)
            return chosen[:first_wrong(draft, chosen) + 1], entries
        for row in self.model.logits(hidden.final).cpu().numpy():
            answered = bool(np.isfinite(row.max()))
            chosen.append(self.chooser.choose(row, len(self.tokens) + len(chosen)) if answered else -1)
            if self.logprobs is not None and answered:
                entries.append(token_logprob(row, chosen[-1], self.logprobs))
            if len(chosen) > len(draft) or chosen[-1] != draft[len(chosen) - 1]:
                break
        return chosen, entries


def first_wrong(draft: list[int], right: list[int]) -> int:
    """The index of the draft's first wrong token; its length if all are right."""
    return next((i for i, token in enumerate(draft) if token != right[i]), len(draft))


def token_logprob(logits: np.ndarray, token: int, alternatives: int) -> TokenLogprob:
    """The log-probabilities of a token and of the most likely ones. logits [vocab_size]: fp32."""
    log_p = log_softmax(logits)
    top: list[Alternative] = [{"token_id": t, "logprob": float(log_p[t])} for t in most_likely(log_p, alternatives)] \
        if alternatives else []
    return {"token_id": token, "logprob": float(log_p[token]), "top": top}
