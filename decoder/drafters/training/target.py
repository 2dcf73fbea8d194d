"""The frozen target in training: Hugging Face's model, which answers prompts and gives features."""

from dataclasses import dataclass

import torch

from ...checkpoint.hugging_face import hugging_face_from_tensors
from ...checkpoint.loader import Checkpoint
from ...request.tokenizer import Tokenizer
from ..eagle3_config import feature_layers


@dataclass(frozen=True)
class Observed:
    """The output of one pass over sequences. features [B, T, 3 H]: after three layers, lowest first; final [B, T, H]: after the
    last norm; embedded [B, T, H]: the embeddings."""

    features: torch.Tensor
    final: torch.Tensor
    embedded: torch.Tensor


class Target:
    """The target with weights in `dtype`, never trained. The checkpoint keeps its tensors."""

    def __init__(self, checkpoint: Checkpoint, tokenizer: Tokenizer, device: torch.device, dtype: torch.dtype) -> None:
        """Raises LoadError for a target of fewer than 7 layers, which has too few features."""
        self.shape, self.tokenizer, self.device, self.dtype = checkpoint.config.shape, tokenizer, device, dtype
        self.layers = feature_layers(None, self.shape.num_layers, checkpoint.source)
        self.eos_ids = sorted(checkpoint.config.eos_ids)
        self.vocab_limit = min(tokenizer.size, self.shape.vocab_size)
        self.model = hugging_face_from_tensors(checkpoint).to(device, dtype).eval().requires_grad_(False)

    @property
    def head(self) -> torch.Tensor:
        """The head's rows of the tokenizer's ids, [vocab_limit, H]."""
        weight: torch.Tensor = self.model.get_output_embeddings().weight
        return weight[:self.vocab_limit]

    def autocast(self) -> torch.autocast:
        """A context for the drafter's computation: products in bf16 if the target's weights are."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    @torch.no_grad()
    def observe(self, ids: torch.Tensor) -> Observed:
        """One pass over ids [B, T], padded on the right."""
        found = self.model.model(ids, output_hidden_states=True, use_cache=False)
        features = torch.cat([found.hidden_states[layer + 1] for layer in self.layers], -1)  # state i is the input of layer i
        return Observed(features, found.last_hidden_state, self.model.get_input_embeddings()(ids))
