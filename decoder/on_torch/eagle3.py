"""The EAGLE-3 network on the `torch` backend. drafters/eagle3.py has its equations."""

import torch

from ...schedules.recipe import Recipe
from ..backend import DraftWeights, Step
from ..rows import Rows
from .cache import KVCache
from .layer import RopeTable, make_layer, run_layer
from .linear import TORCH, make_head, make_linear
from .ops import argmax, rms_norm


class Eagle3Model:
    """See backend.DraftNetwork."""

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
        """See backend.DraftNetwork."""
        self.rope.reach(capacity)
        return KVCache(self.shape, capacity, self.recipe.kv_chunk, TORCH[self.precision.kv_cache], self.device)

    @torch.inference_mode()
    def reduce(self, features: torch.Tensor) -> torch.Tensor:
        """See backend.DraftNetwork."""
        return self.fc(features.to(self.device, self.dtype))

    @torch.inference_mode()
    def forward(self, tokens: list[int], features: torch.Tensor, rows: Rows) -> Step:
        """See backend.DraftNetwork."""
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
        """See backend.DraftNetwork."""
        return self.head(final).masked_fill(self.beyond, -torch.inf)

    def greedy(self, final: torch.Tensor) -> list[int]:
        """See backend.DraftNetwork."""
        logits = self.logits(final)
        answered = logits.amax(dim=-1).isfinite()
        ids: list[int] = torch.where(answered, self.ids[argmax(logits).clamp(max=len(self.ids) - 1)], -1).tolist()
        return ids
