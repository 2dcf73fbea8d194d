"""The interface of a kernel file: legal schedules of a shape, the launch, the instructions that the artefact must have.

A `Launch` determines a compiled artefact: function, argument types, constants, options. The launcher and the offline compiler
pass the same `Launch` to Triton, so the inspected artefact is the one that runs.
A launcher lists each tensor's layout in a table of `Operand`; `Launch.arguments` checks it before the launch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from ..schedules.recipe import Numerics
from ..schedules.schedule import Schedule, knobs_of
from ..shapes.errors import UserError
from ..shapes.model import KernelShape

if TYPE_CHECKING:
    import torch

Constant = int | float | bool | str | None  # a `constexpr` argument, or a compiler option
Path = tuple[int, ...]  # into a launch's arguments: (place,), or (place, place in a tuple)
# Families of tensor-core instructions, as the reader of cubins names them.
FAMILIES = ("HMMA", "IMMA", "DMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCQMMA")
FALLBACK_PTX = ("cvt.rn.f16x2.e4m3x2", "cvt.rn.f16x2.e5m2x2")  # FP8 to f16
ShapeT = TypeVar("ShapeT", bound=KernelShape)
ScheduleT = TypeVar("ScheduleT", bound=Schedule)


class ContractError(UserError):
    """Tensors, shape and schedule of a launch that don't fit each other."""


class Parameter(Protocol):
    """One argument of a jitted function."""

    name: str
    num: int
    do_not_specialize: bool


class Jitted(Protocol):
    """The attributes of Triton's untyped JITFunction that this project uses. `kernel[grid]` is callable."""

    __name__: str
    __module__: str
    __globals__: dict[str, object]
    src: str
    fn: FunctionType
    params: Sequence[Parameter]
    arg_names: list[str]
    device_caches: dict[int, object]
    compile: Callable[..., object]
    signature: Any
    _pack_args: Callable[..., Any]

    def __hash__(self) -> int: ...

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...


NO_STRIDE = 16  # passed for an axis of one entry or an absent tensor: any multiple of 16 serves


class AtLeast(int):
    """A minimum size of an axis. The launch uses the first entries."""


class Operand(NamedTuple):
    """A tensor of a launch and its required layout. tensor: None if this launch has none.

    sizes: of each axis. strides: names of the kernel arguments that take the strides of the first axes. Each stride is a positive
    multiple of 16 elements below 2^31: one artefact serves every layout, and loads are 16 bytes wide. Other axes are contiguous.
    """

    tensor: "torch.Tensor | None"
    sizes: tuple[int, ...] = ()
    strides: tuple[str, ...] = ()

    def fits(self, dtype: "torch.dtype", device: "torch.device") -> bool:
        """Whether the tensor has this dtype, device and layout, and is aligned to 16 bytes."""
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
        """The error that says found and required layout."""
        tensor = self.tensor
        assert tensor is not None
        sizes = ", ".join(f">= {n}" if isinstance(n, AtLeast) else str(n) for n in self.sizes)
        layout = "contiguous" if not self.strides else "contiguous but for " + ", ".join(
            f"{stride} (a positive multiple of 16)" for stride in self.strides)
        at = tensor.data_ptr() % 16
        return ContractError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}"
            + (f", {at} bytes past a multiple of 16" if at else ""),
            expected=f"{dtype} [{sizes}], {layout}, on {device}, aligned to 16 bytes",
            action="pass a .clone() of a slice that starts inside a tensor" if at else "")


@cache
def _dtype(word: str) -> "torch.dtype":
    """torch's dtype of a Triton type such as `*bf16` or `tensordesc<bf16[64, 128]>`."""
    import torch

    element = word.removeprefix("tensordesc<").split("[")[0].removeprefix("*")
    return {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp32": torch.float32, "i32": torch.int32,
            "i8": torch.int8}[element]


