"""The precision part of a recipe: which numbers each operation of the decoder works on."""

from dataclasses import dataclass

from .errors import ScheduleError
from .recipe import Recipe

ALLOWED = {
    "linear": ("fp32", "bf16", "e4m3"),
    "activation": ("fp32", "bf16", "e4m3x2"),
    "attention": ("fp32", "bf16"),
    "kv_cache": ("fp32", "bf16"),
    "lm_head": ("fp32", "bf16"),
    "accumulate": ("fp32",),
}
BYTES = {"fp32": 4, "bf16": 2, "e4m3": 1}


@dataclass(frozen=True)
class Precision:
    """One word per operation, as the recipe file has it. The residual stream is in the precision of `attention`."""

    linear: str
    activation: str
    attention: str
    kv_cache: str
    lm_head: str
    accumulate: str

    @property
    def is_e4m3(self) -> bool:
        """Projections with e4m3 weights, and activations as two e4m3 terms."""
        return self.linear == "e4m3"

    @property
    def terms(self) -> int:
        """e4m3 numbers that stand for one activation."""
        return 2 if self.activation == "e4m3x2" else 1


def precision_of(recipe: Recipe) -> Precision:
    """The recipe's precisions, checked.

    Raises:
        ScheduleError: a missing, unknown or contradicting precision.
    """
    found = dict(recipe.precision)
    for name, value in found.items():
        if value not in ALLOWED.get(name, ()):
            raise ScheduleError(f"recipe {recipe.name}: precision.{name} is {value!r}",
                            expected=f"one of {', '.join(ALLOWED[name])}" if name in ALLOWED
                            else f"one of the operations {', '.join(ALLOWED)}")
    missing = [name for name in ALLOWED if name not in found]
    if missing:
        raise ScheduleError(f"recipe {recipe.name}: precision.{missing[0]} is missing")
    precision = Precision(**found)
    if (precision.linear == "e4m3") != (precision.activation == "e4m3x2"):
        raise ScheduleError(f"recipe {recipe.name}: linear is {precision.linear}, activation {precision.activation}",
                        expected="e4m3 with e4m3x2, or neither: e4m3 weights are multiplied with e4m3 activations")
    plain = {precision.attention, precision.kv_cache, precision.lm_head}
    plain |= set() if precision.is_e4m3 else {precision.linear, precision.activation}
    if len(plain) != 1:
        raise ScheduleError(f"recipe {recipe.name}: mixes {' and '.join(sorted(plain))}",
                        expected="one precision, fp32 or bf16, for everything that isn't e4m3")
    return precision
