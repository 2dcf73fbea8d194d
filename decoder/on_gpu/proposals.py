"""Drafters as chains of launches: a proposal after each verification (SD), and branches prepared during it (SSD)."""

from functools import partial
from typing import Protocol

import torch

from ...kernels.fixed import FIXED
from ...kernels.ngram import ngram_draft
from ...schedules.recipe import Numerics
from ..backend import RoundPlan
from ..drafters.eagle3 import Eagle3Drafter
from ..drafters.ngram import NGramDrafter
from ..drafters.scripted import ScriptedDrafter
from ..drafters.small_model import SmallModelDrafter
from .branches import DeviceBranches
from .buffers import Verified
from .cache import DeviceCache
from .eagle3 import TritonEagle3Model
from .network import DeviceNetwork, WriteDraft
from .verification import Verification


class Proposal(Protocol):
    """A drafter as a chain of launches, of K = `length` tokens each. layers: target layers whose features it reads; key: of
    its graphs; positions: the tokens that it has room for; device: its own; writes_rows: `draft` writes the rows to verify
    itself, with -1 in places that have no token, instead of calling `write`."""

    writes_rows: bool

    @property
    def layers(self) -> tuple[int, ...]: ...
    @property
    def key(self) -> object: ...
    @property
    def positions(self) -> int: ...
    @property
    def device(self) -> torch.device: ...

    def begin(self, tokens: list[int], source: Verified) -> None:
        """Called before a request's first round. tokens: the sequence; source: the buffers that the first `draft` reads."""

    def draft(self, source: Verified, length: int, tokens: int, write: WriteDraft, keep: bool = False) -> None:
        """Drafts `length` tokens, each given to `write`. tokens: an upper bound of those in the cache. keep: `scores` will
        follow, with `drafted`."""


class BranchingProposal(Proposal, Protocol):
    """A drafter with a model, which can prepare branches. cache: the drafter's; network: its model."""

    @property
    def cache(self) -> DeviceCache: ...
    @property
    def network(self) -> DeviceNetwork | TritonEagle3Model: ...

    def branches(self, count: int) -> DeviceBranches:
        """Buffers for `count` branches."""

    def scores(self, source: Verified, length: int, tokens: int, drafted: bool) -> torch.Tensor:
        """The drafter's logits after each token of the draft in source.inputs.row_tokens, [length + 1, V_d] fp32. drafted:
        whether the last `draft` made that draft."""

    def extend(self, branches: DeviceBranches, step: int, tokens: int) -> torch.Tensor:
        """Pass `step` of all branches. Returns the final rows [branches, H]."""


class CachedProposal:
    """The part that drafters with a cache share."""

    writes_rows = False

    def __init__(self, cache: DeviceCache) -> None:
        self.cache = cache
        self.key: object = cache

    @property
    def positions(self) -> int:
        """See Proposal."""
        return self.cache.capacity

    @property
    def device(self) -> torch.device:
        """See Proposal."""
        return self.cache.buffer.device


class Eagle3Proposal(CachedProposal):
    """EAGLE-3: the first pass covers the entries of the last verification, later ones its own tokens."""

    def __init__(self, network: TritonEagle3Model, cache: DeviceCache, layers: tuple[int, ...], features: torch.Tensor,
                 rows: int = 0) -> None:
        """rows: of any verification at most, where draft lengths vary; 0 where they don't."""
        super().__init__(cache)
        self.network, self.layers, self.features, self.rows = network, layers, features, rows
        self.key = cache, rows

    def begin(self, tokens: list[int], source: Verified) -> None:
        """See Proposal. The first proposal writes the prompt's last entry again, from the feature at hand."""
        source.winners[:1].fill_(tokens[-1])
        source.features[0].copy_(self.features[-1])

    def draft(self, source: Verified, length: int, tokens: int, write: WriteDraft, keep: bool = False) -> None:
        """See Proposal."""
        self.network.launch_draft(self.cache, source, length, self.cache.chunks_for(tokens), write, keep, self.rows)

    def branches(self, count: int) -> DeviceBranches:
        """See Proposal."""
        return DeviceBranches(self.cache, self.network.decode, count, self.network.ids, lead=0)

    def scores(self, source: Verified, length: int, tokens: int, drafted: bool) -> torch.Tensor:
        """See Proposal."""
        return self.network.launch_scores(self.cache, source, length, self.cache.chunks_for(tokens), drafted)

    def extend(self, branches: DeviceBranches, step: int, tokens: int) -> torch.Tensor:
        """See Proposal."""
        return self.network.launch_branches(branches, step, self.cache.chunks_for(tokens))


