"""The case of each tuned kernel."""

from dataclasses import dataclass
from typing import Any

from ....schedules.recipe import Recipe
from ....schedules.schedule import HeadSchedule, MergeSchedule
from ....shapes.model import AttentionShape, CertifiedHeadShape, HeadShape, KernelShape, LinearShape, MergeShape
from .attention import AttentionCase, MergeCase
from .heads import CertifiedCase, HeadCase
from .linears import LinearCase
from .operands import Case, Operands


@dataclass(frozen=True)
class Beside:
    """The recipe's schedules of kernels that others are launched with: merge with attention, lm_head with the certified head."""

    merge: MergeSchedule
    lm_head: HeadSchedule


def make_case(kernel: str, shape: KernelShape, recipe: Recipe, make: Operands, beside: Beside) -> Case[Any]:
    """The case of one kernel and shape. beside: of the recipe."""
    if isinstance(shape, LinearShape):
        return LinearCase(shape, recipe, make)
    if isinstance(shape, HeadShape):
        return HeadCase(shape, recipe, make, logits=kernel == "lm_head_logits")
    if isinstance(shape, CertifiedHeadShape):
        return CertifiedCase(shape, recipe, make, beside.lm_head)
    if isinstance(shape, AttentionShape):
        return AttentionCase(shape, recipe, make, beside.merge)
    assert isinstance(shape, MergeShape), f"{kernel} isn't tuned"
    return MergeCase(shape, recipe, make)
