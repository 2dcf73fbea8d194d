"""Rotary position embedding: the frequencies of the default, llama3 and YaRN kinds, and the table of cosines and sines.

Position p and pair i have the angle p * f_i. A scaling changes the frequencies once, at load, whatever the length of a prompt, so
a token's rotation doesn't depend on later tokens. Sources: RoFormer (Su et al. 2021); YaRN (Peng et al. 2023, §3.2-3.4); the
scaling of the Llama 3.1 model card. Dynamic NTK and longrope depend on the length and are refused.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch

from ...shapes.fields import Fields
from ...shapes.model import ModelShape
from ..errors import LoadError

BLOCK = 256  # positions per call: always the same size, so a position's bits don't depend on the capacity
SUPPORTED = ("default", "llama3", "yarn")


def rope_kind(scaling: Mapping[str, object] | None) -> str:
    """The kind of a rope_scaling. Raises LoadError if it isn't supported."""
    kind = "default" if scaling is None else scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in SUPPORTED:
        raise LoadError(f"RoPE type {kind!r} is not supported", expected=f"one of {', '.join(SUPPORTED)}",
                        action="use a model with another position encoding")
    return str(kind)


def frequencies(shape: ModelShape) -> tuple[torch.Tensor, float]:
    """(f [head_dim / 2] in fp32, factor of cosines and sines).

    Raises:
        LoadError: an unsupported RoPE kind; a missing or unknown parameter.
    """
    kind = rope_kind(shape.rope_scaling)
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
    plain = 1.0 / (shape.rope_theta ** exponent)
    if kind == "default":
        return plain, 1.0
    fields = Fields(shape.rope_scaling or {}, f"{shape.name}: rope_scaling", LoadError)
    fields.known |= {"rope_type", "type"}
    return _llama3(plain, fields) if kind == "llama3" else _yarn(plain, shape, fields)


def _llama3(plain: torch.Tensor, fields: Fields) -> tuple[torch.Tensor, float]:
    factor = fields.positive("factor", float)
    low, high = fields.positive("low_freq_factor", float), fields.positive("high_freq_factor", float)
    trained = fields.positive("original_max_position_embeddings", int)
    fields.done()
    wavelength = 2 * math.pi / plain
    smooth = (trained / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(wavelength > trained / low, plain / factor, plain)
    middle = (wavelength <= trained / low) & (wavelength >= trained / high)
    return torch.where(middle, between, scaled), 1.0


def _yarn(plain: torch.Tensor, shape: ModelShape, fields: Fields) -> tuple[torch.Tensor, float]:
    factor = fields.positive("factor", float)
    trained = fields.positive("original_max_position_embeddings", int, shape.max_position)
    fast, slow = fields.positive("beta_fast", float, 32.0), fields.positive("beta_slow", float, 1.0)
    attention_factor = fields.positive("attention_factor", float, None)
    fields.done(action="this YaRN variant isn't supported")

    def pair_of(rotations: float) -> float:
        """The pair, as a fraction, that turns `rotations` times within the trained length."""
        return shape.head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(shape.rope_theta))

    first, last = max(math.floor(pair_of(fast)), 0), min(math.ceil(pair_of(slow)), shape.head_dim - 1)
    span = max(last - first, 0.001)  # pairs; not 0 if both ends are one pair
    ramp = ((torch.arange(shape.head_dim // 2, dtype=torch.float32) - first) / span).clamp(0, 1)
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return plain / factor * ramp + plain * (1 - ramp), attention_factor


def rope_table(shape: ModelShape, positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, [positions rounded up to BLOCK, head_dim / 2] each in fp32. Angles are fp32; numpy computes in fp64 on
    one thread. (torch splits the work by threads, and the tail of a part may take another code path.)"""
    f, factor = frequencies(shape)
    cos, sin = [], []
    for start in range(0, positions, BLOCK):
        angle = (torch.arange(start, start + BLOCK, dtype=torch.float32)[:, None] * f[None, :]).double().numpy()
        cos.append(torch.from_numpy(np.cos(angle)).float() * factor)
        sin.append(torch.from_numpy(np.sin(angle)).float() * factor)
    return torch.cat(cos).to(device), torch.cat(sin).to(device)
