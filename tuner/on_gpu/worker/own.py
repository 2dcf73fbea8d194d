"""A kernel of one's own as it is checked and timed: operands from its arguments, errors against its reference in fp64."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....kernels.arguments import KernelError, Scalar, Tensor, names_in, value_of
from ....kernels.kernel import Kernel
from ....schedules.schedule import OwnSchedule
from ....shapes.own import Frozen, OwnShape
from .case import Case, unwritten
from .operands import Operands
from .own_operands import Guarded, allocate, fill, poison_

if TYPE_CHECKING:
    import torch

    from .case import Outputs

MOST_ROWS = 8  # that are checked alone, and the last one
FAR = 8  # largest error of an element over max_rms_error: of 1e15 normally distributed errors none is larger than 8 deviations
Values = Mapping[str, object]  # of dimensions and knobs, by name
Change = Callable[[str, Tensor, "torch.Tensor"], None]  # of an input that was filled: its name, description, values
Launchable = Callable[[OwnShape, OwnSchedule], bool]


class OwnCase(Case[OwnSchedule]):
    """One kernel and shape. launchable: whether another shape's artefact is at hand, to compare fewer rows.

    Raises KernelError for a kernel that can't be checked.
    """

    def __init__(self, kernel: Kernel, shape: OwnShape, make: Operands,
                 launchable: Launchable = lambda shape, schedule: True) -> None:
        require_checkable(kernel)
        self.kernel, self.shape, self.make, self.launchable = kernel, shape, make, launchable
        self.places = list(_tensors(kernel))
        self.kept: dict[tuple[int, str, tuple[int, ...]], Guarded] = {}
        self.timings: dict[tuple[OwnSchedule, int], Callable[[], object]] = {}
        self.right: tuple[torch.Tensor, ...] | None = None

    def _input(self, name: str, described: Tensor, values: Values, copy: int, seed: int) -> Guarded:
        """A filled tensor. Copies differ in place, not in values."""
        made = allocate(described, described.sizes(values), self.make.device)
        below = value_of(described.below, values) if described.below is not None else None
        fill(made.tensor, described, below, seed * 64 + self.places.index(name), self.make.wide)
        return made

    def _keep(self, name: str, described: Tensor, values: Values, copy: int) -> Guarded:
        key = copy, name, described.sizes(values)
        if key not in self.kept:
            self.kept[key] = self._input(name, described, values, copy, 0)
        return self.kept[key]

    def _launch(self, schedule: OwnSchedule, shape: OwnShape | None = None, change: Change | None = None,
                seed: int = 0) -> "Outputs":
        """The outputs of one launch into fresh poison. change: made to copies of the inputs. Raises KernelError for a write
        outside an output."""
        outputs: dict[str, Guarded] = {}

        def tensor(name: str, described: Tensor, values: Values) -> "torch.Tensor":
            if described.output:
                outputs[name] = allocate(described, described.sizes(values), self.make.device)
                return outputs[name].tensor
            if change is None and seed == 0:
                return self._keep(name, described, values, 0).tensor
            made = self._input(name, described, values, 0, seed).tensor
            if change is not None:
                change(name, described, made)
            return made

        self._bound(schedule, shape or self.shape, tensor)()
        strayed = [name for name, made in outputs.items() if not made.intact()]
        if strayed:
            raise StrayWrite(f"wrote outside {', '.join(strayed)}")
        return tuple(made.tensor for made in outputs.values())

    def _bound(self, schedule: OwnSchedule, shape: OwnShape, tensor: Any) -> Callable[[], object]:
        """A launch with all its arguments."""
        import triton

        bound = self.kernel.bind(shape, schedule, tensor)
        grid = self.kernel.blocks(shape, schedule, bound)
        options = {} if triton.knobs.runtime.interpret else self.kernel.options(schedule)
        return lambda: self.kernel.jitted[grid](**bound, **options)

    def whole(self, schedule: OwnSchedule) -> "Outputs":
        return self._launch(schedule)

    def wrong(self, whole: "Outputs", schedule: OwnSchedule) -> tuple[float, str]:
        import torch

        if self.right is None:
            self.right = reference_outputs(self.kernel, self.shape, lambda name, described, values: self._keep(
                name, described, values, 0).tensor)
        limit, worst = self.kernel.max_rms_error or 0.0, 0.0
        for name, output, right in zip(_outputs(self.kernel), whole, self.right):
            if problem := unwritten(output):
                return math.nan, f"{name}: {problem}"
            difference, scale = (output.double() - right).abs(), right.pow(2).mean().sqrt()
            if not output.is_floating_point():
                if count := int((difference != 0).sum()):
                    return math.inf, f"{name}: {count} of {output.numel()} whole numbers differ from the reference"
                continue
            error = float(difference.pow(2).mean().sqrt() / scale) if float(scale) else float(bool(difference.any()))
            worst = max(worst, error)
            if not error <= limit:
                return error, f"{name}: relative RMS error {error:.2e} against fp64, at most {limit:.0e} by max_rms_error"
            far = difference / (right.abs() + scale)
            if float(far.max()) > FAR * limit:
                index = [int(i) for i in torch.unravel_index(far.argmax(), far.shape)]
                return error, (f"{name}{index} is {float(output[tuple(index)]):.6g}, in fp64 {float(right[tuple(index)]):.6g}: "
                               f"farther than {FAR} times max_rms_error")
        return worst, ""

    def row_pairs(self, schedule: OwnSchedule, whole: "Outputs") -> "Iterator[tuple[str, Outputs, Outputs]]":
        """Each row among rows of poison; and fewer rows, where the bundle has their artefact."""
        rows = self.kernel.rows
        if rows is None:
            return
        count = self.shape.dims[rows]
        axes = [_row_axis(described, rows) for described in _outputs(self.kernel).values()]
        for row in sorted({*range(min(count, MOST_ROWS)), count - 1}):
            found = self._launch(schedule, change=_Hiding(rows, row))
            yield f"row {row} among others", _taken(found, axes, row, 1), _taken(whole, axes, row, 1)
        for shape in self.kernel.own_shapes:
            fewer = shape.dims[rows]
            alike = {**shape.dims, rows: count} == dict(self.shape.dims)
            if alike and fewer < count and self.launchable(shape, schedule):
                yield f"{fewer} rows of {count}", self._fewer(schedule, shape, rows), _taken(whole, axes, 0, fewer)

    def _fewer(self, schedule: OwnSchedule, shape: OwnShape, rows: str) -> "Outputs":
        """The outputs of the first rows, as many as `shape` has."""
        full = {**schedule.knobs, **self.shape.dims}

        def first(name: str, described: Tensor, made: "torch.Tensor") -> None:
            axis = _row_axis(described, rows)
            if axis is not None:
                made.copy_(self._keep(name, described, full, 0).tensor.narrow(axis, 0, shape.dims[rows]))

        return self._launch(schedule, shape, first)

    def timed(self, schedule: OwnSchedule, copy: int) -> None:
        if (schedule, copy) not in self.timings:  # all copies at once: nothing is allocated while a graph is captured
            for one in range(self.make.copies):
                self.timings[schedule, one] = self._bound(
                    schedule, self.shape, lambda name, described, values, one=one: self._keep(
                        name, described, values, one).tensor)
        self.timings[schedule, copy]()

    def bits(self, schedule: OwnSchedule) -> "Iterator[torch.Tensor]":
        seed = 1
        while True:
            yield from self._launch(schedule, seed=seed)
            seed += 1


class StrayWrite(KernelError):
    """A candidate that writes outside its outputs."""


def require_checkable(kernel: Kernel) -> None:
    """Raises KernelError for a kernel without reference, limit, grid or outputs, or whose rows can't be told apart."""
    missing = [name for name in ("reference", "max_rms_error", "grid") if getattr(kernel, name) is None]
    if missing:
        raise KernelError(f"{kernel.name} has no {' and no '.join(missing)}", expected="one, to check candidates on a GPU")
    outputs = _outputs(kernel)
    if not outputs:
        raise KernelError(f"{kernel.name} has no output", expected="at least one Tensor(..., output=True)")
    if kernel.rows is not None:
        for name, described in _tensors(kernel).items():
            axis = _row_axis(described, kernel.rows)
            if axis is None and (described.output or kernel.rows in described.names()):
                raise KernelError(f"{kernel.name}: {name} has no axis {kernel.rows}", expected="the rows as an axis of their own")


