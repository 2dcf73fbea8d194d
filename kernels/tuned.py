"""A kernel of one's own, launched with the schedule that was promoted for this GPU, these sizes and this toolchain.

    tuned = tune_kernels.tuned(kernel)
    tuned(x, w, y)

Nothing is compiled: the artefact comes from the bundle and is the one that was timed. What was found is kept by the arguments'
sizes and types, so a launch costs little more than `function[grid](...)`.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schedules import store
from ..schedules.errors import NotPromoted
from ..schedules.promoted import PromotedSchedule
from ..schedules.recipe import OWN
from ..schedules.schedule import OwnSchedule
from ..shapes.errors import ShapeError
from ..shapes.fields import shown
from ..shapes.own import Frozen, OwnShape, own_knobs
from ..shapes.target import load_sku, sku_of
from . import bundle, toolchain
from .arguments import ELEMENTS, KernelError, Scalar, Tensor
from .kernel import Kernel
from .operation import Jitted

if TYPE_CHECKING:
    import torch

BUNDLE = Path("build/offline")
VARIABLE = "TUNE_KERNELS_BUNDLE"
FIRST = "first"  # a default: the first of the kernel's schedules
Arguments = Mapping[str, Any]


def tuned(kernel: Kernel, *, bundle: Path | str | None = None, schedules: Path | str | None = None,
          default: Mapping[str, Any] | str | None = None) -> "Tuned":
    """The kernel as it was promoted.

    bundle: the folder that --offline wrote; $TUNE_KERNELS_BUNDLE or build/offline where None. schedules: the folder of promoted
    schedules that is asked first. default: knobs, or "first" for the first that the kernel lists, to compile and launch where
    nothing is promoted; where None, such a launch is refused.

    Raises KernelError: a kernel without grid, or a default that is no schedule.
    """
    return Tuned(kernel, Path(bundle or os.environ.get(VARIABLE) or BUNDLE), Path(schedules) if schedules else None,
                 _default(kernel, default))


def _default(kernel: Kernel, given: Mapping[str, Any] | str | None) -> OwnSchedule | None:
    if given is None:
        return None
    if given == FIRST:
        return kernel.schedules[0]
    if not isinstance(given, Mapping):
        raise KernelError(f"default is {shown(given)}", expected=f"knobs by name, or {FIRST!r}")
    return OwnSchedule(own_knobs(given, f"{kernel.name}: default", KernelError))


@dataclass(frozen=True)
class _Found:
    """A launch for arguments of these sizes and types. run: Triton's. call: all its arguments. places: the caller's among them.
    options: of the launch. device: its index. expected: (sizes, type) of each of the caller's arguments, empty unless all are
    tensors. descriptors: (sizes, strides, block) by place."""

    run: Callable[..., object]
    call: list[Any]
    places: tuple[int, ...]
    options: dict[str, Any]
    device: int
    expected: "tuple[tuple[torch.Size, torch.dtype], ...]"
    descriptors: Mapping[int, tuple[list[int], list[int], list[int]]]

    def fits(self, arguments: Sequence[Any]) -> bool:
        """Whether these are contiguous tensors as expected. Of the first alone the GPU is asked, to save time."""
        if len(arguments) != len(self.expected) or arguments[0].get_device() != self.device:
            return False
        for a, (sizes, dtype) in zip(arguments, self.expected):
            if a.shape != sizes or a.dtype is not dtype or not a.is_contiguous():
                return False
        return True

    def launch(self, arguments: Iterable[Any]) -> None:
        call = self.call[:]
        for place, argument in zip(self.places, arguments):
            call[place] = argument
        if self.descriptors:
            from triton.tools.tensor_descriptor import TensorDescriptor

            for place, layout in self.descriptors.items():
                call[place] = TensorDescriptor(call[place], *layout)
        self.run(*call, **self.options)


class Tuned:
    """Callable with the kernel's tensors, tuples and scalars, in the function's order; scalars may be left out: they follow from
    the description. See `tuned`."""

    def __init__(self, kernel: Kernel, folder: Path, schedules: Path | None, default: OwnSchedule | None) -> None:
        if kernel.grid is None:
            raise KernelError(f"{kernel.name} has no grid", expected="grid=lambda shape, knobs: (blocks, ...)")
        self.kernel, self.folder, self.default = kernel, folder, default
        self.search = store.search_path(schedules)
        described = kernel.arguments
        self.names = tuple(name for name in kernel.jitted.arg_names
                           if isinstance(described.get(name), Tensor | Scalar | tuple))
        self.found: dict[tuple[object, ...], _Found] = {}
        self.quick: dict[object, _Found] = {}  # by the sizes of the first tensor: cheaper than the whole key

    def __call__(self, *arguments: Any, **named: Any) -> None:
        """One launch on the current stream.

        Raises:
            NotPromoted: nothing is promoted for this GPU, sizes and toolchain, and there is no default.
            KernelError: arguments that don't fit the description. BundleError: the artefact isn't in the bundle.
        """
        if not named and arguments:
            quick = self.quick.get(getattr(arguments[0], "shape", None))
            if quick is not None and quick.fits(arguments):
                quick.launch(arguments)
                return
        key = (*map(_sign, arguments), *((name, _sign(a)) for name, a in named.items()))
        found = self.found.get(key)
        if found is None:
            found = self.found[key] = self._resolve(self._by_name(arguments, named))
        if found.expected and not named:
            self.quick[found.expected[0][0]] = found
        found.launch([*arguments, *named.values()])

    def schedule(self, *arguments: Any, **named: Any) -> tuple[OwnSchedule, PromotedSchedule | None]:
        """(the schedule of such a launch, its promoted row; None where it is the default). Raises as a call does."""
        given = self._by_name(arguments, named)
        shape = self._shape(given)
        row = self._row(shape, given)
        if row is None:
            assert self.default is not None
            return self.default, None
        assert isinstance(row.schedule, OwnSchedule)
        return row.schedule, row

    def _by_name(self, arguments: Sequence[Any], named: Arguments) -> dict[str, Any]:
        if len(arguments) > len(self.names):
            raise KernelError(f"{self.kernel.name}: {len(arguments)} arguments", expected=f"at most {', '.join(self.names)}")
        given = dict(zip(self.names, arguments))
        for name in named:
            if name in given or name not in self.names:
                raise KernelError(f"{self.kernel.name}: {name} is given {'twice' if name in given else 'and not taken'}",
                                  expected=f"some of {', '.join(self.names)}, each once")
        given |= named
        missing = [name for name in self.names if name not in given and not isinstance(self.kernel.arguments[name], Scalar)]
        if missing:
            raise KernelError(f"{self.kernel.name}: no {', '.join(missing)}", expected=f"each tensor of {', '.join(self.names)}")
        return given

    def _shape(self, given: Arguments) -> OwnShape:
        """The sizes of the kernel's dimensions in these tensors. Raises KernelError for tensors that don't fit."""
        tensors = self._tensors(given)
        dims: dict[str, int] = {}
        for described, tensor in tensors.values():
            if len(tensor.shape) == len(described.dims):
                for size, dim in zip(tensor.shape, described.dims):
                    if isinstance(dim, str) and dim in self.kernel.own_shapes[0].dims:
                        dims.setdefault(dim, size)
        for name, argument in self.kernel.arguments.items():
            if isinstance(argument, Scalar) and isinstance(argument.value, str) and type(given.get(name)) is int:
                dims.setdefault(argument.value, given[name])
        order = self.kernel.own_shapes[0].dims
        whole = [self.kernel.shape_of({name: dims[name] for name in order})] if order.keys() <= dims.keys() else []
        for shape in [*whole, *self.kernel.own_shapes]:
            if all(_misfit(described, tensor, shape.dims) is None for described, tensor in tensors.values()):
                return shape
        name, why = next((n, why) for n, (described, tensor) in tensors.items()
                         if (why := _misfit(described, tensor, (whole or self.kernel.own_shapes)[0].dims)))
        raise KernelError(f"{self.kernel.name}: {name} is {why}", expected=f"contiguous {self._words(name)} of one shape")

    def _words(self, name: str) -> str:
        described = self._tensors_described()[name]
        return f"{described.dtype} [{', '.join(map(str, described.dims))}]"

    def _tensors_described(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, argument in self.kernel.arguments.items():
            parts = {f"{name}[{i}]": part for i, part in enumerate(argument)} if isinstance(argument, tuple) else {name: argument}
            found |= {n: part for n, part in parts.items() if isinstance(part, Tensor)}
        return found

    def _tensors(self, given: Arguments) -> "dict[str, tuple[Tensor, torch.Tensor]]":
        """(description, tensor) by name. Raises KernelError for something that is none."""
        flat: dict[str, Any] = {}
        for name, value in given.items():
            flat |= {f"{name}[{i}]": part for i, part in enumerate(value)} if isinstance(value, tuple) else {name: value}
        found = {}
        for name, described in self._tensors_described().items():
            if not hasattr(flat.get(name), "data_ptr"):
                raise KernelError(f"{self.kernel.name}: {name} is {shown(flat.get(name))}", expected="a tensor")
            found[name] = described, flat[name]
        return found

    def _row(self, shape: OwnShape, given: Arguments) -> PromotedSchedule | None:
        """The promoted row; None where the default stands in. Raises NotPromoted, ScheduleError."""
        import torch

        device = next(iter(self._tensors(given).values()))[1].device
        try:
            if device.type != "cuda":
                raise NotPromoted(f"{self.kernel.name}: tensors on {device}", expected="on a GPU")
            target = sku_of(torch.cuda.get_device_name(device))
            here, digest = toolchain.installed(target, OWN.numerics), bundle.kernel_digest(self.kernel.jitted)
            return store.lookup(store.Key(target.name, OWN.name, self.kernel.name, shape, here, digest), self.search)
        except (NotPromoted, ShapeError):
            if self.default is None:
                raise
            return None

    def _resolve(self, given: Arguments) -> _Found:
        shape = self._shape(given)
        row = self._row(shape, given)
        schedule = row.schedule if row else self.default
        assert isinstance(schedule, OwnSchedule)
        tensors = self._tensors(given)
        bound = self.kernel.bind(shape, schedule, lambda name, described, values: tensors[name][1])
        for name, argument in self.kernel.arguments.items():
            if name in given and isinstance(argument, Scalar):
                if isinstance(argument.value, str) and given[name] != bound[name]:
                    raise KernelError(f"{self.kernel.name}: {name} is {shown(given[name])}",
                                      expected=f"{argument.value} = {bound[name]}")
                bound[name] = given[name]
        grid = self.kernel.blocks(shape, schedule, bound)
        parameters = inspect.signature(self.kernel.jitted.fn).parameters
        order = list(parameters)
        device = next(iter(tensors.values()))[1].get_device()
        function: Any = self._promoted(shape, schedule, row, device) if row else self.kernel.jitted
        call = [None if name in given else bound.get(name, parameter.default) for name, parameter in parameters.items()]
        whole = all(hasattr(value, "data_ptr") for value in given.values())
        expected = tuple((value.shape, value.dtype) for value in given.values()) if whole else ()
        layouts = {order.index(name): layout for name, layout in self._descriptors(shape, schedule, given).items()}
        return _Found(function.run, call, tuple(order.index(name) for name in given),
                      {"grid": grid, "warmup": False, **self._options(schedule)}, device, expected, layouts)

    def _options(self, schedule: OwnSchedule) -> dict[str, Any]:
        import triton

        return {} if triton.knobs.runtime.interpret else self.kernel.options(schedule)

    def _promoted(self, shape: OwnShape, schedule: OwnSchedule, row: PromotedSchedule, device: int) -> Jitted:
        """A copy of the function that takes the promoted artefact and compiles nothing; the user's own function stays as it is.
        Raises BundleError."""
        launch = self.kernel.operation.launch(shape, schedule, OWN.numerics)
        key = bundle.artefact_key(launch, load_sku(row.target).capability)
        judged = {key: row.artefact.cubin_sha256}
        bundle.require_judged(bundle.read(self.folder / "artefacts" / key), key, judged)
        copy = _copy_of(self.kernel.jitted)
        bundle.install(copy, self.folder, device=device, judged=judged)
        return copy

    def _descriptors(self, shape: OwnShape, schedule: OwnSchedule,
                     given: Arguments) -> dict[str, tuple[list[int], list[int], list[int]]]:
        values = {**schedule.knobs, **shape.dims}
        return {name: ([*t.sizes(values)], [*t.strides(values)], [*Tensor(t.dtype, *t.block).sizes(values)])
                for name, t in self._tensors_described().items() if t.block is not None and name in given}


def _copy_of(function: Jitted) -> Jitted:
    """The same function, with artefacts of its own."""
    from triton.runtime.jit import JITFunction

    made: Any = function
    copy: Jitted = JITFunction(made.fn, made.version, made.do_not_specialize, made.do_not_specialize_on_alignment, made.debug,
                               made.noinline, made._repr, made.launch_metadata)
    return copy


def _sign(argument: Any) -> object:
    """The part of a launch's key that an argument is: sizes and types of tensors, values of numbers."""
    if hasattr(argument, "data_ptr"):
        return argument.shape, argument.dtype, argument.is_contiguous(), argument.get_device()
    if isinstance(argument, tuple):
        return tuple(_sign(part) for part in argument)
    return type(argument), argument


def _misfit(described: Tensor, tensor: "torch.Tensor", dims: Frozen[int]) -> str | None:
    """A tensor in words that isn't as described in these sizes, or None."""
    sizes = described.sizes(dims)
    dtype = f"torch.{ELEMENTS[described.dtype][0]}"
    right = tuple(tensor.shape) == sizes and str(tensor.dtype) == dtype and tensor.is_contiguous()
    return None if right else f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
