"""A Qwen2 or Llama decoder on the `triton` backend: every operation of a pass is a kernel of kernels/, at fixed addresses.

`forward` is the decode path: up to `max_rows` rows a pass, the same artefacts for every number of rows, replayed from graphs.
`prefill` takes prompts through kernels for many rows; its last bits may differ from decode's, and it is one path for
all decoders, whose result doesn't depend on how a prompt is cut.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from typing import cast

import torch
import triton

from ...kernels.layout import ROWS, Activation, Weights
from ...kernels.lm_head import lm_head, lm_head_logits, new_scratch
from ...kernels.prefill import WIDE
from ...schedules.recipe import Precision, Recipe
from ...schedules.schedule import HeadSchedule
from ...shapes.model import ModelShape
from ..backend import BackendNotes, Hidden, RequestState, RoundPlan
from ..checkpoint.loader import Checkpoint
from ..checkpoint.rope import rope_table
from ..checkpoint.weights import EMBEDDING, FINAL_NORM, HEAD, Tensors
from ..errors import LoadError, NumericsError, RequestError
from ..rows import Cache, Rows
from ..selection import Options, Selection, select_schedules
from .branches import DeviceBranches
from .cache import SLACK, DeviceCache, standing_in
from .graphs import WARM_UP, on
from .inputs import DeviceInputs, Verified
from .layer import Decode, Launched, PackedLayer, Prefill, launch_all, pack_layer
from .workspace import new_workspace, splits

PREFILL_ROWS = 2048  # rows of one pass over a prompt; the bits don't depend on it
FEWEST_ROWS = WIDE.BLOCK_M  # a prefill pass is filled up to: one tile of rows costs what a part of it does


class TritonModel:
    """See backend.Model."""

    prefill_is_decode = False
    has_device_rounds = True

    def __init__(self, shape: ModelShape, tensors: Tensors, recipe: Recipe, device: torch.device, selection: Selection,
                 options: Options) -> None:
        """Takes the tensors out of the dictionary as it goes, so that they are freed."""
        self.shape, self.device, self.recipe, self.selection = shape, device, recipe, selection
        self.precision = low_precision(recipe)
        self.notes = BackendNotes("triton", device_name(device), tuple(selection.rows), warnings=tuple(selection.warnings),
                                  promoted=selection.promoted)
        self.embedding = tensors.pop(EMBEDDING).to(device, torch.bfloat16)
        self.head = self.embedding if shape.tie_embeddings else tensors.pop(HEAD).to(device, torch.bfloat16)
        self.final_norm = tensors.pop(FINAL_NORM).to(device, torch.bfloat16)
        self.layers = [pack_layer(tensors, f"model.layers.{i}.", self.precision, shape.qkv_bias, device)
                       for i in range(shape.num_layers)]
        self.rope = rope_table(shape, shape.max_position + SLACK, device)
        self.vocab_limit = shape.vocab_size
        self.decode = Decode(shape, recipe, new_workspace(shape, ROWS, self.precision.is_e4m3, splits(selection.schedules),
                                                          device), self.rope, selection.schedules)
        self.inputs = DeviceInputs(device)
        self.scratch = new_scratch(self.head.shape[0], self.head_schedule, device)
        self.verified = Verified(self.inputs, self.scratch.tokens, self.decode.space.features)
        self.graphs_enabled = options.graphs
        self.lock = threading.RLock()
        self.prefill_rows = min(PREFILL_ROWS, 1 << (shape.max_position - 1).bit_length())
        self.prompt = torch.zeros(self.prefill_rows, dtype=torch.int32, device=device)
        self._prefill: Prefill | None = None

    @property
    def max_rows(self) -> int:
        """Rows of one decode pass."""
        return self.decode.max_rows

    @property
    def warm_up_repeats(self) -> int:
        """See backend.Model: until each pass is only replayed; once, for its kernels, where there are no graphs."""
        if self.device.type != "cuda":
            return 0
        return WARM_UP if self.graphs_enabled else 1

    def device_rounds(self, request: RequestState, cache: Cache, plan: RoundPlan) -> Iterator[None] | None:
        """See backend.Model."""
        from .rounds import resident_rounds

        return resident_rounds(self, request, cast(DeviceCache, cache), plan)

    @property
    def head_schedule(self) -> HeadSchedule:
        return self.selection.schedules.lm_head

    def new_cache(self, capacity: int) -> DeviceCache:
        """A cache of `capacity` slots, with its graphs."""
        return DeviceCache(self.shape, capacity, self.recipe, self.device, self.graphs_enabled)

    def forward(self, tokens: list[int], rows: Rows, layers: tuple[int, ...] = ()) -> Hidden:
        """See backend.Model.forward."""
        with self.lock, torch.inference_mode(), on(self.device):
            cache = cast(DeviceCache, rows.cache)
            parts = []
            for group in rows.groups:
                with standing_in(cache, group.own):
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

    def launch(self, cache: DeviceCache, rows: int, chunks: int, layers: tuple[int, ...] = ()) -> None:
        """Every launch of one decode pass over inputs.row_tokens at inputs.length."""
        launch_all(self.launches(self.decode, self.inputs.row_tokens, cache, self.inputs.length, rows, chunks, layers))

    def launch_draft(self, cache: DeviceCache, inputs: DeviceInputs, length: int, chunks: int,
                     propose: Callable[[torch.Tensor, int], None]) -> None:
        """As a drafter, a whole proposal of `length` tokens: the last two tokens of the sequence, then its own. inputs: the
        target's; propose: takes each drafted token [1] and its place."""
        tokens, rows = inputs.pair, 2
        for step in range(length):
            start = inputs.start(1 if step == 0 else 2 + step)
            launch_all(self.launches(self.decode, tokens, cache, start, rows, chunks, ()))
            tokens = self.launch_head(self.decode.space.final[rows - 1:rows])
            propose(tokens, step)
            rows = 1

    def launch_walk(self, cache: DeviceCache, inputs: DeviceInputs, length: int, chunks: int) -> torch.Tensor:
        """As a drafter, one pass over the pending token and the draft in inputs.row_tokens: logits after each of them,
        [length + 1, vocab_size] fp32. The cache must hold every token but the pending one."""
        rows = length + 1
        launch_all(self.launches(self.decode, inputs.row_tokens, cache, inputs.length, rows, chunks, ()))
        return self.logits(self.decode.space.final[:rows])

    def launch_branches(self, branches: DeviceBranches, step: int, chunks: int) -> torch.Tensor:
        """As a drafter, pass `step` of all branches: final rows [branches, H]."""
        launch_all(self.launches(branches.decode, branches.tokens(step), branches.cache, branches.start(step), branches.count,
                                 chunks, ()))
        return self.decode.space.final[:branches.count]

    def launches(self, phase: Decode | Prefill, tokens: torch.Tensor, cache: DeviceCache, length: torch.Tensor, rows: int,
                 chunks: int, layers: tuple[int, ...]) -> Iterator[Launched]:
        """One pass, launch by launch, up to the rows that the head reads."""
        yield "norm", lambda: phase.begin(tokens, self.embedding, self.layers[0].input_norm, rows)
        for index, (layer, weight, last) in enumerate(self._with_next_norm()):
            yield from phase.layer(index, layer, cache, length, rows, chunks)
            feature = self._feature(phase.space.features, layers, index)
            yield "norm", functools.partial(phase.end, weight, rows, last, feature)

    def _with_next_norm(self) -> Iterator[tuple[PackedLayer, torch.Tensor, bool]]:
        """Each layer with the norm after it."""
        for layer, following in zip(self.layers, self.layers[1:]):
            yield layer, following.input_norm, False
        yield self.layers[-1], self.final_norm, True

    def _feature(self, features: torch.Tensor, layers: tuple[int, ...], index: int) -> torch.Tensor | None:
        if index not in layers:
            return None
        at = layers.index(index) * self.shape.hidden_size
        return features[:, at:at + self.shape.hidden_size]

    def prefill(self, tokens: list[int], rows: Rows, layers: tuple[int, ...] = ()) -> Hidden:
        """See backend.Model.prefill. Rows are filled up to a power of two where the cache has room for it, so that few graphs
        serve all prompts; what the extra rows leave lies past the cursor."""
        if len(tokens) > self.prefill_rows:
            raise RequestError(f"a prefill pass of {len(tokens)} rows", expected=f"at most {self.prefill_rows}")
        with self.lock, torch.inference_mode(), on(self.device):
            cache, first, count = cast(DeviceCache, rows.cache), rows.positions[0], len(tokens)
            phase = self._prefill_phase()
            room = min(cache.capacity, self.shape.max_position) + SLACK - first
            filled = max(1 << (count - 1).bit_length(), FEWEST_ROWS)
            launched = filled if filled <= min(room, phase.space.rows) else count
            self.prompt[:launched].copy_(torch.tensor([*tokens, *[0] * (launched - count)], dtype=torch.int32))
            self.inputs.upload([], first)
            cache.graphs.run(("prefill", launched, layers), lambda: launch_all(
                self.launches(phase, self.prompt, cache, self.inputs.length, launched, 0, layers)))
            rows.finish()
            return Hidden(phase.space.final[:count].clone(), self._features(phase.space.features, count, layers))

    def _prefill_phase(self) -> Prefill:
        """Buffers for prompts, made once: graphs hold their addresses."""
        if self._prefill is None:
            space = new_workspace(self.shape, self.prefill_rows, self.precision.is_e4m3, {"qkv": 1, "o": 1, "down": 1},
                                  self.device)
            self._prefill = Prefill(self.shape, self.recipe, space, self.rope)
        return self._prefill

    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """[rows, vocab_size] in fp32; -inf at ids beyond the tokenizer's."""
        with self.lock, torch.inference_mode(), on(self.device):
            parts = [lm_head_logits(Activation(part.contiguous()[None]), Weights(self.head), schedule=self.head_schedule,
                                    numerics=self.recipe.numerics)
                     for part in final.split(self.head_schedule.row_tile)]
            logits = torch.cat(parts)
            logits[:, self.vocab_limit:] = -torch.inf
            return logits

    def greedy(self, final: torch.Tensor) -> list[int]:
        """See backend.Model.greedy."""
        found: list[int] = []
        with self.lock, torch.inference_mode(), on(self.device):
            for part in final.split(self.head_schedule.row_tile):
                found += self.launch_head(part.contiguous()).tolist()
        if min(found) < 0:
            raise nan_error()
        return found

    def launch_head(self, final: torch.Tensor) -> torch.Tensor:
        """The winners of up to a row tile of rows, [rows] int32, at a fixed address."""
        return lm_head(Activation(final[None]), Weights(self.head), schedule=self.head_schedule, numerics=self.recipe.numerics,
                       limit=self.vocab_limit, scratch=self.scratch)

    def project(self, index: int, kernel: str, x: torch.Tensor) -> torch.Tensor:
        """See backend.Model.project."""
        weights = self.layers[index].linears[kernel]
        with self.lock, torch.inference_mode(), on(self.device):
            rows = x.to(self.device, torch.bfloat16)
            y = torch.cat([self.decode.project(kernel, weights, part.contiguous()) for part in rows.split(self.max_rows)])
        return turns_undone(y) if kernel == "gate_up" else y

    def limit_vocabulary(self, size: int) -> None:
        """See backend.Model.limit_vocabulary."""
        self.vocab_limit = min(size, self.shape.vocab_size)


