"""The kernels that aren't tuned: one schedule each, which the decoder launches and the offline sweep compiles, and the shapes
that they take in a model.

A shape follows from the model, the recipe and the schedules of the neighbours: a norm sums as many partials as the linear before
it leaves, a quantisation reads as many maxima as the merge or gate_up before it writes. A kernel has no shape where its neighbour
isn't there. All take part in programmatic dependent launch, or they would hold up those that do.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from ..schedules.recipe import Recipe
from ..schedules.schedule import AttentionSchedule, FixedSchedule, LinearSchedule, MergeSchedule, Schedule
from ..shapes.model import (
    AcceptShape,
    DraftNormShape,
    DraftTokenShape,
    KernelShape,
    LinearShape,
    ModelShape,
    NormShape,
    QuantiseShape,
    ReduceShape,
    RopeShape,
    RowShape,
)
from . import accept, activation, attention, branch_selection, lm_head, merge, norm, prefill, rope
from .layout import ROWS
from .operation import AnyOperation

Schedules = Mapping[str, Collection[Schedule]]  # that each tunable kernel may run under, by name
ScheduleT = TypeVar("ScheduleT", bound=Schedule)


@dataclass(frozen=True)
class Neighbours:
    """The source of a fixed kernel's shapes. schedules: of the tunable kernels that are there."""

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
        """Whether a tunable kernel is there."""
        return kernel in self.schedules

    def schedules_of(self, kernel: str, kind: type[ScheduleT]) -> list[ScheduleT]:
        """The schedules of a tunable kernel; nothing if it isn't there."""
        return [s for s in self.schedules.get(kernel, ()) if isinstance(s, kind)]

    def partials(self, kernel: str) -> list[int]:
        """split_k of a linear's schedules, and the one y of a prompt's pass; nothing if it isn't there."""
        found = [s.split_k for s in self.schedules_of(kernel, LinearSchedule)]
        return sorted({1, *found}) if found else []

    def linears(self) -> list[LinearShape]:
        """The linears that are there."""
        shapes = self.model.linear_shapes(self.recipe.linear_dtype, self.recipe.terms)
        return [shape for kernel, shape in shapes.items() if self.has(kernel)]


@dataclass(frozen=True)
class FixedKernel:
    """One kernel that isn't tuned. shapes_beside: its shapes, which may repeat."""

    operation: AnyOperation
    schedule: FixedSchedule
    shapes_beside: Callable[[Neighbours], Iterable[KernelShape]]

    def shapes(self, model: ModelShape, recipe: Recipe, schedules: Schedules) -> list[KernelShape]:
        """Every shape that it takes in a model beside these schedules, each once."""
        return list(dict.fromkeys(self.shapes_beside(Neighbours(model, recipe, schedules))))


def norm_shapes(beside: Neighbours) -> Iterable[KernelShape]:
    """At the entry of a target's pass, after o, and after down: before the next layer, or the last one, before the head."""
    H, quantised = beside.model.hidden_size, beside.quantised
    if beside.has("qkv") and not beside.drafter:
        yield NormShape(H, 0, embeds=True, quantised=quantised)
    for split_k in beside.partials("o"):
        yield NormShape(H, split_k, quantised=quantised)
    for split_k in beside.partials("down"):
        yield NormShape(H, split_k, quantised=False)
        if beside.drafter:
            for one_row in (False, True):
                yield NormShape(H, split_k, quantised=quantised, one_row=one_row)
            yield NormShape(H, split_k, quantised=False, one_row=True)
        else:
            yield NormShape(H, split_k, quantised=quantised)
            yield NormShape(H, split_k, quantised=quantised, feature=True)


def draft_norm_shapes(beside: Neighbours) -> Iterable[KernelShape]:
    """At the entry of a drafter's pass, in either kind of checkpoint."""
    if beside.has("qkv") and beside.drafter:
        for normed_residual in (False, True):
            yield DraftNormShape(beside.model.hidden_size, beside.quantised, normed_residual)


