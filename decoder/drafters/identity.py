"""Which target a drafter belongs to: sizes and vocabulary, as SHA-256. Names and paths say nothing."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from ...shapes.model import ModelShape
from ..request.tokenizer import Tokenizer

DIGITS = 3  # of the norm's epsilon: GGUF files keep it in fp32


@dataclass(frozen=True)
class TargetIdentity:
    """shape: digest of the target's sizes; vocabulary: of its tokens and their ids. Special tokens aren't in it: releases of
    transformers differ in which they find in a GGUF file (5.17: 2, 5.24: 3 for SmolLM2)."""

    shape: str
    vocabulary: str


def identity_of(shape: ModelShape, tokenizer: Tokenizer) -> TargetIdentity:
    """Equal for one model in several files, such as a GGUF file and a Hugging Face folder."""
    sizes = shape.sizes | {"rms_norm_eps": f"{shape.rms_norm_eps:.{DIGITS}g}"}
    return TargetIdentity(_digest(sizes), _digest(tokenizer.inner.get_vocab()))


def _digest(table: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
