"""Values of one's own names: the sizes of a user's kernel, and the knobs of its schedule."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, NoReturn, TypeVar

from .errors import ShapeError, UserError
from .fields import NAME, shown

V = TypeVar("V")
LARGEST_SIZE = 2**48  # of one dimension
LONGEST_TEXT = 200  # of a knob's value

Knob = int | float | bool | str | None


class Frozen(dict[str, V], Generic[V]):
    """A mapping that can't change and has a hash. It keeps its order, which doesn't count; 1, 1.0 and True are three values."""

    def __init__(self, values: Mapping[str, V] | Iterable[tuple[str, V]] = ()) -> None:
        super().__init__(values)
        self._key = frozenset((name, type(value), value) for name, value in self.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and self._key == other._key

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:  # type: ignore[override]  # a dict has none, as it can change
        return hash(self._key)

    def __reduce__(self) -> tuple[object, ...]:
        return Frozen, (dict(self),)

    def _refuse(self, *arguments: object, **named: object) -> NoReturn:
        raise TypeError("sizes and knobs can't be changed")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse


@dataclass(frozen=True)
class OwnShape:
    """The sizes of a kernel of one's own, by the names that it gives its dimensions."""

    dims: Frozen[int] = field(default_factory=Frozen)


def own_shape(dims: Mapping[str, object], where: str, error: type[UserError] = ShapeError) -> OwnShape:
    """A shape from its dimensions. Raises `error` for a wrong name or size."""
    found: dict[str, int] = {}
    for name, size in dims.items():
        require_word(name, f"{where}: dimension", error)
        if type(size) is not int or not 1 <= size <= LARGEST_SIZE:
            raise error(f"{where}: {name} is {shown(size)}", expected=f"a whole number from 1 to {LARGEST_SIZE:,}")
        found[name] = size
    return OwnShape(Frozen(found))


def own_knobs(knobs: Mapping[str, object], where: str, error: type[UserError]) -> Frozen[Knob]:
    """Knobs from a file or a user's mapping. Raises `error` for a wrong name or value."""
    found: dict[str, Knob] = {}
    for name, value in knobs.items():
        require_word(name, f"{where}: knob", error)
        if problem := knob_problem(value):
            raise error(f"{where}: {name} is {shown(value)}", expected=problem)
        found[name] = value  # type: ignore[assignment]  # a knob's value, as was checked
    return Frozen(found)


def knob_problem(value: object) -> str | None:
    """What was expected in a knob's place, or None if the value can be one."""
    if value is None or type(value) is bool:
        return None
    if type(value) is int:
        return None if abs(value) < 2**63 else "a whole number of 64 bits"
    if type(value) is float:
        return None if math.isfinite(value) else "a finite number"
    if type(value) is str:
        fits = len(value) <= LONGEST_TEXT and value.isprintable()
        return None if fits else f"printable text of at most {LONGEST_TEXT} characters"
    return "a whole number, a number, text, true, false or null"


def require_word(name: object, what: str, error: type[UserError]) -> str:
    """A name of a dimension, knob or argument, as Python has them."""
    if not isinstance(name, str) or not name.isidentifier() or not NAME.fullmatch(name):
        raise error(f"{what} {shown(name)}", expected="a name as Python has them: letters, digits and '_'")
    return name
