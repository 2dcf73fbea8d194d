"""Rounds on the device: one CUDA graph drafts, verifies, accepts and finds the end of a request. Python launches rounds before it
has read the records of the last ones, and takes no part in them.

They serve greedy requests without log-probabilities: AR, and SD with a drafter whose proposal is a chain of launches (EAGLE-3, a
small model, n-gram look-up) or with a script in its place. SSD with a model that drafts is in ssd_rounds.py. Other requests are
driven from Python (request/rounds.py). The tokens are the same: both run the same kernels on the same rows.
"""

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace

import torch

from ...kernels.layout import ENDS
from ..backend import RequestState, RoundPlan
from ..sampling import no_answer
from .cache import DeviceCache
from .graphs import Graphs
from .network import DeviceNetwork
from .proposals import NGramProposal, Proposal, proposal_of
from .ssd_rounds import SsdRounds
from .verification import Verification, warn_of_faults

IN_FLIGHT = 2  # batches launched before Python waits for the oldest one's records: the device never waits for Python
NOTHING_TO_HIDE = ("mode ssd ran as sd: at best SSD is (K t_d + t_v) / t_v times as fast, and an n-gram look-up's t_d is next to "
                   "nothing beside t_v")
TOKENS_PER_BATCH = 4  # rows verified per graph, approximately: several rounds of AR, or one of SD


