"""The target's part of a round on the device, at fixed addresses: verification, verdict, record. A script may replace the
drafter's proposals."""

from dataclasses import dataclass
from functools import partial

import torch

from ...kernels.accept import accept, draft_token
from ...kernels.fixed import FIXED
from ...kernels.layout import HEADER, HIT, RECORD, ROWS
from ...schedules.recipe import Numerics
from ..backend import RequestState, RoundPlan
from ..drafter import Drafter
from ..drafters.scripted import ScriptedDrafter
from ..stats import Stats
from .buffers import DeviceInputs
from .cache import SLACK, DeviceCache
from .network import DeviceNetwork

RING = 64  # records kept on the device; more than are ever in flight
PATTERN = 1024  # rounds of a script before it repeats
DRAFT = HEADER + ROWS  # offset in a record: the drafted tokens of its round stand from here to HIT, as far as there is room


@dataclass(frozen=True)
class Script:
    """A recorded sequence in place of a drafter's proposals, int32 at fixed addresses. reference [capacity]: the sequence;
    accepted [PATTERN]: right drafted tokens per round; hits [PATTERN]: whether a branch serves the next round."""

    reference: torch.Tensor
    accepted: torch.Tensor
    hits: torch.Tensor

    def load(self, drafter: ScriptedDrafter) -> None:
        """Loads a request's script, its patterns repeated."""
        known = torch.tensor(drafter.reference[:len(self.reference)], dtype=torch.int32)
        self.reference.zero_()
        self.reference[:len(known)].copy_(known)
        for table, pattern in ((self.accepted, drafter.accepted), (self.hits, drafter.hits)):
            table.copy_(torch.tensor([int(pattern[i % len(pattern)]) for i in range(PATTERN)], dtype=torch.int32))


def new_script(capacity: int, device: torch.device) -> Script:
    """Room for the scripts of sequences of `capacity` tokens."""
    return Script(*(torch.zeros(size, dtype=torch.int32, device=device) for size in (capacity, PATTERN, PATTERN)))


def write_draft_token(token: torch.Tensor, step: int, inputs: DeviceInputs, numerics: Numerics, script: Script | None) -> None:
    """Writes a drafted token [1] int32, or the script's, as row 1 + step of `inputs`."""
    draft_token(token, inputs, step=step, schedule=FIXED["draft_token"].schedule, numerics=numerics,
                reference=script.reference if script else None, accepted=script.accepted if script else None)


@dataclass(frozen=True)
class Record:
    """One finished round. tokens: the emitted ones, -1 for a row of NaN in the target's logits; hit: whether a branch serves the
    next round; drafted: draft tokens before the first -1; broken: whether the draft held a -1 that marks a drafter whose logits
    hold NaN."""

    tokens: list[int]
    accepted: int
    finished: bool
    hit: bool
    drafted: int
    broken: bool

    def emit(self, request: RequestState) -> bool:
        """Emits the tokens before the first -1. Returns whether there was none, or the request has ended."""
        request.stats.drafter_faults += self.broken
        right = next((i for i, token in enumerate(self.tokens) if token < 0), len(self.tokens))
        if right:
            kept = request.push(self.tokens[:right])
            request.stats.count_round(self.drafted, self.accepted if right == len(self.tokens) else right - 1, kept)
        return right == len(self.tokens) or request.finished


def read_record(values: list[int], length: int, at: int = 0, may_fall_short: bool = False) -> Record:
    """The record in one row of the records. length: K; at: index of the round in its batch; may_fall_short: a -1 in the draft
    ends it and is no fault."""
    places = values[DRAFT + at * length:DRAFT + (at + 1) * length]
    drafted = next((i for i, token in enumerate(places) if token < 0), length)
    return Record(values[HEADER:HEADER + values[0]], values[1], bool(values[2]), bool(values[HIT]),
                  drafted if may_fall_short else length, drafted < length and not may_fall_short)


