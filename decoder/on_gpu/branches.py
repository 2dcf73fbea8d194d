"""Branches of a drafter's sequence on the GPU: next drafts for the likely outcomes of a round, one row each of the same pass.

A pass reads the weights once for all branches. RoPE, attention and merge run once per branch, with the kernels of one sequence:
each branch has a cache of its own, which holds its tokens in the sequence's next slots. `copy_round` copies the keys and values
that a round added to the sequence into these caches.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from ...kernels.layout import COUNT, DRAFT, MADE, ROUND, ROWS, STRIDE, TABLE, TOKEN
from ...kernels.merge import aligned_parts
from .buffers import DeviceInputs
from .cache import DeviceCache, Pass
from .layer import Decode, Launched
from .weights import PackedLayer

NONE = -1  # table entry of a missing branch


class BranchDecode(Decode):
    """A decode pass whose row b belongs to branch b, at position length[b * STRIDE] of that branch's cache. buffer [branches, 2,
    num_layers, slots, num_kv_heads, head_dim]: the branches' keys and values, bf16."""

    def __init__(self, decode: Decode, buffer: torch.Tensor) -> None:
        super().__init__(decode.shape, decode.recipe, decode.space, decode.schedules)
        self.buffer = buffer
        if self.amax is not None:  # Triton specialises on 16-byte alignment: each row is padded to it with zeros
            self.amax = self.amax.new_zeros(len(self.amax), aligned_parts(self.amax.shape[1]))

    def mix(self, index: int, weights: PackedLayer, at: Pass) -> Iterator[Launched]:
        """See Phase. at: the pass of the longest branch, whose cache lends RoPE's table and the partials."""
        space, cache, amax = self.space, at.cache, self.amax
        for b in range(at.rows):
            start, q, (keys, values) = at.length[b * STRIDE:b * STRIDE + 1], space.q[b:b + 1], self.buffer[b, :, index]
            part = replace(cache.partials, o=cache.partials.o[b:b + 1])
            yield "rope", partial(self.rope_append, space.qkv[:, b:b + 1], cache.rope, start, rows=1, q=q, cache=(keys, values),
                                  norms=weights.head_norms)
            yield "attention", partial(self.attention, q, keys, values, start, chunks=at.chunks, out=part)
            yield "merge", partial(self.merge, part, start, rows=1, chunks=at.chunks,
                                   amax=None if amax is None else amax[b:b + 1])
        yield from self.narrow(cache.partials.o, at.rows, amax)


class DeviceBranches:
    """The branches of one drafter, at fixed addresses.

    count: number of branches, at most a row tile. ids [V_d]: the target id of each column of the drafter's logits, ascending;
    None if the columns are target ids. lead: a branch's first slot is (tokens in the target's cache) + accepted + lead; 0 for
    EAGLE-3, 1 for a model. table [TABLE, ROWS] int32: see kernels/branch_selection.py. counts [count] int64: accepted tokens
    before each branch.
    """

    def __init__(self, cache: DeviceCache, decode: Decode, count: int, ids: torch.Tensor | None, lead: int) -> None:
        self.cache, self.count, self.ids, self.lead = cache, count, ids, lead
        device = cache.buffer.device
        self.buffer = cache.buffer.new_empty(count, *cache.buffer.shape)
        self.decode = BranchDecode(decode, self.buffer)
        self.table = torch.full((TABLE, ROWS), NONE, dtype=torch.int32, device=device)
        self.counts = torch.zeros(count, dtype=torch.int64, device=device)
        self.starts = torch.zeros(ROWS, count, STRIDE, dtype=torch.int32, device=device)
        self.steps = torch.arange(2 * ROWS, dtype=torch.int32, device=device)

    def begin(self, length: int) -> None:
        """Begins a request with `length` tokens in the target's cache. Clears the branches of the last request."""
        self.table.fill_(NONE)
        self.buffer[:, :, :, :length].copy_(self.cache.buffer[None, :, :, :length])

    def start(self, step: int) -> torch.Tensor:
        """The positions of pass `step`, int32: branch b's at [b * STRIDE]."""
        return self.starts[step].view(-1)

    def tokens(self, step: int) -> torch.Tensor:
        """The tokens that pass `step` feeds, [count] int32 at a fixed address: recovery tokens at step 0, then drafted ones."""
        return self.table[DRAFT + step - 1 if step else TOKEN, :self.count]

    def copy_round(self, inputs: DeviceInputs, length: int) -> None:
        """Copies the round's entries to every branch: at most length + 1 of the last verification, and the draft's."""
        slots = (inputs.starts[:1] + self.steps[:2 * length + 2]).long()
        rows = self.cache.buffer.index_select(2, slots)
        self.buffer.index_copy_(3, slots, rows.expand(self.count, *rows.shape))

    def choose_outcomes(self, logits: torch.Tensor, inputs: DeviceInputs, length: int) -> None:
        """drafter.likely_outcomes on the device, in fp32. logits [length + 1, V_d]: after each token of the draft in
        inputs.row_tokens. Writes the outcomes to the table and the positions of the branches' passes to `starts`."""
        columns, known = self.columns(inputs.row_tokens[1:1 + length])
        log_q = torch.log_softmax(logits, -1)
        drafted = log_q[:length].gather(1, columns).masked_fill(~known, -torch.inf)
        scores = log_q + torch.nn.functional.pad(drafted[:, 0].cumsum(0), (1, 0))[:, None]
        before = scores[:length]  # after a partial accept the drafted token is no recovery token
        before.scatter_(1, columns, before.gather(1, columns).masked_fill(known, -torch.inf))
        scores[length].scatter_(0, log_q[length].argmax(0, keepdim=True), torch.inf)
        best = scores.flatten().topk(self.count).indices
        counts, found = best // logits.shape[1], best % logits.shape[1]
        self.counts.copy_(counts)
        self.table[COUNT, :self.count].copy_(counts)
        self.table[TOKEN, :self.count].copy_(found if self.ids is None else self.ids[found])
        self.table[MADE].copy_(inputs.state[ROUND].expand(ROWS))
        self.starts[:length, :, 0].copy_(inputs.length + self.lead + counts + self.steps[:length, None])

    def columns(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(columns of the logits for target ids [n], whether the drafter knows the id), both [n, 1]. A script's ids may be
        unknown."""
        if self.ids is None:
            return tokens.long().clamp(min=0)[:, None], (tokens >= 0)[:, None]
        found = torch.searchsorted(self.ids, tokens.to(self.ids.dtype)).clamp(max=len(self.ids) - 1)
        return found[:, None], (self.ids[found] == tokens)[:, None]
