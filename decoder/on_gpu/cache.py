"""The KV cache of one sequence on the GPU, in the layout of the kernels. The cache of `torch` is in on_torch/cache.py.

One allocation holds all layers, [slots, num_kv_heads, head_dim] per layer: a token of a layer is contiguous, and a chunk is a
range of slots. The addresses never change, so graphs stay valid; rollback moves the cursor. Slots at and past the cursor may hold
anything: attention masks its loads.
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
from ..rows import BranchTokens, Cursor, Rows
from .graphs import Graphs

SLACK = 64  # slots past the capacity, for writes of rounds in flight at the end of a request


class DeviceCache(Cursor):
    """Keys and values [num_layers, slots, num_kv_heads, head_dim] bf16; slots = capacity + SLACK. See rows.Cache.

    cursor: tokens in the cache, by the host's count. partials: attention's, shared by the layers. rope: cosines and sines
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
        """Chunks that a launch covers if the cache holds `tokens` after it. Rounded up to a power of two: few graphs serve all
        lengths, and the work still follows the length."""
        need = -(-tokens // self.chunk)
        return min(1 << (need - 1).bit_length(), self.chunks)

    def steps_of_chunks(self, first: int, last: int) -> list[int]:
        """Numbers of tokens, one per value of `chunks_for` between `first` and `last` tokens."""
        found = [first]
        while self.chunks_for(found[-1]) < self.chunks_for(last):
            found.append(self.chunks_for(found[-1]) * self.chunk + 1)
        return found

    def new_branch_tokens(self, branches: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See rows.Cache."""
        layers, _, heads, head_dim = self.keys.shape
        keys = self.keys.new_empty(layers, branches, steps, heads, head_dim)
        return keys, torch.empty_like(keys)


@dataclass(frozen=True)
class Pass:
    """The place of a pass: `rows` rows from position length[0] of the cache on. length [1] int32, on the device. chunks:
    attention's launch covers so many chunks of keys, at least to the last key; 0 in a prompt's pass. The bits don't depend on
    it."""

    cache: DeviceCache
    length: torch.Tensor
    rows: int
    chunks: int = 0


def cache_of(rows: Rows) -> DeviceCache:
    """The cache behind the rows of a pass."""
    assert isinstance(rows.cache, DeviceCache), f"{type(rows.cache).__name__}: a cache of another backend"
    return rows.cache


@contextmanager
def swapped_in(cache: DeviceCache, own: BranchTokens | None) -> Iterator[None]:
    """A context for the pass of one branch's row: the branch's own tokens replace those in the shared slots. At its end the new
    token is copied to the branch, and the slots are restored. Does nothing for own None."""
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
