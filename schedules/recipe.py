"""Recipes: what fixes a model's output bits. `recipes/NAME.toml` says the precision of each operation, the numerics flags
of the compiler, the row tile, the KV chunk, how far a kernel may be from fp64, and one default schedule per kernel and
target."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..shapes.fields import Fields, nearest, read_table
from .errors import ScheduleError

SHIPPED = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class Numerics:
    """Compiler flags that reach the output bits. max_num_imprecise_acc: FP8 products the tensor core may accumulate in
    its narrow accumulator before they are added in fp32, by target; it is the compiler's own default, checked, not set.
    promote_every: FP8 products along K after which the decode linears add to fp32 at the latest; 0 where nothing is FP8."""

    enable_fp_fusion: bool
    max_num_imprecise_acc: Mapping[str, int]
    promote_every: int = 0

    def flags(self, arch: str) -> dict[str, Any]:
        """The flags on one target, as promoted schedules have them."""
        return {"enable_fp_fusion": self.enable_fp_fusion, "max_num_imprecise_acc": self.max_num_imprecise_acc.get(arch),
                "promote_every": self.promote_every}


@dataclass(frozen=True)
class ErrorLimits:
    """How far a kernel's output may be from fp64 on the tuner's bell-shaped operands: RMS of the difference over RMS of the
    output. partials: a linear's fp32 partials, added, whose error is that of accumulating alone; output: what leaves a kernel in
    bf16; swiglu: a product of two linears in bf16. They decide whether a candidate is right and reach no bit, so they are no part
    of a promoted schedule's look-up. 0 in a recipe that no kernel runs under."""

    partials: float = 0.0
    output: float = 0.0
    swiglu: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """One versioned recipe. `defaults[target][kernel]` holds the knobs of that kernel's default schedule."""

    name: str
    precision: Mapping[str, str]
    numerics: Numerics
    max_rms_error: ErrorLimits
    row_tile: int
    kv_chunk: int
    defaults: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @property
    def linear_dtype(self) -> str:
        """`dtype` of the linears' shapes."""
        return "bf16" if self.precision.get("linear") == "bf16" else "e4m3"

    @property
    def terms(self) -> int:
        """`terms` of the linears' shapes: e4m3 numbers that stand for one activation."""
        return 2 if self.precision.get("activation") == "e4m3x2" else 1


def recipe_names() -> list[str]:
    return sorted(p.stem for p in SHIPPED.glob("*.toml"))


def load_recipe(name: str) -> Recipe:
    """A shipped recipe by name. Raises ScheduleError for an unknown name or a wrong field."""
    if name not in recipe_names():
        raise ScheduleError(f"unknown recipe {name!r}{nearest(name, recipe_names())}",
                            expected=f"one of {', '.join(recipe_names())}")
    path = SHIPPED / f"{name}.toml"
    fields = Fields(read_table(path, ScheduleError), path.name, ScheduleError)
    flags = Fields(fields.get("numerics", dict), f"{path.name}: numerics", ScheduleError)
    numerics = Numerics(flags.get("enable_fp_fusion", bool), flags.get("max_num_imprecise_acc", dict),
                        flags.get("promote_every", int, 0))
    flags.done()
    defaults = fields.get("default", dict, {})
    recipe = Recipe(name=fields.get("name", str), precision=fields.get("precision", dict), numerics=numerics,
                    max_rms_error=_error_limits(fields) if defaults else ErrorLimits(), row_tile=fields.positive("row_tile", int),
                    kv_chunk=fields.positive("kv_chunk", int), defaults=defaults)
    fields.done()
    if recipe.linear_dtype == "e4m3" and (unpinned := sorted(set(defaults) - set(numerics.max_num_imprecise_acc))):
        raise fields.fail("numerics", f"pins no max_num_imprecise_acc for {', '.join(unpinned)}",
                          expected="one for each target that it has defaults for, as its products are FP8")
    if recipe.name != name:
        raise fields.fail("name", f"is {recipe.name!r}", expected=f"{name!r}, as the file is called")
    return recipe


def _error_limits(fields: Fields) -> ErrorLimits:
    inner = Fields(fields.get("max_rms_error", dict), f"{fields.where}: max_rms_error", ScheduleError)
    limits = ErrorLimits(*(inner.positive(name, float) for name in ("partials", "output", "swiglu")))
    inner.done()
    return limits
