"""The EAGLE-3 network on the `triton` backend: see eagle3.py for what it computes. A whole proposal is one chain of launches.

In a proposal (`launch_draft`) the first pass writes the entries of the last verification from the target's features, K + 1 rows
whatever was accepted, and goes on from the accepted one; rows past it land in slots that are overwritten before they are seen.
"""

from collections.abc import Callable
from typing import cast

import numpy as np
import torch

from ...kernels.activation import quantise
from ...kernels.fixed import FIXED
from ...kernels.layout import ROWS, STRIDE, Activation
from ...kernels.lm_head import lm_head, lm_head_logits, new_scratch
from ...kernels.norm import DraftEntry, Residual, draft_norm, norm
from ...kernels.prefill import prefill_linear
from ...schedules.recipe import Recipe
from ...schedules.schedule import HeadSchedule, LinearSchedule
from ...shapes.model import ModelShape
from ..backend import Step
from ..checkpoint.rope import rope_table
from ..checkpoint.weights import Tensors
from ..rows import Rows
from ..selection import Options, Selection
from .branches import DeviceBranches
from .cache import SLACK, DeviceCache, standing_in
from .graphs import on
from .inputs import DeviceInputs, Verified
from .layer import Decode, Phase, Prefill, decode_linear, launch_all, pack_layer, summed
from .model import low_precision, nan_error
from .packing import pack
from .workspace import new_workspace, splits

FEED = 128  # rows of one pass over a prompt