def launch_bytes(kernel: Kernel, shape: OwnShape) -> float:
    """Bytes of all tensors of a launch."""
    values = {**kernel.schedules[0].knobs, **shape.dims}
    return float(sum(math.prod(t.sizes(values)) * t.element_bytes for t in _tensors(kernel).values()))


def reference_outputs(kernel: Kernel, shape: OwnShape, tensor: Any) -> "tuple[torch.Tensor, ...]":
    """The outputs that the user's reference gives in fp64. Raises KernelError for a reference that can't be used."""
    import torch

    knobs = {name for schedule in kernel.schedules for name in schedule.knobs}
    given: dict[str, object] = dict(shape.dims)
    for name, argument in kernel.arguments.items():
        value = _for_reference(name, argument, shape.dims, knobs, tensor)
        if inspect.isfunction(argument):
            value = _computed(kernel, name, argument, shape)
        if value is not None:
            given[name.removesuffix("_ptr")] = value
    assert kernel.reference is not None
    try:
        found = kernel.reference(**_accepted(kernel, given))
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as e:
        raise KernelError(f"{kernel.name}: the reference raised {type(e).__name__}: {e}"[:400],
                          expected="the outputs, of the other arguments in fp64") from None
    outputs = _outputs(kernel)
    if isinstance(found, Mapping):
        found = tuple(found.get(name.removesuffix("_ptr")) for name in outputs)
    listed = found if isinstance(found, tuple) else (found,)
    sizes = [described.sizes(shape.dims) for described in outputs.values()]
    if [tuple(y.shape) if isinstance(y, torch.Tensor) else None for y in listed] != sizes:
        raise KernelError(f"{kernel.name}: the reference gives {[getattr(y, 'shape', y) for y in listed]}"[:400],
                          expected=f"tensors of {', '.join(str(list(size)) for size in sizes)}, in the order of the outputs")
    right = tuple(y.double() for y in listed)
    if not all(bool(y.isfinite().all()) for y in right):
        raise KernelError(f"{kernel.name}: the reference isn't finite on bell-shaped inputs", expected="finite outputs")
    return right


