"""Rounds that live on the device: draft, verify, accept and the end of a request in one CUDA graph. Python launches rounds ahead
and reads their records when they have come; it takes no part in them.

For greedy requests without log-probabilities on the `triton` backend: AR, and SD with a drafter whose proposal is a chain of
launches (EAGLE-3, a small model), or with a script in its place. Everything else goes through `speculate`; the tokens are the
same, because both run the same kernels on the same rows.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from ..kernels.accept import ENDS, HEADER, RECORD, accept, draft_token
from ..kernels.fixed import FIXED
from .device_cache import DeviceCache
from .drafter import Drafter
from .eagle3 import Eagle3Drafter
from .output import EndRules
from .scripted import ScriptedDrafter
from .session import Session
from .small_model import SmallModelDrafter
from .triton_eagle3 import TritonEagle3Model
from .triton_model import TritonModel, nan_error

AHEAD = 2  # batches launched before the oldest one's records are awaited: the device never waits for Python
TOKENS_A_BATCH = 4  # rows verified in one graph, about: several rounds of one token, one of several
RING = 64  # records kept on the device; more than AHEAD batches hold, and a multiple of each
PATTERN = 1024  # rounds of a script before it repeats


class Proposal(Protocol):
    """A drafter's chain of launches. cache: the drafter's, if it has one; graphs belong to it. layers: target layers whose
    features it reads."""

    cache: DeviceCache | None
    layers: tuple[int, ...]

    def begin(self, session: Session) -> None:
        """Before a request's first round."""

    def launch(self, rounds: "Rounds", draft_length: int, tokens: int) -> None:
        """Drafts `draft_length` tokens into the rows to verify. tokens: an upper bound of what its cache will hold."""


class NoProposal:
    """AR: nothing is drafted."""

    cache: DeviceCache | None = None
    layers: tuple[int, ...] = ()

    def begin(self, session: Session) -> None:
        """Nothing to prepare."""

    def launch(self, rounds: "Rounds", draft_length: int, tokens: int) -> None:
        """Nothing to draft."""


class Eagle3Proposal:
    """EAGLE-3: entries of the last verification first, then its own."""

    def __init__(self, drafter: Eagle3Drafter, features: torch.Tensor) -> None:
        self.model = cast(TritonEagle3Model, drafter.model)
        self.own = cast(DeviceCache, drafter.cache)
        self.cache: DeviceCache | None = self.own
        self.layers, self.features = drafter.feature_layers, features

    def begin(self, session: Session) -> None:
        """The last entry of the prompt is written again by the first proposal, from the feature at hand."""
        model = cast(TritonModel, session.model)
        model.scratch.tokens[:1].fill_(session.tokens[-1])
        model.decode.space.features[0].copy_(self.features[-1])

    def launch(self, rounds: "Rounds", draft_length: int, tokens: int) -> None:
        """See Proposal."""
        model = rounds.model
        self.model.launch_draft(self.own, model.scratch.tokens, model.decode.space.features, model.inputs, draft_length,
                                self.own.chunks_for(tokens), rounds.propose)


class SmallModelProposal:
    """A small model: the last two tokens first, whether or not the cache has the former (after a full accept it hasn't), then
    its own."""

    layers: tuple[int, ...] = ()

    def __init__(self, drafter: SmallModelDrafter) -> None:
        self.model = cast(TritonModel, drafter.model)
        self.own = cast(DeviceCache, drafter.cache)
        self.cache: DeviceCache | None = self.own

    def begin(self, session: Session) -> None:
        """The prompt is in the cache already."""

    def launch(self, rounds: "Rounds", draft_length: int, tokens: int) -> None:
        """See Proposal."""
        model, inputs = self.model, rounds.model.inputs
        model.launch_draft(self.own, inputs, draft_length, self.own.chunks_for(tokens), rounds.propose)


@dataclass(frozen=True)
class Script:
    """What stands for a drafter's proposals, at fixed addresses: reference [capacity], the recorded sequence; accepted
    [PATTERN], how many drafted tokens of each round are right."""

    reference: torch.Tensor
    accepted: torch.Tensor

    def write(self, drafter: ScriptedDrafter) -> None:
        """A request's script; the pattern of accepted counts is repeated."""
        known = torch.tensor(drafter.reference[:len(self.reference)], dtype=torch.int32)
        self.reference.zero_()
        self.reference[:len(known)].copy_(known)
        self.accepted.copy_(torch.tensor([drafter.accepted[i % len(drafter.accepted)] for i in range(PATTERN)],
                                         dtype=torch.int32))


