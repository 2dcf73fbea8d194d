"""SSD's rounds on the device: while the target verifies, the drafter prepares branches on a stream of its own; then comes the
verdict, and the branch that it hits becomes the next draft. Python launches a round and waits once, for its record: on a miss it
has the drafter draft.

A round is three graphs: `verify` on the target's stream, `prepare` on the drafter's, and, when both are done, `finish`: accept,
serve. The drafter reads a copy of what the last round left (`Verified`), so verification may overwrite the original, and the
drafter may live on another GPU. Where the drafter is the target itself, or there are no streams, one works after the other.

On a miss the steps of the new draft are kept and its branches start from them; on a hit the drafter walks along the draft served,
its first entries repaired from the target's features.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...kernels.branch_selection import select_branch
from ...kernels.fixed import FIXED
from ...kernels.layout import HIT
from ..backend import RequestState
from ..drafter import Drafter
from ..drafters.scripted import ScriptedDrafter
from ..stats import Stats
from .graphs import Graphs
from .proposals import Preparing
from .round_parts import Rounds, Script, new_script, put, take


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
        """Its length."""
        return 0.0 if self.start is None or self.end is None else self.start.elapsed_time(self.end) / 1e3

    def after(self, other: "Span") -> float:
        """Seconds from another's start to this one's, on one device."""
        return 0.0 if self.start is None or other.start is None else other.start.elapsed_time(self.start) / 1e3


@dataclass(frozen=True)
class Flight:
    """A round under way: where its record will be, when it has come, and what its parts took. draft: None after a hit."""

    slot: int
    done: torch.cuda.Event | None
    draft: Span | None
    verify: Span
    prepare: Span


class Ahead:
    """The rounds of one target's cache with one drafter and a number of branches. beside: whether the two work at once."""

    def __init__(self, rounds: Rounds, proposal: Preparing, branches: int) -> None:
        self.rounds, self.proposal, self.network = rounds, proposal, proposal.network
        model, device = rounds.model, proposal.cache.buffer.device
        self.same_device = device == rounds.cache.buffer.device
        self.beside = device.type == "cuda" and self.network is not model
        self.stream = torch.cuda.Stream(device) if self.beside else None
        self.ready = torch.cuda.Event() if self.beside else None  # the copy of what the last round left
        self.mirror = model.verified.like(device)
        self.branches = proposal.branches(branches)
        self.table = self.branches.table if self.same_device else torch.empty_like(self.branches.table, device=model.device)
        self.graphs, self.endings = Graphs(self.network.graphs_enabled, device), Graphs(model.graphs_enabled, model.device)
        self.scripts = rounds.tables if self.same_device else new_script(rounds.cache.capacity, device)
        self.script: Script | None = None  # the drafter's, on its device

    def serves(self, proposal: Preparing, branches: int) -> bool:
        """Whether it was made for this drafter and as many branches."""
        return proposal.cache is self.proposal.cache and branches == self.branches.count

    @torch.inference_mode()
    def begin(self, session: RequestState, proposal: Preparing, drafter: Drafter, ends: list[int]) -> None:
        """A request's first round."""
        self.rounds.begin(session, drafter, ends)
        proposal.begin(session.tokens[-1], self.rounds.model.verified)
        self.script = None
        if isinstance(drafter, ScriptedDrafter):
            self.script = self.scripts
            if not self.same_device:
                self.scripts.write(drafter)
        self.branches.begin(len(session.tokens) - 1)
        self._copy()

    def _copy(self) -> None:
        """What the drafter reads, as the target's stream has left it."""
        self.mirror.take(self.rounds.model.verified)
        if self.ready is not None:
            self.ready.record(torch.cuda.current_stream(self.rounds.model.device))

    @contextlib.contextmanager
    def _drafting(self) -> Iterator[None]:
        """The drafter's stream, once there is something to read; others wait for it at `_join`."""
        if self.stream is None or self.ready is None:
            yield
            return
        self.stream.wait_event(self.ready)
        with torch.cuda.stream(self.stream):
            yield

    def _join(self) -> None:
        """Whatever is launched from now on, on the target's GPU or the drafter's, comes after the drafter's stream."""
        if self.stream is not None:
            for device in {self.rounds.cache.buffer.device, self.stream.device}:
                torch.cuda.current_stream(device).wait_stream(self.stream)

    @torch.inference_mode()
    def launch(self, draft_length: int, tokens: int, number: int, hit: bool) -> Flight:
        """Round `number` of a request. Its draft stands in the rows to verify after a hit, and is made now after a miss. tokens:
        of the sequence so far."""
        rounds, device = self.rounds, self.branches.table.device
        most = tokens + 2 * draft_length + 1  # of any cache, entries of two rounds and a branch's own
        draft = None if hit else self._draft(draft_length, most)
        verify, prepare, slot = Span(rounds.model.device), Span(device), number % len(rounds.records)
        if self.beside:
            self._verify(verify, draft_length, most)
            self._prepare(prepare, draft_length, most, not hit)
        else:  # they share buffers: what is verified last is accepted
            self._prepare(prepare, draft_length, most, not hit)
            self._verify(verify, draft_length, most)
        self._join()
        self.endings.run(("finish", draft_length, rounds.script is not None), lambda: self.finish(draft_length))
        self._copy()
        return Flight(slot, rounds.fetch(slot, 1), draft, verify, prepare)

    def _draft(self, length: int, most: int) -> Span:
        """The drafter's proposal for the round that begins; after it the copy holds what stands in the rows to verify."""
        span, inputs, numerics = Span(self.network.device), self.mirror.inputs, self.network.recipe.numerics
        key = ("draft", length, self.proposal.cache.chunks_for(most), self.script is not None)
        with self._drafting(), span:
            self.graphs.run(key, lambda: self.proposal.launch(
                self.mirror, length, most, lambda token, step: put(token, step, inputs, numerics, self.script), keep=True))
            self.rounds.model.inputs.row_tokens.copy_(inputs.row_tokens, non_blocking=True)
        self._join()
        return span

    def _verify(self, span: Span, length: int, most: int) -> None:
        cache, layers = self.rounds.cache, self.proposal.layers
        with span:
            cache.graphs.run(("verify", length, cache.chunks_for(most), layers),
                             lambda: self.rounds.verify(length, most, layers))

    def _prepare(self, span: Span, length: int, most: int, drafted: bool) -> None:
        key = ("prepare", length, self.proposal.cache.chunks_for(most), drafted)
        with self._drafting():
            with span:
                self.graphs.run(key, lambda: self.prepare(length, most, drafted))
            if not self.same_device:  # outside the span: a copy to another GPU waits for that one's stream
                self.table.copy_(self.branches.table, non_blocking=True)

    def prepare(self, length: int, most: int, drafted: bool) -> None:
        """Every launch of the branches' drafts while the draft in the copy's row_tokens is being verified. drafted: see
        proposals.Preparing."""
        branches, inputs = self.branches, self.mirror.inputs
        logits = self.proposal.walk(self.mirror, length, most, drafted)
        branches.share(inputs, length)
        branches.choose(logits, inputs, length)
        for step in range(length):
            final = self.proposal.follow(branches, step, most)
            branches.tokens(step + 1).copy_(self.network.launch_head(final))

    def finish(self, length: int) -> None:
        """The verdict, and the next draft where a branch is ready for it. A script has the word on both."""
        rounds, model, script = self.rounds, self.rounds.model, self.rounds.script
        rounds.accept(length)
        select_branch(self.table, model.inputs, rounds.records, draft_length=length, schedule=FIXED["select_branch"].schedule,
                      numerics=model.recipe.numerics, hits=script.hits if script else None)
        for step in range(length if script else 0):
            rounds.propose(self.table[0, :1], step)

    def count(self, flight: Flight, stats: Stats) -> None:
        """What the parts of a finished round took. Two GPUs' clocks can't be compared: there, both count as begun at once."""
        verified, began = flight.verify.seconds, 0.0
        if self.same_device:
            began = flight.prepare.after(flight.verify)
        ended = began + flight.prepare.seconds
        stats.verify_s += verified
        stats.overlap_s += max(min(verified, ended) - max(began, 0.0), 0.0)
        stats.sync_s += max(ended - verified, 0.0)
        stats.draft_s += flight.draft.seconds if flight.draft else 0.0