def rope_shapes(beside: Neighbours) -> Iterable[KernelShape]:
    """After qkv."""
    model = beside.model
    for split_k in beside.partials("qkv"):
        yield RopeShape(model.num_heads, model.num_kv_heads, model.head_dim, split_k, 1, model.qk_norm)
    if beside.has("qkv"):
        yield RopeShape(model.num_heads, model.num_kv_heads, model.head_dim, 1,
                        rope.rows_per_program(rope.PROMPT_ROWS + ROWS, model.qk_norm), model.qk_norm)


def persistent_attention_shapes(beside: Neighbours) -> Iterable[KernelShape]:
    """In attention's place where a context has many chunks."""
    for schedule in beside.schedules_of("attention", AttentionSchedule):
        if shape := attention.persistent_shape(beside.model.attention_shape, schedule):
            yield shape


def fold_shapes(beside: Neighbours) -> Iterable[KernelShape]:
    """Before merge where a context has many chunks."""
    if beside.has("merge"):
        yield beside.model.merge_shape


def quantise_shapes(beside: Neighbours) -> Iterable[KernelShape]:
    """After merge and after gate_up, which leave maxima; in a prompt's pass after swiglu."""
    model = beside.model
    if not beside.quantised:
        return
    for merging in beside.schedules_of("merge", MergeSchedule):
        parts = merge.parts(model.merge_shape, merging)
        for read in (parts, merge.aligned_parts(parts)):  # the latter in a pass of branches
            yield QuantiseShape(model.num_heads * model.head_dim, read)
    for gating in beside.schedules_of("gate_up", LinearSchedule):
        yield QuantiseShape(model.intermediate_size, -(-2 * model.intermediate_size // gating.BLOCK_N))
        yield QuantiseShape(model.intermediate_size, activation.segments(model.intermediate_size))


def quantise_row_shapes(beside: Neighbours) -> Iterable[KernelShape]:
    """Input of a linear without maxima: attention's output in a prompt's pass, fc's features, a linear on its own, a drafter's
    head."""
    for linear in beside.linears() if beside.quantised else []:
        yield QuantiseShape(linear.K, 0)
    if beside.quantised and beside.drafter and beside.has("lm_head"):
        yield QuantiseShape(beside.model.hidden_size, 0)


def swiglu_shapes(beside: Neighbours) -> Iterable[KernelShape]:
    """After gate_up, in a prompt's pass."""
    if beside.has("gate_up"):
        yield RowShape(beside.model.intermediate_size)


def prefill_linear_shapes(beside: Neighbours) -> Iterable[KernelShape]:
    """Each linear; swiglu is a kernel of its own there."""
    return (replace(linear, swiglu=False) for linear in beside.linears())


def prefill_attention_shapes(beside: Neighbours) -> Iterable[KernelShape]:
    """As decode attention's."""
    if beside.has("attention"):
        yield beside.model.attention_shape


def reduce_shapes(beside: Neighbours) -> Iterable[KernelShape]:
    """After lm_head; a drafter's ids stand for the target's."""
    if beside.has("lm_head"):
        yield ReduceShape(mapped=False)
        if beside.drafter:
            yield ReduceShape(mapped=True)


def accept_shapes(beside: Neighbours) -> Iterable[KernelShape]:
    """After a target's lm_head."""
    if beside.has("lm_head") and not beside.drafter:
        yield AcceptShape(ROWS)


def draft_token_shapes(beside: Neighbours) -> Iterable[KernelShape]:
    """Before a target's pass, and after its verdict, with a script or without."""
    if beside.has("lm_head") and not beside.drafter:
        yield from (DraftTokenShape(scripted) for scripted in (False, True))


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
    "accept": FixedKernel(accept.ACCEPT, FixedSchedule(num_warps=1, pdl=True), accept_shapes),
    "draft_token": FixedKernel(accept.DRAFT_TOKEN, FixedSchedule(num_warps=1, pdl=True), draft_token_shapes),
    "select_branch": FixedKernel(branch_selection.OPERATION, FixedSchedule(num_warps=1, pdl=True), draft_token_shapes),
}