class Rounds:
    """The rounds of one cache: graphs by shape, and the records they leave."""

    def __init__(self, model: TritonModel, cache: DeviceCache) -> None:
        self.model, self.cache = model, cache
        device = model.device
        self.records = torch.zeros(RING, RECORD, dtype=torch.int32, device=device)
        self.host = torch.zeros(RING, RECORD, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.tables = Script(torch.zeros(cache.capacity, dtype=torch.int32, device=device),
                             torch.zeros(PATTERN, dtype=torch.int32, device=device))
        self.script: Script | None = None

    @torch.inference_mode()
    def begin(self, session: Session, proposal: Proposal, drafter: Drafter | None, ends: list[int]) -> None:
        """A request's first round."""
        self.script = None
        if isinstance(drafter, ScriptedDrafter):
            self.tables.write(drafter)
            self.script = self.tables
        before, pending = session.tokens[-2:]
        self.model.inputs.begin(before, pending, len(session.tokens) - 1, session.output.remaining, ends)
        proposal.begin(session)

    def batch(self, draft_length: int) -> int:
        """Rounds in one graph."""
        return max(1, TOKENS_A_BATCH // (draft_length + 1))

    def propose(self, token: torch.Tensor, step: int) -> None:
        """A drafted token becomes a row to verify."""
        model, script = self.model, self.script
        draft_token(token, model.inputs.row_tokens, model.inputs.state, step=step, schedule=FIXED["draft_token"].schedule,
                    numerics=model.recipe.numerics, reference=script.reference if script else None,
                    accepted=script.accepted if script else None)

    def launch(self, proposal: Proposal, draft_length: int, tokens: int) -> None:
        """One round: draft, verify, accept. tokens: an upper bound of what the caches will hold."""
        model, inputs = self.model, self.model.inputs
        if draft_length:
            proposal.launch(self, draft_length, tokens)
        rows = draft_length + 1
        model.launch(self.cache, rows, self.cache.chunks_for(tokens), proposal.layers)
        winners = model.launch_head(model.decode.space.final[:rows])
        accept(winners, inputs.row_tokens, inputs.pair, inputs.state, inputs.starts, inputs.ends, self.records,
               draft_length=draft_length, schedule=FIXED["accept"].schedule, numerics=model.recipe.numerics)

    @torch.inference_mode()
    def run(self, proposal: Proposal, draft_length: int, tokens: int, slot: int, batch: int) -> torch.cuda.Event | None:
        """Launches `batch` rounds, from a graph once there is one, and the copy of their records, from `slot` on; the event says
        when they have come."""
        def rounds() -> None:
            for _ in range(batch):
                self.launch(proposal, draft_length, tokens)

        self.cache.graphs.run(("rounds", proposal.cache, draft_length, self.cache.chunks_for(tokens), self.script is not None),
                              rounds)
        self.host[slot:slot + batch].copy_(self.records[slot:slot + batch], non_blocking=True)
        if self.model.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event


def proposal_of(drafter: Drafter | None, features: torch.Tensor | None) -> Proposal | None:
    """The device's form of a drafter, or None where it has none."""
    inner = drafter.inner if isinstance(drafter, ScriptedDrafter) else drafter
    if inner is None:
        return NoProposal() if drafter is None else None
    if isinstance(inner, Eagle3Drafter) and isinstance(inner.model, TritonEagle3Model) and features is not None:
        return Eagle3Proposal(inner, features)
    if isinstance(inner, SmallModelDrafter) and isinstance(inner.model, TritonModel):
        return SmallModelProposal(inner)
    return None


def resident_rounds(session: Session, cache: Any, drafter: Drafter | None, features: torch.Tensor | None, draft_length: int,
                    rules: EndRules) -> Iterator[None] | None:
    """The rounds of a greedy request on the device, or None where its drafter or its many end ids have no place there."""
    proposal = proposal_of(drafter, features)
    ends = sorted(rules.eos_ids | rules.stop_ids)
    if proposal is None or len(ends) > ENDS:
        return None
    if cache.rounds is None:
        cache.rounds = Rounds(cast(TritonModel, session.model), cache)
    return resident(session, cache.rounds, drafter, proposal, draft_length if drafter else 0, ends)


def resident(session: Session, rounds: Rounds, drafter: Drafter | None, proposal: Proposal, draft_length: int,
             ends: list[int]) -> Iterator[None]:
    """The rounds of one request; yields after each, when its tokens are out. ends: ids that end it."""
    stats, cache = session.stats, rounds.cache
    with rounds.model.lock:
        rounds.begin(session, proposal, drafter, ends)
        batch = rounds.batch(draft_length)
        waiting: list[tuple[int, torch.cuda.Event | None]] = []
        launched = 0
        while not session.finished:
            started = time.perf_counter()
            while len(waiting) < AHEAD:
                most = len(session.tokens) + (len(waiting) + 1) * batch * (draft_length + 1)
                slot, launched = launched % RING, launched + batch
                waiting.append((slot, rounds.run(proposal, draft_length, most, slot, batch)))
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


def take(session: Session, record: list[int], drafted: int) -> None:
    """Hands out the tokens of one record."""
    emitted, accepted = record[:2]
    tokens = record[HEADER:HEADER + emitted]
    if min(tokens) < 0:
        raise nan_error()
    kept = session.push(tokens)
    session.stats.count_round(drafted, accepted, kept)