def prepared_ahead(session: RequestState, ahead: Ahead, drafter: Drafter, proposal: Preparing, draft_length: int,
                   ends: list[int]) -> Iterator[None]:
    """The rounds of one SSD request; yields after each, when its tokens are out. The next round is under way by then, unless the
    device saw the request end. ends: ids that end it."""
    stats, rounds = session.stats, ahead.rounds
    if session.finished:
        return
    with rounds.model.lock:
        ahead.begin(session, proposal, drafter, ends)
        tokens, number = len(session.tokens), 0
        flight: Flight | None = ahead.launch(draft_length, tokens, number, hit=False)
        while flight is not None:
            if flight.done is not None:
                flight.done.synchronize()
            came = time.perf_counter()
            record, before = rounds.host[flight.slot].tolist(), flight
            emitted, _, ended = record[:3]
            tokens, number, hit = tokens + emitted, number + 1, bool(record[HIT])
            flight = None if ended else ahead.launch(draft_length, tokens, number, hit)
            ahead.count(before, stats)
            take(session, record, draft_length)
            stats.host_s += time.perf_counter() - came
            yield
            if session.finished:
                break
            stats.branch_hits, stats.branch_misses = stats.branch_hits + hit, stats.branch_misses + (not hit)
        rounds.cache.cursor = len(session.tokens) - 1
