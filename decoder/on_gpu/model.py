"""A Qwen2 or Llama decoder on the `triton` backend: every operation of a pass is a kernel of kernels/, at fixed addresses.

`forward` is the decode path: up to `max_rows` rows per pass, the same compiled kernels for every number of rows, replayed from
graphs. `prefill` runs prompts through kernels for many rows. Its last bits may differ from decode's. AR, SD and SSD all use it,
and its result doesn't depend on the cut of a prompt into passes.
"""

from collections.abc import Iterator, Sequence

import torch
import triton

from ...kernels.prefill import WIDE
from ...schedules.recipe import Recipe
from ...shapes.model import ModelShape
from ..backend import BackendNotes, DraftWeights, Hidden, PassProfile, RequestState, RoundPlan
from ..checkpoint.loader import Checkpoint
from ..checkpoint.weights import Tensors
from ..errors import LoadError, RequestError
from ..rows import Cache, Rows
from ..selection import Options, Selection, select_schedules
from .buffers import Splits, new_workspace
from .cache import DeviceCache, Pass, cache_of, swapped_in
from .eagle3 import TritonEagle3Model
from .graphs import WARM_UP, on
from .layer import Prefill, launch_all
from .network import DeviceNetwork, answered_winners, low_precision
from .profile import pass_profile
from .rounds import DeviceRounds

PREFILL_ROWS = 2048  # rows of one pass over a prompt; the bits don't depend on it
FEWEST_ROWS = WIDE.BLOCK_M  # a shorter prefill pass is filled up to it: part of a tile costs as much as the whole


