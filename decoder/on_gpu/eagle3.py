"""The EAGLE-3 network (drafters/eagle3.py) on the `triton` backend. A whole proposal is one chain of launches.

The first pass of a proposal (`launch_draft`) writes the entries of the last verification from the target's features: K + 1 rows,
whatever was accepted. The next pass continues from the accepted entry. Later rows land in slots that are overwritten before any
row reads them.
"""

from dataclasses import dataclass
from functools import partial

import torch

from ...kernels.activation import quantise
from ...kernels.fixed import FIXED
from ...kernels.layout import ROWS, STRIDE, Activation
from ...kernels.linear import linear
from ...kernels.lm_head import lm_head, lm_head_logits, new_scratch
from ...kernels.norm import DraftEntry, Residual, draft_norm
from ...kernels.prefill import prefill_linear
from ...schedules.recipe import Recipe
from ...schedules.schedule import StepSchedules
from ...shapes.model import ModelShape
from ..backend import DraftWeights, Step
from ..rows import Rows
from .branches import DeviceBranches
from .buffers import DeviceInputs, Splits, Verified, new_workspace, splits_of
from .cache import DeviceCache, Pass, cache_of, swapped_in
from .graphs import on
from .layer import Decode, Phase, Prefill, launch_all, summed
from .network import WriteDraft, answered_winners, low_precision
from .weights import pack, pack_layer, token_table

FEED = 128  # rows of one pass over a prompt


@dataclass(frozen=True)
class Buffers:
    """The network's buffers besides a layer's, at fixed addresses. fc_in [2, FEED, 3 H_target], head_in [2, ROWS, H]: inputs of
    fc and of an e4m3 head; fc_partials [split_k, ROWS, H] fp32; reduced [FEED, H] bf16: fc's output; scored: the steps along a
    draft, rows 0..K; spread [ROWS, STRIDE] int32: the draft's tokens, each aligned to 16 bytes."""

    fc_in: Activation
    head_in: Activation
    fc_partials: torch.Tensor
    reduced: torch.Tensor
    scored: Step
    spread: torch.Tensor


def new_buffers(shape: ModelShape, features: int, split_k: int, e4m3: bool, device: torch.device) -> Buffers:
    """The buffers of a drafter of this shape. features: 3 H_target; split_k: of fc."""
    H = shape.hidden_size

    def terms(rows: int, K: int) -> Activation:
        kind = torch.float8_e4m3fn if e4m3 else torch.bfloat16
        scale = torch.empty(rows, dtype=torch.float32, device=device) if e4m3 else None
        return Activation(torch.empty(2, rows, K, dtype=kind, device=device), scale)

    def zeros() -> torch.Tensor:
        return torch.zeros(ROWS, H, dtype=torch.bfloat16, device=device)

    return Buffers(terms(FEED, features), terms(ROWS, H), torch.empty(split_k, ROWS, H, dtype=torch.float32, device=device),
                   torch.empty(FEED, H, dtype=torch.bfloat16, device=device), Step(zeros(), zeros()),
                   torch.zeros(ROWS, STRIDE, dtype=torch.int32, device=device))