@dataclass(frozen=True)
class Launch:
    """One artefact. types: Triton type of each argument that isn't a constant: `*bf16`, `i32`, `fp32`."""

    kernel: Jitted
    types: Mapping[str, str]
    constants: Mapping[str, Constant]
    options: Mapping[str, Constant]

    def signature(self) -> dict[str, str]:
        """Triton type by argument name, in order; `constexpr` for constants."""
        return {p.name: "constexpr" if p.name in self.constants else self.types[p.name] for p in self.kernel.params}

    def pointers(self) -> list[str]:
        """Names of the pointers and tensor descriptors, in order."""
        return [name for name, kind in self.signature().items() if kind.startswith(("*", "tensordesc"))]

    def constant_paths(self) -> Mapping[Path, object]:
        """The constants by place."""
        return {(self.kernel.arg_names.index(name),): value for name, value in self.constants.items()}

    def attributes(self) -> Mapping[Path, list[list[str | int]]]:
        """Triton's specialisation: pointers and strides are multiples of 16 (launchers refuse others)."""
        return {(p.num,): [["tt.divisibility", 16]] for p in self.kernel.params
                if p.name not in self.constants and not p.do_not_specialize
                and self.types[p.name].startswith(("*", "i"))}

    def arguments(self, operands: Mapping[str, Operand]) -> dict[str, object]:
        """The kernel's pointers and strides, by argument name.

        Raises:
            ContractError: a tensor missing or superfluous; wrong dtype, device, size or layout; a pointer not aligned to 16
            bytes.
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
                    raise ContractError(f"{name} of {argument} is {stride}", expected=f"{found[name]}, as in the other tensor")
        for operand in operands.values():
            for name in operand.strides:
                found.setdefault(name, NO_STRIDE)
        return found

    def _wrong_number(self, argument: str, missing: bool) -> ContractError:
        name = argument.removesuffix("_ptr")
        return ContractError(f"{name} is {'missing' if missing else 'given'}",
                             expected=f"{self.kernel.__name__} of this shape takes {'a tensor' if missing else 'no'} {name}")

    def __call__(self, grid: Sequence[int], **arguments: object) -> None:
        import triton

        if triton.knobs.runtime.interpret:  # it runs launches one after the other and has no gdc_wait
            self.kernel[tuple(grid)](**arguments, **{**self.constants, **({"PDL": False} if "PDL" in self.constants else {})})
        else:
            self.kernel[tuple(grid)](**arguments, **self.constants, **self.options)


@dataclass(frozen=True)
class Instructions:
    """Rules for the artefacts of one kernel on one target.

    required, forbidden: tensor-core instruction families. forbidden_ptx: substrings that no PTX line may contain, for
    conversions, which belong to no family; fallback_ptx: the same where matrix products run in another type than FP8.
    early_reads: as in Operation."""

    required: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    forbidden_ptx: tuple[str, ...] = ()
    early_reads: tuple[str, ...] = ()
    fallback_ptx: tuple[str, ...] = ()


def tensor_core(dtype: str, arch: str) -> Instructions:
    """Rules for a matrix product of this type. e4m3 converted to f16 is Triton's silent fallback: forbidden."""
    if dtype == "e4m3":
        return Instructions(required=("QGMMA",) if arch == "sm_90" else ("UTCQMMA",),
                            forbidden=("HMMA", "HGMMA", "UTCHMMA"), forbidden_ptx=("cvt.rn.f16x2.e4m3x2",))
    return Instructions(required=("HGMMA",) if arch == "sm_90" else ("UTCHMMA",), forbidden=("HMMA",))


def no_tensor_core(shape: KernelShape, arch: str) -> Instructions:
    """Rules for a kernel without a matrix product."""
    return Instructions(forbidden=("HMMA", "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA"))


def options(schedule: Schedule, numerics: Numerics) -> dict[str, Constant]:
    """Compiler options of a schedule under a recipe's numerics."""
    knobs = vars(schedule)  # of the step's kernels; Kernel.options has one's own
    chosen: dict[str, Constant] = {"num_warps": schedule.num_warps, "enable_fp_fusion": numerics.enable_fp_fusion}
    chosen |= {name: knobs[name] for name in ("num_stages", "maxnreg") if knobs.get(name) is not None}
    return chosen | ({"launch_pdl": True} if schedule.pdl else {})


