"""The arguments of a kernel of one's own: tensors, scalars and strides, whose sizes are written in the names of its dimensions.

A size is a number, a name, or text in +, -, * and // of both: `"H"`, `128`, `"(K + 127) // 128"`, `"heads * head_dim"`. A name is
a dimension of the shape or, in a tensor that is no output, a knob of the schedule.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..shapes.errors import UserError
from ..shapes.fields import nearest, shown

Size = int | str
# torch's name and bytes of each element, by Triton's name.
ELEMENTS = {"fp64": ("float64", 8), "fp32": ("float32", 4), "fp16": ("float16", 2), "bf16": ("bfloat16", 2),
            "fp8e4nv": ("float8_e4m3fn", 1), "fp8e5": ("float8_e5m2", 1), "i64": ("int64", 8), "i32": ("int32", 4),
            "i16": ("int16", 2), "i8": ("int8", 1), "u64": ("uint64", 8), "u32": ("uint32", 4), "u16": ("uint16", 2),
            "u8": ("uint8", 1), "u1": ("bool", 1)}
OTHER_NAMES = {"e4m3": "fp8e4nv", "e5m2": "fp8e5", "i1": "u1", **{name: element for element, (name, _) in ELEMENTS.items()}}
SCALARS = ("i32", "i64", "u64", "u1", "fp32", "fp64", "fp16", "bf16", "i8", "i16", "u8", "u16", "u32", "constexpr")
OPERATORS: dict[type, Callable[[int, int], int]] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
                                                    ast.FloorDiv: operator.floordiv}
LONGEST = 200  # characters of a size


class KernelError(UserError):
    """A description of a kernel that can't be, or that doesn't fit its function."""


@cache
def _parsed(text: str) -> ast.expr:
    """Raises KernelError for text that is no size."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body if len(text) <= LONGEST else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if tree is None or not _plain(tree):
        raise KernelError(f"size {shown(text)}",
                          expected="a number, a name, or +, -, * and // of them, such as '(K + 127) // 128'")
    return tree


def _plain(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return type(node.op) in OPERATORS and _plain(node.left) and _plain(node.right)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and _plain(node.operand)
    return isinstance(node, ast.Name) or (isinstance(node, ast.Constant) and type(node.value) is int)


def names_in(size: Size) -> set[str]:
    """The names that a size is written in. Raises KernelError."""
    return {node.id for node in ast.walk(_parsed(size)) if isinstance(node, ast.Name)} if isinstance(size, str) else set()


def value_of(size: Size, values: Mapping[str, object]) -> int:
    """A size's value. Raises KernelError for a name without a whole number, and for a division by 0."""
    return _value(_parsed(size), values, size) if isinstance(size, str) else size


def _value(node: ast.expr, values: Mapping[str, object], text: str) -> int:
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, values, text), _value(node.right, values, text)
        if isinstance(node.op, ast.FloorDiv) and right == 0:
            raise KernelError(f"size {text!r} divides by 0 with {dict(values)}")
        return OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp):
        return -_value(node.operand, values, text)
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int)
        return node.value
    assert isinstance(node, ast.Name)
    found = values.get(node.id)
    if type(found) is not int:
        raise KernelError(f"size {text!r}: {node.id} is {shown(found)}{nearest(node.id, values)}", expected="a whole number")
    return found


def _element(dtype: object) -> str:
    """Triton's name of a type: of `e4m3`, `torch.bfloat16` or `tl.float32` too. Raises KernelError."""
    text = str(dtype).removeprefix("torch.").removeprefix("tl.")
    element = OTHER_NAMES.get(text, text)
    if element not in ELEMENTS:
        raise KernelError(f"type {shown(text)}{nearest(text, [*ELEMENTS, *OTHER_NAMES])}",
                          expected=f"one of {', '.join(ELEMENTS)}, e4m3, e5m2")
    return element


