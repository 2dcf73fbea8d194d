"""The identity of a drafter's target: SHA-256 of its sizes and its vocabulary. Names and paths don't count."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from ...shapes.model import ModelShape
from ..request.tokenizer import Tokenizer

DIGITS = 3  # significant digits of the norm's epsilon: GGUF files round it to fp32


@dataclass(frozen=True)
class TargetIdentity:
    """Digests. shape: of the target's sizes; vocabulary: of its tokens and their ids. Special tokens don't count: releases of
    transformers find different ones in a GGUF file (SmolLM2: 2 in 5.17, 3 in 5.24)."""

    shape: str
    vocabulary: str


def identity_of(shape: ModelShape, tokenizer: Tokenizer) -> TargetIdentity:
    """The identity of a target. Equal for a GGUF file and a Hugging Face folder of one model."""
    sizes = shape.sizes | {"rms_norm_eps": f"{shape.rms_norm_eps:.{DIGITS}g}"}
    return TargetIdentity(_digest(sizes), _digest(tokenizer.inner.get_vocab()))


def _digest(table: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
