"""The EAGLE-3 drafter (Li et al. 2025): one layer over the target's features.

Entry i pairs token i + 1 with the target's feature at i, at RoPE position i, and predicts token i + 2. Where the
target's feature isn't there yet, the drafter's own output stands for it; after a verification the accepted entries
are written again from the target's features. Forward: normed = concat(input_layernorm(embedding),
hidden_norm(feature)); the residual is the feature itself; the recurrent feature is the layer's output before the
last norm.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ...schedules.recipe import Recipe
from ...shapes.model import ModelShape
from ..checkpoint.weights import Tensors
from ..drafter import Branch, Outcome, likely_outcomes
from ..on_torch.cache import Appended, Branches, KVCache, Rows
from ..on_torch.linear import TORCH, make_head, make_linear
from ..on_torch.model import RopeTable, make_layer, run_layer
from ..on_torch.ops import argmax, rms_norm
from ..sampling import Chooser

FEED = 128  # rows of one pass over a prompt


class Network(Protocol):
    """What the drafter asks of a backend's network."""

    shape: ModelShape
    embedding: torch.Tensor

    @property
    def max_rows(self) -> int: ...
    def new_cache(self, capacity: int) -> Any: ...
    def reduce(self, features: torch.Tensor) -> torch.Tensor: ...
    def forward(self, tokens: list[int], features: torch.Tensor, rows: Rows) -> "Step": ...
    def greedy(self, final: torch.Tensor) -> list[int]: ...
    def rows_over_target(self, final: torch.Tensor) -> np.ndarray: ...


@dataclass(frozen=True)
class Step:
    """Rows out of one pass: final [rows, H], after the last norm; feature [rows, H], the recurrent one."""

    final: torch.Tensor
    feature: torch.Tensor

    def last(self) -> "Step":
        return Step(self.final[-1:], self.feature[-1:])


class Eagle3Model:
    """The drafter's network. ids [V_d]: the target id of each row of its head."""

    def __init__(self, shape: ModelShape, tensors: Tensors, embedding: torch.Tensor, ids: torch.Tensor, recipe: Recipe,
                 device: torch.device, norm_before_residual: bool, vocab_limit: int) -> None:
        self.shape, self.recipe, self.device, self.norm_before_residual = shape, recipe, device, norm_before_residual
        self.max_rows = recipe.row_tile
        self.precision = recipe.precision
        self.dtype = TORCH[self.precision.attention]
        self.embedding = embedding.to(device, self.dtype)
        self.fc = make_linear(tensors.pop("fc.weight").to(device), self.precision)
        self.head = make_head(tensors.pop("lm_head.weight").to(device), self.precision, drafter=True)
        self.norm = tensors.pop("norm.weight").to(device, self.dtype)
        self.hidden_norm = tensors.pop("midlayer.hidden_norm.weight").to(device, self.dtype)
        self.layer = make_layer(tensors, "midlayer.", self.precision, False, device)
        assert not tensors, f"unused: {list(tensors)}"
        self.rope = RopeTable(shape, self.dtype, device)
        self.ids = ids.to(device)
        self.beyond = self.ids >= vocab_limit  # rows of the head for ids that no tokenizer has

    def new_cache(self, capacity: int) -> KVCache:
        """A cache of one layer."""
        return KVCache(self.shape, capacity, self.recipe.kv_chunk, TORCH[self.precision.kv_cache], self.device)

    @torch.inference_mode()
    def reduce(self, features: torch.Tensor) -> torch.Tensor:
        """fc: the target's features [rows, 3 H_target] as the drafter's [rows, H]."""
        return self.fc(features.to(self.device, self.dtype))

    @torch.inference_mode()
    def forward(self, tokens: list[int], features: torch.Tensor, rows: Rows) -> Step:
        """One pass over entries (token, feature [H]), appended to what `rows` stands for."""
        eps = self.shape.rms_norm_eps
        embedded = self.embedding[torch.tensor(tokens, device=self.device)]
        normed_feature = rms_norm(features, self.hidden_norm, eps)
        normed = torch.cat([rms_norm(embedded, self.layer.input_norm, eps), normed_feature], dim=-1)
        residual = normed_feature if self.norm_before_residual else features
        out = run_layer(0, self.layer, residual, normed, self.shape, self.rope.at(rows.positions), rows)
        rows.finish()
        return Step(rms_norm(out, self.norm, eps), out)

    @torch.inference_mode()
    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """[rows, V_d] in fp32 over draft ids; -inf where the target id has no token."""
        return self.head(final).masked_fill(self.beyond, -torch.inf)

    def greedy(self, final: torch.Tensor) -> list[int]:
        """The winning target id of each row."""
        ids: list[int] = self.ids[argmax(self.logits(final))].tolist()
        return ids

    def rows_over_target(self, final: torch.Tensor) -> np.ndarray:
        """The logits over target ids, [rows, V], -inf at ids that the drafter doesn't know."""
        logits = self.logits(final)
        wide = logits.new_full((logits.shape[0], self.shape.vocab_size), -torch.inf)
        wide[:, self.ids] = logits
        return wide.cpu().numpy()


