"""Tensors for a kernel of one's own, from the types and sizes of its arguments.

Each lies between guards of poison: an unmasked read past the end brings a NaN into the result, and a write past the end shows.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ....kernels.arguments import ELEMENTS, Tensor
from . import values

if TYPE_CHECKING:
    import torch

GUARD = 512  # bytes on each side; tensors stay as aligned as the allocator makes them
POISON = 0xFF  # of each byte: NaN in every float type
IDS = 128  # whole numbers are below this, unless the argument says otherwise: they fit every type
E5M2_EXPONENT = 0x7C  # all ones: infinity or NaN


@dataclass(frozen=True)
class Guarded:
    """A tensor and the memory around it, [bytes] uint8."""

    tensor: "torch.Tensor"
    memory: "torch.Tensor"
    first: int

    def intact(self) -> bool:
        """Whether both guards still hold poison."""
        end = self.first + self.tensor.numel() * self.tensor.element_size()
        return bool((self.memory[:self.first] == POISON).all()) and bool((self.memory[end:] == POISON).all())

    def poison(self) -> None:
        """Fill the tensor: NaN, or the greatest whole number."""
        poison_(self.tensor)


def poison_(tensor: "torch.Tensor") -> None:
    """Fill with NaN, or the greatest whole number; `True` in a tensor of bool."""
    import torch

    if tensor.dtype is torch.bool:
        tensor.fill_(True)
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def allocate(described: Tensor, sizes: tuple[int, ...], device: str) -> Guarded:
    """A poisoned tensor between guards."""
    import torch

    dtype = getattr(torch, ELEMENTS[described.dtype][0])
    count = int(np.prod(sizes, dtype=np.int64)) * described.element_bytes
    first = GUARD + (0 if described.aligned else described.element_bytes)
    memory = torch.full((first + count + GUARD,), POISON, dtype=torch.uint8, device=device)
    tensor = memory[first:first + count].view(dtype).view(sizes)
    made = Guarded(tensor, memory, first)
    made.poison()
    return made


def fill(tensor: "torch.Tensor", described: Tensor, below: int | None, seed: int, wide: bool) -> None:
    """Values from the integer hash. below: of whole numbers. wide: floats of many exponents, as for numerics classes."""
    count = min(tensor.numel(), values.PERIOD)
    made: Any = values.fill(_block(described.dtype, count, below, seed, wide), tuple(tensor.shape), tensor.dtype,
                            str(tensor.device))
    tensor.copy_(made)


def _block(dtype: str, count: int, below: int | None, seed: int, wide: bool) -> np.ndarray:
    if dtype in ("fp8e4nv", "fp8e5"):
        if not wide:
            return values.normal(count, seed)
        return values.wide_e4m3(count, seed) if dtype == "fp8e4nv" else _wide_e5m2(count, seed)
    if dtype.startswith(("fp", "bf")):
        return values.wide(count, seed, -8, 8) if wide else values.normal(count, seed)
    return (values.hashed(count, seed) >> np.uint32(7)).astype(np.int64) % (2 if dtype == "u1" else below or IDS)


def _wide_e5m2(count: int, seed: int) -> np.ndarray:
    """[count] bytes of e5m2: every finite value."""
    found = (values.hashed(count, seed) >> np.uint32(7)).astype(np.uint8)
    found[(found & E5M2_EXPONENT) == E5M2_EXPONENT] ^= 0x40
    return found
