"""Values for probes and timings, from an integer hash in numpy: the same on every machine and with every library version.

A large operand repeats one block of PERIOD values, a prime, so that no two of its rows are equal. `wide` values span many
exponents, so that another order of a sum shows in its bits; `normal` ones are bell-shaped, so that an error relative to the
root mean square means something.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

PERIOD = 1_048_573
E4M3_NAN = (0x7F, 0xFF)


def hashed(count: int, seed: int) -> np.ndarray:
    """[count] uint32: a finaliser of full avalanche over index and seed (Mueller's `hash32`; Steele's SplitMix order)."""
    x = np.arange(count, dtype=np.uint32) + np.uint32((seed * 0x9E3779B9) & 0xFFFFFFFF)
    for factor in (0x45D9F3B, 0x45D9F3B):
        x = (x ^ (x >> np.uint32(16))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def normal(count: int, seed: int) -> np.ndarray:
    """[count] fp32, mean 0 and variance 1: four bytes of one hash, added and scaled."""
    total = hashed(count, seed).view(np.uint8).reshape(count, 4).astype(np.float32).sum(1)
    return (total - np.float32(4 * 127.5)) / np.float32(2 * 73.9)  # 73.9: standard deviation of a uniform byte


def wide(count: int, seed: int, low: int, high: int) -> np.ndarray:
    """[count] fp32 of either sign, exponents evenly from `low` up to `high`, mantissas of 7 bits as bf16 has."""
    bits = hashed(count, seed)
    exponent = ((bits >> np.uint32(8)) % np.uint32(high - low) + np.uint32(low + 127)).astype(np.uint32)
    sign, mantissa = bits & np.uint32(1), bits >> np.uint32(1) & np.uint32(127)
    raw = sign << np.uint32(31) | exponent << np.uint32(23) | mantissa << np.uint32(16)
    return raw.view(np.float32)


def wide_e4m3(count: int, seed: int) -> np.ndarray:
    """[count] bytes of e4m3: every finite value equally often, which is every exponent equally often."""
    values = (hashed(count, seed) >> np.uint32(7)).astype(np.uint8)
    values[np.isin(values, E4M3_NAN)] ^= 1
    return values


def fill(block: np.ndarray, shape: tuple[int, ...], dtype: "torch.dtype", device: str) -> "torch.Tensor":
    """A tensor of `shape` that repeats a block of values; bytes are taken as `dtype` is stored."""
    import torch

    size = int(np.prod(shape))
    values = torch.from_numpy(block[:size]).to(device)
    values = values.view(dtype) if values.dtype == torch.uint8 else values.to(dtype)
    if size > len(values):
        raw = values.view(torch.uint8).reshape(-1)
        values = raw.repeat(-(-size // len(values)))[:size * values.element_size()].view(dtype)
    return values.clone().view(shape)