def batch_of(draft_length: int) -> int:
    """Rounds in one graph."""
    return max(1, TOKENS_PER_BATCH // (draft_length + 1))


Batch = tuple[tuple[object, ...], Callable[[], None]]  # the key of a graph, its launches


@dataclass(frozen=True)
class Flight:
    """A batch in flight. slot: place of its first record; length: K; done: the event of its records' copy to the host, None on a
    CPU."""

    slot: int
    length: int
    rounds: int
    done: torch.cuda.Event | None

    @property
    def tokens(self) -> int:
        """The most that it emits."""
        return self.rounds * (self.length + 1)


def lengths_of(plan: RoundPlan, proposal: Proposal | None) -> Iterator[int]:
    """The draft length of each batch, without end. A drafter with a cache falls behind in rounds of AR: once a policy has chosen
    them, the request goes on in AR."""
    while plan.policy is None or proposal is None:
        yield plan.draft_length
    while (length := plan.policy.next()) or proposal.writes_rows:
        yield length
    while True:
        yield 0


def speculative_step(verification: Verification, proposal: Proposal | None, draft_length: int, tokens: int, at: int) -> None:
    """Launches one round: draft, verify, accept. Without a proposal it is a round of AR.

    draft_length: K, 0 in AR. tokens: an upper bound of the tokens in the caches after the round. at: index of the round in its
    batch.
    """
    if proposal is not None:
        proposal.draft(verification.network.verified, draft_length, tokens, verification.write_draft)
        if proposal.writes_rows and verification.script:
            verification.write_script(draft_length)
    verification.verify(draft_length, tokens, proposal.layers if proposal else ())
    verification.accept(draft_length, at)


class DeviceRounds:
    """The rounds of one cache, with their state: records, graphs, SSD's branches."""

    def __init__(self, network: DeviceNetwork, cache: DeviceCache) -> None:
        self.network, self.cache = network, cache
        self.verification = Verification(network, cache)
        self.graphs = Graphs(network.graphs_enabled, network.device)
        self.ssd: SsdRounds | None = None

    def start(self, request: RequestState, plan: RoundPlan) -> Iterator[None] | None:
        """See backend.Model.device_rounds. Every graph that the request may reach is captured before its first round, at the
        expense of stats.capture_s."""
        proposal = proposal_of(plan, self.verification)
        if len(plan.end_ids) > ENDS or (proposal is None and plan.drafter is not None):
            return None
        if proposal is not None and proposal.positions < len(request.tokens) + request.remaining - 1:
            return None  # the drafter has fewer positions than the request needs
        self.verification.load_script(plan.drafter)
        on_two_devices = proposal is not None and proposal.device != self.cache.buffer.device
        if isinstance(proposal, NGramProposal) and plan.branches:
            request.stats.mode = "sd"
            request.stats.warnings.append(NOTHING_TO_HIDE)
            plan = replace(plan, branches=0)
        if proposal is None or isinstance(proposal, NGramProposal) or not (plan.branches or on_two_devices):
            self._capture(request, lambda: self._capture_batches(request, plan, proposal))
            return self._run(request, plan, self._batches(request, plan, proposal))
        if not 0 < plan.branches <= proposal.network.decode.row_tile:
            return None
        if self.ssd is None or not self.ssd.fits(proposal, plan.branches):
            self.ssd = None  # frees its memory before the new one allocates
            self.ssd = SsdRounds(self.verification, proposal, plan.branches)
        ssd = self.ssd
        ssd.load_script(plan.drafter)
        self._capture(request, lambda: ssd.capture(request, plan, proposal))
        return self._run(request, plan, ssd.run(request, plan, proposal))

    def _run(self, request: RequestState, plan: RoundPlan, rounds: Generator[None, None, bool]) -> Iterator[None]:
        """Runs the rounds of a request to its end. After a round without an answer the request goes on without a drafter: a
        drafted token on which the target's own numbers overflow reaches the rows beside it, and AR never sees that token.

        Raises:
            NumericsError: the target has no answer without a draft either.
        """
        stats, before = request.stats, request.stats.drafter_faults
        answered = yield from rounds
        if not answered and plan.drafter is not None:
            stats.drafter_faults += 1
            stats.warnings.append(f"drafter {plan.drafter.name}: the target's logits hold NaN beside its draft; the request goes "
                                  "on without drafts")
            alone = replace(plan, drafter=None, features=None, draft_length=0, branches=0, policy=None)
            self.verification.load_script(None)
            answered = yield from self._batches(request, alone, None)
        else:
            warn_of_faults(stats, before, plan.drafter)
        if not answered:
            raise no_answer()

    def _capture(self, request: RequestState, capture: Callable[[], None]) -> None:
        started = time.perf_counter()
        if self.graphs.enabled and not request.finished:
            capture()
        request.stats.capture_s += time.perf_counter() - started

    @torch.inference_mode()
    def _capture_batches(self, request: RequestState, plan: RoundPlan, proposal: Proposal | None) -> None:
        """Captures every graph that the request may reach, and times them for a policy. The rounds that load its kernels see a
        finished request: they move no cursor, and later rounds overwrite the slots that they write."""
        lengths = range(plan.draft_length + 1) if plan.policy else (plan.draft_length,)
        batches = {length: self._reachable(request, plan, proposal, length) for length in lengths}
        lacking = any(self.graphs.lacks(key) for of in batches.values() for key, _ in of)
        if not lacking and not (plan.policy and not plan.policy.calibrated):
            return
        self._begin(request, plan, proposal, finished=True)
        with self.network.lock:
            for of in batches.values():
                for key, launches in of:
                    self.graphs.prepare(key, launches)
            if plan.policy:
                plan.policy.calibrate({length: self.graphs.seconds(of[0][0]) / batch_of(length)
                                       for length, of in batches.items()})

    def _reachable(self, request: RequestState, plan: RoundPlan, proposal: Proposal | None, length: int) -> list[Batch]:
        """The batches of one draft length that the request may reach, one for each number of chunks."""
        rows = batch_of(length) * (length + 1)
        longest = batch_of(plan.draft_length) * (plan.draft_length + 1)
        first = len(request.tokens) + rows
        last = len(request.tokens) + request.remaining + IN_FLIGHT * max(rows, longest, TOKENS_PER_BATCH)
        return [self._batch(proposal, length, tokens) for tokens in self.cache.steps_of_chunks(first, last)]

    def _batch(self, proposal: Proposal | None, length: int, tokens: int) -> Batch:
        """(key of a batch's graph, its launches). tokens: an upper bound of the tokens in the caches after the batch."""
        batch, drafter = batch_of(length), proposal if length else None

        def launches() -> None:
            for at in range(batch):
                speculative_step(self.verification, drafter, length, tokens, at)

        scripted = self.verification.script is not None
        return (drafter.key if drafter else None, length, self.cache.chunks_for(tokens), scripted, batch), launches

    @torch.inference_mode()
    def _launch(self, proposal: Proposal | None, length: int, tokens: int, first: int) -> Flight:
        """Launches a batch and the copy of its records to the host. first: index of its first round in the request."""
        slot, count = first % len(self.verification.records), batch_of(length)
        with self.network.lock:
            self.graphs.run(*self._batch(proposal, length, tokens))
            return Flight(slot, length, count, self.verification.fetch(slot, count))

    @torch.inference_mode()
    def _begin(self, request: RequestState, plan: RoundPlan, proposal: Proposal | None, finished: bool = False) -> None:
        with self.network.lock:
            self.verification.begin(request, plan, finished)
            if proposal is not None:
                proposal.begin(request.tokens, self.network.verified)

    def _batches(self, request: RequestState, plan: RoundPlan, proposal: Proposal | None) -> Generator[None, None, bool]:
        """The rounds of AR and SD. Yields after each round, when its tokens are emitted. Returns whether every round had an
        answer."""
        stats, lengths, short = request.stats, lengths_of(plan, proposal), proposal is not None and proposal.writes_rows
        self._begin(request, plan, proposal)
        waiting: list[Flight] = []
        launched, came = 0, time.perf_counter()
        while not request.finished:
            started = time.perf_counter()
            while len(waiting) < IN_FLIGHT:
                length = next(lengths)
                most = len(request.tokens) + sum(flight.tokens for flight in waiting) + batch_of(length) * (length + 1)
                waiting.append(self._launch(proposal, length, most, launched))
                launched += waiting[-1].rounds
            flight, before = waiting.pop(0), came
            waits = time.perf_counter()
            if flight.done is not None:
                flight.done.synchronize()
            came = time.perf_counter()
            stats.host_s += waits - started
            for at in range(flight.rounds):
                read = time.perf_counter()
                record = self.verification.record(flight.slot + at, flight.length, at, short)
                if plan.policy:
                    plan.policy.observe(flight.length, flight.length, record.accepted, (came - before) / flight.rounds)
                    stats.count_draft_length(flight.length)
                answered = record.emit(request)
                stats.host_s += time.perf_counter() - read
                if not answered:
                    return False
                yield
                if request.finished:
                    break
        self.cache.cursor = len(request.tokens) - 1
        return True
