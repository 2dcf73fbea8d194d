"""The kernels that aren't tuned: one schedule each, and their shapes in a model.

A shape depends on the model, the recipe and the schedules of the neighbours. A norm sums the partials of the linear before it; a
quantisation reads the maxima of the merge or gate_up before it. Without its neighbour, a kernel has no shape. All use
programmatic dependent launch: a kernel without it would delay its successor."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from ..schedules.recipe import Recipe
from ..schedules.schedule import (
    AttentionSchedule,
    FixedSchedule,
    HeadSchedule,
    LinearSchedule,
    MergeSchedule,
    Schedule,
)
from ..shapes.model import (
    AcceptShape,
    DraftNormShape,
    DraftTokenShape,
    KernelShape,
    LinearShape,
    LookupShape,
    ModelShape,
    NormShape,
    QuantiseShape,
    ReduceShape,
    RescoreShape,
    RopeShape,
    RowShape,
)
from . import accept, activation, attention, branch_selection, certified_head, lm_head, merge, ngram, norm, prefill, rope, screen
from .layout import LONGEST, ROWS
from .operation import AnyOperation

Schedules = Mapping[str, Collection[Schedule]]  # legal schedules by tunable kernel
ScheduleT = TypeVar("ScheduleT", bound=Schedule)


@dataclass(frozen=True)
class Neighbours:
    """The model, recipe and schedules that a fixed kernel's shapes depend on. schedules: of the tunable kernels present."""

    model: ModelShape
    recipe: Recipe
    schedules: Schedules

    @property
    def quantised(self) -> bool:
        """Whether activations are e4m3."""
        return self.recipe.linear_dtype == "e4m3"

    @property
    def drafter(self) -> bool:
        """Whether the model is an EAGLE-3 drafter."""
        return self.model.architecture == "eagle3"

    def has(self, kernel: str) -> bool:
        """Whether a tunable kernel is present."""
        return kernel in self.schedules

    def schedules_of(self, kernel: str, kind: type[ScheduleT]) -> list[ScheduleT]:
        """The schedules of a tunable kernel; empty if it is absent."""
        return [s for s in self.schedules.get(kernel, ()) if isinstance(s, kind)]

    def partials(self, kernel: str) -> list[int]:
        """Numbers of partials that a linear writes: split_k of its schedules, and 1 in prefill. Empty if it is absent."""
        found = [s.split_k for s in self.schedules_of(kernel, LinearSchedule)]
        return sorted({1, *found}) if found else []

    def linears(self) -> list[LinearShape]:
        """Shapes of the linears present."""
        shapes = self.model.linear_shapes(self.recipe.linear_dtype, self.recipe.terms)
        return [shape for kernel, shape in shapes.items() if self.has(kernel)]


@dataclass(frozen=True)
class FixedKernel:
    """One kernel that isn't tuned. shapes_of: its shapes, perhaps with repetitions."""

    operation: AnyOperation
    schedule: FixedSchedule
    shapes_of: Callable[[Neighbours], Iterable[KernelShape]]

    def shapes(self, model: ModelShape, recipe: Recipe, schedules: Schedules) -> list[KernelShape]:
        """Its shapes in a model under these schedules, each once."""
        return list(dict.fromkeys(self.shapes_of(Neighbours(model, recipe, schedules))))


def norm_shapes(near: Neighbours) -> Iterable[KernelShape]:
    """Before a target's first layer, after o, and after down: before the next layer or the head."""
    H, quantised = near.model.hidden_size, near.quantised
    if near.has("qkv") and not near.drafter:
        yield NormShape(H, 0, embeds=True, quantised=quantised)
    for split_k in near.partials("o"):
        yield NormShape(H, split_k, quantised=quantised)
    for split_k in near.partials("down"):
        yield NormShape(H, split_k, quantised=False)
        if near.drafter:
            for one_row in (False, True):
                yield NormShape(H, split_k, quantised=quantised, one_row=one_row)
            yield NormShape(H, split_k, quantised=False, one_row=True)
        else:
            yield NormShape(H, split_k, quantised=quantised)
            yield NormShape(H, split_k, quantised=quantised, feature=True)


def draft_norm_shapes(near: Neighbours) -> Iterable[KernelShape]:
    """Before a drafter's layer, for both kinds of checkpoint."""
    if near.has("qkv") and near.drafter:
        for normed_residual in (False, True):
            yield DraftNormShape(near.model.hidden_size, near.quantised, normed_residual)


def rope_shapes(near: Neighbours) -> Iterable[KernelShape]:
    """After qkv."""
    model = near.model
    for split_k in near.partials("qkv"):
        yield RopeShape(model.num_heads, model.num_kv_heads, model.head_dim, split_k, 1, model.qk_norm)
    if near.has("qkv"):
        yield RopeShape(model.num_heads, model.num_kv_heads, model.head_dim, 1,
                        rope.rows_per_program(rope.PROMPT_ROWS + ROWS, model.qk_norm), model.qk_norm)


def persistent_attention_shapes(near: Neighbours) -> Iterable[KernelShape]:
    """Replaces attention when a context has many chunks."""
    for schedule in near.schedules_of("attention", AttentionSchedule):
        if shape := attention.persistent_shape(near.model.attention_shape, schedule):
            yield shape


def fold_shapes(near: Neighbours) -> Iterable[KernelShape]:
    """Before merge when a context has many chunks."""
    if near.has("merge"):
        yield near.model.merge_shape


