"""The parts of a round on the device, at fixed addresses: verification, verdict, record; and what stands for a drafter under a
script. resident.py and ahead.py make rounds of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels.accept import accept, draft_token
from ...kernels.fixed import FIXED
from ...kernels.layout import HEADER, RECORD
from ...schedules.recipe import Numerics
from ..backend import RequestState
from ..drafter import Drafter
from ..drafters.scripted import ScriptedDrafter
from .cache import DeviceCache
from .inputs import DeviceInputs
from .model import TritonModel, nan_error

RING = 64  # records kept on the device; more than are ever in flight, and a multiple of each batch
PATTERN = 1024  # rounds of a script before it repeats

Propose = Callable[[torch.Tensor, int], None]  # a drafted token [1] int32 and its place in the draft


@dataclass(frozen=True)
class Script:
    """What stands for a drafter's proposals, at fixed addresses: reference [capacity], the recorded sequence; accepted
    [PATTERN], how many drafted tokens of each round are right; hits [PATTERN], whether a branch serves the next round."""

    reference: torch.Tensor
    accepted: torch.Tensor
    hits: torch.Tensor

    def write(self, drafter: ScriptedDrafter) -> None:
        """A request's script; its patterns are repeated."""
        known = torch.tensor(drafter.reference[:len(self.reference)], dtype=torch.int32)
        self.reference.zero_()
        self.reference[:len(known)].copy_(known)
        for table, pattern in ((self.accepted, drafter.accepted), (self.hits, drafter.hits)):
            table.copy_(torch.tensor([int(pattern[i % len(pattern)]) for i in range(PATTERN)], dtype=torch.int32))


def new_script(capacity: int, device: torch.device) -> Script:
    """Room for the scripts of sequences of `capacity` tokens."""
    return Script(*(torch.zeros(size, dtype=torch.int32, device=device) for size in (capacity, PATTERN, PATTERN)))


def put(token: torch.Tensor, step: int, inputs: DeviceInputs, numerics: Numerics, script: Script | None) -> None:
    """A drafted token [1], or the script's, becomes row 1 + step of `inputs`."""
    draft_token(token, inputs, step=step, schedule=FIXED["draft_token"].schedule, numerics=numerics,
                reference=script.reference if script else None, accepted=script.accepted if script else None)


class Rounds:
    """The rounds of one cache, and the records they leave. ahead: what ahead.py keeps with them."""

    def __init__(self, model: TritonModel, cache: DeviceCache) -> None:
        self.model, self.cache = model, cache
        device = model.device
        self.records = torch.zeros(RING, RECORD, dtype=torch.int32, device=device)
        self.host = torch.zeros(RING, RECORD, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.tables = new_script(cache.capacity, device)
        self.script: Script | None = None
        self.ahead: Any = None

    def begin(self, session: RequestState, drafter: Drafter | None, ends: list[int]) -> None:
        """A request's first round. ends: ids that end it."""
        self.script = None
        if isinstance(drafter, ScriptedDrafter):
            self.tables.write(drafter)
            self.script = self.tables
        before, pending = session.tokens[-2:]
        self.model.inputs.begin(before, pending, len(session.tokens) - 1, session.remaining, ends)

    def propose(self, token: torch.Tensor, step: int) -> None:
        """A drafted token becomes a row to verify."""
        put(token, step, self.model.inputs, self.model.recipe.numerics, self.script)

    def verify(self, draft_length: int, tokens: int, layers: tuple[int, ...]) -> None:
        """The pass over the pending token and the draft, and its winners. tokens: an upper bound of what the cache will hold."""
        rows = draft_length + 1
        self.model.launch(self.cache, rows, self.cache.chunks_for(tokens), layers)
        self.model.launch_head(self.model.decode.space.final[:rows])

    def accept(self, draft_length: int) -> None:
        """The verdict on that pass, and its record."""
        model, inputs = self.model, self.model.inputs
        accept(model.verified.winners, inputs, self.records, draft_length=draft_length,
               schedule=FIXED["accept"].schedule, numerics=model.recipe.numerics)

    def fetch(self, slot: int, count: int) -> torch.cuda.Event | None:
        """Copies `count` records, from `slot` on, to the host; the event says when they have come."""
        self.host[slot:slot + count].copy_(self.records[slot:slot + count], non_blocking=True)
        if self.model.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.model.device))
        return event


def take(session: RequestState, record: list[int], drafted: int) -> None:
    """Hands out the tokens of one record."""
    emitted, accepted = record[:2]
    tokens = record[HEADER:HEADER + emitted]
    if min(tokens) < 0:
        raise nan_error()
    kept = session.push(tokens)
    session.stats.count_round(drafted, accepted, kept)
