"""Triton's interpreter spends most of its time on Python around numpy: it makes the same tables for each value and looks through
triton.language at each launch. These parts are remembered here. Its check of each integer sum for an overflow asserts nothing
where `debug` is off, as it is: the sums are left out. Nothing that a kernel computes changes. Written for Triton 3.7; another
version runs as it is.
"""

import dataclasses
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton._utils import validate_block_shape


def install() -> None:
    """Once a process."""
    if not triton.__version__.startswith("3.7.") or getattr(interpreter, "quick", False):
        return
    interpreter.quick = True
    interpreter._get_np_dtype = numpy_type_by_name(interpreter._get_np_dtype)
    interpreter._patch_builtin = patch_builtin
    tl.core.tensor.__init__, tl.core.block_type.__init__ = tensor_init, block_init
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)


def numpy_type_by_name(found: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    """The interpreter's table, asked once for each name of a scalar; a pointer is 64 bits."""
    known: dict[str, np.dtype] = {}

    def of(kind: Any) -> np.dtype:
        scalar = kind.scalar
        name = scalar.name
        if name not in known:
            known[name] = found(scalar)
        return known[name]

    return of


@cache
def builtins_of(package: Any) -> list[tuple[str, Any]]:
    """Its builtin functions, as they are when nothing is patched: a launch restores what it patched."""
    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name, member in builtins_of(package):
        scope.set_attr(package, name, with_semantic(member))


@cache
def with_semantic(member: Any) -> Callable[..., Any]:
    """The builtin, told whom to ask."""
    def call(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return member(*arguments, **named)

    return call


@cache
def shape_of(lengths: tuple[int, ...]) -> tuple[Any, Any]:
    """(number of elements, shape) as a tensor has them: both are never written to."""
    numel = 1
    for length in lengths:
        numel *= length
    return tl.constexpr(numel), tl.core.tuple([tl.constexpr(length) for length in lengths])


def tensor_init(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.numel, self.shape = shape_of(tuple(type.shape) if type.is_block() else ())
    self.type = type
    self.dtype = type.scalar


@cache
def block_of(element: str, lengths: tuple[int, ...]) -> tuple[Any, int, str]:
    """(shape, number of elements, name) of a block's type. Raises what Triton raises for a shape that isn't one."""
    shape = tl.core.tuple(list(lengths))
    return shape, validate_block_shape(shape), f"<{shape}, {element}>"


def block_init(self: Any, element_ty: Any, shape: Any) -> None:
    lengths = tuple(tl.core._unwrap_if_constexpr(length) for length in shape)
    if not lengths:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, self.numel, self.name = block_of(str(element_ty), lengths)