def _computed(kernel: Kernel, name: str, argument: Callable[..., object], shape: OwnShape) -> object:
    """The value of an argument that the user computes; None if it differs between schedules. Raises KernelError if it raises."""
    try:
        values = [argument(shape.dims, schedule.knobs) for schedule in kernel.schedules]
    except Exception as e:  # the user's code may raise anything
        raise KernelError(f"{kernel.name}: argument {name} raised {type(e).__name__}: {e}"[:400],
                          expected="a value for every shape and schedule") from None
    return values[0] if all(value == values[0] for value in values) else None


def _accepted(kernel: Kernel, given: Mapping[str, object]) -> dict[str, object]:
    """The arguments that the reference takes. Raises KernelError for one that isn't there."""
    assert kernel.reference is not None
    parameters = inspect.signature(kernel.reference).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(given)
    missing = [name for name, p in parameters.items() if name not in given and p.default is p.empty]
    if missing:
        raise KernelError(f"{kernel.name}: the reference takes {missing[0]}", expected=f"of {', '.join(given)}")
    return {name: given[name] for name in parameters if name in given}


def _for_reference(name: str, argument: object, dims: Frozen[int], knobs: set[str], tensor: Any) -> object:
    """An input in fp64 (whole numbers in int64), a number; None for everything else, and for what depends on knobs."""
    if isinstance(argument, tuple):
        return tuple(_for_reference(f"{name}[{i}]", part, dims, knobs, tensor) for i, part in enumerate(argument))
    if isinstance(argument, Tensor):
        if argument.output or argument.names() & knobs - set(_block_names(argument)):
            return None
        made = tensor(name, argument, dims)
        return made.double() if made.is_floating_point() else made.long()
    if isinstance(argument, Scalar):
        return None if isinstance(argument.value, str) and names_in(argument.value) & knobs else argument.number(dims)
    return argument if isinstance(argument, (int, float, bool, str)) else None


def _block_names(described: Tensor) -> set[str]:
    """Names of a descriptor's block, which no size of the tensor is."""
    inner = {name for size in described.dims for name in names_in(size)}
    return {name for size in described.block or () for name in names_in(size)} - inner


def _tensors(kernel: Kernel) -> dict[str, Tensor]:
    """Tensor arguments by name; parts of a tuple as `name[0]`."""
    found: dict[str, Tensor] = {}
    for name, argument in kernel.arguments.items():
        parts = {f"{name}[{i}]": part for i, part in enumerate(argument)} if isinstance(argument, tuple) else {name: argument}
        found |= {n: part for n, part in parts.items() if isinstance(part, Tensor)}
    return found


def _outputs(kernel: Kernel) -> dict[str, Tensor]:
    return {name: described for name, described in _tensors(kernel).items() if described.output}


def _row_axis(described: Tensor, rows: str) -> int | None:
    return described.dims.index(rows) if rows in described.dims else None


@dataclass(frozen=True)
class _Hiding:
    """Poisons all rows but one; whole numbers, which may be addresses, are reversed instead."""

    rows: str
    row: int

    def __call__(self, name: str, described: Tensor, made: "torch.Tensor") -> None:
        axis = _row_axis(described, self.rows)
        if axis is None:
            return
        kept = made.select(axis, self.row).clone()
        if made.is_floating_point():
            poison_(made)
        else:
            made.copy_(made.flip(axis))
        made.select(axis, self.row).copy_(kept)


def _taken(outputs: "Outputs", axes: list[int | None], first: int, count: int) -> "Outputs":
    """Some rows of each output."""
    return tuple(y.narrow(axis or 0, first, count) for y, axis in zip(outputs, axes))