def turns_undone(y: torch.Tensor) -> torch.Tensor:
    """Columns of gates and ups in turns of 8 as gates, then ups."""
    return torch.cat([part.flatten(-2) for part in y.unflatten(-1, (-1, 2, 8)).unbind(-2)], dim=-1)


def nan_error(whose: str = "model") -> NumericsError:
    """What a token of -1 means."""
    return NumericsError(f"the {whose}'s logits hold NaN", expected="finite logits",
                         action="check the weights; try another recipe")


def join(parts: list[Hidden]) -> Hidden:
    """Rows of several passes as one."""
    if len(parts) == 1:
        return parts[0]
    features = [part.features for part in parts if part.features is not None]
    return Hidden(torch.cat([part.final for part in parts]), torch.cat(features) if features else None)


def low_precision(recipe: Recipe) -> Precision:
    """The recipe's precisions, if this backend has kernels for them.

    Raises:
        LoadError: fp32.
    """
    precision = recipe.precision
    if precision.attention != "bf16":
        raise LoadError(f"recipe {recipe.name} on the triton backend", expected="bf16 or fp8-v1: its kernels use tensor cores",
                        action="use backend torch for fp32")
    return precision


def device_name(device: torch.device) -> str:
    """The GPU's name, or the device's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def load_triton_model(checkpoint: Checkpoint, recipe: Recipe, device: torch.device, options: Options) -> TritonModel:
    """The checkpoint on this backend; its tensors are consumed.

    Raises:
        LoadError: a device that isn't a GPU, a recipe without kernels, schedules without evidence.
    """
    low_precision(recipe)
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise LoadError(f"the triton backend on {device}", expected="a GPU", action="use backend torch")
    selection = select_schedules(recipe, checkpoint.config.shape, device, options)
    model = TritonModel(checkpoint.config.shape, checkpoint.tensors, recipe, device, selection, options)
    assert not checkpoint.tensors, f"unused: {list(checkpoint.tensors)}"
    return model


