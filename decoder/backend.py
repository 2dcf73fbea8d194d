"""The interface between the engine and a backend: a backend makes a `Model` of a checkpoint, and the engine drives it.

Token ids go in, hidden rows come out; the engine never sees a weight. A backend owns its layout, its launches and its schedules,
and must be row-invariant. `torch` is the reference and runs anywhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..schedules.promoted import PromotedSchedule
from ..shapes.fields import Table
from ..shapes.model import ModelShape
from .draft_length import DraftLength
from .drafter import Drafter
from .selection import Options
from .stats import Stats

if TYPE_CHECKING:
    import torch

    from .checkpoint.loader import Checkpoint
    from .checkpoint.weights import Tensors
    from .rows import Cache, Rows


@dataclass
class Hidden:
    """The output of one pass. final [rows, hidden_size]: after the last norm; features [rows, n * hidden_size]: the residual
    after each requested layer, lowest layer first, or None."""

    final: "torch.Tensor"
    features: "torch.Tensor | None" = None


@dataclass(frozen=True)
class Step:
    """The output of one pass of an EAGLE-3 network. final [rows, H]: after the last norm; feature [rows, H]: the recurrent
    one."""

    final: "torch.Tensor"
    feature: "torch.Tensor"

    def last(self) -> "Step":
        """The last row."""
        return Step(self.final[-1:], self.feature[-1:])


@dataclass(frozen=True)
class KernelTime:
    """One kind of kernel in one pass. time_us: alone; adds_us: the pass's time less the time without it; share: time_us over the
    pass's time; ceiling_share: bandwidth over the measured read ceiling."""

    kind: str
    launches: int
    time_us: float
    adds_us: float
    share: float
    read_bytes: int
    bandwidth_tb_s: float
    ceiling_share: float


@dataclass(frozen=True)
class PassProfile:
    """The time of passes by kind of kernel. tokens: in the cache before the pass; rows: the kinds by the pass's number of
    rows."""

    read_ceiling_tb_s: float
    tokens: int
    rows: dict[int, list[KernelTime]]


@dataclass(frozen=True)
class BackendNotes:
    """A backend's part of `stats`. schedules: those in use, with their evidence; launches_per_token: None if not counted;
    promoted: the promoted rows among the schedules."""

    name: str
    device: str
    schedules: tuple[Table, ...] = ()
    launches_per_token: float | None = None
    warnings: tuple[str, ...] = field(default=())
    promoted: tuple[PromotedSchedule, ...] = field(default=())


class RequestState(Protocol):
    """A running request, for rounds on a device. tokens: the prompt and every emitted token; the last one is in no cache yet."""

    tokens: list[int]
    stats: Stats

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""

    def push(self, tokens: list[int]) -> int:
        """Emits tokens until the request ends. Returns the number of emitted tokens."""


@dataclass(frozen=True)
class RoundPlan:
    """The settings of a request's rounds. drafter: None for AR; features: the target's, of the prompt's rows, or None if the
    drafter reads none; draft_length: 0 for AR; branches: 0 outside SSD; end_ids: ids that end the request; policy:
    chooses the draft length of each round, up to draft_length."""

    drafter: Drafter | None
    features: "torch.Tensor | None"
    draft_length: int
    branches: int
    end_ids: frozenset[int]
    policy: DraftLength | None = None


@dataclass(frozen=True)
class DraftWeights:
    """The checkpoint of an EAGLE-3 drafter. tensors: consumed by the network; embedding [V, H]: its own or the target's; ids
    [V_d]: the target id of each row of its head; norm_before_residual: whether the residual is the normed feature."""

    shape: ModelShape
    tensors: "Tensors"
    embedding: "torch.Tensor"
    ids: "torch.Tensor"
    norm_before_residual: bool = False


