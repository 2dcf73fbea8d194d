"""A description of a kernel: what it refuses, and the artefact that a launch of it finds."""

from collections.abc import Iterator
from typing import Any

import pytest
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from own_kernels import add_all, copy_tiles, norm, scale
from stand_in_driver import Driver
from triton.runtime import driver
from tune_kernels import Kernel, KernelError, Scalar, Stride, Tensor
from tune_kernels.kernels import bundle
from tune_kernels.kernels.arguments import StandIn, names_in, value_of
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import OwnSchedule
from tune_kernels.shapes.own import Frozen

interpreted = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="interpreting")
NUMERICS = load_recipe("fp8-v1").numerics
ARGUMENTS = {"x_ptr": Tensor("bf16", "rows", "H"), "w_ptr": Tensor("bf16", "H"),
             "y_ptr": Tensor("bf16", "rows", "H", output=True), "stride": Stride("x_ptr", 0), "H": Scalar("i32", "H"),
             "eps": 1e-6}
SHAPES = [{"rows": 5, "H": 1000}, {"rows": 16, "H": 4096}]
KNOBS = {"BLOCK": [1024, 4096], "num_warps": [4, 8]}


def described(fn: Any = norm, **changed: Any) -> Kernel:
    return Kernel(fn, **{"arguments": ARGUMENTS, "shapes": SHAPES, "knobs": KNOBS,
                         "grid": lambda shape, knobs: (shape["rows"],), **changed})


def test_shapes_schedules_and_name() -> None:
    kernel = described()
    assert kernel.name == "own_kernels.norm"
    assert [dict(shape.dims) for shape in kernel.own_shapes] == SHAPES
    assert [dict(s.knobs) for s in kernel.schedules] == [{"BLOCK": b, "num_warps": w} for b in (1024, 4096) for w in (4, 8)]


def test_configs_and_keys_come_from_the_autotuner() -> None:
    kernel = described(scale, arguments={"x_ptr": Tensor("fp32", "n"), "y_ptr": Tensor("fp32", "n", output=True),
                                         "n": Scalar("i32", "n"), "factor": 2.0}, shapes=[{"n": 4096}, {"n": 5000}], knobs=None)
    assert [dict(s.knobs) for s in kernel.schedules] == [
        {"BLOCK": 1024, "num_warps": 4, "num_stages": 3}, {"BLOCK": 2048, "num_warps": 8, "num_stages": 2, "maxnreg": 128}]
    assert kernel.keys == ("n",)
    even, odd = (kernel.bind(shape, kernel.schedules[0])["EVEN"] for shape in kernel.own_shapes)
    assert (even, odd) == (True, False)


