"""A decoder on the `torch` backend, in the recipe's precision.

A row's bits don't depend on the rows beside it, so prefill is the decode path with more rows.
"""

from collections.abc import Sequence

import torch

from ...schedules.recipe import Recipe
from ...shapes.model import ModelShape
from ..backend import BackendNotes, DraftWeights, Hidden, RequestState, RoundPlan
from ..checkpoint.loader import Checkpoint
from ..checkpoint.weights import EMBEDDING, FINAL_NORM, HEAD, Tensors
from ..rows import Cache, Rows
from ..selection import Options
from .cache import KVCache
from .eagle3 import Eagle3Model
from .layer import RopeTable, make_layer, run_layer
from .linear import TORCH, Linear, make_head
from .ops import argmax, rms_norm

PREFILL_ROWS = 128  # rows of one pass over a prompt; the bits don't depend on it


class TorchModel:
    """See backend.Model."""

    def __init__(self, shape: ModelShape, tensors: Tensors, recipe: Recipe, device: torch.device) -> None:
        """tensors: each is removed from the dictionary once it is converted, which frees it."""
        self.shape, self.device, self.recipe = shape, device, recipe
        self.precision = recipe.precision
        self.dtype = TORCH[self.precision.attention]
        self.notes = BackendNotes("torch", str(device))
        self.embedding = tensors.pop(EMBEDDING).to(device, self.dtype)
        head = self.embedding if shape.tie_embeddings else tensors.pop(HEAD).to(device)
        self.head = make_head(head, self.precision)
        self.final_norm = tensors.pop(FINAL_NORM).to(device, self.dtype)
        self.layers = [make_layer(tensors, f"model.layers.{i}.", self.precision, shape, device)
                       for i in range(shape.num_layers)]
        self.rope = RopeTable(shape, self.dtype, device)
        self.vocab_limit = shape.vocab_size
        self.max_rows = recipe.row_tile
        self.prefill_rows = PREFILL_ROWS
        self.prefill_is_decode = True
        self.has_device_rounds, self.warm_up_repeats = False, int(device.type == "cuda")

    def new_cache(self, capacity: int) -> KVCache:
        """See backend.Model."""
        self.rope.reach(capacity)
        return KVCache(self.shape, capacity, self.recipe.kv_chunk, TORCH[self.precision.kv_cache], self.device)

    @torch.inference_mode()
    def forward(self, tokens: list[int], rows: Rows, layers: tuple[int, ...] = ()) -> Hidden:
        """See backend.Model.forward."""
        x = self.embedding[torch.tensor(tokens, device=self.device)]
        rope = self.rope.at(rows.positions)
        kept = []
        for index, layer in enumerate(self.layers):
            x = run_layer(index, layer, x, rms_norm(x, layer.input_norm, self.shape.rms_norm_eps), self.shape, rope, rows)
            if index in layers:
                kept.append(x)
        rows.finish()
        final = rms_norm(x, self.final_norm, self.shape.rms_norm_eps)
        return Hidden(final, torch.cat(kept, dim=-1) if kept else None)

    def prefill(self, tokens: list[int], rows: Rows, layers: tuple[int, ...] = ()) -> Hidden:
        """See backend.Model.prefill."""
        return self.forward(tokens, rows, layers)

    @torch.inference_mode()
    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """See backend.Model.logits."""
        logits = self.head(final.float())
        if self.vocab_limit < self.shape.vocab_size:
            logits = logits.clone()
            logits[:, self.vocab_limit:] = -torch.inf
        return logits

    def greedy(self, final: torch.Tensor) -> list[int]:
        """See backend.Model.greedy."""
        logits = self.logits(final)
        answered = logits.amax(dim=-1).isfinite()
        ids: list[int] = torch.where(answered, argmax(logits), -1).tolist()
        return ids

    def head_counts(self) -> tuple[int, int]:
        """See backend.Model: every logit is computed."""
        return 0, 0

    def device_rounds(self, request: RequestState, cache: Cache, plan: RoundPlan) -> None:
        """See backend.Model. None: Python drives every round."""

    def draft_network(self, weights: DraftWeights, device: torch.device, options: Options) -> Eagle3Model:
        """See backend.Model. This backend has no schedules and ignores the options."""
        return Eagle3Model(weights, self.recipe, device, self.vocab_limit)

    def pass_profile(self, cache: Cache, rows: Sequence[int]) -> None:
        """See backend.Model. None: this backend can't time kernels."""

    def sibling(self, checkpoint: Checkpoint, device: torch.device, options: Options) -> "TorchModel":
        """See backend.Model.sibling."""
        return load_torch_model(checkpoint, self.recipe, device, options)

    def project(self, index: int, kernel: str, x: torch.Tensor) -> torch.Tensor:
        """See backend.Model.project."""
        linear: Linear = getattr(self.layers[index], kernel)
        return linear(x.to(self.device, linear.dtype))

    def limit_vocabulary(self, size: int) -> None:
        """See backend.Model.limit_vocabulary."""
        self.vocab_limit = min(size, self.shape.vocab_size)


def load_torch_model(checkpoint: Checkpoint, recipe: Recipe, device: torch.device, options: Options) -> TorchModel:
    """The checkpoint on this backend; its tensors are consumed. This backend has no schedules and ignores the options."""
    model = TorchModel(checkpoint.config.shape, checkpoint.tensors, recipe, device)
    assert not checkpoint.tensors, f"unused: {list(checkpoint.tensors)}"
    return model


