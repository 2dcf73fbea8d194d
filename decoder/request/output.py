"""The output of a request, and its end: end-of-sequence ids, stop ids, stop strings, the limit.

Tokens are added one at a time, whatever the size of a round: every mode ends a request at the same token.
"""

from dataclasses import dataclass, field
from typing import TypedDict

from .tokenizer import TextStream, Tokenizer


class Alternative(TypedDict):
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


class TokenLogprob(Alternative):
    """The log-probability of an emitted token. top: the most likely tokens in its place, most likely first."""

    top: list[Alternative]


@dataclass(frozen=True)
class EndRules:
    """The conditions that end a request. eos_ids: the model's, empty if ignored; stop_ids, stop: the request's ids and
    strings."""

    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()


@dataclass
class Output:
    """The tokens and text of a request so far.

    token_ids: include the id that ended the request. text: ends before the stop string and holds no special token. finish_reason:
    None while the request runs, then `eos`, `stop` (an id or a string of the request) or `length`.
    """

    rules: EndRules
    tokenizer: Tokenizer | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self._stream = TextStream(self.tokenizer) if self.tokenizer else None
        self._released = 0

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.rules.max_new_tokens - len(self.token_ids)

    def push(self, token: int) -> None:
        """Adds one token. If one token meets several conditions, an end id precedes a stop string, and that the limit."""
        assert self.finish_reason is None
        self.token_ids.append(token)
        if token in self.rules.eos_ids:
            self._end("eos")
        elif token in self.rules.stop_ids:
            self._end("stop")
        else:
            self._extend(self._stream.push(token) if self._stream else "")
            if self.finish_reason is None and self.remaining == 0:
                self._end("length")

    def _extend(self, piece: str) -> None:
        """Adds text, as if characters came one by one: the stop string that is complete first ends the request; of several
        complete at the same character, the longest."""
        before = len(self.text)
        self.text += piece
        found = [(at + len(stop), at) for stop in self.rules.stop
                 if (at := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        if found:
            self.text = self.text[:min(found)[1]]
            self.finish_reason = "stop"

    def _end(self, reason: str) -> None:
        if self._stream:
            self._extend(self._stream.flush())
        self.finish_reason = self.finish_reason or reason

    def release(self) -> str:
        """The text since the last call, less an end that may begin a stop string."""
        end = len(self.text)
        if self.finish_reason is None:
            end -= max((held_back(self.text, stop) for stop in self.rules.stop), default=0)
        piece = self.text[self._released:end]
        self._released = max(self._released, end)
        return piece


def held_back(text: str, stop: str) -> int:
    """The length of the longest proper prefix of `stop` that ends `text`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