WRONG = {
    "no jitted function": ({"fn": len}, "fn is a builtin_function_or_method"),
    "an argument too many": ({"arguments": {**ARGUMENTS, "z_ptr": Tensor("bf16", "H")}}, "no argument z_ptr.*did you mean"),
    "an argument too few": ({"arguments": {k: v for k, v in ARGUMENTS.items() if k != "w_ptr"}}, "argument w_ptr has no value"),
    "a constexpr that nobody gives": ({"knobs": {"num_warps": [4]}}, "constexpr BLOCK has no value"),
    "a knob of some combinations": ({"knobs": [{"BLOCK": 1024}, {"num_warps": 4}]}, "constexpr BLOCK has no value"),
    "a knob that is no argument": ({"knobs": {**KNOBS, "BLOK": [1]}}, "no argument BLOK.*did you mean 'BLOCK'"),
    "a knob that is an argument": ({"knobs": {**KNOBS, "H": [1]}}, "H is a knob and an argument"),
    "a knob that is a dimension": ({"shapes": [{"rows": 1, "H": 16, "BLOCK": 4}]}, "BLOCK is a knob and a dimension"),
    "a knob without values": ({"knobs": {"BLOCK": []}}, "BLOCK has no value"),
    "a knob that is a list": ({"knobs": {"BLOCK": [[1]]}}, "BLOCK is \\[1\\]"),
    "text for knobs": ({"knobs": "BLOCK"}, "knobs is 'BLOCK'"),
    "too many combinations": ({"knobs": {"BLOCK": range(1, 1000), "num_warps": range(1, 1000)}}, "998,001 combinations"),
    "no shape": ({"shapes": []}, "shapes is"),
    "shapes of other dimensions": ({"shapes": [{"rows": 1, "H": 16}, {"rows": 1}]}, "a shape of rows"),
    "a size of 0": ({"shapes": [{"rows": 0, "H": 16}]}, "rows is 0"),
    "an unknown dimension": ({"arguments": {**ARGUMENTS, "w_ptr": Tensor("bf16", "HH")}},
                             "w_ptr has a size in HH.*did you mean 'H'"),
    "an output sized by a knob": ({"arguments": {**ARGUMENTS, "y_ptr": Tensor("bf16", "BLOCK", output=True)}},
                                  "size in BLOCK[\\s\\S]*don't depend on knobs"),
    "a stride of no tensor": ({"arguments": {**ARGUMENTS, "stride": Stride("z_ptr", 0)}}, "stride 0 of z_ptr"),
    "a stride of no axis": ({"arguments": {**ARGUMENTS, "stride": Stride("x_ptr", 2)}}, "stride 2 of x_ptr"),
    "a path for a name": ({"name": "../evil"}, "kernel '../evil'"),
    "a path for a dimension": ({"shapes": [{"../H": 1}]}, "dimension '../H'"),
    "an unknown target": ({"instructions": {"sm_13": {}}}, "instructions for 'sm_13'"),
    "an unknown family": ({"instructions": {"sm_90": {"required": ["QGMA"]}}}, "'QGMA'.*did you mean 'QGMMA'"),
    "families that are text": ({"instructions": {"sm_90": {"required": "QGMMA"}}}, "'required' is 'QGMMA'"),
    "an unknown rule": ({"instructions": {"sm_90": {"needed": ["QGMMA"]}}}, "'needed'"),
    "rows of no dimension": ({"rows": "row"}, "rows is 'row'.*did you mean 'rows'"),
    "an early read of no argument": ({"early_reads": ["v_ptr"]}, "early_reads: 'v_ptr'"),
    "a contract that is text": ({"contract": "H > 4"}, "contract is 'H > 4'"),
    "a limit of 0": ({"max_rms_error": 0.0}, "max_rms_error is 0.0"),
}


@pytest.mark.parametrize(("changed", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_description_that_cannot_be(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        described(**changed)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Tensor("bf17", "H"), "type 'bf17'.*did you mean 'bf16'"),
    (lambda: Tensor("bf16", "H; import os"), "size 'H; import os'"),
    (lambda: Tensor("bf16", "f(H)"), "size"), (lambda: Tensor("bf16", "H ** 2"), "size"),
    (lambda: Tensor("bf16", 1.5), "size 1.5"),
    (lambda: Tensor("bf16", "H", block=(1, 2)), "a block of 2 sizes"), (lambda: Scalar("i33", 5), "type 'i33'"),
    (lambda: Scalar("i32", None), "scalar None"), (lambda: Tensor("bf16", "(" * 500 + "H"), "size")])
