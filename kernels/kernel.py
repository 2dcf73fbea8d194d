"""A kernel of one's own: a Triton function, its arguments, the shapes and schedules to try. See docs/your-own-kernel.md.

    from tune_kernels import Kernel, Scalar, Tensor

    kernel = Kernel(norm, arguments={"x_ptr": Tensor("bf16", "rows", "H"), "w_ptr": Tensor("bf16", "H"),
                                     "y_ptr": Tensor("bf16", "rows", "H", output=True), "H": Scalar("i32", "H"), "eps": 1e-6},
                    shapes=[{"rows": 16, "H": 4096}], knobs={"BLOCK": [1024, 4096], "num_warps": [4, 8]},
                    grid=lambda shape, knobs: (shape["rows"],))

`Kernel.operation` is the same value that the built-in kernels have. Nothing of the user's but the import runs before a worker
asks the operation.
"""

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..schedules.recipe import Numerics
from ..schedules.schedule import OwnSchedule
from ..shapes.fields import nearest, require_name, shown
from ..shapes.own import Knob, OwnShape, own_knobs, own_shape, require_word
from ..shapes.target import ARCHES
from .arguments import Argument, KernelError, Scalar, StandIn, Stride, Tensor, names_in
from .operation import FALLBACK_PTX, FAMILIES, Instructions, Jitted, Launch, Operation, common_contract
from .specialisation import specialise

# Options of the compiler and of the launch that a schedule may set, by Triton's names.
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "launch_cooperative_grid", "enable_fp_fusion")
MOST_CONFIGS = 100_000  # of one kernel: a slip in a list should not fill the memory
MOST_WARPS = 32
MOST_BLOCKS = (2**31 - 1, 65535, 65535)  # of a grid, by axis
RULES = ("required", "forbidden", "forbidden_ptx")

Dims = Mapping[str, int]
Knobs = Mapping[str, Knob]
Grid = tuple[int, ...]
Maker = Callable[[str, Tensor, Mapping[str, object]], object]  # of a tensor argument: its name, description, sizes' values


