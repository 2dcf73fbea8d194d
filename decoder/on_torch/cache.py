"""The KV cache of one sequence: a fixed buffer, all layers in one allocation, and a cursor.

The buffer consists of chunks of the recipe's size, each contiguous: keys [head_dim, slot], values [slot, head_dim] per KV head. A
chunk's strides don't depend on the capacity, so attention makes the same call on it. Slots at and past the cursor may hold
anything, NaN included: readers replace the slots that no row may see by zeros.
"""

import torch

from ...shapes.model import ModelShape
from ..rows import Cursor, Group, Rows


class KVCache(Cursor):
    """See rows.Cache. keys [num_layers, chunks, num_kv_heads, head_dim, chunk], values [num_layers, chunks, num_kv_heads, chunk,
    head_dim]."""

    def __init__(self, shape: ModelShape, capacity: int, chunk: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(capacity, chunk)
        chunks = -(-capacity // chunk)
        layers, heads, head_dim = shape.num_layers, shape.num_kv_heads, shape.head_dim
        self.buffer = torch.empty(2, layers * chunks * heads * head_dim * chunk, dtype=dtype, device=device)
        self.keys = self.buffer[0].view(layers, chunks, heads, head_dim, chunk)
        self.values = self.buffer[1].view(layers, chunks, heads, chunk, head_dim)

    def new_branch_tokens(self, branches: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See rows.Cache."""
        layers, _, heads, head_dim, _ = self.keys.shape
        keys = self.keys.new_empty(layers, branches, steps, heads, head_dim)
        return keys, torch.empty_like(keys)

    def write(self, layer: int, position: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes k and v [rows, num_kv_heads, head_dim] into slots position..position + rows - 1."""
        done = 0
        while done < k.shape[0]:
            index, slot = divmod(position + done, self.chunk)
            count = min(self.chunk - slot, k.shape[0] - done)
            self.keys[layer, index, :, :, slot:slot + count] = k[done:done + count].permute(1, 2, 0)
            self.values[layer, index, :, slot:slot + count] = v[done:done + count].permute(1, 0, 2)
            done += count

    def read(self, layer: int, index: int, filled: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [num_kv_heads, head_dim, chunk] and values [num_kv_heads, chunk, head_dim] of chunk `index`: the first `filled`
        slots as written, zeros after them. Masked scores alone wouldn't do: 0 x NaN is NaN."""
        if filled == self.chunk:
            return self.keys[layer, index], self.values[layer, index]
        _, _, heads, head_dim, chunk = self.keys.shape
        k = self.keys.new_zeros(heads, head_dim, chunk)
        v = self.values.new_zeros(heads, chunk, head_dim)
        if filled > 0:
            k[:, :, :filled] = self.keys[layer, index, :, :, :filled]
            v[:, :filled] = self.values[layer, index, :, :filled]
        return k, v


def cache_of(rows: Rows) -> KVCache:
    """The cache behind the rows of a pass."""
    assert isinstance(rows.cache, KVCache), f"{type(rows.cache).__name__}: a cache of another backend"
    return rows.cache


def append(rows: Rows, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """Writes k (after RoPE) and v [rows, num_kv_heads, head_dim] at the rows' positions, in the cache or in a branch's own
    tokens."""
    for group in rows.groups:
        if group.own is None:
            cache_of(rows).write(layer, group.first, k[group.rows], v[group.rows])
        else:
            group.own.keys[layer, group.own.done] = k[group.rows][0]
            group.own.values[layer, group.own.done] = v[group.rows][0]


def read(rows: Rows, layer: int, group: Group, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one chunk for a group, as in KVCache.read, zero past the group's last row. A branch's chunk holds the
    shared prefix, then its own tokens."""
    cache, own, start = cache_of(rows), group.own, index * rows.cache.chunk
    chunk = cache.chunk
    if own is None:
        end = group.first + group.rows.stop - group.rows.start
        return cache.read(layer, index, min(end - start, chunk))
    if start + chunk <= own.shared:
        return cache.read(layer, index, chunk)
    k, v = cache.read(layer, index, max(own.shared - start, 0))
    first = max(start - own.shared, 0)  # the branch's own tokens in this chunk: first..last - 1
    last = min(group.first + 1, start + chunk) - own.shared
    at = own.shared + first - start
    k[:, :, at:at + last - first] = own.keys[layer, first:last].permute(1, 2, 0)
    v[:, at:at + last - first] = own.values[layer, first:last].permute(1, 0, 2)
    return k, v