class SmallModelProposal(CachedProposal):
    """A small model: the first pass covers the last two tokens of the sequence, since after a full accept the cache lacks the
    first of them; later passes cover its own tokens."""

    layers: tuple[int, ...] = ()

    def __init__(self, network: DeviceNetwork, cache: DeviceCache) -> None:
        super().__init__(cache)
        self.network = network

    def begin(self, tokens: list[int], source: Verified) -> None:
        """See Proposal. The cache holds the prompt already."""

    def draft(self, source: Verified, length: int, tokens: int, write: WriteDraft, keep: bool = False) -> None:
        """See Proposal."""
        self.network.launch_draft(self.cache, source.inputs, length, self.cache.chunks_for(tokens), write)

    def branches(self, count: int) -> DeviceBranches:
        """See Proposal."""
        return DeviceBranches(self.cache, self.network.decode, count, None, lead=1)

    def scores(self, source: Verified, length: int, tokens: int, drafted: bool) -> torch.Tensor:
        """See Proposal. The pass includes the draft's last token, so the cache then lacks the next pending token alone."""
        return self.network.launch_scores(self.cache, source.inputs, length, self.cache.chunks_for(tokens))

    def extend(self, branches: DeviceBranches, step: int, tokens: int) -> torch.Tensor:
        """See Proposal."""
        return self.network.launch_branches(branches, step, self.cache.chunks_for(tokens))


class NGramProposal:
    """n-gram look-up in the sequence itself. history [tokens] int32: as `accept` writes it."""

    layers: tuple[int, ...] = ()
    key = NGramDrafter.name
    writes_rows = True

    def __init__(self, history: torch.Tensor, numerics: Numerics) -> None:
        self.history, self.positions, self.device = history, len(history), history.device
        self._draft = partial(ngram_draft, history, schedule=FIXED["ngram"].schedule, numerics=numerics)

    def begin(self, tokens: list[int], source: Verified) -> None:
        """See Proposal. The history begins with the whole sequence."""
        self.history[:len(tokens)].copy_(torch.tensor(tokens, dtype=torch.int32))

    def draft(self, source: Verified, length: int, tokens: int, write: WriteDraft, keep: bool = False) -> None:
        """See Proposal. One launch writes the whole draft."""
        self._draft(source.inputs, draft_length=length)


def proposal_of(plan: RoundPlan, verification: Verification) -> BranchingProposal | NGramProposal | None:
    """The plan's drafter as launches; None if it has no such form."""
    inner = plan.drafter.inner if isinstance(plan.drafter, ScriptedDrafter) else plan.drafter
    if isinstance(inner, Eagle3Drafter) and isinstance(inner.model, TritonEagle3Model) and plan.features is not None:
        assert isinstance(inner.cache, DeviceCache)
        rows = plan.draft_length + 1 if plan.policy else 0
        return Eagle3Proposal(inner.model, inner.cache, inner.feature_layers, plan.features, rows)
    if isinstance(inner, SmallModelDrafter) and isinstance(inner.model, DeviceNetwork):
        assert isinstance(inner.cache, DeviceCache)
        return SmallModelProposal(inner.model, inner.cache)
    if type(inner) is NGramDrafter:  # a class derived from it may draft by another rule
        return NGramProposal(verification.history, verification.network.recipe.numerics)
    return None