class TritonModel(DeviceNetwork):
    """See backend.Model."""

    prefill_is_decode = False
    has_device_rounds = True

    def __init__(self, shape: ModelShape, tensors: Tensors, recipe: Recipe, device: torch.device, selection: Selection,
                 options: Options) -> None:
        """tensors: each is removed from the dictionary once it is packed, which frees it."""
        super().__init__(shape, tensors, recipe, device, selection.schedules, options.graphs)
        self.notes = BackendNotes("triton", device_name(device), tuple(selection.rows), warnings=tuple(selection.warnings),
                                  promoted=selection.promoted)
        self.prefill_rows = min(PREFILL_ROWS, 1 << (shape.max_position - 1).bit_length())
        self.prompt = torch.zeros(self.prefill_rows, dtype=torch.int32, device=device)
        self.rounds: DeviceRounds | None = None
        self._prefill: Prefill | None = None

    @property
    def warm_up_repeats(self) -> int:
        """See backend.Model. With graphs: runs until each pass is only replayed. Without: one, which loads the kernels."""
        if self.device.type != "cuda":
            return 0
        return WARM_UP if self.graphs_enabled else 1

    def device_rounds(self, request: RequestState, cache: Cache, plan: RoundPlan) -> Iterator[None] | None:
        """See backend.Model. Their state belongs to one cache, and is made anew for another."""
        assert isinstance(cache, DeviceCache)
        if self.rounds is None or self.rounds.cache is not cache:
            self.rounds = DeviceRounds(self, cache)
        return self.rounds.start(request, plan)

    def draft_network(self, weights: DraftWeights, device: torch.device, options: Options) -> TritonEagle3Model:
        """See backend.Model."""
        selection = select_schedules(self.recipe, weights.shape, device, options)
        return TritonEagle3Model(weights, self.recipe, device, self.vocab_limit, selection.schedules, options.graphs)

    def forward(self, tokens: list[int], rows: Rows, layers: tuple[int, ...] = ()) -> Hidden:
        """See backend.Model.forward."""
        with self.lock, torch.inference_mode(), on(self.device):
            cache = cache_of(rows)
            parts = []
            for group in rows.groups:
                with swapped_in(cache, group.own):
                    mine = tokens[group.rows]
                    parts += [self._pass(mine[at:at + self.max_rows], cache, group.first + at, layers)
                              for at in range(0, len(mine), self.max_rows)]
            rows.finish()
            return join(parts)

    def _pass(self, tokens: list[int], cache: DeviceCache, length: int, layers: tuple[int, ...]) -> Hidden:
        rows, chunks = len(tokens), cache.chunks_for(length + len(tokens))
        self.inputs.upload(tokens, length)
        cache.graphs.run((rows, chunks, layers), lambda: self.launch(cache, rows, chunks, layers))
        space = self.decode.space
        return Hidden(space.final[:rows].clone(), self._features(space.features, rows, layers))

    def _features(self, features: torch.Tensor, rows: int, layers: tuple[int, ...]) -> torch.Tensor | None:
        return features[:rows, :len(layers) * self.shape.hidden_size].clone() if layers else None

    def prefill(self, tokens: list[int], rows: Rows, layers: tuple[int, ...] = ()) -> Hidden:
        """See backend.Model.prefill. If the cache has room, the last token is repeated up to a power of two of rows: few graphs
        then serve all prompts, and the extra rows hold no number that the prompt lacks. Their keys and values lie past the
        cursor.

        Raises:
            RequestError: more tokens than `prefill_rows`.
        """
        if len(tokens) > self.prefill_rows:
            raise RequestError(f"a prefill pass of {len(tokens)} rows", expected=f"at most {self.prefill_rows}")
        with self.lock, torch.inference_mode(), on(self.device):
            cache, first, count = cache_of(rows), rows.positions[0], len(tokens)
            phase = self._prefill_phase()
            room = cache.slots - first
            filled = max(1 << (count - 1).bit_length(), FEWEST_ROWS)
            launched = filled if filled <= min(room, phase.space.rows) else count
            self.prompt[:launched].copy_(torch.tensor([*tokens, *tokens[-1:] * (launched - count)], dtype=torch.int32))
            self.inputs.upload([], first)
            cache.graphs.run(("prefill", launched, layers), lambda: launch_all(
                self.launches(phase, self.prompt, Pass(cache, self.inputs.length, launched), layers)))
            rows.finish()
            return Hidden(phase.space.final[:count].clone(), self._features(phase.space.features, count, layers))

    def _prefill_phase(self) -> Prefill:
        """The buffers for prompts, made at the first prompt."""
        if self._prefill is None:
            space = new_workspace(self.shape, self.prefill_rows, self.precision.is_e4m3, Splits(), self.device)
            self._prefill = Prefill(self.shape, self.recipe, space)
        return self._prefill

    def greedy(self, final: torch.Tensor) -> list[int]:
        """See backend.Model.greedy."""
        with self.lock, torch.inference_mode(), on(self.device):
            return answered_winners(self.launch_head, self.scratch, final.split(self.head_schedule.row_tile))

    def head_counts(self) -> tuple[int, int]:
        """See backend.Model."""
        return self.device_head.counts()

    def pass_profile(self, cache: Cache, rows: Sequence[int]) -> PassProfile:
        """See backend.Model."""
        assert isinstance(cache, DeviceCache)
        return pass_profile(self, cache, rows)

    def sibling(self, checkpoint: Checkpoint, device: torch.device, options: Options) -> "TritonModel":
        """See backend.Model.sibling."""
        return load_triton_model(checkpoint, self.recipe, device, options)

    def project(self, index: int, kernel: str, x: torch.Tensor) -> torch.Tensor:
        """See backend.Model.project."""
        weights = self.layers[index].linears[kernel]
        with self.lock, torch.inference_mode(), on(self.device):
            rows = x.to(self.device, torch.bfloat16)
            y = torch.cat([self.decode.project(kernel, weights, part.contiguous()) for part in rows.split(self.max_rows)])
        return deinterleaved(y) if kernel == "gate_up" else y

    def limit_vocabulary(self, size: int) -> None:
        """See backend.Model.limit_vocabulary."""
        self.vocab_limit = min(size, self.shape.vocab_size)


def deinterleaved(y: torch.Tensor) -> torch.Tensor:
    """[rows, 2 I] with gates and ups interleaved in blocks of 8 columns, as gates, then ups."""
    return torch.cat([part.flatten(-2) for part in y.unflatten(-1, (-1, 2, 8)).unbind(-2)], dim=-1)


def join(parts: list[Hidden]) -> Hidden:
    """Rows of several passes as one."""
    if len(parts) == 1:
        return parts[0]
    features = [part.features for part in parts if part.features is not None]
    return Hidden(torch.cat([part.final for part in parts]), torch.cat(features) if features else None)


def device_name(device: torch.device) -> str:
    """The GPU's name, or the device's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def load_triton_model(checkpoint: Checkpoint, recipe: Recipe, device: torch.device, options: Options) -> TritonModel:
    """The checkpoint on this backend; its tensors are consumed.

    Raises:
        LoadError: the device isn't a GPU; the recipe has no kernels.
        NotPromoted: see select_schedules.
    """
    low_precision(recipe)
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise LoadError(f"the triton backend on {device}", expected="a GPU", action="use backend torch")
    selection = select_schedules(recipe, checkpoint.config.shape, device, options)
    model = TritonModel(checkpoint.config.shape, checkpoint.tensors, recipe, device, selection, options)
    assert not checkpoint.tensors, f"unused: {list(checkpoint.tensors)}"
    return model


