"""Checks of kernels of one's own, in the interpreter: what is right passes, each kind of wrong is named."""

from dataclasses import replace
from typing import Any

import faulty_kernels
import own_kernels
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tune_kernels import Kernel, KernelError, Scalar, Tensor
from tune_kernels.schedules.schedule import OwnSchedule
from tune_kernels.tuner.on_gpu.samples.gate import Checked
from tune_kernels.tuner.on_gpu.worker.checks import numerics_class, run_checks
from tune_kernels.tuner.on_gpu.worker.operands import SIZES, Operands
from tune_kernels.tuner.on_gpu.worker.own import OwnCase, StrayWrite, require_checkable
from tune_kernels.tuner.on_gpu.worker.own_operands import allocate, fill

pytestmark = pytest.mark.interpreter
SMALL = replace(SIZES, repeats=3, class_outputs=1000)
NORM = {"x_ptr": Tensor("bf16", "rows", "H"), "w_ptr": Tensor("bf16", "H"), "y_ptr": Tensor("bf16", "rows", "H", output=True),
        "stride": Scalar("i32", "H"), "H": Scalar("i32", "H"), "eps": Scalar("fp32", 1e-6)}


def rms_norm(x: Any, w: Any, eps: float) -> Any:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w


def norm(**changes: Any) -> Kernel:
    return Kernel(own_kernels.norm, **{
        "arguments": NORM, "shapes": [{"rows": 4, "H": 80}, {"rows": 2, "H": 80}], "knobs": {"BLOCK": [128, 256]},
        "grid": lambda shape, knobs: (shape["rows"],), "reference": rms_norm, "max_rms_error": 4e-3, "rows": "rows", **changes})


def checked(kernel: Kernel, schedule: OwnSchedule, device: str) -> Checked:
    shape = kernel.own_shapes[0]
    case, wide = (OwnCase(kernel, shape, Operands(device, wide)) for wide in (False, True))
    return run_checks(case, wide, schedule, SMALL)


def test_a_norm_passes(device: str) -> None:
    kernel = norm()
    found = [checked(kernel, schedule, device) for schedule in kernel.schedules]
    assert [one.failure for one in found] == [None, None]
    kinds = {kind: (c.run, c.passed) for kind, c in found[0].checks.items()}
    assert kinds == {"reference": (1, 1), "rows": (5, 5), "determinism": (3, 3)}, "4 rows alone, and 2 of them"
    assert all(one.error and 0 < one.error < 4e-3 for one in found)


def test_without_rows_none_are_checked(device: str) -> None:
    found = checked(norm(rows=None), norm().schedules[0], device)
    assert found.failure is None and set(found.checks) == {"reference", "determinism"}


@pytest.mark.parametrize(("fault", "stage", "said"), [
    ("wrong", "reference", "y_ptr: relative RMS error 1.00e-01 against fp64, at most 1e-04"),
    ("ticket", "determinism", "3 of 3 runs gave other bits"),
    ("neighbour", "rows", "bits differ: row 0 among others"),
    ("nothing", "reference", "y_ptr: 480 of 480 outputs were not written"),
    ("unmasked", "reference", "are NaN"),
])
def test_each_fault_is_named(fault: str, stage: str, said: str, device: str) -> None:
    kernel = faulty_kernels.make(fault)
    failure = checked(kernel, kernel.schedules[0], device).failure
    assert failure and (failure.stage, said in failure.detail) == (stage, True), failure


def test_a_write_outside_the_outputs_is_named(device: str) -> None:
    kernel = faulty_kernels.make("past the end")
    with pytest.raises(StrayWrite, match="wrote outside y_ptr"):
        checked(kernel, kernel.schedules[0], device)