def test_an_argument_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        make()


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 512))
def test_sizes_are_pythons_arithmetic(K: int, heads: int, block: int) -> None:
    values = {"K": K, "heads": heads}
    assert value_of(f"(K + {block - 1}) // {block}", values) == -(-K // block)
    assert value_of("heads * 128 - K", values) == heads * 128 - K
    assert value_of("-(-K // 16)", values) == -(-K // 16)
    assert names_in("(K + 127) // 128 * heads") == {"K", "heads"}


def test_types_go_by_the_names_of_torch_and_triton() -> None:
    assert Tensor("e4m3", 1).dtype == Tensor(tl.float8e4nv, 1).dtype == Tensor("torch.float8_e4m3fn", 1).dtype == "fp8e4nv"
    assert Tensor("bfloat16", 1).dtype == "bf16"


@pytest.mark.parametrize(("changed", "message"), [
    ({"contract": lambda shape, knobs: "too small" if knobs["BLOCK"] < shape["H"] else None}, "too small"),
    ({"contract": lambda shape, knobs: 1 / 0}, "contract raised ZeroDivisionError"),
    ({"contract": lambda shape, knobs: 5}, "contract returned 5"),
    ({"contract": lambda shape, knobs: exec("raise SystemExit(3)")}, "contract raised SystemExit"),
    ({"grid": lambda shape, knobs: (shape["columns"],)}, "grid raised KeyError"),
    ({"grid": lambda shape, knobs: (0,)}, r"grid is \(0,\)"), ({"grid": (1, 70000)}, r"grid is \(1, 70000\)"),
    ({"grid": lambda: (1,)}, "grid raised TypeError"),
    ({"arguments": {**ARGUMENTS, "eps": Scalar("fp64", 1e-6)}}, "eps = 1e-06 goes to the kernel as fp32"),
    ({"arguments": {**ARGUMENTS, "H": Scalar("i64", "H")}}, "H = 4096 goes to the kernel as i32"),
    ({"arguments": {**ARGUMENTS, "eps": lambda shape, knobs: undefined}}, "heuristics raised NameError"),  # noqa: F821
    ({"arguments": {**ARGUMENTS, "w_ptr": Tensor("bf16", "H // 0")}}, "divides by 0"),
    ({"arguments": {**ARGUMENTS, "w_ptr": Tensor("bf16", "H - 4096")}}, "'H - 4096' is 0"),
    ({"knobs": {"BLOCK": 4096, "num_warps": 3}}, "num_warps 3 is not a power of two"),
])
@interpreted
def test_a_shape_and_knobs_that_cannot_go_together(changed: dict[str, Any], message: str) -> None:
    import re

    kernel = described(**{"shapes": SHAPES[1:], "knobs": {"BLOCK": [1024]}, **changed})
    problem = kernel.operation.contract(kernel.own_shapes[0], kernel.schedules[0])
    assert problem is not None and re.search(message, problem), problem


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    stand_in = Driver(90)
    monkeypatch.setattr(driver, "_active", stand_in)
    yield stand_in
    for function in (norm, scale.fn.fn, add_all, copy_tiles):
        function.device_caches.clear()


def asked_for(kernel: Kernel, place: int, grid: tuple[int, ...]) -> tuple[str, str]:
    """(the key of the artefact compiled offline, the key that a launch of the function asks for) of one shape."""
    found: list[str] = []
    shape, schedule = kernel.own_shapes[place], kernel.schedules[0]
    assert kernel.operation.contract(shape, schedule) is None
    kernel.jitted.device_caches[0]

    class Launched(Exception):
        pass

    def compiled(src: Any, target: Any, options: dict[str, Any], **rest: Any) -> object:
        found.append(bundle._digest(src, bundle.backend_of(90).parse_options(dict(options)), 90))
        raise Launched

    kernel.jitted.compile = compiled
    with pytest.raises(Launched):
        kernel.jitted[grid](**kernel.bind(shape, schedule), **kernel.options(schedule))
    return bundle.artefact_key(kernel.operation.launch(shape, schedule, NUMERICS), 90), found[0]


TUPLES = {"parts": (Tensor("fp32", "n"), Tensor("fp32", "n")), "bias_ptr": None, "y_ptr": Tensor("bf16", "n", output=True),
          "n": Scalar("i32", "n"), "DTYPE": tl.bfloat16, "MODE": "double"}
TILES = {"x": Tensor("bf16", "M", 64, block=("BLOCK_M", "BLOCK_N")), "y": Tensor("bf16", "M", 64, block=("BLOCK_M", "BLOCK_N"),
                                                                              output=True), "M": Scalar("i32", "M")}
LAUNCHED = {
    "rows of 1000": described(), "one row of 1": described(shapes=[{"rows": 1, "H": 1}]),
    "an unaligned tensor": described(arguments={**ARGUMENTS, "w_ptr": Tensor("bf16", "H", aligned=False)}),
    "a tuple, None, a type and text": described(add_all, arguments=TUPLES, shapes=[{"n": 1000}], knobs={"BLOCK": 128}, grid=(8,)),
    "tensor descriptors": described(copy_tiles, arguments=TILES, shapes=[{"M": 48}], knobs={"BLOCK_M": 16, "BLOCK_N": 64},
                                    grid=(3,)),
    "no fused multiply-adds": described(knobs={"BLOCK": 1024, "enable_fp_fusion": False}),
    "an autotuner's first": described(
        scale, knobs=None, shapes=[{"n": 4096}], grid=lambda args: (triton.cdiv(args["n"], args["BLOCK"]),),
        arguments={"x_ptr": Tensor("fp32", "n"), "y_ptr": Tensor("fp32", "n", output=True), "n": Scalar("i32", "n"),
                   "factor": 2.0}),
}


@interpreted
@pytest.mark.parametrize("kernel", LAUNCHED.values(), ids=LAUNCHED.keys())
def test_a_launch_finds_the_artefact(gpu: Driver, kernel: Kernel) -> None:
    ours, asked = asked_for(kernel, 0, (1,))
    assert ours == asked


@interpreted
def test_what_triton_specialises_is_another_artefact() -> None:
    """A row length of 1, of 1000 (8 divides it) and of 4096 (16 does); a tensor off 16 bytes."""
    kernel = described(shapes=[{"rows": 1, "H": h} for h in (1, 1000, 4096)])
    launches = [kernel.operation.launch(shape, kernel.schedules[0], NUMERICS) for shape in kernel.own_shapes]
    assert len({bundle.artefact_key(launch, 90) for launch in launches}) == 3
    assert launches[0].signature()["H"] == "constexpr"
    assert (4,) in launches[2].attributes() and (4,) not in launches[1].attributes()
    unaligned = described(arguments={**ARGUMENTS, "w_ptr": Tensor("bf16", "H", aligned=False)})
    marks = unaligned.operation.launch(unaligned.own_shapes[0], unaligned.schedules[0], NUMERICS).attributes()
    assert (0,) in marks and (1,) not in marks


@interpreted
def test_text_is_not_the_number_it_spells() -> None:
    def key(mode: object) -> str:
        kernel = described(add_all, arguments={**TUPLES, "MODE": mode}, shapes=[{"n": 1000}], knobs={"BLOCK": 128})
        return bundle.artefact_key(kernel.operation.launch(kernel.own_shapes[0], kernel.schedules[0], NUMERICS), 90)

    assert len({key(mode) for mode in ("1", 1, True, 1.0, None, "None")}) == 6


def test_a_stand_in_answers_as_a_tensor() -> None:
    tensor = StandIn(Tensor("bf16", "rows", "H"), {"rows": 5, "H": 64})
    assert (tensor.shape, tensor.stride(), tensor.stride(0), tensor.numel(), tensor.element_size(), len(tensor)) == (
        (5, 64), (64, 1), 64, 320, 2, 5)
    torch = pytest.importorskip("torch")
    assert tensor.dtype == torch.bfloat16 and torch.bfloat16 == tensor.dtype


def test_an_empty_schedule_for_a_kernel_without_knobs() -> None:
    kernel = described(arguments={**ARGUMENTS, "BLOCK": lambda shape, knobs: 4096}, knobs=None)
    assert kernel.schedules == (OwnSchedule(Frozen()),)
    assert kernel.bind(kernel.own_shapes[0], kernel.schedules[0])["BLOCK"] == 4096
