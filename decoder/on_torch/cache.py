"""The KV cache of one sequence: a fixed buffer, all layers in one allocation, and a cursor.

The buffer is cut into chunks of the recipe's size, each one contiguous block: keys [head_dim, slot], values [slot,
head_dim] per KV head. A chunk has the same strides whatever the capacity, so attention makes the same call on it.
Slots at and past the cursor may hold anything, NaN included: readers zero what they don't own. Rollback moves the
cursor; nothing is copied or freed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...shapes.model import ModelShape
from ..errors import RequestError


class KVCache:
    """Keys [num_layers, chunks, num_kv_heads, head_dim, chunk], values [num_layers, chunks, num_kv_heads, chunk,
    head_dim].

    capacity: slots. cursor: tokens in the cache, 0..capacity. chunk: keys one attention step walks, fixed by the
    recipe.
"""

    def __init__(self, shape: ModelShape, capacity: int, chunk: int, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity, self.chunk, self.cursor = capacity, chunk, 0
        chunks = -(-capacity // chunk)
        layers, heads, head_dim = shape.num_layers, shape.num_kv_heads, shape.head_dim
        self.buffer = torch.empty(2, layers * chunks * heads * head_dim * chunk, dtype=dtype, device=device)
        self.keys = self.buffer[0].view(layers, chunks, heads, head_dim, chunk)
        self.values = self.buffer[1].view(layers, chunks, heads, chunk, head_dim)

    def rollback(self, cursor: int) -> None:
        """Forgets every token from `cursor` on."""
        assert 0 <= cursor <= self.cursor, f"rollback to {cursor}, cursor at {self.cursor}"
        self.cursor = cursor

    def clear(self) -> None:
        self.cursor = 0

    def own(self, branches: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the tokens of branches: keys and values [num_layers, branches, steps, num_kv_heads, head_dim]."""
        layers, _, heads, head_dim, _ = self.keys.shape
        keys = self.keys.new_empty(layers, branches, steps, heads, head_dim)
        return keys, torch.empty_like(keys)

    def write(self, layer: int, position: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k and v [rows, num_kv_heads, head_dim] into slots position..position+rows."""
        done = 0
        while done < k.shape[0]:
            index, slot = divmod(position + done, self.chunk)
            take = min(self.chunk - slot, k.shape[0] - done)
            self.keys[layer, index, :, :, slot:slot + take] = k[done:done + take].permute(1, 2, 0)
            self.values[layer, index, :, slot:slot + take] = v[done:done + take].permute(1, 0, 2)
            done += take

    def read(self, layer: int, index: int, filled: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [num_kv_heads, head_dim, chunk] and values [num_kv_heads, chunk, head_dim] of one chunk, of which the
        first `filled` slots are as written and the rest zero: 0 x NaN is NaN, so masking the scores alone would not
        do."""
        if filled == self.chunk:
            return self.keys[layer, index], self.values[layer, index]
        _, _, heads, head_dim, chunk = self.keys.shape
        k = self.keys.new_zeros(heads, head_dim, chunk)
        v = self.values.new_zeros(heads, chunk, head_dim)
        if filled > 0:
            k[:, :, :filled] = self.keys[layer, index, :, :, :filled]
            v[:, :filled] = self.values[layer, index, :, :filled]
        return k, v


@dataclass(frozen=True)
class Group:
    """Rows of one pass that share their keys: row i of the group sits at position `first + i` and sees keys
    0..first+i."""

    rows: slice
    first: int


class Appended:
    """The rows of one pass, appended to a sequence in order. The cursor moves when the pass is finished."""

    def __init__(self, cache: KVCache, rows: int) -> None:
        self.cache, self.first, self.end = cache, cache.cursor, cache.cursor + rows
        if self.end > cache.capacity:
            raise RequestError(f"the sequence needs {self.end} slots; the KV cache has {cache.capacity}",
                               action="load the decoder with a larger capacity")
        self.positions = list(range(self.first, self.end))
        self.groups = [Group(slice(0, rows), self.first)]

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k and v [rows, num_kv_heads, head_dim], RoPE applied to k."""
        self.cache.write(layer, self.first, k, v)

    def read(self, layer: int, group: Group, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One chunk, zero where no row of the pass may look (see KVCache.read)."""
        chunk = self.cache.chunk
        return self.cache.read(layer, index, min(self.end - index * chunk, chunk))

    def finish(self) -> None:
        self.cache.cursor = self.end


class Branches:
    """Continuations of one sequence: branch b sees the first lengths[b] tokens of the cache and its own tokens, no
    other's.

    Each pass adds one token to every branch. The cache itself is only read.
"""

    def __init__(self, cache: KVCache, lengths: Sequence[int], steps: int) -> None:
        self.cache, self.lengths, self.done = cache, list(lengths), 0
        self.keys, self.values = cache.own(len(lengths), steps)
        self._place()

    def _place(self) -> None:
        self.positions = [length + self.done for length in self.lengths]
        self.groups = [Group(slice(b, b + 1), position) for b, position in enumerate(self.positions)]

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k and v [branches, num_kv_heads, head_dim]."""
        self.keys[layer, :, self.done] = k
        self.values[layer, :, self.done] = v

    def read(self, layer: int, group: Group, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One chunk as the branch sees it: the shared prefix, then the branch's own tokens, then zeros."""
        branch, start = group.rows.start, index * self.cache.chunk
        length, chunk = self.lengths[branch], self.cache.chunk
        if start + chunk <= length:
            return self.cache.read(layer, index, chunk)
        k, v = self.cache.read(layer, index, max(length - start, 0))
        first = max(start - length, 0)  # the branch's own tokens that fall into this chunk
        last = min(group.first + 1, start + chunk) - length
        at = length + first - start
        k[:, :, at:at + last - first] = self.keys[layer, branch, first:last].permute(1, 2, 0)
        v[:, at:at + last - first] = self.values[layer, branch, first:last].permute(1, 0, 2)
        return k, v

    def finish(self) -> None:
        self.done += 1
        self._place()


Rows = Appended | Branches