class TritonEagle3Model:
    """See backend.DraftNetwork. ids [V_d]: the target id of each row of the head, ascending, so that ties go to the lowest id."""

    def __init__(self, weights: DraftWeights, recipe: Recipe, device: torch.device, vocab_limit: int, schedules: StepSchedules,
                 graphs: bool) -> None:
        """vocab_limit: target ids from here on are never drafted; graphs: whether passes are captured."""
        self.shape, self.recipe, self.device, self.graphs_enabled = weights.shape, recipe, device, graphs
        self._pack(weights, vocab_limit)
        shape, e4m3 = weights.shape, low_precision(recipe).is_e4m3
        space = new_workspace(shape, ROWS, e4m3, splits_of(schedules), device, inputs=2)
        self.decode = Decode(shape, recipe, space, schedules)
        self.prefill = Prefill(shape, recipe, new_workspace(shape, FEED, e4m3, Splits(), device, inputs=2))
        self.head_schedule = schedules.lm_head
        self.scratch = new_scratch(self.head.w.shape[0], self.head_schedule, device)
        self.inputs = DeviceInputs(device)
        self.buffers = new_buffers(shape, self.fc.w.shape[1], schedules.linear("fc").split_k, e4m3, device)
        self.fc_linear = partial(linear, schedule=schedules.linear("fc"), numerics=recipe.numerics)
        self.quantise_row = partial(quantise, schedule=FIXED["quantise_row"].schedule, numerics=recipe.numerics)
        self.draft_norm = partial(draft_norm, schedule=FIXED["draft_norm"].schedule, numerics=recipe.numerics)
        self.lm_head = partial(lm_head, schedule=self.head_schedule, numerics=recipe.numerics)
        self.lm_head_logits = partial(lm_head_logits, schedule=self.head_schedule, numerics=recipe.numerics)

    def _pack(self, weights: DraftWeights, vocab_limit: int) -> None:
        """Packs the weights for the kernels; consumes the tensors."""
        tensors, precision, device = weights.tensors, low_precision(self.recipe), self.device

        def vector(name: str) -> torch.Tensor:
            return tensors.pop(name).to(device, torch.bfloat16)

        self.embedding = token_table(weights.embedding, device)
        self.fc = pack(tensors.pop("fc.weight"), precision, device)
        order = torch.argsort(weights.ids)
        self.ids = weights.ids[order].to(device)
        self.map = self.ids.to(torch.int32)
        self.limit = int((weights.ids < vocab_limit).sum())  # rows of the head below vocab_limit
        self.head = pack(tensors.pop("lm_head.weight")[order], precision, device)
        self.norm = vector("norm.weight")
        self.layer = pack_layer(tensors, "midlayer.", precision, self.shape, device)
        self.entry = DraftEntry(self.embedding, self.layer.input_norm, vector("midlayer.hidden_norm.weight"),
                                self.shape.rms_norm_eps, weights.norm_before_residual)
        assert not tensors, f"unused: {list(tensors)}"

    @property
    def max_rows(self) -> int:
        """Rows of one decode pass."""
        return self.decode.max_rows

    def new_cache(self, capacity: int) -> DeviceCache:
        """See backend.DraftNetwork."""
        return DeviceCache(self.shape, capacity, self.recipe, self.device, self.graphs_enabled)

    def launch_reduce(self, features: torch.Tensor, rows: int) -> torch.Tensor:
        """Launches fc over features [>= rows, 3 H_target], at most FEED rows. Returns its output [>= rows, H] at a fixed
        address."""
        x, out, partials = Activation(features[None]), self.buffers.reduced, self.buffers.fc_partials
        if self.buffers.fc_in.scale is not None:
            x = self.buffers.fc_in
            self.quantise_row(features, x, rows=rows)
        if rows > ROWS:
            prefill_linear(x, self.fc, out, rows=rows, numerics=self.recipe.numerics)
        elif len(partials) > 1:
            out[:rows].copy_(summed(self.fc_linear(x.first(rows), self.fc, out=partials[:, :rows])))
        else:
            self.fc_linear(x.first(rows), self.fc, out=out[:rows])
        return out

    @torch.inference_mode()
    def reduce(self, features: torch.Tensor) -> torch.Tensor:
        """See backend.DraftNetwork."""
        with on(self.device):
            parts = [self.launch_reduce(part.to(self.device, torch.bfloat16).contiguous(), len(part))[:len(part)].clone()
                     for part in features.split(FEED)]
        return torch.cat(parts)

    @torch.inference_mode()
    def forward(self, tokens: list[int], features: torch.Tensor, rows: Rows) -> Step:
        """See backend.DraftNetwork."""
        cache = cache_of(rows)
        steps = []
        for group in rows.groups:
            with swapped_in(cache, group.own):
                steps.append(self._pass(tokens[group.rows], features[group.rows], cache, group.first))
        rows.finish()
        return Step(torch.cat([step.final for step in steps]), torch.cat([step.feature for step in steps]))

    def _pass(self, tokens: list[int], features: torch.Tensor, cache: DeviceCache, length: int) -> Step:
        rows, chunks = len(tokens), cache.chunks_for(length + len(tokens))
        phase: Decode | Prefill = self.decode if rows <= self.max_rows else self.prefill
        with on(self.device):
            self.buffers.reduced[:rows].copy_(features)
            if phase is self.decode:
                self.inputs.upload(tokens, length)
                cache.graphs.run((rows, chunks), lambda: self.launch(phase, self.inputs.row_tokens, cache, rows, chunks))
            else:
                self.inputs.upload([], length)
                self.launch(phase, torch.tensor(tokens, dtype=torch.int32, device=self.device), cache, rows, chunks)
        return Step(phase.space.final[:rows].clone(), phase.space.x[:rows].clone())

    def launch(self, phase: Decode | Prefill, tokens: torch.Tensor, cache: DeviceCache, rows: int, chunks: int) -> None:
        """Every launch of one pass over entries (tokens [>= rows], buffers.reduced), at position inputs.length."""
        self._launch(phase, tokens, self.buffers.reduced, Pass(cache, self.inputs.length, rows, chunks))
        phase.end(self.norm, rows, last=True)

    def _launch(self, phase: Phase, tokens: torch.Tensor, features: torch.Tensor, at: Pass) -> None:
        self.draft_norm(self.entry, tokens, features, phase.space.x, phase.space.entry, rows=at.rows)
        launch_all(phase.layer(0, self.layer, at))

    def launch_entries(self, cache: DeviceCache, source: Verified, rows: int, chunks: int, terms: bool) -> Activation:
        """Launches the entries of a verification of `rows` rows, from the target's features. Row 0 of x is then the accepted
        entry. Returns the head's input after it. terms: see _end."""
        reduced = self.launch_reduce(source.features, rows)
        self._launch(self.decode, source.winners, reduced, Pass(cache, source.inputs.start(0), rows, chunks))
        return self._end(terms, source.inputs.tip)

    def launch_own(self, cache: DeviceCache, token: torch.Tensor, start: torch.Tensor, chunks: int, terms: bool) -> Activation:
        """Launches one entry from the drafter's own feature, row 0 of x. Returns the head's input after it. terms: see _end."""
        self._launch(self.decode, token, self.decode.space.x, Pass(cache, start, 1, chunks))
        return self._end(terms)

    def _end(self, terms: bool, row: torch.Tensor | None = None) -> Activation:
        """Launches the norm of one row before the head. terms: an e4m3 head gets its two terms directly; otherwise the result
        goes to row 0 of space.final."""
        if not terms or self.head.scale is None:
            self.decode.end(self.norm, 1, last=True, row=row)
            return Activation(self.decode.space.final[None, :1])
        self.decode.norm(Residual(self.decode.space.x, self.decode.space.y_down, row=row), self.norm, self.shape.rms_norm_eps,
                         self.buffers.head_in, rows=1)
        return self.buffers.head_in.first(1)

    def launch_draft(self, cache: DeviceCache, source: Verified, length: int, chunks: int, write: WriteDraft,
                     keep: bool = False, rows: int = 0) -> None:
        """Launches a proposal of `length` tokens. rows: of the last verification at most; 0 for length + 1. write: called with
        each drafted token [1] and its index. keep: keeps the steps for `launch_scores`."""
        x = self.launch_entries(cache, source, rows or length + 1, chunks, terms=not keep)
        for step in range(length):
            if keep:
                self._keep(step)
            token = self._winners(x if x.scale is not None else self._head_input(x.values[0]))
            write(token, step)
            if step + 1 < length:
                x = self.launch_own(cache, token, source.inputs.start(2 + step), chunks, terms=not keep)

    def launch_scores(self, cache: DeviceCache, source: Verified, length: int, chunks: int, drafted: bool) -> torch.Tensor:
        """The logits after each token of the draft in source.inputs.row_tokens, on the drafter's own features: [length + 1, V_d]
        fp32. drafted: `launch_draft` has made this draft and kept its steps, so only the last token's pass is launched."""
        if not drafted:
            self.launch_entries(cache, source, length + 1, chunks, terms=False)
            self._keep(0)
        self.buffers.spread[:length, 0].copy_(source.inputs.row_tokens[1:1 + length])
        for step in range(length - 1 if drafted else 0, length):
            self.launch_own(cache, self.buffers.spread[step, :1], source.inputs.start(2 + step), chunks, terms=False)
            self._keep(step + 1)
        return self.logits(self.buffers.scored.final[:length + 1])

    def _keep(self, step: int) -> None:
        self.buffers.scored.final[step].copy_(self.decode.space.final[0])
        self.buffers.scored.feature[step].copy_(self.decode.space.x[0])

    def launch_branches(self, branches: DeviceBranches, step: int, chunks: int) -> torch.Tensor:
        """Launches pass `step` of all branches; pass 0 starts at each branch's point of the draft. Returns the final rows
        [branches, H]."""
        phase, rows = branches.decode, branches.count
        feature = self.buffers.scored.feature.index_select(0, branches.counts) if step == 0 else phase.space.x
        self._launch(phase, branches.tokens(step), feature, Pass(branches.cache, branches.start(step), rows, chunks))
        phase.end(self.norm, rows, last=True)
        return phase.space.final[:rows]

    def launch_head(self, final: torch.Tensor) -> torch.Tensor:
        """Launches the head over final [rows, H] bf16, at most a row tile. Returns the winners' target ids [rows] int32 at a
        fixed address, -1 for a row of NaN."""
        return self._winners(self._head_input(final))

    def _winners(self, x: Activation) -> torch.Tensor:
        return self.lm_head(x, self.head, limit=self.limit, ids=self.map, scratch=self.scratch)

    def _head_input(self, final: torch.Tensor) -> Activation:
        """final as the head reads it: two e4m3 terms for an e4m3 head."""
        if self.head.scale is None:
            return Activation(final[None])
        self.quantise_row(final, self.buffers.head_in, rows=len(final))
        return self.buffers.head_in.first(len(final))

    @torch.inference_mode()
    def greedy(self, final: torch.Tensor) -> list[int]:
        """See backend.DraftNetwork."""
        with on(self.device):
            return answered_winners(self.launch_head, self.scratch, final.split(self.head_schedule.row_tile))

    @torch.inference_mode()
    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """See backend.DraftNetwork."""
        with on(self.device):
            parts = [self.lm_head_logits(self._head_input(part.contiguous()), self.head)
                     for part in final.split(self.head_schedule.row_tile)]
        logits = torch.cat(parts)
        logits[:, self.limit:] = -torch.inf
        return logits
