"""Which target a drafter belongs to: sizes and tokenizer, as SHA-256. Names and paths say nothing."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass

from ...shapes.model import ModelShape
from ..request.tokenizer import Tokenizer

NAMES = ("name", "source")  # fields of a shape that say where it is from
DIGITS = 3  # of the norm's epsilon: GGUF files keep it in fp32


@dataclass(frozen=True)
class TargetIdentity:
    """shape: digest of the target's sizes; tokenizer: fingerprint of its vocabulary and special ids."""

    shape: str
    tokenizer: str


def identity_of(shape: ModelShape, tokenizer: Tokenizer) -> TargetIdentity:
    """Equal for one model in several files, such as a GGUF file and a Hugging Face folder."""
    sizes = {name: value for name, value in dataclasses.asdict(shape).items() if name not in NAMES}
    sizes["rms_norm_eps"] = f"{shape.rms_norm_eps:.{DIGITS}g}"
    return TargetIdentity(hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest(), tokenizer.fingerprint())
