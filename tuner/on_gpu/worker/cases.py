"""The case of each tuned kernel."""

from typing import Any

from ....schedules.recipe import Recipe
from ....schedules.schedule import MergeSchedule
from ....shapes.model import AttentionShape, HeadShape, KernelShape, LinearShape, MergeShape
from .attention import AttentionCase, MergeCase
from .heads import HeadCase
from .linears import LinearCase
from .operands import Case, Operands


def make_case(kernel: str, shape: KernelShape, recipe: Recipe, make: Operands, merging: MergeSchedule) -> Case[Any]:
    """The case of one kernel and shape. merging: the recipe's schedule of merge, for attention."""
    if isinstance(shape, LinearShape):
        return LinearCase(shape, recipe, make)
    if isinstance(shape, HeadShape):
        return HeadCase(shape, recipe, make, logits=kernel == "lm_head_logits")
    if isinstance(shape, AttentionShape):
        return AttentionCase(shape, recipe, make, merging)
    assert isinstance(shape, MergeShape), f"{kernel} isn't tuned"
    return MergeCase(shape, recipe, make)
