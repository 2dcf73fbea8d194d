"""The life of one request on a decoder. It holds the decoder's lease from its start until it ends, fails, is closed or is
garbage-collected."""

import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from ..errors import RequestError
from ..stats import Stats
from .output import Output, TokenLogprob


@dataclass(frozen=True)
class Result:
    """A finished request. text: None for a model without tokenizer; token_ids: every emitted id, the end id included;
    finish_reason: `eos`, `stop` or `length`; logprobs: one entry per token, None if not requested."""

    text: str | None
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    stats: Stats


class Lease:
    """The right to use a decoder, which serves one request at a time. The refusal of another request names the holder."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: Callable[[], str] | None = None

    def acquire(self, holder: Callable[[], str]) -> None:
        """Takes the decoder for a request. holder: describes the request, for the refusal of another one.

        Raises:
            RequestError: another request holds it.
        """
        if not self._lock.acquire(blocking=False):
            first = self._holder
            raise RequestError(f"this decoder is serving another request: {first() if first else 'one that has just begun'}",
                               expected="one request at a time for each decoder",
                               action="read that stream to its end or close() it, or load a second decoder")
        self._holder = holder

    def release(self) -> None:
        """Gives the decoder back."""
        self._holder = None
        self._lock.release()


class Stream:
    """An iterator over the text of one request, in pieces that add up to `result.text`. Also a context manager.

    The stream holds the decoder until its last piece, an error, `close`, the end of the `with` block, or its garbage collection.
    One thread at a time may read it; any thread may close it.
    """

    def __init__(self, rounds: Generator[None, None, None], output: Output, finish: Callable[[], Result],
                 release: Callable[[], None]) -> None:
        self._rounds, self._output, self._finish, self._release = rounds, output, finish, release
        self._reading = threading.Lock()
        self._closed = self._released = False
        self._result: Result | None = None

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> str:
        if not self._reading.acquire(blocking=False):
            raise RequestError("this stream is being read by another thread", expected="one reader")
        try:
            return self._piece()
        except BaseException:
            self._closed = True
            raise
        finally:
            self._reading.release()
            if self._closed:
                self._give_back()

    def _piece(self) -> str:
        """Runs rounds until there is text that no stop string can take back."""
        while not self._closed:
            next(self._rounds)
            piece = self._output.release()
            if self._output.finish_reason is not None:
                for _ in self._rounds:
                    raise AssertionError("a round after the request's end")
                self._result, self._closed = self._finish(), True
            if piece:
                return piece
        raise StopIteration

    @property
    def closed(self) -> bool:
        """Whether the request has ended, by itself, an error or `close`."""
        return self._closed

    @property
    def result(self) -> Result:
        """The result of the finished request.

        Raises:
            RequestError: the request still runs, or was closed before its end.
        """
        if self._result is None:
            raise RequestError("this stream has no result: " + ("it was closed before its end" if self._closed else "it is still "
                               "running"), action="read it to its end")
        return self._result

    def close(self) -> None:
        """Ends the request and releases the decoder, after the current round if another thread reads. May be called again."""
        self._closed = True
        self._give_back()

    def _give_back(self) -> None:
        """Ends the rounds and releases the decoder, unless a thread reads: that one does so after its round."""
        if self._reading.acquire(blocking=False):
            try:
                if not self._released:
                    self._released = True
                    try:
                        self._rounds.close()
                    finally:
                        self._release()
            finally:
                self._reading.release()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):  # at interpreter exit, modules may be gone already
            self.close()
