"""Recipes fix a model's output bits. `recipes/NAME.toml` has the precision of each operation, the compiler's numerics flags, the
row tile, the KV chunk, the limits of the error against fp64, and one default schedule per kernel and target."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..shapes.fields import Count, Fields, Name, Positive, PositiveInt, nearest, read_fields
from .errors import ScheduleError

SHIPPED = Path(__file__).parent / "recipes"
BYTES = {"fp32": 4, "bf16": 2, "e4m3": 1}
Plain = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Precision:
    """The number format of each operation. The residual stream has the format of `attention`."""

    linear: Literal["fp32", "bf16", "e4m3"]
    activation: Literal["fp32", "bf16", "e4m3x2"]
    attention: Plain
    kv_cache: Plain
    lm_head: Plain
    accumulate: Literal["fp32"]

    @property
    def is_e4m3(self) -> bool:
        """Whether linears have e4m3 weights, and activations in two e4m3 terms."""
        return self.linear == "e4m3"

    @property
    def terms(self) -> int:
        """Number of terms per activation."""
        return 2 if self.activation == "e4m3x2" else 1


@dataclass(frozen=True)
class Numerics:
    """Compiler flags that change the output bits. max_num_imprecise_acc: FP8 products that the tensor core may accumulate in its
    narrow accumulator before they are added in fp32, by target; the compiler's default, which is checked and not set.
    promote_every: maximum of FP8 products along K before the decode linears add to fp32; 0 without FP8."""

    enable_fp_fusion: bool
    max_num_imprecise_acc: Mapping[str, Count]
    promote_every: Count = 0

    def flags(self, arch: str) -> dict[str, bool | int | None]:
        """The flags on one target, as in promoted schedules."""
        return {"enable_fp_fusion": self.enable_fp_fusion, "max_num_imprecise_acc": self.max_num_imprecise_acc.get(arch),
                "promote_every": self.promote_every}


@dataclass(frozen=True)
class ErrorLimits:
    """Limits of a kernel's error against fp64 on the tuner's bell-shaped operands: RMS of the difference over RMS of the output.

    partials: of a linear's summed fp32 partials, which have only the accumulation's error. output: of a bf16 output. swiglu: of a
    product of two linears in bf16. They don't change the bits, so they aren't part of a promoted schedule's look-up."""

    partials: Positive
    output: Positive
    swiglu: Positive


NO_LIMITS = ErrorLimits(0.0, 0.0, 0.0)  # of a recipe without kernels


@dataclass(frozen=True)
class Recipe:
    """One versioned recipe. defaults: knobs of the default schedule, by target and kernel."""

    name: Name
    row_tile: PositiveInt
    kv_chunk: PositiveInt
    precision: Precision
    numerics: Numerics
    max_rms_error: ErrorLimits = NO_LIMITS
    defaults: Mapping[str, Mapping[str, Mapping[str, object]]] = field(default_factory=dict)

    @property
    def linear_dtype(self) -> str:
        """`dtype` of the linears' shapes."""
        return self.precision.linear

    @property
    def terms(self) -> int:
        """`terms` of the linears' shapes."""
        return self.precision.terms


# In the place of a recipe, for kernels of one's own: their source, arguments and knobs fix every bit. FMA as Triton has it.
OWN = Recipe("own", 1, 1, Precision("fp32", "fp32", "fp32", "fp32", "fp32", "fp32"), Numerics(True, {}))


def recipe_names() -> list[str]:
    """The names of the shipped recipes."""
    return sorted(p.stem for p in SHIPPED.glob("*.toml"))


def recipe_called(name: str) -> Recipe:
    """As load_recipe; OWN by its name."""
    return OWN if name == OWN.name else load_recipe(name)


def load_recipe(name: str) -> Recipe:
    """A shipped recipe. Raises ScheduleError for an unknown name or a wrong field."""
    if name not in recipe_names():
        raise ScheduleError(f"unknown recipe {name!r}{nearest(name, recipe_names())}",
                            expected=f"one of {', '.join(recipe_names())}")
    fields = read_fields(SHIPPED / f"{name}.toml", ScheduleError)
    recipe = fields.read(Recipe)
    if recipe.name != name:
        raise fields.fail("name", f"is {recipe.name!r}", expected=f"{name!r}, the file's name")
    if recipe.defaults and recipe.max_rms_error is NO_LIMITS:
        raise fields.fail("max_rms_error", "missing", expected="partials, output and swiglu, in a recipe with defaults")
    unpinned = sorted(set(recipe.defaults) - set(recipe.numerics.max_num_imprecise_acc))
    if recipe.precision.is_e4m3 and unpinned:
        raise fields.fail("numerics", f"no max_num_imprecise_acc for {', '.join(unpinned)}",
                          expected="one for each target with defaults, because products are FP8")
    _require_one_precision(recipe.precision, fields)
    return recipe


def _require_one_precision(precision: Precision, fields: Fields) -> None:
    """Raises ScheduleError for contradictory precisions."""
    if precision.is_e4m3 != (precision.terms == 2):
        raise fields.fail("precision", f"linear is {precision.linear}, activation {precision.activation}",
                          expected="e4m3 with e4m3x2, or neither: e4m3 weights need e4m3 activations")
    plain: set[str] = {precision.attention, precision.kv_cache, precision.lm_head}
    plain |= set() if precision.is_e4m3 else {precision.linear, precision.activation}
    if len(plain) != 1:
        raise fields.fail("precision", f"mixes {' and '.join(sorted(plain))}",
                          expected="one precision, fp32 or bf16, for everything that isn't e4m3")