class Eagle3Drafter:
    """See drafter.Drafter. `tip` is the step of the entry before the next token, known once the cache is caught up."""

    name = "eagle3"

    def __init__(self, model: "Network", layers: tuple[int, ...], capacity: int) -> None:
        self.model, self.feature_layers, self.max_rows = model, layers, model.max_rows
        self.cache = model.new_cache(capacity)
        self.chooser = Chooser()
        self.pending = model.embedding.new_empty(0, model.shape.hidden_size)  # target features of entries not written yet
        self.tip = Step(self.pending, self.pending)

    def start(self, tokens: list[int], features: torch.Tensor | None, chooser: Chooser) -> None:
        """The prompt's features; feeds all its entries."""
        assert features is not None
        self.chooser = chooser
        self.cache.clear()
        self.pending = self.model.reduce(features)
        self._catch_up(tokens)

    def _catch_up(self, tokens: list[int]) -> None:
        """Writes the entries whose target features have arrived: the last ones before the end of `tokens`."""
        done = 0
        while done < len(self.pending):
            part = self.pending[done:done + FEED]
            first = self.cache.cursor + 1  # entry i holds token i + 1
            step = self.model.forward(tokens[first:first + len(part)], part, Appended(self.cache, len(part)))
            self.tip = step.last()
            done += len(part)
        self.pending = self.pending[:0]
        assert self.cache.cursor >= len(tokens) - 1

    def draft(self, tokens: list[int], length: int) -> list[int]:
        """Entries from the target's features first, then the drafter's own."""
        self._catch_up(tokens)
        step, drafted = self.tip, list[int]()
        while len(drafted) < length:
            drafted += self._choose(step.final, [len(tokens) + len(drafted)])
            if len(drafted) < length:
                step = self.model.forward(drafted[-1:], step.feature, Appended(self.cache, 1))
        return drafted

    def _choose(self, final: torch.Tensor, indices: list[int]) -> list[int]:
        if self.chooser.greedy:
            return self.model.greedy(final)
        return [self.chooser.choose(row, i) for row, i in zip(self.model.rows_over_target(final), indices)]

    def accept(self, outcome: Outcome) -> None:
        """Forgets the entries that stand on the drafter's own features; the accepted ones come back from the
        target's."""
        assert outcome.features is not None
        self.cache.rollback(min(self.cache.cursor, outcome.base - 1))
        self.pending = torch.cat([self.pending, self.model.reduce(outcome.features)])

    def prepare(self, tokens: list[int], draft: list[int], branches: int, length: int) -> Branch:
        """Repairs first: the entries whose target features came with the last verdict. Then walks the draft, its
        last token included, on the drafter's own features, and drafts all likely branches in one batch."""
        self._catch_up(tokens)
        base = len(tokens)
        self.cache.rollback(base - 1)
        steps = [self.tip]
        for token in draft:
            steps.append(self.model.forward([token], steps[-1].feature, Appended(self.cache, 1)))
        rows = self.model.rows_over_target(torch.cat([step.final for step in steps]))
        outcomes = likely_outcomes([self.chooser.scores(row, base + i) for i, row in enumerate(rows)], draft, branches)
        if not outcomes or not length:
            return {}
        own = Branches(self.cache, [base - 1 + count for count, _ in outcomes], length)
        feature = torch.cat([steps[count].feature for count, _ in outcomes])
        last = [token for _, token in outcomes]
        drafted: list[list[int]] = []
        while len(drafted) < length:
            step = self.model.forward(last, feature, own)
            last, feature = self._choose(step.final, [position + 1 for position in own.positions]), step.feature
            drafted.append(last)
        return {key: list(column) for key, column in zip(outcomes, zip(*drafted))}
