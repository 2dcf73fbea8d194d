"""The interface between the engine and a backend: a backend makes a `Model` of a checkpoint, the engine drives it.

Token ids go in, hidden rows come out; the engine never sees a weight. A backend owns its layout, its launches and its
schedules, and must be row-invariant on its own. `torch` is the reference and runs anywhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..schedules.promoted import PromotedSchedule
from ..shapes.fields import Table
from ..shapes.model import ModelShape
from .drafter import Drafter
from .selection import Options
from .stats import Stats

if TYPE_CHECKING:
    import numpy as np
    import torch

    from .checkpoint.loader import Checkpoint
    from .checkpoint.weights import Tensors
    from .rows import Cache, Rows


@dataclass
class Hidden:
    """Rows out of one pass. final [rows, hidden_size]: after the last norm; features [rows, n * hidden_size]: the
    residual stream after the asked layers, concatenated low to high, or None."""

    final: "torch.Tensor"
    features: "torch.Tensor | None" = None


@dataclass(frozen=True)
class Step:
    """Rows out of one pass: final [rows, H], after the last norm; feature [rows, H], the recurrent one."""

    final: "torch.Tensor"
    feature: "torch.Tensor"

    def last(self) -> "Step":
        return Step(self.final[-1:], self.feature[-1:])


@dataclass(frozen=True)
class KernelTime:
    """One kind of kernel in one pass. time_us: on its own; adds_us: the pass's time less the pass without it; share: of time_us
    in the pass's time; ceiling_share: of the measured read ceiling."""

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
    """rows: the kernels of a pass by its number of rows; tokens: in the cache before it."""

    read_ceiling_tb_s: float
    tokens: int
    rows: dict[int, list[KernelTime]]


@dataclass(frozen=True)
class BackendNotes:
    """A backend's part of `stats`. schedules: those in use, with their evidence; launches_per_token: None where they aren't
    counted; promoted: the promoted rows among the schedules."""

    name: str
    device: str
    schedules: tuple[Table, ...] = ()
    launches_per_token: float | None = None
    warnings: tuple[str, ...] = field(default=())
    promoted: tuple[PromotedSchedule, ...] = field(default=())


class RequestState(Protocol):
    """A request under way, as rounds on a device see it. tokens: the prompt and everything emitted; the last one is in no cache
    yet."""

    tokens: list[int]
    stats: Stats

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""

    def push(self, tokens: list[int]) -> int:
        """Emits tokens until the request ends; how many were emitted."""


@dataclass(frozen=True)
class RoundPlan:
    """How the rounds of a request go. drafter: None for AR; features: the target's, of the prompt's rows, where the drafter asks
    for some; draft_length: 0 for AR; branches: 0 outside SSD; end_ids: ids that end the request."""

    drafter: Drafter | None
    features: "torch.Tensor | None"
    draft_length: int
    branches: int
    end_ids: frozenset[int]


@dataclass(frozen=True)
class DraftWeights:
    """An EAGLE-3 drafter out of its checkpoint. tensors: consumed by the network; embedding: its own or the target's; ids [V_d]:
    the target id of each row of its head; norm_before_residual: the residual is the normed feature."""

    shape: ModelShape
    tensors: "Tensors"
    embedding: "torch.Tensor"
    ids: "torch.Tensor"
    norm_before_residual: bool = False


class Model(Protocol):
    """A target or a small drafter. Stateless: sequences live in the caches it makes, so one may serve two threads."""

    shape: ModelShape
    device: "torch.device"
    notes: BackendNotes
    embedding: "torch.Tensor"  # [vocab_size, hidden_size]: an EAGLE-3 drafter without its own reads it
    vocab_limit: int  # no id at or beyond it is ever emitted
    max_rows: int  # rows of one verification; a longer pass is cut, which the bits don't show
    prefill_rows: int  # rows of one pass over a prompt; the bits don't depend on it
    prefill_is_decode: bool  # whether prefill gives the bits of forward
    has_device_rounds: bool  # whether `device_rounds` may give any
    warm_up_repeats: int  # runs of a request before its time counts: kernels get loaded, graphs captured

    def new_cache(self, capacity: int) -> "Cache":
        """A cache for one sequence of up to `capacity` tokens."""

    def forward(self, tokens: list[int], rows: "Rows", layers: tuple[int, ...] = ()) -> Hidden:
        """One pass over `tokens`, one row each, appended to what `rows` stands for; `layers`: features after those
        layers."""

    def prefill(self, tokens: list[int], rows: "Rows", layers: tuple[int, ...] = ()) -> Hidden:
        """As forward, for prompts: up to `prefill_rows` tokens, by kernels for many rows where the backend has some."""

    def logits(self, final: "torch.Tensor") -> "torch.Tensor":
        """[rows, vocab_size] in fp32."""

    def greedy(self, final: "torch.Tensor") -> list[int]:
        """The winning token of each row, the lowest id on ties, never beyond `vocab_limit`; -1 for a row without an answer: its
        largest logit is NaN or infinite."""

    def device_rounds(self, request: RequestState, cache: "Cache", plan: RoundPlan) -> Iterator[None] | None:
        """The rounds of a greedy request without log-probabilities, run by the device itself; None where it can't run this plan.
        Yields after each round, when its tokens are out; then `cache` holds every token of the request but the last."""

    def draft_network(self, weights: DraftWeights, device: "torch.device", options: Options) -> "DraftNetwork":
        """An EAGLE-3 drafter's network on this backend, for this model. Raises LoadError, NotPromoted: see select_schedules."""

    def project(self, index: int, kernel: str, x: "torch.Tensor") -> "torch.Tensor":
        """One projection of one layer (qkv, o, gate_up, down) on rows x, for the reference check: [rows, N]."""

    def pass_profile(self, cache: "Cache", rows: Sequence[int]) -> PassProfile | None:
        """Where the time of passes of so many rows goes, half way into the cache; None where the backend can't tell."""

    def sibling(self, checkpoint: "Checkpoint", device: "torch.device", options: Options) -> "Model":
        """Another checkpoint on the same backend under the same recipe: a small model that drafts for this one."""

    def limit_vocabulary(self, size: int) -> None:
        """From now on no id at or beyond `size` (the tokenizer's) is ever emitted."""


class DraftNetwork(Protocol):
    """An EAGLE-3 drafter's network (see drafters/eagle3.py). Stateless, as a Model is."""

    shape: ModelShape
    embedding: "torch.Tensor"

    @property
    def max_rows(self) -> int:
        """Rows of one decode pass."""

    def new_cache(self, capacity: int) -> "Cache":
        """A cache of one layer and `capacity` slots."""

    def reduce(self, features: "torch.Tensor") -> "torch.Tensor":
        """fc: the target's features [rows, 3 H_target] as the drafter's [rows, H]."""

    def forward(self, tokens: list[int], features: "torch.Tensor", rows: "Rows") -> Step:
        """One pass over entries (token, feature [H]), appended to what `rows` stands for."""

    def greedy(self, final: "torch.Tensor") -> list[int]:
        """The winning target id of each row; -1 for a row without an answer, as in Model."""

    def rows_over_target(self, final: "torch.Tensor") -> "np.ndarray":
        """The logits over target ids, [rows, V] fp32, -inf at ids that the drafter doesn't know."""