def quantise_shapes(near: Neighbours) -> Iterable[KernelShape]:
    """After merge and gate_up, which write maxima; in prefill after swiglu."""
    model = near.model
    if not near.quantised:
        return
    for merging in near.schedules_of("merge", MergeSchedule):
        parts = merge.parts(model.merge_shape, merging)
        for read in (parts, merge.aligned_parts(parts)):  # the latter in a pass over branches
            yield QuantiseShape(model.num_heads * model.head_dim, read)
    for gating in near.schedules_of("gate_up", LinearSchedule):
        yield QuantiseShape(model.intermediate_size, -(-2 * model.intermediate_size // gating.BLOCK_N))
        yield QuantiseShape(model.intermediate_size, activation.segments(model.intermediate_size))


def quantise_row_shapes(near: Neighbours) -> Iterable[KernelShape]:
    """Input of a linear without maxima: attention's output in prefill, fc's features, a single linear, a drafter's head."""
    for linear in near.linears() if near.quantised else []:
        yield QuantiseShape(linear.K, 0)
    if near.quantised and near.drafter and near.has("lm_head"):
        yield QuantiseShape(near.model.hidden_size, 0)


def swiglu_shapes(near: Neighbours) -> Iterable[KernelShape]:
    """After gate_up in prefill."""
    if near.has("gate_up"):
        yield RowShape(near.model.intermediate_size)


def prefill_linear_shapes(near: Neighbours) -> Iterable[KernelShape]:
    """Each linear; in prefill, swiglu is a separate kernel."""
    return (replace(linear, swiglu=False) for linear in near.linears())


def prefill_attention_shapes(near: Neighbours) -> Iterable[KernelShape]:
    """The same as in decode."""
    if near.has("attention"):
        yield near.model.attention_shape


def reduce_shapes(near: Neighbours) -> Iterable[KernelShape]:
    """After lm_head, plain or certified; a drafter's token ids are mapped to the target's."""
    if near.has("lm_head") or near.has("lm_head_certified"):
        yield ReduceShape(mapped=False)
        if near.drafter:
            yield ReduceShape(mapped=True)


def digits_shapes(near: Neighbours) -> Iterable[KernelShape]:
    """Before a certified head's screen."""
    if near.has("lm_head_certified"):
        yield RowShape(near.model.hidden_size)


def rescore_shapes(near: Neighbours) -> Iterable[KernelShape]:
    """After a certified head's screen, in the steps of the plain heads that are here and of the recipe's."""
    if near.has("lm_head_certified"):
        steps = {s.BLOCK_K for s in near.schedules_of("lm_head", HeadSchedule)}
        steps |= {whole for knobs in near.recipe.defaults.values() if isinstance(whole := knobs["lm_head"]["BLOCK_K"], int)}
        for block in sorted(steps):
            yield RescoreShape(near.model.vocab_size, near.model.hidden_size, block)


def accept_shapes(near: Neighbours) -> Iterable[KernelShape]:
    """After a target's lm_head."""
    if near.has("lm_head") and not near.drafter:
        yield AcceptShape(ROWS)


def draft_token_shapes(near: Neighbours) -> Iterable[KernelShape]:
    """Before a target's pass and after its verdict, with and without a script."""
    if near.has("lm_head") and not near.drafter:
        yield from (DraftTokenShape(scripted) for scripted in (False, True))


def ngram_shapes(near: Neighbours) -> Iterable[KernelShape]:
    """Before a target's pass."""
    if near.has("lm_head") and not near.drafter:
        yield LookupShape(LONGEST)


FIXED: dict[str, FixedKernel] = {
    "norm": FixedKernel(norm.OPERATION, FixedSchedule(num_warps=32, pdl=True), norm_shapes),
    "draft_norm": FixedKernel(norm.DRAFT, FixedSchedule(num_warps=32, pdl=True), draft_norm_shapes),
    "rope": FixedKernel(rope.OPERATION, FixedSchedule(num_warps=1, pdl=True), rope_shapes),
    "attention_persistent": FixedKernel(attention.PERSISTENT, attention.PERSISTENT_SCHEDULE, persistent_attention_shapes),
    "fold": FixedKernel(merge.FOLDING, merge.FOLD_SCHEDULE, fold_shapes),
    "quantise": FixedKernel(activation.QUANTISE, FixedSchedule(num_warps=8, pdl=True), quantise_shapes),
    "quantise_row": FixedKernel(activation.QUANTISE, FixedSchedule(num_warps=32, pdl=True), quantise_row_shapes),
    "swiglu": FixedKernel(activation.SWIGLU, FixedSchedule(num_warps=8, pdl=True), swiglu_shapes),
    "prefill_linear": FixedKernel(prefill.LINEAR, prefill.WIDE, prefill_linear_shapes),
    "prefill_narrow": FixedKernel(prefill.LINEAR, prefill.NARROW, prefill_linear_shapes),
    "prefill_attention": FixedKernel(prefill.ATTENTION, prefill.ATTENTION_SCHEDULE, prefill_attention_shapes),
    "lm_head_reduce": FixedKernel(lm_head.REDUCE, lm_head.REDUCE_SCHEDULE, reduce_shapes),
    "head_digits": FixedKernel(screen.DIGITS, certified_head.DIGITS_SCHEDULE, digits_shapes),
    "head_rescore": FixedKernel(certified_head.RESCORE, certified_head.RESCORE_SCHEDULE, rescore_shapes),
    "accept": FixedKernel(accept.ACCEPT, FixedSchedule(num_warps=1, pdl=True), accept_shapes),
    "draft_token": FixedKernel(accept.DRAFT_TOKEN, FixedSchedule(num_warps=1, pdl=True), draft_token_shapes),
    "ngram": FixedKernel(ngram.OPERATION, ngram.SCHEDULE, ngram_shapes),
    "select_branch": FixedKernel(branch_selection.OPERATION, FixedSchedule(num_warps=1, pdl=True), draft_token_shapes),
}