def warn_of_faults(stats: Stats, before: int, drafter: Drafter | None) -> None:
    """Adds a warning if the request's drafts held -1. before: stats.drafter_faults at the request's start."""
    if drafter is not None and stats.drafter_faults > before:
        stats.warnings.append(f"drafter {drafter.name}: {stats.drafter_faults - before} drafts without a token, because its "
                              "logits hold NaN; the emitted tokens are the target's own")


class Verification:
    """The target's part of the rounds of one cache. records [RING, RECORD] int32: see kernels/accept.py and DRAFT; history
    [slots] int32: the sequence, as `accept` extends it."""

    def __init__(self, network: DeviceNetwork, cache: DeviceCache) -> None:
        self.network, self.cache = network, cache
        device = network.device
        self.records = torch.zeros(RING, RECORD, dtype=torch.int32, device=device)
        self.host = torch.zeros(RING, RECORD, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.history = torch.zeros(cache.capacity + SLACK, dtype=torch.int32, device=device)
        self.tables = new_script(cache.capacity, device)
        self.script: Script | None = None
        self._accept = partial(accept, schedule=FIXED["accept"].schedule, numerics=network.recipe.numerics)

    def load_script(self, drafter: Drafter | None) -> None:
        """Loads the script of a scripted drafter; removes the last one for any other."""
        self.script = None
        if isinstance(drafter, ScriptedDrafter):
            self.tables.load(drafter)
            self.script = self.tables

    def begin(self, request: RequestState, plan: RoundPlan, finished: bool = False) -> None:
        """Prepares the inputs for a request, whose script is loaded. finished: see DeviceInputs.begin."""
        self.network.inputs.begin(request.tokens, request.remaining, sorted(plan.end_ids), finished)

    def write_draft(self, token: torch.Tensor, step: int) -> None:
        """Writes a drafted token [1] int32 as row 1 + step to verify."""
        write_draft_token(token, step, self.network.inputs, self.network.recipe.numerics, self.script)

    def write_script(self, draft_length: int) -> None:
        """Overwrites the whole draft by the script's."""
        for step in range(draft_length):
            self.write_draft(self.network.inputs.row_tokens[:1], step)

    def verify(self, draft_length: int, tokens: int, layers: tuple[int, ...]) -> None:
        """Launches the pass over the pending token and the draft, and its head. tokens: an upper bound of the tokens in the cache
        after the pass."""
        rows = draft_length + 1
        self.network.launch(self.cache, rows, self.cache.chunks_for(tokens), layers)
        self.network.launch_head(self.network.decode.space.final[:rows])

    def accept(self, draft_length: int, at: int = 0) -> None:
        """Launches the verdict on that pass, and its record. at: index of the round in its batch."""
        inputs, first = self.network.inputs, DRAFT + at * draft_length
        assert first + draft_length <= HIT
        if draft_length:  # into every record: only the device knows this round's, and the host has the earlier ones
            draft = inputs.row_tokens[1:1 + draft_length]
            self.records[:, first:first + draft_length].copy_(draft.expand(len(self.records), draft_length))
        self._accept(self.network.verified.winners, inputs, self.records, self.history, draft_length=draft_length)

    def record(self, slot: int, length: int, at: int, may_fall_short: bool) -> Record:
        """The record of a round that was fetched. slot: its place, which may lie past the ring's end; see read_record."""
        return read_record(self.host[slot % RING].tolist(), length, at, may_fall_short)

    def fetch(self, slot: int, count: int) -> torch.cuda.Event | None:
        """Copies `count` records to the host, from `slot` on. Returns the event of the finished copy, None on a CPU."""
        for first, last in ((slot, slot + count), (0, slot + count - RING)):  # the second where the ring ends inside
            if first < last:
                self.host[first:last].copy_(self.records[first:last], non_blocking=True)
        if self.network.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.network.device))
        return event