@dataclass(frozen=True, init=False)
class Tensor:
    """A tensor, contiguous in the order of its dims, whose first element lies on 16 bytes unless `aligned` is False.

    dtype: Triton's name of the elements, e4m3, e5m2, or torch's type. output: the kernel writes all of it. block: the tensor
    comes as a tensor descriptor with blocks of these sizes. below: elements are whole numbers from 0 to below - 1, such as ids.
    """

    dtype: str
    dims: tuple[Size, ...]
    output: bool
    block: tuple[Size, ...] | None
    aligned: bool
    below: Size | None

    def __init__(self, dtype: object, *dims: Size, output: bool = False, block: tuple[Size, ...] | None = None,
                 aligned: bool = True, below: Size | None = None) -> None:
        for name, value in (("dtype", _element(dtype)), ("dims", dims), ("output", output),
                            ("block", None if block is None else tuple(block)), ("aligned", aligned), ("below", below)):
            object.__setattr__(self, name, value)
        for size in (*dims, *(self.block or ()), *(() if below is None else (below,))):
            if type(size) is not int and not isinstance(size, str):
                raise KernelError(f"size {shown(size)} of a tensor", expected="a whole number or text")
            names_in(size)
        if self.block is not None and len(self.block) != len(dims):
            raise KernelError(f"a block of {len(self.block)} sizes in a tensor of {len(dims)}", expected="as many")

    @property
    def element_bytes(self) -> int:
        return ELEMENTS[self.dtype][1]

    def sizes(self, values: Mapping[str, object]) -> tuple[int, ...]:
        """values: of the dimensions and knobs. Raises KernelError for a size below 1."""
        found = tuple(value_of(size, values) for size in self.dims)
        for size, text in zip(found, self.dims):
            if size < 1:
                raise KernelError(f"size {text!r} is {size} with {dict(values)}", expected="at least 1")
        return found

    def strides(self, values: Mapping[str, object]) -> tuple[int, ...]:
        """In elements."""
        sizes = self.sizes(values)
        return tuple(math.prod(sizes[axis + 1:]) for axis in range(len(sizes)))

    def names(self) -> set[str]:
        """All names that its sizes are written in."""
        return {name for size in (*self.dims, *(self.block or ()), self.below or 0) for name in names_in(size)}


@dataclass(frozen=True)
class Scalar:
    """A number. dtype: Triton's name of its type, as a launch has it; constexpr for one that is compiled in. value: a number, or
    a size in the names of the dimensions."""

    dtype: str
    value: Size | float | bool

    def __post_init__(self) -> None:
        dtype = self.dtype if self.dtype == "constexpr" else _element(self.dtype)
        if dtype not in SCALARS:
            raise KernelError(f"scalar of type {dtype}", expected=f"one of {', '.join(SCALARS)}")
        object.__setattr__(self, "dtype", dtype)
        if isinstance(self.value, str):
            names_in(self.value)
        elif type(self.value) not in (int, float, bool):
            raise KernelError(f"scalar {shown(self.value)}", expected="a number, or a size in the names of the dimensions")

    def number(self, values: Mapping[str, object]) -> int | float | bool:
        """values: of the dimensions and knobs."""
        found = value_of(self.value, values) if isinstance(self.value, str) else self.value
        return float(found) if self.dtype.startswith(("fp", "bf")) else found


@dataclass(frozen=True)
class Stride:
    """The stride, in elements, of one axis of a tensor argument, by that argument's name."""

    tensor: str
    axis: int


# None, a number, text, a Triton type or function: passed as it is. A function of (shape, knobs): its value is passed.
Argument = Tensor | Scalar | Stride | tuple[Any, ...] | object


class StandIn:
    """A tensor without memory: all that Triton's specialisation, a heuristic or a grid may ask of one."""

    def __init__(self, tensor: Tensor, values: Mapping[str, object]) -> None:
        self.shape = tensor.sizes(values)
        self._strides = tensor.strides(values)
        self.dtype = _Type(tensor.dtype)
        self.ndim, self.device, self.is_cuda = len(self.shape), "cuda:0", True
        self._address = 1 << 20 if tensor.aligned else (1 << 20) + tensor.element_bytes

    def data_ptr(self) -> int:
        return self._address

    def stride(self, axis: int | None = None) -> tuple[int, ...] | int:
        return self._strides if axis is None else self._strides[axis]

    def size(self, axis: int | None = None) -> tuple[int, ...] | int:
        return self.shape if axis is None else self.shape[axis]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self.dtype.itemsize

    def is_contiguous(self) -> bool:
        return True

    def __len__(self) -> int:
        return self.shape[0]


class _Type:
    """An element's type, which equals torch's."""

    def __init__(self, element: str) -> None:
        self.name, self.itemsize = ELEMENTS[element]
        self.is_floating_point = element.startswith(("fp", "bf"))

    def __str__(self) -> str:
        return f"torch.{self.name}"

    __repr__ = __str__

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other)
