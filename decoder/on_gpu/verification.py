"""The target's part of a round on the device, at fixed addresses: verification, verdict, record. A script may stand for the
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
from .cache import DeviceCache
from .network import DeviceNetwork

RING = 64  # records kept on the device; more than are ever in flight, and a multiple of each batch
PATTERN = 1024  # rounds of a script before it repeats
DRAFT = HEADER + ROWS  # place in a record: from here to HIT, the drafted tokens of its round, as far as there is room


@dataclass(frozen=True)
class Script:
    """A recorded sequence in the place of a drafter's proposals, int32 at fixed addresses: reference [capacity]; accepted
    [PATTERN], the right drafted tokens of each round; hits [PATTERN], whether a branch serves the next round."""

    reference: torch.Tensor
    accepted: torch.Tensor
    hits: torch.Tensor

    def load(self, drafter: ScriptedDrafter) -> None:
        """A request's script; its patterns are repeated."""
        known = torch.tensor(drafter.reference[:len(self.reference)], dtype=torch.int32)
        self.reference.zero_()
        self.reference[:len(known)].copy_(known)
        for table, pattern in ((self.accepted, drafter.accepted), (self.hits, drafter.hits)):
            table.copy_(torch.tensor([int(pattern[i % len(pattern)]) for i in range(PATTERN)], dtype=torch.int32))


def new_script(capacity: int, device: torch.device) -> Script:
    """Room for the scripts of sequences of `capacity` tokens."""
    return Script(*(torch.zeros(size, dtype=torch.int32, device=device) for size in (capacity, PATTERN, PATTERN)))


def write_draft_token(token: torch.Tensor, step: int, inputs: DeviceInputs, numerics: Numerics, script: Script | None) -> None:
    """A drafted token [1], or the script's, becomes row 1 + step of `inputs`."""
    draft_token(token, inputs, step=step, schedule=FIXED["draft_token"].schedule, numerics=numerics,
                reference=script.reference if script else None, accepted=script.accepted if script else None)


@dataclass(frozen=True)
class Record:
    """One round as the device left it. tokens: emitted ones, -1 where the target's logits hold NaN. hit: a branch serves the next
    round. broken: a drafted token was none."""

    tokens: list[int]
    accepted: int
    finished: bool
    hit: bool
    broken: bool

    def emit(self, request: RequestState, drafted: int) -> bool:
        """Emits the tokens, up to the first one that the target has no answer for; whether it had all."""
        request.stats.drafter_faults += self.broken
        right = next((i for i, token in enumerate(self.tokens) if token < 0), len(self.tokens))
        if right:
            kept = request.push(self.tokens[:right])
            request.stats.count_round(drafted, self.accepted if right == len(self.tokens) else right - 1, kept)
        return right == len(self.tokens) or request.finished


def read_record(values: list[int], drafted: int, at: int = 0) -> Record:
    """values: one row of the records. drafted: tokens of each round. at: of the round, in its batch."""
    places = values[DRAFT + at * drafted:min(DRAFT + (at + 1) * drafted, HIT)]
    return Record(values[HEADER:HEADER + values[0]], values[1], bool(values[2]), bool(values[HIT]), min(places, default=0) < 0)


def warn_of_faults(stats: Stats, before: int, drafter: Drafter | None) -> None:
    """Names the drafter whose drafts held no tokens. before: stats.drafter_faults when the request began."""
    if drafter is not None and stats.drafter_faults > before:
        stats.warnings.append(f"drafter {drafter.name}: {stats.drafter_faults - before} drafts with tokens that are none, as its "
                              "logits hold NaN; the tokens are the target's own all the same")


class Verification:
    """The target's part of the rounds of one cache. records [RING, RECORD] int32: see kernels/accept.py, and DRAFT."""

    def __init__(self, network: DeviceNetwork, cache: DeviceCache) -> None:
        self.network, self.cache = network, cache
        device = network.device
        self.records = torch.zeros(RING, RECORD, dtype=torch.int32, device=device)
        self.host = torch.zeros(RING, RECORD, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.tables = new_script(cache.capacity, device)
        self.script: Script | None = None
        self._accept = partial(accept, schedule=FIXED["accept"].schedule, numerics=network.recipe.numerics)

    def load_script(self, drafter: Drafter | None) -> None:
        """The script of a request, if it has one."""
        self.script = None
        if isinstance(drafter, ScriptedDrafter):
            self.tables.load(drafter)
            self.script = self.tables

    def begin(self, request: RequestState, plan: RoundPlan, finished: bool = False) -> None:
        """A request's first round, its script loaded. finished: see DeviceInputs.begin."""
        self.network.inputs.begin(request.tokens, request.remaining, sorted(plan.end_ids), finished)

    def write_draft(self, token: torch.Tensor, step: int) -> None:
        """A drafted token becomes a row to verify."""
        write_draft_token(token, step, self.network.inputs, self.network.recipe.numerics, self.script)

    def verify(self, draft_length: int, tokens: int, layers: tuple[int, ...]) -> None:
        """The pass over the pending token and the draft, and its winners. tokens: an upper bound of the tokens in the cache after
        it."""
        rows = draft_length + 1
        self.network.launch(self.cache, rows, self.cache.chunks_for(tokens), layers)
        self.network.launch_head(self.network.decode.space.final[:rows])

    def accept(self, draft_length: int, at: int = 0) -> None:
        """The verdict on that pass, and its record. at: of the round, in its batch."""
        inputs, first = self.network.inputs, DRAFT + at * draft_length
        room = min(draft_length, HIT - first)
        if room > 0:  # in every record: the one of this round is copied to the host before another round is launched
            self.records[:, first:first + room].copy_(inputs.row_tokens[1:1 + room].expand(len(self.records), room))
        self._accept(self.network.verified.winners, inputs, self.records, draft_length=draft_length)

    def fetch(self, slot: int, count: int) -> torch.cuda.Event | None:
        """Copies `count` records, from `slot` on, to the host; the event tells when they are there."""
        self.host[slot:slot + count].copy_(self.records[slot:slot + count], non_blocking=True)
        if self.network.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.network.device))
        return event
