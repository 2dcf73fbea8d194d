"""From the arguments of a launch to its artefact, by Triton's own rules: 1 is compiled in, a number that divides by 16 and a
pointer on 16 bytes are known to, an annotation decides a type. Triton's own binder is asked: a launch then finds the artefact."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from .arguments import KernelError
from .operation import Constant, Jitted, Launch, Path
from .toolchain import backend_of

ANY_TARGET = 90  # specialisation is the same for all NVIDIA targets
Kinds = str | tuple[Any, ...]  # Triton's type of an argument; of a tuple, those of its parts


@dataclass(frozen=True)
class Specialised(Launch):
    """A launch as Triton specialised it. kinds, values, marks: Triton's signature, constants and attributes, by argument and by
    path into the arguments."""

    kinds: Mapping[str, Kinds] = field(default_factory=dict)
    values: Mapping[Path, object] = field(default_factory=dict)
    marks: Mapping[Path, list[list[str | int]]] = field(default_factory=dict)

    def signature(self) -> dict[str, Any]:
        return dict(self.kinds)

    def constant_paths(self) -> dict[Path, object]:
        return dict(self.values)

    def attributes(self) -> dict[Path, list[list[str | int]]]:
        return dict(self.marks)

    def pointers(self) -> list[str]:
        return [name for name, kind in _parts(self.kinds) if kind.startswith(("*", "tensordesc"))]


def _parts(kinds: Mapping[str, Kinds]) -> Iterator[tuple[str, str]]:
    """(name, type) of each argument; the parts of a tuple apart."""
    for name, kind in kinds.items():
        if isinstance(kind, str):
            yield name, kind
        else:
            yield from _parts({f"{name}[{i}]": part for i, part in enumerate(kind)})


@cache
def _binder(kernel: Jitted) -> Any:
    from triton.runtime.jit import create_function_from_signature

    return create_function_from_signature(kernel.signature, kernel.params, backend_of(ANY_TARGET))


def specialise(kernel: Jitted, arguments: Mapping[str, object], options: Mapping[str, Constant],
               declared: Mapping[str, str]) -> Specialised:
    """The launch of these arguments. declared: the type that a scalar was said to have.

    Raises KernelError for a scalar that Triton passes as another type, and whatever Triton raises for a value it doesn't take.
    """
    bound, specialisation, rest = _binder(kernel)(**arguments)
    assert not rest, f"arguments that {kernel.__name__} doesn't have: {rest}"
    _, kinds, values, marks = kernel._pack_args(backend_of(ANY_TARGET), dict(options), bound, specialisation, rest)
    for name, dtype in declared.items():
        if kinds[name] not in (dtype, "constexpr"):
            raise KernelError(f"{name} = {bound[name]} goes to the kernel as {kinds[name]}, by Triton's rules",
                              expected=f"{dtype}, as was declared", action="declare that type, or annotate the argument")
    constants: dict[str, Any] = {kernel.arg_names[path[0]]: value for path, value in values.items() if len(path) == 1}
    types = {name: kind for name, kind in kinds.items() if isinstance(kind, str) and kind != "constexpr"}
    return Specialised(kernel, types, constants, options, kinds, values, {path: mark for path, mark in marks.items() if mark})