def test_one_wrong_element_of_many_is_far_though_the_mean_is_right(device: str) -> None:
    """The RMS over all elements would let it pass."""
    kernel = faulty_kernels.make("one element", max_rms_error=1e-2, rows=None, shapes=[{"rows": 5, "H": 960}],
                                 knobs=[{"FAULT": "one element", "BLOCK": 1024}])
    failure = checked(kernel, kernel.schedules[0], device).failure
    assert failure and "y_ptr[0, 3] is" in failure.detail and "farther than 8 times max_rms_error" in failure.detail


def test_the_class_says_the_bits(device: str) -> None:
    """Two blocks of one size sum a row alike; another order of a sum is another class."""
    def classes(kernel: Kernel) -> set[str]:
        wide = OwnCase(kernel, kernel.own_shapes[0], Operands(device, wide=True))
        return {numerics_class(wide, schedule, SMALL) for schedule in kernel.schedules}

    assert len(classes(faulty_kernels.make("none"))) == 1
    assert len(classes(faulty_kernels.make("none", "neighbour"))) == 2


def test_tuples_descriptors_and_several_outputs(device: str) -> None:
    kernel = Kernel(own_kernels.add_all, arguments={
        "parts": (Tensor("fp32", "n"), Tensor("fp32", "n")), "bias_ptr": None, "y_ptr": Tensor("fp32", "n", output=True),
        "n": Scalar("i32", "n"), "DTYPE": own_kernels.tl.float32}, shapes=[{"n": 100}],
        knobs={"BLOCK": [64], "MODE": ["single", "double"]}, grid=lambda shape, knobs: (-(-shape["n"] // knobs["BLOCK"]),),
        reference=lambda parts: parts[0] + parts[1], max_rms_error=1e-6)
    single, double = kernel.schedules
    assert checked(kernel, single, device).failure is None
    wrong = checked(kernel, double, device).failure
    assert wrong and wrong.stage == "reference"


@pytest.mark.parametrize(("changes", "said"), [
    ({"reference": None}, "has no reference"), ({"max_rms_error": None}, "has no max_rms_error"), ({"grid": None}, "has no grid"),
    ({"arguments": {**NORM, "y_ptr": Tensor("bf16", "H", output=True)}}, "y_ptr has no axis rows"),
    ({"arguments": {**NORM, "x_ptr": Tensor("bf16", "rows * H")}}, "x_ptr has no axis rows"),
])
def test_a_kernel_that_cant_be_checked_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(KernelError, match=said):
        require_checkable(norm(**changes))


@pytest.mark.parametrize(("reference", "said"), [
    (lambda x, bias: x, "the reference takes bias"), (lambda x: x[0], "the reference gives"),
    (lambda x: 1 / 0, "the reference raised ZeroDivisionError"), (lambda x: x / 0, "isn't finite"),
])
def test_a_reference_that_cant_be_used_is_the_users_mistake(reference: Any, said: str, device: str) -> None:
    with pytest.raises(KernelError, match=said):
        checked(norm(reference=reference), norm().schedules[0], device)


@given(st.sampled_from(["fp64", "fp32", "fp16", "bf16", "fp8e4nv", "fp8e5", "i64", "i32", "i8", "u8", "u1"]),
       st.integers(1, 40), st.integers(1, 9), st.booleans(), st.booleans(), st.integers(0, 50))
def test_operands_lie_between_guards(dtype: str, rows: int, columns: int, aligned: bool, wide: bool, seed: int) -> None:
    """Finite, the same for one seed, other for another; the guards hold, and tell of one byte."""
    described = Tensor(dtype, rows, columns, aligned=aligned)
    first, second = (allocate(described, (rows, columns), "cpu") for _ in range(2))
    for made in (first, second):
        fill(made.tensor, described, None, seed, wide)
        assert made.intact()
    assert first.tensor.double().isfinite().all()
    assert first.tensor.equal(second.tensor) if dtype[:3] != "fp8" else first.memory.equal(second.memory)
    assert (first.tensor.data_ptr() % 16 == 0) == (aligned or described.element_bytes == 16)
    first.memory[-512] = 0
    assert not first.intact()
