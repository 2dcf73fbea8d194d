"""The KV cache of one sequence on the GPU, in the layout that the kernels read; see kv_cache.py for the one of `torch`.

One fixed buffer, all layers in one allocation, [slots, num_kv_heads, head_dim] a layer, so that a token of a layer is one piece
and a chunk is a range of slots. Its addresses never change, so graphs stay valid; rollback moves the cursor. Slots at and past
the cursor may hold anything: attention masks its loads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...kernels.attention import Partials, new_partials
from ...kernels.layout import ROWS
from ...schedules.recipe import Recipe
from ...shapes.model import AttentionShape, ModelShape
from ..rows import Cursor, Own
from .graphs import Graphs

SLACK = 64  # slots past the capacity: rounds in flight when a request ends may write there


class DeviceCache(Cursor):
    """Keys and values [num_layers, capacity + SLACK, num_kv_heads, head_dim] bf16.

    cursor: tokens in the cache, as the host knows it. partials: attention's, shared by the layers. graphs: what was captured
    against these addresses; rounds: what resident.py keeps with them.
"""

    def __init__(self, shape: ModelShape, capacity: int, recipe: Recipe, device: torch.device, graphs: bool = True) -> None:
        """capacity: tokens. graphs: whether passes are captured, on a GPU."""
        super().__init__(capacity, recipe.kv_chunk)
        slots = capacity + SLACK
        self.buffer = torch.empty(2, shape.num_layers, slots, shape.num_kv_heads, shape.head_dim, dtype=torch.bfloat16,
                                  device=device)
        self.keys, self.values = self.buffer[0], self.buffer[1]
        heads = AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self.chunks = -(-slots // self.chunk)
        self.partials: Partials = new_partials(heads, self.chunks, ROWS, device)
        self.graphs = Graphs(graphs, device)
        self.rounds: Any = None

    def chunks_for(self, tokens: int) -> int:
        """Chunks that a launch covers when the cache holds `tokens` at the end of it: rounded up to a power of two, so that
        few graphs serve all lengths and the work still follows the tokens."""
        need = -(-tokens // self.chunk)
        return min(1 << (need - 1).bit_length(), self.chunks)

    def own(self, branches: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the tokens of branches: keys and values [num_layers, branches, steps, num_kv_heads, head_dim]."""
        layers, _, heads, head_dim = self.keys.shape
        keys = self.keys.new_empty(layers, branches, steps, heads, head_dim)
        return keys, torch.empty_like(keys)


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
