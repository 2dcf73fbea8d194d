"""Rounds that live on the device: draft, verify, accept and the end of a request in one CUDA graph. Python launches rounds ahead
and reads their records when they have come; it takes no part in them.

For greedy requests without log-probabilities on the `triton` backend: AR, and SD with a drafter whose proposal is a chain of
launches (EAGLE-3, a small model), or with a script in its place; SSD with such a drafter is in ahead.py. Everything else goes
through `speculate`; the tokens are the same, because both run the same kernels on the same rows.
"""

import time
from collections.abc import Iterator

import torch

from ...kernels.layout import ENDS
from ..backend import RequestState, RoundPlan
from ..drafter import Drafter
from .cache import DeviceCache
from .model import TritonModel
from .proposals import NoProposal, Proposal, proposal_of
from .round_parts import Rounds, take
from .ssd_rounds import Ahead, prepared_ahead

AHEAD = 2  # batches launched before the oldest one's records are awaited: the device never waits for Python
TOKENS_A_BATCH = 4  # rows verified in one graph, about: several rounds of one token, one of several


def resident_rounds(model: TritonModel, session: RequestState, cache: DeviceCache, plan: RoundPlan) -> Iterator[None] | None:
    """The rounds of a greedy request on the device, or None where its drafter, its branches or its many end ids have no place
    there."""
    proposal = proposal_of(plan.drafter, plan.features)
    ends = sorted(plan.end_ids)
    if proposal is None or len(ends) > ENDS:
        return None
    if proposal.cache is not None and len(session.tokens) + session.remaining > proposal.cache.capacity:
        return None  # a drafter of fewer positions stops drafting on the way, which is driven from Python
    if cache.rounds is None:
        cache.rounds = Rounds(model, cache)
    rounds: Rounds = cache.rounds
    if isinstance(proposal, NoProposal) or (not plan.branches and proposal.cache.buffer.device == cache.buffer.device):
        return resident(session, rounds, plan.drafter, proposal, plan.draft_length, ends)
    if not 0 < plan.branches <= proposal.network.decode.row_tile:
        return None
    assert plan.drafter is not None
    if rounds.ahead is None or not rounds.ahead.serves(proposal, plan.branches):
        rounds.ahead = None  # its memory goes before the new one's comes
        rounds.ahead = Ahead(rounds, proposal, plan.branches)
    return prepared_ahead(session, rounds.ahead, plan.drafter, proposal, plan.draft_length, ends)


def batch_of(draft_length: int) -> int:
    """Rounds in one graph."""
    return max(1, TOKENS_A_BATCH // (draft_length + 1))


@torch.inference_mode()
def begin(session: RequestState, rounds: Rounds, proposal: Proposal, drafter: Drafter | None, ends: list[int]) -> None:
    """A request's first round."""
    rounds.begin(session, drafter, ends)
    proposal.begin(session.tokens[-1], rounds.model.verified)


@torch.inference_mode()
def run(rounds: Rounds, proposal: Proposal, draft_length: int, tokens: int, slot: int, batch: int) -> torch.cuda.Event | None:
    """Launches `batch` rounds, from a graph once there is one, and the copy of their records, from `slot` on; the event says
    when they have come. tokens: an upper bound of what the caches will hold."""
    def launches() -> None:
        for _ in range(batch):
            if draft_length:
                proposal.launch(rounds.model.verified, draft_length, tokens, rounds.propose)
            rounds.verify(draft_length, tokens, proposal.layers)
            rounds.accept(draft_length)

    chunks = rounds.cache.chunks_for(tokens)
    rounds.cache.graphs.run(("rounds", proposal.cache, draft_length, chunks, rounds.script is not None, batch), launches)
    return rounds.fetch(slot, batch)


def resident(session: RequestState, rounds: Rounds, drafter: Drafter | None, proposal: Proposal, draft_length: int,
             ends: list[int]) -> Iterator[None]:
    """The rounds of one request; yields after each, when its tokens are out. ends: ids that end it."""
    stats, cache = session.stats, rounds.cache
    with rounds.model.lock:
        begin(session, rounds, proposal, drafter, ends)
        batch = batch_of(draft_length)
        waiting: list[tuple[int, torch.cuda.Event | None]] = []
        launched = 0
        while not session.finished:
            started = time.perf_counter()
            while len(waiting) < AHEAD:
                most = len(session.tokens) + (len(waiting) + 1) * batch * (draft_length + 1)
                slot, launched = launched % len(rounds.records), launched + batch
                waiting.append((slot, run(rounds, proposal, draft_length, most, slot, batch)))
            slot, event = waiting.pop(0)
            waits = time.perf_counter()
            if event is not None:
                event.synchronize()
            came = time.perf_counter()
            stats.host_s += waits - started
            for record in rounds.host[slot:slot + batch].tolist():
                take(session, record, draft_length)
                stats.host_s += time.perf_counter() - came
                yield
                came = time.perf_counter()
                if session.finished:
                    break
        cache.cursor = len(session.tokens) - 1
