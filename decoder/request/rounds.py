"""The rounds of AR, SD and SSD, driven from Python. Each loop yields after every round, when its tokens are emitted.

AR: one token per pass. SD: draft, verify, accept. SSD: while the target verifies, the drafter's thread prepares the next draft
for the likely outcomes; on a hit that draft is used, on a miss the drafter drafts at once. Every emitted token is the target's
choice in all three.
"""

import time
from collections.abc import Iterator

from ..draft_length import DraftLength
from ..drafter import Branch, Outcome
from .drafting import Drafting, Prepared
from .session import Session


def autoregressive(session: Session) -> Iterator[None]:
    """AR: every round verifies an empty draft."""
    while not session.finished:
        session.emit(session.verify([]))
        yield


def speculative(session: Session, drafting: Drafting, draft_length: int, policy: DraftLength | None = None) -> Iterator[None]:
    """SD: the drafter proposes, the target verifies the whole draft in one pass. policy: chooses the draft length of each
    round, 0 for a round of AR."""
    while not session.finished:
        started = time.perf_counter()
        length = policy.next() if policy else draft_length
        draft = propose(session, drafting, length) if length else []
        outcome, _ = finish_round(session, drafting, draft)
        if policy:
            policy.observe(length, outcome.drafted, outcome.accepted, time.perf_counter() - started)
            session.stats.count_draft_length(length)
        yield


def speculative_speculative(session: Session, drafting: Drafting, draft_length: int, branches: int) -> Iterator[None]:
    """SSD (Kumar, Dao, May): as SD, but the drafter prepares next drafts while the target verifies this one."""
    draft = [] if session.finished else propose(session, drafting, draft_length)
    while not session.finished:
        prepared = drafting.prepare(session.tokens, draft, branches, session.room(draft_length))
        outcome, ready = finish_round(session, drafting, draft, prepared)
        yield
        if session.finished:
            return
        served = ready.get(outcome.key)
        if prepared is not None:
            session.stats.count_branch(outcome.accepted, served is not None)
        if served is None:
            draft = propose(session, drafting, draft_length)
        else:
            draft = served[:session.room(draft_length)]


def finish_round(session: Session, drafting: Drafting, draft: list[int],
                 prepared: Prepared = None) -> tuple[Outcome, Branch]:
    """Verifies a draft, waits for the prepared branches, emits the tokens and gives the drafter the outcome."""
    outcome = session.verify(draft)
    ready = drafting.branches(prepared)
    if outcome.drafted < len(draft):
        drafting.fault("the target's logits hold NaN or infinity beside its draft")
    session.emit(outcome)
    if not session.finished:
        drafting.accept(outcome)
    return outcome, ready


def propose(session: Session, drafting: Drafting, draft_length: int) -> list[int]:
    """A draft for the next round; its time goes to stats.draft_s."""
    started = time.perf_counter()
    draft = drafting.draft(session.tokens, session.room(draft_length))
    session.stats.draft_s += time.perf_counter() - started
    return draft
