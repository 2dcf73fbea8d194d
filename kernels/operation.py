"""The interface of a kernel file: the schedules that fit a shape, the launch, the instructions that the artefact must have.

`Launch` holds all that fixes a compiled artefact: function, argument types, constants, options. The launcher passes the
same constants and options to Triton that the offline compiler does, so the artefact that was inspected is the one that runs.
A launcher names the layout of each tensor in a table of `Operand`; `Launch.arguments` checks it before the launch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from ..schedules.recipe import Numerics
from ..schedules.schedule import Schedule
from ..shapes.errors import UserError
from ..shapes.model import KernelShape

if TYPE_CHECKING:
    import torch

Constant = int | float | bool | str | None  # of a launch: a `constexpr`, or a compiler option
ShapeT = TypeVar("ShapeT", bound=KernelShape)
ScheduleT = TypeVar("ScheduleT", bound=Schedule)


class ContractError(UserError):
    """A launch whose tensors, shape and schedule can't go together."""


class Parameter(Protocol):
    """One argument of a jitted function."""

    name: str
    num: int
    do_not_specialize: bool


class Jitted(Protocol):
    """The part of Triton's JITFunction, which has no types, that this project uses. `kernel[grid]` is callable."""

    __name__: str
    __module__: str
    __globals__: dict[str, object]
    src: str
    fn: FunctionType
    params: Sequence[Parameter]
    arg_names: list[str]
    device_caches: dict[int, object]
    compile: Callable[..., object]

    def __hash__(self) -> int: ...

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...


NO_STRIDE = 16  # of an axis of one entry or an absent tensor: any value that divides by 16


class AtLeast(int):
    """The size of an axis that may be longer: the launch reads or writes its first entries."""


class Operand(NamedTuple):
    """A tensor of a launch and the layout that the kernel addresses, or None if the kernel goes without it.

    sizes: of each axis. strides: arguments of the kernel that take the strides of the first axes; each is a positive multiple of
    16 elements below 2^31, so that one artefact serves every layout and loads are 16 bytes wide. The other axes are contiguous.
    """

    tensor: "torch.Tensor | None"
    sizes: tuple[int, ...] = ()
    strides: tuple[str, ...] = ()

    def fits(self, dtype: "torch.dtype", device: "torch.device") -> bool:
        """Whether the tensor has this type, lies on this device, on 16 bytes, and in this layout."""
        tensor, sizes = self.tensor, self.sizes
        assert tensor is not None
        if tensor.dtype is not dtype or tensor.device != device or tensor.dim() != len(sizes) or tensor.data_ptr() % 16:
            return False
        found, strides, extent = tensor.shape, tensor.stride(), 1
        for axis in range(len(sizes) - 1, -1, -1):
            size, wanted = found[axis], sizes[axis]
            if size != wanted and not (isinstance(wanted, AtLeast) and size > wanted):
                return False
            if size > 1:
                stride = strides[axis]
                if axis >= len(self.strides):
                    if stride != extent:
                        return False
                elif stride <= 0 or stride % 16 or stride >= 2**31:
                    return False
            extent *= size
        return True

    def error(self, name: str, dtype: "torch.dtype", device: "torch.device") -> ContractError:
        """The tensor's layout against the kernel's."""
        tensor = self.tensor
        assert tensor is not None
        sizes = ", ".join(f">= {n}" if isinstance(n, AtLeast) else str(n) for n in self.sizes)
        layout = "contiguous" if not self.strides else "contiguous but for " + ", ".join(
            f"{stride} (a positive multiple of 16)" for stride in self.strides)
        at = tensor.data_ptr() % 16
        return ContractError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}"
            + (f", starting {at} bytes past a multiple of 16" if at else ""),
            expected=f"{dtype} [{sizes}], {layout}, on {device}, starting on 16 bytes",
            action="pass a .clone() of a slice that starts inside a tensor" if at else "")


