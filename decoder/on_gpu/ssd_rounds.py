"""SSD's rounds on the device: while the target verifies, the drafter prepares branches on a stream of its own. After the verdict
the branch for its outcome becomes the next draft. Python launches a round and waits once, for its record. On a miss the drafter
drafts at once.

A round is three graphs: `verify` on the target's stream, `prepare` on the drafter's, and `finish` after both: accept, select the
branch. The drafter reads a copy of the last verification (`Verified`), so the next verification may overwrite the original, and
the drafter may live on another GPU. If the drafter is the target itself, or on a CPU, the two run one after the other.

On a miss the steps of the new draft are kept, and its branches start from them. On a hit the drafter computes the steps of the
selected draft and repairs its first entries from the target's features.
"""

import contextlib
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from ...kernels.branch_selection import select_branch
from ...kernels.fixed import FIXED
from ..backend import RequestState, RoundPlan
from ..drafter import Drafter
from ..drafters.scripted import ScriptedDrafter
from ..stats import Stats
from .graphs import Graphs
from .proposals import BranchingProposal
from .verification import Record, Script, Verification, new_script, read_record, write_draft_token

Key = tuple[object, ...]


class Span:
    """A piece of work on a GPU's current stream, from its start to its end. On a CPU it measures nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start, self.end = (torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None for _ in range(2))

    def __enter__(self) -> "Span":
        if self.start is not None:
            self.start.record(torch.cuda.current_stream(self.device))
        return self

    def __exit__(self, *_: object) -> None:
        if self.end is not None:
            self.end.record(torch.cuda.current_stream(self.device))

    @property
    def seconds(self) -> float:
        """Its length in seconds."""
        return 0.0 if self.start is None or self.end is None else self.start.elapsed_time(self.end) / 1e3

    def after(self, other: "Span") -> float:
        """Seconds from the start of `other` to the start of this one. Both must be on one device."""
        return 0.0 if self.start is None or other.start is None else other.start.elapsed_time(self.start) / 1e3


@dataclass(frozen=True)
class Flight:
    """A round in flight. slot: place of its record; done: the event of the record's copy to the host, None on a CPU; draft: None
    after a hit."""

    slot: int
    done: torch.cuda.Event | None
    draft: Span | None
    verify: Span
    prepare: Span

    def count(self, stats: Stats, same_device: bool) -> None:
        """Adds the times of a finished round's parts. The clocks of two GPUs can't be compared: there, `verify` and `prepare`
        count as begun at the same time."""
        verified = self.verify.seconds
        began = self.prepare.after(self.verify) if same_device else 0.0
        ended = began + self.prepare.seconds
        stats.verify_s += verified
        stats.overlap_s += max(min(verified, ended) - max(began, 0.0), 0.0)
        stats.sync_s += max(ended - verified, 0.0)
        stats.draft_s += self.draft.seconds if self.draft else 0.0


class SsdRounds:
    """The rounds of one target's cache with one drafter and a fixed number of branches. concurrent: whether drafter and target
    run at the same time."""

    def __init__(self, verification: Verification, proposal: BranchingProposal, branches: int) -> None:
        self.verification, self.proposal = verification, proposal
        target, device = verification.network, proposal.cache.buffer.device
        self.same_device = device == verification.cache.buffer.device
        self.concurrent = device.type == "cuda" and proposal.network is not target
        self.stream = torch.cuda.Stream(device) if self.concurrent else None
        self.ready = torch.cuda.Event() if self.concurrent else None  # the copy of the last verification is complete
        self.mirror = target.verified.like(device)
        self.branches = proposal.branches(branches)
        self.table = self.branches.table if self.same_device else torch.empty_like(self.branches.table, device=target.device)
        self.graphs = Graphs(proposal.network.graphs_enabled, device)  # of the drafter's GPU
        self.target_graphs = Graphs(target.graphs_enabled, target.device)
        self.scripts = verification.tables if self.same_device else new_script(verification.cache.capacity, device)
        self.script: Script | None = None  # the drafter's, on its device
        self._select = partial(select_branch, schedule=FIXED["select_branch"].schedule, numerics=target.recipe.numerics)

    def fits(self, proposal: BranchingProposal, branches: int) -> bool:
        """Whether these rounds were made for this drafter and this number of branches."""
        return proposal.cache is self.proposal.cache and branches == self.branches.count

    def load_script(self, drafter: Drafter | None) -> None:
        """Loads a scripted drafter's script on the drafter's device; the verification has loaded its own."""
        self.script = None
        if isinstance(drafter, ScriptedDrafter):
            self.script = self.scripts
            if not self.same_device:
                self.scripts.load(drafter)

    @torch.inference_mode()
    def begin(self, request: RequestState, plan: RoundPlan, proposal: BranchingProposal, finished: bool = False) -> None:
        """Prepares the buffers for a request, whose scripts are loaded. finished: see DeviceInputs.begin."""
        self.verification.begin(request, plan, finished)
        proposal.begin(request.tokens, self.verification.network.verified)
        self.branches.begin(len(request.tokens) - 1)
        self._publish()

    @torch.inference_mode()
    def launch(self, length: int, tokens: int, number: int, hit: bool) -> Flight:
        """Launches a whole round: draft on a miss; verify, and prepare branches at the same time; accept, select the branch.

        length: K. tokens: length of the sequence. number: index of the round in its request. hit: whether the rows to verify hold
        the draft already.
        """
        with self.verification.network.lock:
            most = tokens + 2 * length + 1  # tokens in any cache: entries of two rounds and a branch's own
            draft = None if hit else self._draft(length, most)
            if self.concurrent:
                verify = self._verify(length, most)
                prepare = self._prepare(length, most, not hit)
            else:  # both use one set of buffers, and `accept` reads those of the verification
                prepare = self._prepare(length, most, not hit)
                verify = self._verify(length, most)
            self._join()
            self.target_graphs.run(self._finish_key(length), lambda: self.finish(length))
            self._publish()
            slot = number % len(self.verification.records)
            return Flight(slot, self.verification.fetch(slot, 1), draft, verify, prepare)

    @torch.inference_mode()
    def capture(self, request: RequestState, plan: RoundPlan, proposal: BranchingProposal) -> None:
        """Captures every graph that the request may reach. The rounds that load its kernels see a finished request."""
        length = plan.draft_length
        first = len(request.tokens) + 2 * length + 1
        caches = (self.verification.cache, self.proposal.cache)
        counts = sorted({most for cache in caches for most in cache.steps_of_chunks(first, first + request.remaining)})
        if not any(self._lacks(length, most) for most in counts):
            return
        with self.verification.network.lock:
            self.begin(request, plan, proposal, finished=True)
            for most in counts:
                self._draft(length, most, only_capture=True)
                self._verify(length, most, only_capture=True)
                for drafted in (True, False):
                    self._prepare(length, most, drafted, only_capture=True)
                self._join()
                self.target_graphs.prepare(self._finish_key(length), lambda: self.finish(length))

    def _lacks(self, length: int, most: int) -> bool:
        """Whether any graph of a round isn't captured yet."""
        ours = [self._draft_key(length, most), *(self._prepare_key(length, most, drafted) for drafted in (True, False))]
        return any(map(self.graphs.lacks, ours)) or any(map(self.target_graphs.lacks, (self._verify_key(length, most),
                                                                                       self._finish_key(length))))

    def _draft_key(self, length: int, most: int) -> Key:
        return ("draft", length, self.proposal.cache.chunks_for(most), self.script is not None)

    def _verify_key(self, length: int, most: int) -> Key:
        return ("verify", length, self.verification.cache.chunks_for(most), self.proposal.layers)

    def _prepare_key(self, length: int, most: int, drafted: bool) -> Key:
        return ("prepare", length, self.proposal.cache.chunks_for(most), drafted)

    def _finish_key(self, length: int) -> Key:
        return ("finish", length, self.verification.script is not None)

    def _publish(self) -> None:
        """Copies the last verification for the drafter, after the work on the target's stream."""
        self.mirror.copy_from(self.verification.network.verified)
        if self.ready is not None:
            self.ready.record(torch.cuda.current_stream(self.verification.network.device))

    @contextlib.contextmanager
    def _drafting(self) -> Iterator[None]:
        """Launches inside go to the drafter's stream, after the copy of the last verification. Other streams wait for it in
        `_join`."""
        if self.stream is None or self.ready is None:
            yield
            return
        self.stream.wait_event(self.ready)
        with torch.cuda.stream(self.stream):
            yield

    def _join(self) -> None:
        """Later launches on either GPU wait for the drafter's stream."""
        if self.stream is not None:
            for device in {self.verification.cache.buffer.device, self.stream.device}:
                torch.cuda.current_stream(device).wait_stream(self.stream)

    def _draft(self, length: int, most: int, only_capture: bool = False) -> Span:
        """Launches the drafter's proposal for the next round; the mirror then holds the rows to verify. only_capture: captures
        the graph without replaying it."""
        span, inputs, numerics = Span(self.proposal.network.device), self.mirror.inputs, self.proposal.network.recipe.numerics
        run = self.graphs.prepare if only_capture else self.graphs.run
        with self._drafting(), span:
            run(self._draft_key(length, most), lambda: self.proposal.draft(
                self.mirror, length, most, lambda token, step: write_draft_token(token, step, inputs, numerics, self.script),
                keep=True))
            self.verification.network.inputs.row_tokens.copy_(inputs.row_tokens, non_blocking=True)
        self._join()
        return span

    def _verify(self, length: int, most: int, only_capture: bool = False) -> Span:
        span, layers = Span(self.verification.network.device), self.proposal.layers
        run = self.target_graphs.prepare if only_capture else self.target_graphs.run
        with span:
            run(self._verify_key(length, most), lambda: self.verification.verify(length, most, layers))
        return span

    def _prepare(self, length: int, most: int, drafted: bool, only_capture: bool = False) -> Span:
        span = Span(self.branches.table.device)
        run = self.graphs.prepare if only_capture else self.graphs.run
        with self._drafting():
            with span:
                run(self._prepare_key(length, most, drafted), lambda: self.prepare(length, most, drafted))
            if not self.same_device:  # outside the span: the copy waits for the other GPU's stream
                self.table.copy_(self.branches.table, non_blocking=True)
        return span

    def prepare(self, length: int, most: int, drafted: bool) -> None:
        """Every launch of the branches' drafts, for the draft in the mirror's row_tokens, which the target verifies meanwhile.
        drafted: see Proposal.scores."""
        branches, inputs = self.branches, self.mirror.inputs
        logits = self.proposal.scores(self.mirror, length, most, drafted)
        branches.copy_round(inputs, length)
        branches.choose_outcomes(logits, inputs, length)
        for step in range(length):
            final = self.proposal.extend(branches, step, most)
            branches.tokens(step + 1).copy_(self.proposal.network.launch_head(final))

    def finish(self, length: int) -> None:
        """Every launch of the verdict, and of the next draft if a branch matches it. A script, if present, overrides both."""
        verification, script = self.verification, self.verification.script
        verification.accept(length)
        self._select(self.table, verification.network.inputs, verification.records, draft_length=length,
                     hits=script.hits if script else None)
        for step in range(length if script else 0):
            verification.write_draft(self.table[0, :1], step)

    def run(self, request: RequestState, plan: RoundPlan, proposal: BranchingProposal) -> Generator[None, None, bool]:
        """The rounds of one request. Yields after each round, when its tokens are emitted; the next round is in flight by then,
        unless the device saw the request end. Returns whether every round had an answer."""
        stats, length = request.stats, plan.draft_length
        if request.finished:
            return True
        with self.verification.network.lock:
            self.begin(request, plan, proposal)
        tokens, number = len(request.tokens), 0
        flight: Flight | None = self.launch(length, tokens, number, hit=False)
        while flight is not None:
            record, before = self._read(flight, length), flight
            came = time.perf_counter()
            tokens, number = tokens + len(record.tokens), number + 1
            flight = None if record.finished else self.launch(length, tokens, number, record.hit)
            before.count(stats, self.same_device)
            answered = record.emit(request)
            stats.host_s += time.perf_counter() - came
            if not answered:
                return False
            yield
            if request.finished:
                break
            stats.count_branch(record.accepted, record.hit)
        self.verification.cache.cursor = len(request.tokens) - 1
        return True

    def _read(self, flight: Flight, length: int) -> Record:
        if flight.done is not None:
            flight.done.synchronize()
        return read_record(self.verification.host[flight.slot].tolist(), length)
