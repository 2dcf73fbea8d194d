"""The three decoders. Each is a loop of rounds that yields after every round, when its tokens are out.

AR: one token a pass. SD: draft, verify, accept. SSD: while the target verifies, a worker thread lets the drafter
prepare the next draft for the likely outcomes; a hit serves it, a miss drafts at once. What is emitted is the
target's choice in all three.
"""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ..drafter import Branch, Drafter
from ..stats import Stats
from .session import Session


def autoregressive(session: Session) -> Iterator[None]:
    """AR: a round without a draft, again and again."""
    while not session.finished:
        session.emit(session.verify([]))
        yield


def speculative(session: Session, drafter: Drafter, draft_length: int) -> Iterator[None]:
    """SD: the drafter proposes, the target checks all of it in one pass."""
    while not session.finished:
        draft = propose(session, drafter, draft_length)
        outcome = session.verify(draft)
        drafter.accept(outcome)
        session.emit(outcome)
        yield


def speculative_speculative(session: Session, drafter: Drafter, draft_length: int, branches: int) -> Iterator[None]:
    """SSD (Kumar, Dao, May): as SD, with the next draft prepared while this one is being verified."""
    with Lookahead(drafter) as lookahead:
        draft = [] if session.finished else propose(session, drafter, draft_length)
        while not session.finished:
            number = session.stats.rounds
            lookahead.ask(Question(number, list(session.tokens), draft, branches, session.room(draft_length)))
            outcome = session.verify(draft)
            ready = lookahead.answer(number, session.stats)
            drafter.accept(outcome)
            session.emit(outcome)
            yield
            if session.finished:
                return
            served = ready.get(outcome.key)
            if served is None:
                session.stats.branch_misses += 1
                draft = propose(session, drafter, draft_length)
            else:
                session.stats.branch_hits += 1
                draft = served[:session.room(draft_length)]


def propose(session: Session, drafter: Drafter, draft_length: int) -> list[int]:
    """A draft for the round that begins now, timed."""
    started = time.perf_counter()
    draft = drafter.draft(session.tokens, session.room(draft_length))
    session.stats.draft_s += time.perf_counter() - started
    return draft


@dataclass(frozen=True)
class Question:
    """What the drafter prepares for: the round's number, the tokens before it, its draft, branches wanted, their
    length."""

    number: int
    tokens: list[int]
    draft: list[int]
    branches: int
    length: int


@dataclass(frozen=True)
class Reply:
    """The branches of one round, or the error that came instead; started and ended in seconds of perf_counter."""

    number: int
    branches: Branch
    error: BaseException | None
    started: float
    ended: float


class Lookahead:
    """A worker thread that lets a drafter prepare branches, one question at a time. A reply belongs to its round by
    number; one of another round is dropped and counted."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="tune-kernels-drafter", daemon=True)

    def __enter__(self) -> "Lookahead":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.questions.put(None)
        self.thread.join()

    def ask(self, question: Question) -> None:
        """Starts the drafter on it; returns at once."""
        self.questions.put(question)

    def answer(self, number: int, stats: Stats) -> Branch:
        """The branches of round `number`, waited for if need be. Raises what the drafter raised."""
        verified = time.perf_counter()
        while (reply := self.replies.get()).number != number:
            stats.stale_replies += 1
        stats.sync_s += time.perf_counter() - verified
        stats.overlap_s += max(min(verified, reply.ended) - reply.started, 0.0)
        if reply.error is not None:
            raise reply.error
        return reply.branches

    def _work(self) -> None:
        while (question := self.questions.get()) is not None:
            started = time.perf_counter()
            branches: Branch = {}
            error: BaseException | None = None
            try:
                branches = self.drafter.prepare(question.tokens, question.draft, question.branches, question.length)
            except BaseException as e:  # handed to the thread that waits
                error = e
            self.replies.put(Reply(question.number, branches, error, started, time.perf_counter()))
