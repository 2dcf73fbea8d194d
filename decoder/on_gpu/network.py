"""The weights of a decoder on the GPU, and its passes as launches. Every operation is a kernel of kernels/ at fixed addresses, so
a graph can capture a pass, alone or as a part of a round.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from ...kernels.layout import ROWS, Activation, Weights
from ...kernels.lm_head import HeadScratch, lm_head_logits
from ...schedules.recipe import Precision, Recipe
from ...schedules.schedule import StepSchedules
from ...shapes.model import ModelShape
from ..checkpoint.weights import EMBEDDING, FINAL_NORM, HEAD, Tensors
from ..errors import LoadError
from .branches import DeviceBranches
from .buffers import DeviceInputs, Verified, new_workspace, splits_of
from .cache import DeviceCache, Pass
from .graphs import on
from .head import DeviceHead
from .layer import Decode, Launched, Prefill, launch_all
from .weights import PackedLayer, pack_layer, token_table

WriteDraft = Callable[[torch.Tensor, int], None]  # called with a drafted token [1] int32 and its index in the draft


class DeviceNetwork:
    """A target, or a small model that drafts. lock: held for the launches of one pass or round, since two threads may share a
    network."""

    def __init__(self, shape: ModelShape, tensors: Tensors, recipe: Recipe, device: torch.device, schedules: StepSchedules,
                 graphs: bool) -> None:
        """tensors: each is removed from the dictionary once it is packed, which frees it; graphs: whether passes are captured."""
        self.shape, self.device, self.recipe, self.graphs_enabled = shape, device, recipe, graphs
        self.precision = low_precision(recipe)
        self.embedding = token_table(tensors.pop(EMBEDDING), device)
        self.head = self.embedding if shape.tie_embeddings else tensors.pop(HEAD).to(device, torch.bfloat16)
        self.final_norm = tensors.pop(FINAL_NORM).to(device, torch.bfloat16)
        self.layers = [pack_layer(tensors, f"model.layers.{i}.", self.precision, shape, device)
                       for i in range(shape.num_layers)]
        self.vocab_limit = shape.vocab_size
        space = new_workspace(shape, ROWS, self.precision.is_e4m3, splits_of(schedules), device)
        self.decode = Decode(shape, recipe, space, schedules)
        self.inputs = DeviceInputs(device)
        self.head_schedule = schedules.lm_head
        self.device_head = DeviceHead(self.head, schedules, recipe.numerics)
        self.scratch = self.device_head.scratch
        self.verified = Verified(self.inputs, self.scratch.tokens, space.features)
        self.lm_head_logits = partial(lm_head_logits, schedule=self.head_schedule, numerics=recipe.numerics)
        self.lock = threading.RLock()

    @property
    def max_rows(self) -> int:
        """Rows of one decode pass."""
        return self.decode.max_rows

    def new_cache(self, capacity: int) -> DeviceCache:
        """A cache of `capacity` slots, with its graphs."""
        return DeviceCache(self.shape, capacity, self.recipe, self.device, self.graphs_enabled)

    def launch(self, cache: DeviceCache, rows: int, chunks: int, layers: tuple[int, ...] = ()) -> None:
        """Launches one decode pass over inputs.row_tokens at position inputs.length. chunks: see Pass; layers: target layers
        whose output goes to the features."""
        launch_all(self.launches(self.decode, self.inputs.row_tokens, Pass(cache, self.inputs.length, rows, chunks), layers))

    def launch_draft(self, cache: DeviceCache, inputs: DeviceInputs, length: int, chunks: int, write: WriteDraft) -> None:
        """Launches a proposal of `length` tokens, for a drafter: a pass over the last two tokens of the sequence, then one per
        drafted token. inputs: the target's; write: called with each drafted token."""
        tokens, rows = inputs.pair, 2
        for step in range(length):
            start = inputs.start(1 if step == 0 else 2 + step)
            launch_all(self.launches(self.decode, tokens, Pass(cache, start, rows, chunks)))
            tokens = self.launch_head(self.decode.space.final[rows - 1:rows])
            write(tokens, step)
            rows = 1

    def launch_scores(self, cache: DeviceCache, inputs: DeviceInputs, length: int, chunks: int) -> torch.Tensor:
        """Launches one pass over the pending token and the draft in inputs.row_tokens, for a drafter. Returns the logits after
        each of them, [length + 1, vocab_size] fp32. The cache must hold every token but the pending one."""
        launch_all(self.launches(self.decode, inputs.row_tokens, Pass(cache, inputs.length, length + 1, chunks)))
        return self.logits(self.decode.space.final[:length + 1])

    def launch_branches(self, branches: DeviceBranches, step: int, chunks: int) -> torch.Tensor:
        """Launches pass `step` of all branches, for a drafter. Returns the final rows [branches, H]."""
        at = Pass(branches.cache, branches.start(step), branches.count, chunks)
        launch_all(self.launches(branches.decode, branches.tokens(step), at))
        return self.decode.space.final[:branches.count]

    def launches(self, phase: Decode | Prefill, tokens: torch.Tensor, at: Pass,
                 layers: tuple[int, ...] = ()) -> Iterator[Launched]:
        """The launches of one pass, up to the head's input. tokens [>= rows] int32."""
        yield "norm", lambda: phase.begin(tokens, self.embedding, self.layers[0].input_norm, at.rows)
        for index, (layer, weight, last) in enumerate(self._with_next_norm()):
            yield from phase.layer(index, layer, at)
            feature = self._feature(phase.space.features, layers, index)
            yield "norm", partial(phase.end, weight, at.rows, last, feature)

    def _with_next_norm(self) -> Iterator[tuple[PackedLayer, torch.Tensor, bool]]:
        """(layer, weight of the norm after it, whether it is the last) for each layer."""
        for layer, following in zip(self.layers, self.layers[1:]):
            yield layer, following.input_norm, False
        yield self.layers[-1], self.final_norm, True

    def _feature(self, features: torch.Tensor, layers: tuple[int, ...], index: int) -> torch.Tensor | None:
        if index not in layers:
            return None
        at = layers.index(index) * self.shape.hidden_size
        return features[:, at:at + self.shape.hidden_size]

    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """See backend.Model.logits: [rows, vocab_size] fp32 of final [rows, H] bf16; -inf from vocab_limit on."""
        with self.lock, torch.inference_mode(), on(self.device):
            logits = torch.cat([self.lm_head_logits(Activation(part.contiguous()[None]), Weights(self.head))
                                for part in final.split(self.head_schedule.row_tile)])
            logits[:, self.vocab_limit:] = -torch.inf
            return logits

    def launch_head(self, final: torch.Tensor) -> torch.Tensor:
        """Launches the head over final [rows, H] bf16, at most a row tile. Returns the winners [rows] int32 at a fixed address,
        -1 for a row of NaN."""
        return self.device_head.launch(final, self.vocab_limit)


def answered_winners(launch_head: Callable[[torch.Tensor], torch.Tensor], scratch: HeadScratch,
                     parts: Iterable[torch.Tensor]) -> list[int]:
    """The winner of each row of `parts`, row tiles of final rows; -1 for a row whose largest logit is NaN or infinite."""
    found: list[int] = []
    for part in parts:
        tokens = launch_head(part.contiguous())
        found += torch.where(scratch.best[:len(part)].amax(-1) < torch.inf, tokens, -1).tolist()
    return found


def low_precision(recipe: Recipe) -> Precision:
    """The recipe's precisions, if this backend has kernels for them.

    Raises:
        LoadError: the recipe is fp32.
    """
    precision = recipe.precision
    if precision.attention != "bf16":
        raise LoadError(f"recipe {recipe.name} on the triton backend", expected="bf16 or fp8-v1: its kernels use tensor cores",
                        action="use backend torch for fp32")
    return precision
