"""The EAGLE-3 network on the `torch` backend: see drafters/eagle3.py.

normed = concat(input_layernorm(embedding), hidden_norm(feature)); the residual is the feature itself; the recurrent feature is
the layer's output before the last norm.
"""

import numpy as np
import torch

from ...schedules.recipe import Recipe
from ..backend import DraftWeights, Step
from ..rows import Rows
from .cache import KVCache
from .layer import RopeTable, make_layer, run_layer
from .linear import TORCH, make_head, make_linear
from .ops import argmax, rms_norm


class Eagle3Model:
    """The drafter's network. ids [V_d]: the target id of each row of its head."""

    def __init__(self, weights: DraftWeights, recipe: Recipe, device: torch.device, vocab_limit: int) -> None:
        shape, tensors = weights.shape, weights.tensors
        self.shape, self.recipe, self.device = shape, recipe, device
        self.norm_before_residual = weights.norm_before_residual
        self.max_rows = recipe.row_tile
        self.precision = recipe.precision
        self.dtype = TORCH[self.precision.attention]
        self.embedding = weights.embedding.to(device, self.dtype)
        self.fc = make_linear(tensors.pop("fc.weight").to(device), self.precision)
        self.head = make_head(tensors.pop("lm_head.weight").to(device), self.precision, drafter=True)
        self.norm = tensors.pop("norm.weight").to(device, self.dtype)
        self.hidden_norm = tensors.pop("midlayer.hidden_norm.weight").to(device, self.dtype)
        self.layer = make_layer(tensors, "midlayer.", self.precision, shape, device)
        assert not tensors, f"unused: {list(tensors)}"
        self.rope = RopeTable(shape, self.dtype, device)
        self.ids = weights.ids.to(device)
        self.beyond = self.ids >= vocab_limit  # rows of the head for ids that no tokenizer has

    def new_cache(self, capacity: int) -> KVCache:
        """A cache of one layer."""
        self.rope.reach(capacity)
        return KVCache(self.shape, capacity, self.recipe.kv_chunk, TORCH[self.precision.kv_cache], self.device)

    @torch.inference_mode()
    def reduce(self, features: torch.Tensor) -> torch.Tensor:
        """fc: the target's features [rows, 3 H_target] as the drafter's [rows, H]."""
        return self.fc(features.to(self.device, self.dtype))

    @torch.inference_mode()
    def forward(self, tokens: list[int], features: torch.Tensor, rows: Rows) -> Step:
        """One pass over entries (token, feature [H]), appended to the caches of `rows`."""
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
        """The winning target id of each row; -1 where its largest logit is NaN or infinite."""
        logits = self.logits(final)
        answered = logits.amax(dim=-1).isfinite()
        ids: list[int] = torch.where(answered, self.ids[argmax(logits).clamp(max=len(self.ids) - 1)], -1).tolist()
        return ids

    def rows_over_target(self, final: torch.Tensor) -> np.ndarray:
        """The logits over target ids, [rows, V], -inf at ids that the drafter doesn't know."""
        logits = self.logits(final)
        wide = logits.new_full((logits.shape[0], self.shape.vocab_size), -torch.inf)
        wide[:, self.ids] = logits
        return wide.cpu().numpy()