def stand_in(name: str, tensor: Tensor, values: Mapping[str, object]) -> object:
    """A tensor without memory."""
    return StandIn(tensor, values)


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel. Raises KernelError where the description contradicts itself or the function.

    fn: a @triton.jit function, also under @triton.autotune, whose configs are the knobs where none are given, and
    @triton.heuristics. arguments: every argument that no knob, heuristic or default gives. shapes: the sizes to try, by
    dimension. knobs: values by name, whose product is tried, or a list of combinations; a name is an argument of the function or
    one of OPTIONS. grid: blocks, as a function of (shape, knobs) or, as Triton has it, of all arguments by name. contract: why a
    shape and knobs can't go together, or None. instructions: by target, the families of tensor-core instructions that are
    required or forbidden; where none is required, FP8 that falls back to f16 is refused. shared_bytes: a lower bound of the
    shared memory, to reject without compiling. early_reads: arguments that no kernel in flight writes, under launch_pdl.
    reference: the outputs in fp64, of the other arguments by name without `_ptr`. max_rms_error: RMS of the difference to the
    reference over the reference's. rows: the dimension whose entries must not see each other. name: the file's and function's
    where it is empty.
    """

    fn: Any
    arguments: Mapping[str, Argument]
    shapes: Sequence[Mapping[str, int]]
    knobs: Mapping[str, Knob | Sequence[Knob]] | Sequence[Mapping[str, Knob]] | None = None
    grid: Callable[..., Grid] | Grid | None = None
    contract: Callable[[Dims, Knobs], str | None] | None = None
    instructions: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    shared_bytes: Callable[[Dims, Knobs], int] | None = None
    early_reads: Sequence[str] = ()
    reference: Callable[..., Any] | None = None
    max_rms_error: float | None = None
    rows: str | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not hasattr(self.jitted, "fn") or not inspect.isfunction(self.jitted.fn):
            raise KernelError(f"fn is a {type(self.fn).__name__}", expected="a function under @triton.jit")
        object.__setattr__(self, "name", self.name or _default_name(self.jitted.fn))
        require_name(self.name, "kernel", KernelError)
        self._check_names()
        self._check_arguments()
        self._check_rules()

    @cached_property
    def _layers(self) -> list[Any]:
        """The function and what is around it: autotuner, heuristics."""
        layers = [self.fn]
        while type(layers[-1]).__name__ in ("Autotuner", "Heuristics"):
            layers.append(layers[-1].fn)
        return layers

    @property
    def jitted(self) -> Jitted:
        """The function itself, without autotuner and heuristics."""
        found: Jitted = self._layers[-1]
        return found

    @cached_property
    def heuristics(self) -> dict[str, Callable[[dict[str, object]], object]]:
        """Of @triton.heuristics, in the order in which they are asked."""
        return {name: value for layer in self._layers if type(layer).__name__ == "Heuristics"
                for name, value in layer.values.items()}

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Arguments that @triton.autotune chooses a config by."""
        return tuple(key for layer in self._layers if type(layer).__name__ == "Autotuner" for key in layer.keys)

    @cached_property
    def own_shapes(self) -> tuple[OwnShape, ...]:
        """Each once."""
        if isinstance(self.shapes, (str, Mapping)) or not self.shapes:
            raise KernelError(f"{self.name}: shapes is {shown(self.shapes)}", expected="a list of sizes by dimension")
        found = [self.shape_of(dims) for dims in self.shapes]
        for shape in found:
            if set(shape.dims) != set(found[0].dims):
                raise KernelError(f"{self.name}: a shape of {', '.join(shape.dims)}",
                                  expected=f"each of {', '.join(found[0].dims)}")
        return tuple(dict.fromkeys(found))

    def shape_of(self, dims: object) -> OwnShape:
        """Raises KernelError for what is no shape."""
        if not isinstance(dims, Mapping):
            raise KernelError(f"{self.name}: shape {shown(dims)}", expected="sizes by dimension")
        return own_shape(dims, f"{self.name}: shape", KernelError)

    @cached_property
    def schedules(self) -> tuple[OwnSchedule, ...]:
        """The combinations of knobs to try, each once."""
        return tuple(dict.fromkeys(OwnSchedule(own_knobs(c, self.name, KernelError)) for c in self._configs()))

    def _configs(self) -> Iterable[Mapping[str, Knob]]:
        if self.knobs is None:
            tuners = [layer for layer in self._layers if type(layer).__name__ == "Autotuner"]
            return [_of_config(config) for config in tuners[0].configs] if tuners else [{}]
        if not isinstance(self.knobs, Mapping):
            if isinstance(self.knobs, str) or not self.knobs or not all(isinstance(c, Mapping) for c in self.knobs):
                raise KernelError(f"{self.name}: knobs is {shown(self.knobs)}",
                                  expected="values by name, or a list of combinations")
            return self.knobs
        lists = {name: list(v) if isinstance(v, (list, tuple, range)) else [v] for name, v in self.knobs.items()}
        for name, values in lists.items():
            if not values:
                raise KernelError(f"{self.name}: knob {name} has no value", expected="at least one")
        if (size := math.prod(map(len, lists.values()))) > MOST_CONFIGS:
            raise KernelError(f"{self.name}: {size:,} combinations of knobs", expected=f"at most {MOST_CONFIGS:,}")
        return (dict(zip(lists, values)) for values in itertools.product(*lists.values()))

    def _check_names(self) -> None:
        """Of knobs and dimensions."""
        parameters = inspect.signature(self.jitted.fn).parameters
        dims = self.own_shapes[0].dims
        if len(self.schedules) > MOST_CONFIGS:
            raise KernelError(f"{self.name}: {len(self.schedules):,} combinations of knobs",
                              expected=f"at most {MOST_CONFIGS:,}")
        for name in dict.fromkeys(name for schedule in self.schedules for name in schedule.knobs):
            if name not in parameters and name not in OPTIONS:
                raise KernelError(f"{self.name}: {self.jitted.fn.__name__} has no argument {name}{nearest(name, parameters)}",
                                  expected=f"as a knob one of {', '.join([*parameters, *OPTIONS])}")
            if name in self.arguments:
                raise KernelError(f"{self.name}: {name} is a knob and an argument", expected="one of both")
            if name in dims:
                raise KernelError(f"{self.name}: {name} is a knob and a dimension", expected="names of their own")
        if self.rows is not None and self.rows not in dims:
            raise KernelError(f"{self.name}: rows is {shown(self.rows)}{nearest(str(self.rows), dims)}",
                              expected=f"a dimension, one of {', '.join(dims)}")

    def _check_arguments(self) -> None:
        """Against the function's."""
        parameters = inspect.signature(self.jitted.fn).parameters
        for name in self.arguments:
            require_word(name, f"{self.name}: argument", KernelError)
            if name not in parameters:
                raise KernelError(f"{self.name}: {self.jitted.fn.__name__} has no argument {name}{nearest(name, parameters)}",
                                  expected=f"one of {', '.join(parameters)}")
        in_all = set.intersection(*(set(schedule.knobs) for schedule in self.schedules))
        given = {*self.arguments, *in_all, *self.heuristics}
        for name, parameter in parameters.items():
            if name not in given and parameter.default is inspect.Parameter.empty:
                compiled = "constexpr" in str(parameter.annotation)
                raise KernelError(f"{self.name}: {'constexpr ' if compiled else 'argument '}{name} has no value",
                                  expected="a knob of every combination, or one of arguments" if compiled else
                                           "a Tensor, Scalar, Stride or value in arguments")
        for name, argument in self.arguments.items():
            for part in argument if isinstance(argument, tuple) else (argument,):
                self._check_sizes(name, part)

    def _check_sizes(self, name: str, argument: Argument) -> None:
        """The names that an argument's sizes are written in."""
        dims, knobs = self.own_shapes[0].dims, {name for schedule in self.schedules for name in schedule.knobs}
        if isinstance(argument, Stride):
            tensor = self.arguments.get(argument.tensor)
            if not isinstance(tensor, Tensor) or not -len(tensor.dims) <= argument.axis < len(tensor.dims):
                raise KernelError(f"{self.name}: {name} is stride {argument.axis} of {argument.tensor}",
                                  expected="an axis of one of the tensors in arguments")
            return
        if isinstance(argument, Tensor):
            used, outer = argument.names(), {*dims} if argument.output and argument.block is None else {*dims, *knobs}
        elif isinstance(argument, Scalar) and isinstance(argument.value, str):
            used, outer = names_in(argument.value), {*dims, *knobs}
        else:
            return
        for word in sorted(used - outer):
            raise KernelError(f"{self.name}: {name} has a size in {word}{nearest(word, outer)}",
                              expected=f"one of {', '.join(sorted(outer))}"
                                       + (": an output's sizes don't depend on knobs" if word in knobs else ""))

    def _check_rules(self) -> None:
        """Instructions, functions and limits."""
        for arch, rules in self.instructions.items():
            if arch not in ARCHES:
                raise KernelError(f"{self.name}: instructions for {shown(arch)}{nearest(str(arch), ARCHES)}",
                                  expected=f"a target, one of {', '.join(ARCHES)}")
            for rule, families in rules.items():
                if rule not in RULES or isinstance(families, str):
                    raise KernelError(f"{self.name}: instructions of {arch}: {shown(rule)} is {shown(families)}",
                                      expected=f"a list for one of {', '.join(RULES)}")
                for family in families if rule != "forbidden_ptx" else ():
                    if family not in FAMILIES:
                        raise KernelError(f"{self.name}: instructions of {arch}: {shown(family)}{nearest(str(family), FAMILIES)}",
                                          expected=f"one of {', '.join(FAMILIES)}")
        for name in self.early_reads:
            if name not in self.arguments:
                raise KernelError(f"{self.name}: early_reads: {shown(name)}{nearest(str(name), self.arguments)}",
                                  expected=f"one of {', '.join(self.arguments)}")
        for name in ("contract", "shared_bytes", "reference"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise KernelError(f"{self.name}: {name} is {shown(getattr(self, name))}", expected="a function")
        limit = self.max_rms_error
        if limit is not None and not (isinstance(limit, (int, float)) and 0 < limit < math.inf):
            raise KernelError(f"{self.name}: max_rms_error is {shown(limit)}", expected="a positive number")

    def bind(self, shape: OwnShape, schedule: OwnSchedule, make: Maker = stand_in) -> dict[str, object]:
        """The arguments of a launch by name, heuristics and knobs among them. make: the tensors.

        Raises KernelError for sizes that can't be; and whatever the user's heuristics and functions raise.
        """
        values = {**schedule.knobs, **shape.dims}
        found = {name: self._value(argument, shape, schedule, make, name) for name, argument in self.arguments.items()}
        parameters = inspect.signature(self.jitted.fn).parameters
        found |= {name: value for name, value in schedule.knobs.items() if name in parameters}
        defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        for name, heuristic in self.heuristics.items():
            found[name] = heuristic({**defaults, **values, **found})
        return found

    def _value(self, argument: Argument, shape: OwnShape, schedule: OwnSchedule, make: Maker, name: str) -> object:
        values = {**schedule.knobs, **shape.dims}
        if isinstance(argument, tuple):
            return tuple(self._value(part, shape, schedule, make, f"{name}[{i}]") for i, part in enumerate(argument))
        if isinstance(argument, Tensor):
            base = make(name, argument, values)
            if argument.block is None:
                return base
            from triton.tools.tensor_descriptor import TensorDescriptor

            block = [*Tensor(argument.dtype, *argument.block).sizes(values)]
            return TensorDescriptor(base, [*argument.sizes(values)], [*argument.strides(values)], block)
        if isinstance(argument, Scalar):
            return argument.number(values)
        if isinstance(argument, Stride):
            tensor = self.arguments[argument.tensor]
            assert isinstance(tensor, Tensor)
            return tensor.strides(values)[argument.axis]
        return argument(shape.dims, schedule.knobs) if inspect.isfunction(argument) else argument

    def options(self, schedule: OwnSchedule) -> dict[str, Any]:
        """Options of the compiler, FMA as Triton has it by default unless a knob says otherwise."""
        chosen = {name: value for name, value in schedule.knobs.items() if name in OPTIONS and value is not None}
        return {"enable_fp_fusion": True, **({"debug": True} if getattr(self.jitted, "debug", None) else {}), **chosen}

    def blocks(self, shape: OwnShape, schedule: OwnSchedule, bound: Mapping[str, object]) -> Grid:
        """The grid of a launch with these arguments. Raises KernelError for what is none, and what the user's function raises."""
        if self.grid is None:
            raise KernelError(f"{self.name} has no grid", expected="grid=lambda shape, knobs: (blocks, ...)")
        found = self.grid
        if callable(found):
            alone = len(inspect.signature(found).parameters) == 1
            found = found({**shape.dims, **schedule.knobs, **bound}) if alone else found(shape.dims, schedule.knobs)
        if not isinstance(found, (tuple, list)) or not 1 <= len(found) <= 3 or not all(
                type(n) is int and 1 <= n <= most for n, most in zip(found, MOST_BLOCKS)):
            raise KernelError(f"grid is {shown(found)}", expected="one to three whole numbers from 1")
        return tuple(found)

    def _problem(self, shape: OwnShape, schedule: OwnSchedule) -> str | None:
        """Why a shape and a schedule can't go together, or None. What the user's functions raise is a reason."""
        asked = "arguments"
        try:
            if problem := common_contract(schedule, MOST_WARPS):
                return problem
            asked = "contract"
            found = self.contract(shape.dims, schedule.knobs) if self.contract else None
            if found is not None:
                return found if isinstance(found, str) else f"contract returned {shown(found)}; expected None or a reason"
            asked = "arguments and heuristics"
            bound = self.bind(shape, schedule)
            asked = "grid"
            if self.grid is not None:
                self.blocks(shape, schedule, bound)
            asked = "arguments"
            self._launch(shape, schedule)
        except KernelError as e:
            return str(e).replace("\n", "; ")
        except (Exception, SystemExit) as e:
            return f"{asked} raised {type(e).__name__}: {e}"[:400]
        return None

    def _launch(self, shape: OwnShape, schedule: OwnSchedule) -> Launch:
        declared = {name: argument.dtype for name, argument in self.arguments.items() if isinstance(argument, Scalar)}
        return specialise(self.jitted, self.bind(shape, schedule), self.options(schedule), declared)

    def _instructions(self, arch: str) -> Instructions:
        rules = self.instructions.get(arch, {})
        required = tuple(rules.get("required", ()))
        return Instructions(required, tuple(rules.get("forbidden", ())), tuple(rules.get("forbidden_ptx", ())),
                            fallback_ptx=() if required else FALLBACK_PTX)

    @cached_property
    def operation(self) -> Operation[OwnShape, OwnSchedule]:
        """As the pipeline asks it."""
        def launch(shape: OwnShape, schedule: OwnSchedule, numerics: Numerics) -> Launch:
            return self._launch(shape, schedule)

        def shared_bytes(shape: OwnShape, schedule: OwnSchedule) -> int:
            return self.shared_bytes(shape.dims, schedule.knobs) if self.shared_bytes else 0

        def grid(shape: OwnShape, schedule: OwnSchedule) -> Grid:
            return self.blocks(shape, schedule, self.bind(shape, schedule))

        return Operation(self.jitted, OwnSchedule, self._problem, launch, lambda shape, arch: self._instructions(arch),
                         shared_bytes, tuple(self.early_reads), grid)


def _of_config(config: Any) -> dict[str, Knob]:
    """The knobs of a triton.Config."""
    knobs = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
    return knobs | ({"num_ctas": config.num_ctas} if config.num_ctas != 1 else {}) | (
        {"maxnreg": config.maxnreg} if config.maxnreg is not None else {})


def _default_name(fn: Callable[..., object]) -> str:
    """`file.function`: a name that no built-in kernel has, the same however the file was imported."""
    words = (Path(fn.__code__.co_filename).stem, fn.__name__)
    return ".".join(re.sub(r"[^A-Za-z0-9_]+", "_", word).strip("_")[:48] or "kernel" for word in words)
