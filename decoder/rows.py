"""The engine's view of the rows of a pass and of a sequence's cache. Each backend has a buffer of its own behind `Cache`.

A pass appends its rows to a sequence (`Appended`) or adds one token to each of several continuations of it (`Branches`). Between
passes the engine moves the cursor; nothing is copied or freed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .errors import RequestError

if TYPE_CHECKING:
    import torch


class Cache(Protocol):
    """Keys and values of one sequence: a fixed buffer and a cursor. capacity: slots; chunk: keys that attention reduces at once,
    by the recipe; cursor: tokens in the cache, 0..capacity; buffer: all keys and values, in the backend's layout. Slots from the
    cursor on may hold anything, NaN included."""

    capacity: int
    chunk: int
    cursor: int
    buffer: "torch.Tensor"

    def rollback(self, cursor: int) -> None:
        """Forgets every token from `cursor` on."""

    def clear(self) -> None:
        """Forgets every token."""

    def new_branch_tokens(self, branches: int, steps: int) -> "tuple[torch.Tensor, torch.Tensor]":
        """Empty keys and values for the tokens of branches, [num_layers, branches, steps, num_kv_heads, head_dim] each."""


class Cursor:
    """The cursor of a cache: the base class of the backends' caches."""

    def __init__(self, capacity: int, chunk: int) -> None:
        self.capacity, self.chunk, self.cursor = capacity, chunk, 0

    def rollback(self, cursor: int) -> None:
        """See Cache."""
        assert 0 <= cursor <= self.cursor, f"rollback to {cursor}, cursor at {self.cursor}"
        self.cursor = cursor

    def clear(self) -> None:
        """See Cache."""
        self.cursor = 0


@dataclass(frozen=True)
class BranchTokens:
    """The tokens that a branch doesn't share. keys, values [num_layers, steps, num_kv_heads, head_dim], the first `done` steps
    written; shared: tokens of the cache before them."""

    keys: "torch.Tensor"
    values: "torch.Tensor"
    done: int
    shared: int


@dataclass(frozen=True)
class Group:
    """Rows of one pass that share their keys: row i of the group is at position first + i and sees keys 0..first + i. own: the
    branch's tokens, None outside branches."""

    rows: slice
    first: int
    own: BranchTokens | None = None


class Rows(Protocol):
    """The rows of one pass. positions: one per row; groups: rows that share their keys."""

    @property
    def cache(self) -> Cache: ...
    @property
    def positions(self) -> list[int]: ...
    @property
    def groups(self) -> list[Group]: ...

    def finish(self) -> None:
        """Called after the launch of the pass: its tokens count from now on."""


class Appended:
    """Rows appended to a sequence, in order. The cursor moves when the pass is finished.

    Raises:
        RequestError: the cache has too few slots.
    """

    def __init__(self, cache: Cache, rows: int) -> None:
        self.cache, self.first, self.end = cache, cache.cursor, cache.cursor + rows
        if self.end > cache.capacity:
            raise RequestError(f"the sequence needs {self.end} slots; the KV cache has {cache.capacity}",
                               action="load the decoder with a larger capacity")
        self.positions = list(range(self.first, self.end))
        self.groups = [Group(slice(0, rows), self.first)]

    def finish(self) -> None:
        """See Rows."""
        self.cache.cursor = self.end


class Branches:
    """Continuations of one sequence: branch b sees the first lengths[b] tokens of the cache and its own tokens. Each pass adds
    one token to every branch. The cache is only read."""

    def __init__(self, cache: Cache, lengths: Sequence[int], steps: int) -> None:
        self.cache, self.lengths, self.done = cache, list(lengths), 0
        self.keys, self.values = cache.new_branch_tokens(len(lengths), steps)

    @property
    def positions(self) -> list[int]:
        """See Rows."""
        return [length + self.done for length in self.lengths]

    @property
    def groups(self) -> list[Group]:
        """See Rows: each branch is a group."""
        return [Group(slice(b, b + 1), length + self.done, BranchTokens(self.keys[:, b], self.values[:, b], self.done, length))
                for b, length in enumerate(self.lengths)]

    def finish(self) -> None:
        """See Rows."""
        self.done += 1