class TritonEagle3Model:
    """See eagle3.Eagle3Model. ids: the target id of each row of the head, ascending, so that the lowest row is the lowest id."""

    def __init__(self, shape: ModelShape, tensors: Tensors, embedding: torch.Tensor, ids: torch.Tensor, recipe: Recipe,
                 device: torch.device, norm_before_residual: bool, vocab_limit: int, selection: Selection,
                 options: Options) -> None:
        self.shape, self.recipe, self.device, self.selection = shape, recipe, device, selection
        self.norm_before_residual, self.graphs_enabled = norm_before_residual, options.graphs
        precision = low_precision(recipe)

        def vector(name: str) -> torch.Tensor:
            return tensors.pop(name).to(device, torch.bfloat16)

        self.embedding = embedding.to(device, torch.bfloat16)
        self.fc = pack(tensors.pop("fc.weight"), precision, device)
        order = torch.argsort(ids)
        self.ids = ids[order].to(device)
        self.map = self.ids.to(torch.int32)
        self.limit = int((ids < vocab_limit).sum())  # rows of the head that stand for a token
        self.head = pack(tensors.pop("lm_head.weight")[order], precision, device)
        self.norm, self.hidden_norm = vector("norm.weight"), vector("midlayer.hidden_norm.weight")
        self.layer = pack_layer(tensors, "midlayer.", precision, False, device)
        assert not tensors, f"unused: {list(tensors)}"
        self.rope = rope_table(shape, shape.max_position + SLACK, device)
        space = new_workspace(shape, ROWS, precision.is_e4m3, splits(selection.schedules), device, inputs=2)
        self.decode = Decode(shape, recipe, space, self.rope, selection.schedules)
        wide = new_workspace(shape, FEED, precision.is_e4m3, {"qkv": 1, "o": 1, "down": 1}, device, inputs=2)
        self.prefill = Prefill(shape, recipe, wide, self.rope)
        narrow = self.fc.w.dtype
        self.fc_in = torch.empty(2, FEED, self.fc.w.shape[1], dtype=narrow, device=device)
        self.fc_scale = torch.empty(FEED, dtype=torch.float32, device=device) if precision.is_e4m3 else None
        self.fc_partials = torch.empty(self.fc_schedule.split_k, ROWS, shape.hidden_size, dtype=torch.float32, device=device)
        self.reduced = torch.empty(FEED, shape.hidden_size, dtype=torch.bfloat16, device=device)
        self.head_in = torch.empty(2, ROWS, shape.hidden_size, dtype=narrow, device=device)
        self.head_scale = torch.empty(ROWS, dtype=torch.float32, device=device)
        self.scratch = new_scratch(self.head.w.shape[0], self.head_schedule, device)
        self.inputs = DeviceInputs(device)
        # The steps of a walk along a draft, rows 0..K; and its tokens, each on 16 bytes, as a launch wants them.
        self.walked = Step(torch.zeros_like(space.final), torch.zeros_like(space.x))
        self.spread = torch.zeros(ROWS, STRIDE, dtype=torch.int32, device=device)

    @property
    def max_rows(self) -> int:
        """Rows of one decode pass."""
        return self.decode.max_rows

    @property
    def head_schedule(self) -> HeadSchedule:
        return self.selection.schedules.lm_head

    @property
    def fc_schedule(self) -> LinearSchedule:
        return self.selection.schedules.linear("fc")

    def new_cache(self, capacity: int) -> DeviceCache:
        """A cache of one layer."""
        return DeviceCache(self.shape, capacity, self.recipe, self.device, self.graphs_enabled)

    def launch_reduce(self, features: torch.Tensor, rows: int) -> torch.Tensor:
        """fc of up to FEED rows [rows, 3 H_target]: the drafter's features, [>= rows, H] at a fixed address."""
        x, scale, numerics = features[None], self.fc_scale, self.recipe.numerics
        if scale is not None:
            quantise(features, Activation(self.fc_in, scale), rows=rows, schedule=FIXED["quantise_row"].schedule,
                     numerics=numerics)
            x = self.fc_in
        if rows <= ROWS:
            split = self.fc_schedule.split_k > 1
            y = decode_linear(x, scale, self.fc, rows, self.fc_schedule, numerics,
                              out=self.fc_partials[:, :rows] if split else self.reduced[:rows])
            if split:
                self.reduced[:rows].copy_(summed(y))
        else:
            prefill_linear(Activation(x, scale), self.fc, self.reduced, rows=rows, numerics=numerics)
        return self.reduced

    @torch.inference_mode()
    def reduce(self, features: torch.Tensor) -> torch.Tensor:
        """fc: the target's features [rows, 3 H_target] as the drafter's [rows, H]."""
        with on(self.device):
            parts = [self.launch_reduce(part.to(self.device, torch.bfloat16).contiguous(), len(part))[:len(part)].clone()
                     for part in features.split(FEED)]
        return torch.cat(parts)

    @torch.inference_mode()
    def forward(self, tokens: list[int], features: torch.Tensor, rows: Rows) -> Step:
        """One pass over entries (token, feature [H]), appended to what `rows` stands for."""
        cache = cast(DeviceCache, rows.cache)
        steps = []
        for group in rows.groups:
            with standing_in(cache, group.own):
                steps.append(self._pass(tokens[group.rows], features[group.rows], cache, group.first))
        rows.finish()
        return Step(torch.cat([step.final for step in steps]), torch.cat([step.feature for step in steps]))

    def _pass(self, tokens: list[int], features: torch.Tensor, cache: DeviceCache, length: int) -> Step:
        rows, chunks = len(tokens), cache.chunks_for(length + len(tokens))
        phase: Decode | Prefill = self.decode if rows <= self.max_rows else self.prefill
        with on(self.device):
            self.reduced[:rows].copy_(features)
            if phase is self.decode:
                self.inputs.upload(tokens, length)
                cache.graphs.run((rows, chunks), lambda: self.launch(phase, self.inputs.row_tokens, cache, rows, chunks))
            else:
                self.inputs.upload([], length)
                self.launch(phase, torch.tensor(tokens, dtype=torch.int32, device=self.device), cache, rows, chunks)
        return Step(phase.space.final[:rows].clone(), phase.space.x[:rows].clone())

    def launch(self, phase: Decode | Prefill, tokens: torch.Tensor, cache: DeviceCache, rows: int, chunks: int) -> None:
        """Every launch of one pass over entries of tokens [>= rows] and `reduced`, at inputs.length."""
        self._launch(phase, tokens, self.reduced, cache, self.inputs.length, rows, chunks)
        phase.end(self.norm, rows, last=True)

    def _launch(self, phase: Phase, tokens: torch.Tensor, features: torch.Tensor, cache: DeviceCache, length: torch.Tensor,
                rows: int, chunks: int) -> None:
        space = phase.space
        entry = DraftEntry(self.embedding, self.layer.input_norm, self.hidden_norm, self.shape.rms_norm_eps,
                           self.norm_before_residual)
        draft_norm(entry, tokens, features, space.x, Activation(space.entry, space.x_scale), rows=rows,
                   schedule=FIXED["draft_norm"].schedule, numerics=self.recipe.numerics)
        launch_all(phase.layer(0, self.layer, cache, length, rows, chunks))

    def launch_entries(self, cache: DeviceCache, source: Verified, rows: int, chunks: int, terms: bool) -> Activation:
        """The entries of a verification of `rows` rows from the target's features: what the head reads after the accepted one,
        which is then row 0 of x. terms: as in _end."""
        reduced = self.launch_reduce(source.features, rows)
        self._launch(self.decode, source.winners, reduced, cache, source.inputs.start(0), rows, chunks)
        return self._end(terms, source.inputs.tip)

    def launch_own(self, cache: DeviceCache, token: torch.Tensor, start: torch.Tensor, chunks: int, terms: bool) -> Activation:
        """One entry on the drafter's own feature, row 0 of x: what the head reads after it. terms: as in _end."""
        self._launch(self.decode, token, self.decode.space.x, cache, start, 1, chunks)
        return self._end(terms)

    def _end(self, terms: bool, row: torch.Tensor | None = None) -> Activation:
        """The norm before the head, of one row. terms: straight into what an e4m3 head reads; else into row 0 of space.final."""
        if not terms or self.head.scale is None:
            self.decode.end(self.norm, 1, last=True, row=row)
            return Activation(self.decode.space.final[None, :1])
        norm(Residual(self.decode.space.x, self.decode.space.y_down, row=row), self.norm, self.shape.rms_norm_eps,
             Activation(self.head_in, self.head_scale), rows=1, schedule=FIXED["norm"].schedule, numerics=self.recipe.numerics)
        return self._terms(1)

    def launch_draft(self, cache: DeviceCache, source: Verified, length: int, chunks: int,
                     propose: Callable[[torch.Tensor, int], None], keep: bool = False) -> None:
        """A whole proposal of `length` tokens after a verification of length + 1 rows. propose: takes each drafted token [1] and
        its place. keep: its steps, for `launch_walk`."""
        x = self.launch_entries(cache, source, length + 1, chunks, terms=not keep)
        for step in range(length):
            if keep:
                self._keep(step)
            token = self._winners(x if x.scale is not None else self._head_input(x.values[0]))
            propose(token, step)
            if step + 1 < length:
                x = self.launch_own(cache, token, source.inputs.start(2 + step), chunks, terms=not keep)

    def launch_walk(self, cache: DeviceCache, source: Verified, length: int, chunks: int, drafted: bool) -> torch.Tensor:
        """The draft in source.inputs.row_tokens on the drafter's own features: logits after each of its tokens, [length + 1, V_d]
        fp32. drafted: `launch_draft` has just made this draft and kept its steps; only the last token is left."""
        if not drafted:
            self.launch_entries(cache, source, length + 1, chunks, terms=False)
            self._keep(0)
        self.spread[:length, 0].copy_(source.inputs.row_tokens[1:1 + length])
        for step in range(length - 1 if drafted else 0, length):
            self.launch_own(cache, self.spread[step, :1], source.inputs.start(2 + step), chunks, terms=False)
            self._keep(step + 1)
        return self.logits(self.walked.final[:length + 1])

    def _keep(self, step: int) -> None:
        self.walked.final[step].copy_(self.decode.space.final[0])
        self.walked.feature[step].copy_(self.decode.space.x[0])

    def launch_branches(self, branches: DeviceBranches, step: int, chunks: int) -> torch.Tensor:
        """Pass `step` of all branches, the first one from where each leaves the draft: final rows [branches, H]."""
        phase, rows = branches.decode, branches.count
        feature = self.walked.feature.index_select(0, branches.counts) if step == 0 else phase.space.x
        self._launch(phase, branches.tokens(step), feature, branches.cache, branches.start(step), rows, chunks)
        phase.end(self.norm, rows, last=True)
        return phase.space.final[:rows]

    def launch_head(self, final: torch.Tensor) -> torch.Tensor:
        """The target ids of the winners, [rows] int32, at a fixed address. final [rows, H] bf16, up to a row tile."""
        return self._winners(self._head_input(final))

    def _winners(self, x: Activation) -> torch.Tensor:
        return lm_head(x, self.head, schedule=self.head_schedule, numerics=self.recipe.numerics, limit=self.limit,
                       ids=self.map, scratch=self.scratch)

    def _head_input(self, final: torch.Tensor) -> Activation:
        """final, or what an e4m3 head reads of it."""
        if self.head.scale is None:
            return Activation(final[None])
        quantise(final, Activation(self.head_in, self.head_scale), rows=len(final), schedule=FIXED["quantise_row"].schedule,
                 numerics=self.recipe.numerics)
        return self._terms(len(final))

    def _terms(self, rows: int) -> Activation:
        return Activation(self.head_in, self.head_scale).first(rows)

    @torch.inference_mode()
    def greedy(self, final: torch.Tensor) -> list[int]:
        """The winning target id of each row. Raises NumericsError where a row holds nothing but NaN."""
        with on(self.device):
            parts = [self.launch_head(part.contiguous()).tolist() for part in final.split(self.head_schedule.row_tile)]
        found = [token for part in parts for token in part]
        if min(found) < 0:
            raise nan_error("drafter")
        return found

    @torch.inference_mode()
    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """[rows, V_d] in fp32 over the head's rows; -inf where the target id has no token."""
        with on(self.device):
            parts = [lm_head_logits(self._head_input(part.contiguous()), self.head, schedule=self.head_schedule,
                                    numerics=self.recipe.numerics)
                     for part in final.split(self.head_schedule.row_tile)]
        logits = torch.cat(parts)
        logits[:, self.limit:] = -torch.inf
        return logits

    def rows_over_target(self, final: torch.Tensor) -> np.ndarray:
        """The logits over target ids, [rows, V], -inf at ids that the drafter doesn't know."""
        logits = self.logits(final)
        wide = logits.new_full((logits.shape[0], self.shape.vocab_size), -torch.inf)
        wide[:, self.ids] = logits
        return wide.cpu().numpy()
