"""Drafters as chains of launches: a proposal after each verification (SD), and branches prepared during it (SSD)."""

from typing import Protocol

import torch

from ..backend import RoundPlan
from ..drafters.eagle3 import Eagle3Drafter
from ..drafters.scripted import ScriptedDrafter
from ..drafters.small_model import SmallModelDrafter
from .branches import DeviceBranches
from .buffers import Verified
from .cache import DeviceCache
from .eagle3 import TritonEagle3Model
from .network import DeviceNetwork, WriteDraft


class Proposal(Protocol):
    """A drafter as a chain of launches. cache: the drafter's; network: its model; layers: target layers whose features it reads.

    In every method `length` is K and `tokens` an upper bound of the tokens that the cache will hold.
    """

    @property
    def cache(self) -> DeviceCache: ...
    @property
    def network(self) -> DeviceNetwork | TritonEagle3Model: ...
    @property
    def layers(self) -> tuple[int, ...]: ...

    def begin(self, pending: int, source: Verified) -> None:
        """Called before a request's first round. pending: the last token of the sequence; source: the buffers that the first
        `draft` reads."""

    def draft(self, source: Verified, length: int, tokens: int, write: WriteDraft, keep: bool = False) -> None:
        """Drafts `length` tokens, each given to `write`. keep: `scores` will follow, with `drafted`."""

    def branches(self, count: int) -> DeviceBranches:
        """Buffers for `count` branches."""

    def scores(self, source: Verified, length: int, tokens: int, drafted: bool) -> torch.Tensor:
        """The drafter's logits after each token of the draft in source.inputs.row_tokens, [length + 1, V_d] fp32. drafted:
        whether the last `draft` made that draft."""

    def extend(self, branches: DeviceBranches, step: int, tokens: int) -> torch.Tensor:
        """Pass `step` of all branches. Returns the final rows [branches, H]."""


class Eagle3Proposal:
    """EAGLE-3: the first pass covers the entries of the last verification, later ones its own tokens."""

    def __init__(self, network: TritonEagle3Model, cache: DeviceCache, layers: tuple[int, ...], features: torch.Tensor) -> None:
        self.network, self.cache, self.layers, self.features = network, cache, layers, features

    def begin(self, pending: int, source: Verified) -> None:
        """See Proposal. The first proposal writes the prompt's last entry again, from the feature at hand."""
        source.winners[:1].fill_(pending)
        source.features[0].copy_(self.features[-1])

    def draft(self, source: Verified, length: int, tokens: int, write: WriteDraft, keep: bool = False) -> None:
        """See Proposal."""
        self.network.launch_draft(self.cache, source, length, self.cache.chunks_for(tokens), write, keep)

    def branches(self, count: int) -> DeviceBranches:
        """See Proposal."""
        return DeviceBranches(self.cache, self.network.decode, count, self.network.ids, lead=0)

    def scores(self, source: Verified, length: int, tokens: int, drafted: bool) -> torch.Tensor:
        """See Proposal."""
        return self.network.launch_scores(self.cache, source, length, self.cache.chunks_for(tokens), drafted)

    def extend(self, branches: DeviceBranches, step: int, tokens: int) -> torch.Tensor:
        """See Proposal."""
        return self.network.launch_branches(branches, step, self.cache.chunks_for(tokens))


class SmallModelProposal:
    """A small model: the first pass covers the last two tokens of the sequence, since after a full accept the cache lacks the
    first of them; later passes cover its own tokens."""

    layers: tuple[int, ...] = ()

    def __init__(self, network: DeviceNetwork, cache: DeviceCache) -> None:
        self.network, self.cache = network, cache

    def begin(self, pending: int, source: Verified) -> None:
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


def proposal_of(plan: RoundPlan) -> Proposal | None:
    """The plan's drafter as launches; None if it has no such form."""
    inner = plan.drafter.inner if isinstance(plan.drafter, ScriptedDrafter) else plan.drafter
    if isinstance(inner, Eagle3Drafter) and isinstance(inner.model, TritonEagle3Model) and plan.features is not None:
        assert isinstance(inner.cache, DeviceCache)
        return Eagle3Proposal(inner.model, inner.cache, inner.feature_layers, plan.features)
    if isinstance(inner, SmallModelDrafter) and isinstance(inner.model, DeviceNetwork):
        assert isinstance(inner.cache, DeviceCache)
        return SmallModelProposal(inner.model, inner.cache)
    return None