class Model(Protocol):
    """A target or a small model that drafts. It is stateless: sequences live in its caches, so two threads may share it."""

    shape: ModelShape
    device: "torch.device"
    notes: BackendNotes
    embedding: "torch.Tensor"  # [vocab_size, hidden_size]: an EAGLE-3 drafter without its own reads it
    vocab_limit: int  # no id at or beyond it is ever emitted
    max_rows: int  # rows of one verification; a longer pass is cut, without effect on the bits
    prefill_rows: int  # rows of one pass over a prompt; the bits don't depend on it
    prefill_is_decode: bool  # whether prefill gives the bits of forward
    has_device_rounds: bool  # whether `device_rounds` can return rounds
    warm_up_repeats: int  # untimed runs of a request that load kernels and capture graphs

    def new_cache(self, capacity: int) -> "Cache":
        """A cache for one sequence of up to `capacity` tokens."""

    def forward(self, tokens: list[int], rows: "Rows", layers: tuple[int, ...] = ()) -> Hidden:
        """One pass over `tokens`, one row each, appended to the sequence or branches of `rows`. layers: whose output becomes the
        features."""

    def prefill(self, tokens: list[int], rows: "Rows", layers: tuple[int, ...] = ()) -> Hidden:
        """As forward, for a prompt: up to `prefill_rows` tokens, through kernels for many rows if the backend has them."""

    def logits(self, final: "torch.Tensor") -> "torch.Tensor":
        """[rows, vocab_size] in fp32, -inf from `vocab_limit` on. final [rows, hidden_size]."""

    def greedy(self, final: "torch.Tensor") -> list[int]:
        """The winning token of each row, below `vocab_limit`, the lowest id on ties; -1 for a row without an answer: its largest
        logit is NaN or infinite."""

    def head_counts(self) -> tuple[int, int]:
        """(ids that a certified head computed again, its launches with a row that it couldn't bound) since the last call."""

    def device_rounds(self, request: RequestState, cache: "Cache", plan: RoundPlan) -> Iterator[None] | None:
        """The rounds of a greedy request without log-probabilities, run on the device; None if it can't run this plan. Yields
        after each round, when its tokens are emitted. At the end `cache` holds every token of the request but the last."""

    def draft_network(self, weights: DraftWeights, device: "torch.device", options: Options) -> "DraftNetwork":
        """The network of an EAGLE-3 drafter of this model, on this backend.

        Raises:
            LoadError, NotPromoted: see select_schedules.
        """

    def project(self, index: int, kernel: str, x: "torch.Tensor") -> "torch.Tensor":
        """One projection (qkv, o, gate_up, down) of layer `index`, for the reference check: x [rows, K] to [rows, N]."""

    def pass_profile(self, cache: "Cache", rows: Sequence[int]) -> PassProfile | None:
        """The time by kind of kernel of passes of these numbers of rows, half way into the cache; None if the backend can't
        measure it."""

    def sibling(self, checkpoint: "Checkpoint", device: "torch.device", options: Options) -> "Model":
        """A small model that drafts for this one, on the same backend under the same recipe. Raises as the loading of a model."""

    def limit_vocabulary(self, size: int) -> None:
        """Sets `vocab_limit`, to the tokenizer's size."""


class DraftNetwork(Protocol):
    """The network of an EAGLE-3 drafter (see drafters/eagle3.py), stateless as a Model. ids [V_d]: the target id of each row of
    its head."""

    shape: ModelShape
    embedding: "torch.Tensor"
    ids: "torch.Tensor"

    @property
    def max_rows(self) -> int:
        """Rows of one decode pass."""

    def new_cache(self, capacity: int) -> "Cache":
        """A cache of one layer and `capacity` slots."""

    def reduce(self, features: "torch.Tensor") -> "torch.Tensor":
        """fc: the target's features [rows, 3 H_target] to the drafter's [rows, H]."""

    def forward(self, tokens: list[int], features: "torch.Tensor", rows: "Rows") -> Step:
        """One pass over entries (token, feature [H]), appended to the sequence or branches of `rows`."""

    def greedy(self, final: "torch.Tensor") -> list[int]:
        """The winning target id of each row; -1 for a row without an answer, as in Model."""

    def logits(self, final: "torch.Tensor") -> "torch.Tensor":
        """[rows, V_d] in fp32 over the head's rows, -inf at target ids that are never emitted. final [rows, H]."""