@dataclass(frozen=True)
class Operation(Generic[ShapeT, ScheduleT]):
    """One kernel of the step. kernel: the jitted function.

    contract: the reason why a schedule doesn't fit a shape, or None. launch: the artefact. instructions: by shape and arch.
    shared_bytes: a lower bound of the kernel's shared memory per block, known before compiling.
    early_reads: arguments that the kernel may read before its dependency wait (programmatic dependent launch), because no kernel
    that may still be in flight writes the parts it reads. grid: blocks of a launch, or None where the launcher computes it from
    its tensors."""

    kernel: Jitted
    schedule_type: type[ScheduleT]
    contract: Callable[[ShapeT, ScheduleT], str | None]
    launch: Callable[[ShapeT, ScheduleT, Numerics], Launch]
    instructions: Callable[[ShapeT, str], Instructions]
    shared_bytes: Callable[[ShapeT, ScheduleT], int] = field(default=lambda shape, schedule: 0)
    early_reads: tuple[str, ...] = ()
    grid: Callable[[ShapeT, ScheduleT], tuple[int, ...]] | None = None


AnyOperation = Operation[Any, Any]  # in tables by name: the name determines shape type and schedule type


def common_contract(schedule: Schedule, most_warps: int = 16) -> str | None:
    """The contract of every kernel: the reason why a schedule is illegal, or None."""
    if schedule.num_warps < 1 or schedule.num_warps & (schedule.num_warps - 1) or schedule.num_warps > most_warps:
        return f"num_warps {schedule.num_warps} is not a power of two up to {most_warps}"
    maxnreg = knobs_of(schedule).get("maxnreg")
    if isinstance(maxnreg, int):
        if not 24 <= maxnreg <= 255 or maxnreg % 8:
            return f"maxnreg {maxnreg} is not a multiple of 8 from 24 to 248"
        if maxnreg * schedule.num_warps * 32 > 65536:
            return f"maxnreg {maxnreg} x {schedule.num_warps * 32} threads is more than the 65,536 registers of an SM"
    return None


def warps_contract(shape: KernelShape, schedule: Schedule) -> str | None:
    """As common_contract, for a kernel that takes every shape."""
    return common_contract(schedule)


def power_of_two(name: str, value: int, low: int, high: int) -> str | None:
    """The problem if `value` isn't a power of two from `low` to `high`, or None."""
    if value & (value - 1) or not low <= value <= high:
        return f"{name} {value} is not a power of two from {low} to {high}"
    return None


def first_problem(*problems: str | None) -> str | None:
    return next((p for p in problems if p), None)


def require(holds: bool, found: str, expected: str) -> None:
    """Raises ContractError unless `holds`."""
    if not holds:
        raise ContractError(found, expected=expected)


def sizes_of(name: str, tensor: "torch.Tensor", axes: int) -> tuple[int, ...]:
    """The sizes of a tensor. Raises ContractError if it hasn't this number of axes."""
    require(tensor.dim() == axes, f"{name} is {list(tensor.shape)}", f"{axes} axes")
    return tuple(tensor.shape)


def require_rows(rows: int, most: int | None = None) -> None:
    """Raises ContractError unless 1 <= rows <= most."""
    require(rows >= 1 and (most is None or rows <= most), f"{rows} rows", "at least 1" if most is None else f"1 to {most}")


def require_contract(operation: Operation[ShapeT, ScheduleT], shape: ShapeT, schedule: ScheduleT) -> None:
    """Raises ContractError if the schedule doesn't fit the shape."""
    if problem := operation.contract(shape, schedule):
        raise ContractError(problem, expected="a schedule that fits the shape",
                            action="run tune-kernels --offline: it lists those that fit")


def num_sms(tensor: "torch.Tensor") -> int:
    """Streaming multiprocessors of the tensor's GPU; 3 in the interpreter: enough to run persistent loops more than once."""
    import torch

    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 3
