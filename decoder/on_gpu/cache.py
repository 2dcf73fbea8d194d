"""The KV cache of one sequence on the GPU, in the layout that the kernels read; on_torch/cache.py has the one of `torch`.

One fixed buffer, all layers in one allocation, [slots, num_kv_heads, head_dim] a layer, so that a token of a layer is one piece
and a chunk is a range of slots. Its addresses never change, so graphs stay valid; rollback moves the cursor. Slots at and past
the cursor may hold anything: attention masks its loads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...kernels.attention import Partials, new_partials
from ...kernels.layout import ROWS
from ...schedules.recipe import Recipe
from ...shapes.model import AttentionShape, ModelShape
from ..checkpoint.rope import rope_table
from ..rows import Cursor, Own, Rows
from .graphs import Graphs

SLACK = 64  # slots past the capacity: rounds in flight when a request ends may write there


class DeviceCache(Cursor):
    """Keys and values [num_layers, slots, num_kv_heads, head_dim] bf16; slots = capacity + SLACK. See rows.Cache.

    cursor: tokens in the cache, as the host knows it. partials: attention's, shared by the layers. rope: cosines and sines
    [>= slots, head_dim / 2] fp32; a position's bits don't depend on the capacity. graphs: passes captured at these addresses.
    """

    def __init__(self, shape: ModelShape, capacity: int, recipe: Recipe, device: torch.device, graphs: bool = True) -> None:
        """capacity: tokens. graphs: whether passes are captured, on a GPU."""
        super().__init__(capacity, recipe.kv_chunk)
        self.slots = slots = capacity + SLACK
        self.buffer = torch.empty(2, shape.num_layers, slots, shape.num_kv_heads, shape.head_dim, dtype=torch.bfloat16,
                                  device=device)
        self.keys, self.values = self.buffer[0], self.buffer[1]
        heads = AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self.chunks = -(-slots // self.chunk)
        self.partials: Partials = new_partials(heads, self.chunks, ROWS, device)
        self.rope = rope_table(shape, slots, device)
        self.graphs = Graphs(graphs, device)

    def chunks_for(self, tokens: int) -> int:
        """Chunks that a launch covers when the cache holds `tokens` at the end of it: rounded up to a power of two, so that
        few graphs serve all lengths and the work still follows the tokens."""
        need = -(-tokens // self.chunk)
        return min(1 << (need - 1).bit_length(), self.chunks)

    def steps_of_chunks(self, first: int, last: int) -> list[int]:
        """Numbers of tokens, one for each value that `chunks_for` takes from `first` to `last` tokens."""
        found = [first]
        while self.chunks_for(found[-1]) < self.chunks_for(last):
            found.append(self.chunks_for(found[-1]) * self.chunk + 1)
        return found

    def own(self, branches: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the tokens of branches: keys and values [num_layers, branches, steps, num_kv_heads, head_dim]."""
        layers, _, heads, head_dim = self.keys.shape
        keys = self.keys.new_empty(layers, branches, steps, heads, head_dim)
        return keys, torch.empty_like(keys)


@dataclass(frozen=True)
class Pass:
    """The place of a pass: `rows` rows from position length[0] of the cache on; length [1] int32, on the device. chunks: of keys
    that attention is launched over, up to the last key or beyond; 0 in a prompt's pass. They don't reach the bits."""

    cache: DeviceCache
    length: torch.Tensor
    rows: int
    chunks: int = 0


def cache_of(rows: Rows) -> DeviceCache:
    """The buffer behind the rows of a pass."""
    assert isinstance(rows.cache, DeviceCache), f"{type(rows.cache).__name__}: a cache of another backend"
    return rows.cache


@contextmanager
def standing_in(cache: DeviceCache, own: Own | None) -> Iterator[None]:
    """While a branch's row runs, its own tokens stand in the shared slots; afterwards the new one is the branch's, and what was
    in the slots comes back. Of rows that aren't a branch's, nothing."""
    if own is None:
        yield
        return
    slots = cache.buffer[:, :, own.shared:own.shared + own.done + 1]
    kept = slots.clone()
    slots[0, :, :own.done], slots[1, :, :own.done] = own.keys[:, :own.done], own.values[:, :own.done]
    try:
        yield
        own.keys[:, own.done], own.values[:, own.done] = slots[0, :, own.done], slots[1, :, own.done]
    finally:
        slots.copy_(kept)
