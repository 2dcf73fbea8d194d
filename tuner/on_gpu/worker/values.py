"""Values for probes and timings, from an integer hash in numpy: equal on every machine and with every library version.

A large operand repeats one block of PERIOD values. PERIOD is prime: no two rows are equal. `wide` values span many exponents: a
change of a sum's order changes its bits. `normal` values are bell-shaped, as relative RMS errors need them.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

PERIOD = 1_048_573
E4M3_NAN = (0x7F, 0xFF)


def hashed(count: int, seed: int) -> np.ndarray:
    """[count] uint32: a full-avalanche hash of index and seed (Mueller's `hash32`, in SplitMix order)."""
    x = np.arange(count, dtype=np.uint32) + np.uint32((seed * 0x9E3779B9) & 0xFFFFFFFF)
    for factor in (0x45D9F3B, 0x45D9F3B):
        x = (x ^ (x >> np.uint32(16))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def normal(count: int, seed: int) -> np.ndarray:
    """[count] fp32 of mean 0 and variance 1: the scaled sum of a hash's four bytes."""
    total = hashed(count, seed).view(np.uint8).reshape(count, 4).astype(np.float32).sum(1)
    return (total - np.float32(4 * 127.5)) / np.float32(2 * 73.9)  # 73.9: standard deviation of a uniform byte


def wide(count: int, seed: int, low: int, high: int) -> np.ndarray:
    """[count] fp32 of either sign, exponents uniform in [low, high), mantissas of 7 bits as in bf16."""
    bits = hashed(count, seed)
    exponent = ((bits >> np.uint32(8)) % np.uint32(high - low) + np.uint32(low + 127)).astype(np.uint32)
    sign, mantissa = bits & np.uint32(1), bits >> np.uint32(1) & np.uint32(127)
    raw = sign << np.uint32(31) | exponent << np.uint32(23) | mantissa << np.uint32(16)
    return raw.view(np.float32)


def wide_e4m3(count: int, seed: int) -> np.ndarray:
    """[count] bytes of e4m3, uniform over the finite values, and so over the exponents."""
    values = (hashed(count, seed) >> np.uint32(7)).astype(np.uint8)
    values[np.isin(values, E4M3_NAN)] ^= 1
    return values


def fill(block: np.ndarray, shape: tuple[int, ...], dtype: "torch.dtype", device: str) -> "torch.Tensor":
    """A tensor of `shape` that repeats `block`. Bytes are reinterpreted as `dtype`, floats converted to it."""
    import torch

    size = int(np.prod(shape))
    values = torch.from_numpy(block[:size]).to(device)
    values = values.view(dtype) if values.dtype == torch.uint8 else values.to(dtype)
    if size > len(values):
        raw = values.view(torch.uint8).reshape(-1)
        values = raw.repeat(-(-size // len(values)))[:size * values.element_size()].view(dtype)
    return values.clone().view(shape)
