"""Drafters as chains of launches: a proposal after each verification (SD), and what prepares the next one ahead (SSD)."""

from typing import Protocol, cast

import torch

from ..drafter import Drafter
from ..drafters.eagle3 import Eagle3Drafter
from ..drafters.scripted import ScriptedDrafter
from ..drafters.small_model import SmallModelDrafter
from .branches import DeviceBranches
from .cache import DeviceCache
from .eagle3 import TritonEagle3Model
from .inputs import Verified
from .model import TritonModel
from .round_parts import Propose


class Proposal(Protocol):
    """A drafter's chain of launches. cache: its own, if it has one; graphs belong to it. layers: target layers whose features it
    reads. `tokens` is everywhere an upper bound of what the cache will hold."""

    @property
    def cache(self) -> DeviceCache | None: ...
    @property
    def layers(self) -> tuple[int, ...]: ...

    def begin(self, pending: int, source: Verified) -> None:
        """Before a request's first round. pending: its last token; source: what the first proposal will read."""

    def launch(self, source: Verified, length: int, tokens: int, propose: Propose, keep: bool = False) -> None:
        """Drafts `length` tokens. keep: a `walk` along them will follow."""


class Preparing(Proposal, Protocol):
    """A proposal whose drafter can prepare branches. network: its model."""

    @property
    def network(self) -> TritonModel | TritonEagle3Model: ...
    @property
    def cache(self) -> DeviceCache: ...

    def branches(self, count: int) -> DeviceBranches:
        """Room for that many."""

    def walk(self, source: Verified, length: int, tokens: int, drafted: bool) -> torch.Tensor:
        """The drafter's logits after each token of the draft in source.inputs.row_tokens, [length + 1, V_d] fp32. drafted: by
        `launch`, just now."""

    def follow(self, branches: DeviceBranches, step: int, tokens: int) -> torch.Tensor:
        """Pass `step` of all branches: final rows [branches, H]."""


class NoProposal:
    """AR: nothing is drafted."""

    cache: DeviceCache | None = None
    layers: tuple[int, ...] = ()

    def begin(self, pending: int, source: Verified) -> None:
        """Nothing to prepare."""

    def launch(self, source: Verified, length: int, tokens: int, propose: Propose, keep: bool = False) -> None:
        """Nothing to draft."""


class Eagle3Proposal:
    """EAGLE-3: entries of the last verification first, then its own."""

    def __init__(self, network: TritonEagle3Model, drafter: Eagle3Drafter, features: torch.Tensor) -> None:
        self.network, self.cache = network, cast(DeviceCache, drafter.cache)
        self.layers, self.features = drafter.feature_layers, features

    def begin(self, pending: int, source: Verified) -> None:
        """The last entry of the prompt is written again by the first proposal, from the feature at hand."""
        source.winners[:1].fill_(pending)
        source.features[0].copy_(self.features[-1])

    def launch(self, source: Verified, length: int, tokens: int, propose: Propose, keep: bool = False) -> None:
        """See Proposal."""
        self.network.launch_draft(self.cache, source, length, self.cache.chunks_for(tokens), propose, keep)

    def branches(self, count: int) -> DeviceBranches:
        """See Preparing."""
        return DeviceBranches(self.cache, self.network.decode, count, self.network.ids, lead=0)

    def walk(self, source: Verified, length: int, tokens: int, drafted: bool) -> torch.Tensor:
        """See Preparing."""
        return self.network.launch_walk(self.cache, source, length, self.cache.chunks_for(tokens), drafted)

    def follow(self, branches: DeviceBranches, step: int, tokens: int) -> torch.Tensor:
        """See Preparing."""
        return self.network.launch_branches(branches, step, self.cache.chunks_for(tokens))


class SmallModelProposal:
    """A small model: the last two tokens first, whether or not the cache has the former (after a full accept it hasn't), then
    its own."""

    layers: tuple[int, ...] = ()

    def __init__(self, network: TritonModel, drafter: SmallModelDrafter) -> None:
        self.network, self.cache = network, cast(DeviceCache, drafter.cache)

    def begin(self, pending: int, source: Verified) -> None:
        """The prompt is in the cache already."""

    def launch(self, source: Verified, length: int, tokens: int, propose: Propose, keep: bool = False) -> None:
        """See Proposal."""
        self.network.launch_draft(self.cache, source.inputs, length, self.cache.chunks_for(tokens), propose)

    def branches(self, count: int) -> DeviceBranches:
        """See Preparing."""
        return DeviceBranches(self.cache, self.network.decode, count, None, lead=1)

    def walk(self, source: Verified, length: int, tokens: int, drafted: bool) -> torch.Tensor:
        """See Preparing. Every walk feeds the draft's last token as well, so the next one finds all but its pending token."""
        return self.network.launch_walk(self.cache, source.inputs, length, self.cache.chunks_for(tokens))

    def follow(self, branches: DeviceBranches, step: int, tokens: int) -> torch.Tensor:
        """See Preparing."""
        return self.network.launch_branches(branches, step, self.cache.chunks_for(tokens))


def proposal_of(drafter: Drafter | None, features: torch.Tensor | None) -> NoProposal | Preparing | None:
    """The device's form of a drafter, or None where it has none."""
    inner = drafter.inner if isinstance(drafter, ScriptedDrafter) else drafter
    if inner is None:
        return NoProposal() if drafter is None else None
    if isinstance(inner, Eagle3Drafter) and isinstance(inner.model, TritonEagle3Model) and features is not None:
        return Eagle3Proposal(inner.model, inner, features)
    if isinstance(inner, SmallModelDrafter) and isinstance(inner.model, TritonModel):
        return SmallModelProposal(inner.model, inner)
    return None
