"""What a kernel file says of its operation: which schedules fit a shape, what is launched, which instructions it must have.

`Launch` holds all that fixes a compiled artefact: function, argument types, constants, options. The launcher passes the
same constants and options to Triton that the offline compiler does, so what was inspected is what runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..schedules.recipe import Numerics
from ..schedules.schedule import Schedule
from ..shapes.errors import UserError
from ..shapes.model import KernelShape


class ContractError(UserError):
    """A launch whose tensors, shape and schedule can't go together."""


@dataclass(frozen=True)
class Launch:
    """One artefact. types: Triton's type of each argument that isn't a constant (`*bf16`, `i32`, `fp32`)."""

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]

    def signature(self) -> dict[str, str]:
        """Argument name → Triton type, in order; constants are `constexpr`."""
        return {p.name: "constexpr" if p.name in self.constants else self.types[p.name] for p in self.kernel.params}

    def pointers(self) -> list[str]:
        """Arguments that lead to memory, pointers and tensor descriptors, in order."""
        return [name for name, kind in self.signature().items() if kind.startswith(("*", "tensordesc"))]

    def attributes(self) -> dict[tuple[int], list[list[Any]]]:
        """What Triton's specialisation adds: pointers and strides divide by 16 (launchers refuse others)."""
        return {(p.num,): [["tt.divisibility", 16]] for p in self.kernel.params
                if p.name not in self.constants and not p.do_not_specialize
                and self.types[p.name].startswith(("*", "i"))}

    def __call__(self, grid: Sequence[int], **arguments: Any) -> None:
        import triton

        if triton.knobs.runtime.interpret:  # which runs one launch after the other and knows no gdc_wait
            self.kernel[tuple(grid)](**arguments, **{**self.constants, **({"PDL": False} if "PDL" in self.constants else {})})
        else:
            self.kernel[tuple(grid)](**arguments, **self.constants, **self.options)


@dataclass(frozen=True)
class Instructions:
    """What an artefact of one kernel must hold on one target, and mustn't. required: tensor-core families that must occur;
    forbidden: those that may not; forbidden_ptx: substrings that no PTX line may contain, for conversions that have no family;
    ahead: as Operation has it."""

    required: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    forbidden_ptx: tuple[str, ...] = ()
    ahead: tuple[str, ...] = ()


def tensor_core(dtype: str, arch: str) -> Instructions:
    """What a matrix product of this type must reach: FP8 the FP8 instruction, and a conversion to f16 on the way is the silent
    fallback."""
    if dtype == "e4m3":
        return Instructions(required=("QGMMA",) if arch == "sm_90" else ("UTCQMMA",),
                            forbidden=("HMMA", "HGMMA", "UTCHMMA"), forbidden_ptx=("cvt.rn.f16x2.e4m3x2",))
    return Instructions(required=("HGMMA",) if arch == "sm_90" else ("UTCHMMA",), forbidden=("HMMA",))


def options(schedule: Any, numerics: Numerics) -> dict[str, Any]:
    """Compiler options of a schedule under a recipe's numerics."""
    chosen: dict[str, Any] = {"num_warps": schedule.num_warps, "enable_fp_fusion": numerics.enable_fp_fusion}
    if (stages := getattr(schedule, "num_stages", None)) is not None:
        chosen["num_stages"] = stages
    if getattr(schedule, "pdl", False):
        chosen["launch_pdl"] = True
    if (maxnreg := getattr(schedule, "maxnreg", None)) is not None:
        chosen["maxnreg"] = maxnreg
    return chosen


@dataclass(frozen=True)
class Operation:
    """One kernel of the step. kernel: the jitted function.

    contract: why a shape and a schedule can't go together, or None. launch: the artefact.
    instructions: by shape and target. shared_bytes: what the kernel needs at the least, known before compiling.
    ahead: arguments that it may read before it waits for the kernel in front, under programmatic dependent launch: no kernel that
    may still be running writes what it reads of them."""

    kernel: Any
    schedule_type: type[Schedule]
    contract: Callable[[Any, Any], str | None]
    launch: Callable[[Any, Any, Numerics], Launch]
    instructions: Callable[[KernelShape, str], Instructions]
    shared_bytes: Callable[[Any, Any], int] = field(default=lambda shape, schedule: 0)
    ahead: tuple[str, ...] = ()


def common_contract(schedule: Any, most_warps: int = 16) -> str | None:
    """The rules that hold for every kernel."""
    if schedule.num_warps & (schedule.num_warps - 1) or schedule.num_warps > most_warps:
        return f"num_warps {schedule.num_warps} is not a power of two up to {most_warps}"
    maxnreg = getattr(schedule, "maxnreg", None)
    if maxnreg is not None:
        if not 24 <= maxnreg <= 255 or maxnreg % 8:
            return f"maxnreg {maxnreg} is not a multiple of 8 from 24 to 248"
        if maxnreg * schedule.num_warps * 32 > 65536:
            return f"maxnreg {maxnreg} x {schedule.num_warps * 32} threads is more than the 65,536 registers of an SM"
    return None


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


def require_strides(**strides: int) -> None:
    """Every stride that a kernel takes divides by 16: one artefact for all layouts, and 16-byte loads."""
    for name, stride in strides.items():
        require(stride % 16 == 0 and stride > 0, f"{name} is {stride}", "a positive multiple of 16 elements")


def require_aligned(**tensors: Any) -> None:
    """Every pointer starts on 16 bytes: Triton makes another artefact for one that doesn't, which nobody inspected."""
    for name, tensor in tensors.items():
        if tensor is not None:
            require(tensor.data_ptr() % 16 == 0, f"{name} starts at an address that 16 doesn't divide",
                    "16-byte alignment: a slice that starts inside a tensor needs a .clone()")


def require_contract(operation: Operation, shape: Any, schedule: Any) -> None:
    if problem := operation.contract(shape, schedule):
        raise ContractError(problem, expected="a schedule that fits the shape",
                            action="see which ones do: tune-kernels --offline")


def num_sms(tensor: Any) -> int:
    """Streaming multiprocessors of the GPU that a tensor is on; 3 in the interpreter, so that loops over them are walked."""
    import torch

    return torch.cuda.get_device_properties(tensor.device).multi_processor_count if tensor.is_cuda else 3