@cache
def _dtype(word: str) -> "torch.dtype":
    """torch's type of Triton's `*bf16` or `tensordesc<bf16[64, 128]>`."""
    import torch

    element = word.removeprefix("tensordesc<").split("[")[0].removeprefix("*")
    return {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp32": torch.float32, "i32": torch.int32}[element]


@dataclass(frozen=True)
class Launch:
    """One artefact. types: Triton's type of each argument that isn't a constant (`*bf16`, `i32`, `fp32`)."""

    kernel: Jitted
    types: Mapping[str, str]
    constants: Mapping[str, Constant]
    options: Mapping[str, Constant]

    def signature(self) -> dict[str, str]:
        """Argument name → Triton type, in order; constants are `constexpr`."""
        return {p.name: "constexpr" if p.name in self.constants else self.types[p.name] for p in self.kernel.params}

    def pointers(self) -> list[str]:
        """Arguments that lead to memory, pointers and tensor descriptors, in order."""
        return [name for name, kind in self.signature().items() if kind.startswith(("*", "tensordesc"))]

    def attributes(self) -> dict[tuple[int], list[list[str | int]]]:
        """The attributes of Triton's specialisation: pointers and strides divide by 16 (launchers refuse others)."""
        return {(p.num,): [["tt.divisibility", 16]] for p in self.kernel.params
                if p.name not in self.constants and not p.do_not_specialize
                and self.types[p.name].startswith(("*", "i"))}

    def arguments(self, operands: Mapping[str, Operand]) -> dict[str, object]:
        """The kernel's pointers and strides, by argument name.

        Raises:
            ContractError: a tensor that is missing or one too many; another type, device, size or layout; a pointer off 16 bytes.
        """
        found: dict[str, object] = {}
        device: torch.device | None = None
        for argument, operand in operands.items():
            tensor = operand.tensor
            if (tensor is None) != (argument in self.constants):
                raise self._wrong_number(argument, tensor is None)
            if tensor is None:
                continue
            device = device or tensor.device
            dtype = _dtype(self.types[argument])
            if not operand.fits(dtype, device):
                raise operand.error(argument.removesuffix("_ptr"), dtype, device)
            found[argument] = tensor
            for axis, name in enumerate(operand.strides):
                stride = tensor.stride(axis) if tensor.shape[axis] > 1 else NO_STRIDE
                if found.setdefault(name, stride) != stride:
                    raise ContractError(f"{name} of {argument} is {stride}", expected=f"{found[name]}, as of the tensor before")
        for operand in operands.values():
            for name in operand.strides:
                found.setdefault(name, NO_STRIDE)
        return found

    def _wrong_number(self, argument: str, missing: bool) -> ContractError:
        name, takes = argument.removesuffix("_ptr"), "a" if missing else "no"
        return ContractError(f"{name} is {'missing' if missing else 'given'}",
                             expected=f"{takes} tensor here: {self.kernel.__name__} of this shape takes {takes} {name}")

    def __call__(self, grid: Sequence[int], **arguments: object) -> None:
        import triton

        if triton.knobs.runtime.interpret:  # which runs one launch after the other and knows no gdc_wait
            self.kernel[tuple(grid)](**arguments, **{**self.constants, **({"PDL": False} if "PDL" in self.constants else {})})
        else:
            self.kernel[tuple(grid)](**arguments, **self.constants, **self.options)


@dataclass(frozen=True)
class Instructions:
    """Rules for an artefact of one kernel on one target. required: tensor-core families that must occur; forbidden: those that
    may not; forbidden_ptx: substrings that no PTX line may contain, for conversions that have no family; early_reads: as
    Operation has it."""

    required: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    forbidden_ptx: tuple[str, ...] = ()
    early_reads: tuple[str, ...] = ()


def tensor_core(dtype: str, arch: str) -> Instructions:
    """A matrix product of this type. An e4m3 one that converts to f16 on the way is the silent fallback."""
    if dtype == "e4m3":
        return Instructions(required=("QGMMA",) if arch == "sm_90" else ("UTCQMMA",),
                            forbidden=("HMMA", "HGMMA", "UTCHMMA"), forbidden_ptx=("cvt.rn.f16x2.e4m3x2",))
    return Instructions(required=("HGMMA",) if arch == "sm_90" else ("UTCHMMA",), forbidden=("HMMA",))


def no_tensor_core(shape: KernelShape, arch: str) -> Instructions:
    """A kernel without a matrix product."""
    return Instructions(forbidden=("HMMA", "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA"))


def options(schedule: Schedule, numerics: Numerics) -> dict[str, Constant]:
    """Compiler options of a schedule under a recipe's numerics."""
    knobs = vars(schedule)
    chosen: dict[str, Constant] = {"num_warps": schedule.num_warps, "enable_fp_fusion": numerics.enable_fp_fusion}
    chosen |= {name: knobs[name] for name in ("num_stages", "maxnreg") if knobs.get(name) is not None}
    return chosen | ({"launch_pdl": True} if schedule.pdl else {})


@dataclass(frozen=True)
class Operation(Generic[ShapeT, ScheduleT]):
    """One kernel of the step. kernel: the jitted function.

    contract: why a shape and a schedule can't go together, or None. launch: the artefact.
    instructions: by shape and target. shared_bytes: a lower bound of the kernel's shared memory, known before compiling.
    early_reads: arguments that the kernel may read before it waits for the kernel in front, under programmatic dependent launch;
    no kernel that may still be in flight writes the parts that it reads."""

    kernel: Jitted
    schedule_type: type[ScheduleT]
    contract: Callable[[ShapeT, ScheduleT], str | None]
    launch: Callable[[ShapeT, ScheduleT, Numerics], Launch]
    instructions: Callable[[ShapeT, str], Instructions]
    shared_bytes: Callable[[ShapeT, ScheduleT], int] = field(default=lambda shape, schedule: 0)
    early_reads: tuple[str, ...] = ()


AnyOperation = Operation[Any, Any]  # of a table by name: the name decides which shape and schedule go with it


def common_contract(schedule: Schedule, most_warps: int = 16) -> str | None:
    """The rules that hold for every kernel."""
    if schedule.num_warps & (schedule.num_warps - 1) or schedule.num_warps > most_warps:
        return f"num_warps {schedule.num_warps} is not a power of two up to {most_warps}"
    maxnreg = vars(schedule).get("maxnreg")
    if maxnreg is not None:
        if not 24 <= maxnreg <= 255 or maxnreg % 8:
            return f"maxnreg {maxnreg} is not a multiple of 8 from 24 to 248"
        if maxnreg * schedule.num_warps * 32 > 65536:
            return f"maxnreg {maxnreg} x {schedule.num_warps * 32} threads is more than the 65,536 registers of an SM"
    return None


def warps_contract(shape: KernelShape, schedule: Schedule) -> str | None:
    """The contract of a kernel that takes every shape."""
    return common_contract(schedule)


def power_of_two(name: str, value: int, low: int, high: int) -> str | None:
    """Why `value` isn't a power of two from low to high, or None."""
    if value & (value - 1) or not low <= value <= high:
        return f"{name} {value} is not a power of two from {low} to {high}"
    return None


def first_problem(*problems: str | None) -> str | None:
    return next((p for p in problems if p), None)


def require(holds: bool, found: str, expected: str) -> None:
    if not holds:
        raise ContractError(found, expected=expected)


def sizes_of(name: str, tensor: "torch.Tensor", axes: int) -> tuple[int, ...]:
    """The sizes of a tensor of so many axes. Raises ContractError for another number."""
    require(tensor.dim() == axes, f"{name} is {list(tensor.shape)}", f"{axes} axes")
    return tuple(tensor.shape)


def require_rows(rows: int, most: int | None = None) -> None:
    """At least one row, and at most `most`."""
    require(rows >= 1 and (most is None or rows <= most), f"{rows} rows", "at least 1" if most is None else f"1 to {most}")


def require_contract(operation: Operation[ShapeT, ScheduleT], shape: ShapeT, schedule: ScheduleT) -> None:
    if problem := operation.contract(shape, schedule):
        raise ContractError(problem, expected="a schedule that fits the shape",
                            action="see which ones do: tune-kernels --offline")


def num_sms(tensor: "torch.Tensor") -> int:
    """Streaming multiprocessors of the GPU that a tensor is on; 3 in the interpreter, so that loops over them are walked."""
    import torch

    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 3
