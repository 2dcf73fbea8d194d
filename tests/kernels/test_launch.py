"""A launch finds the artefact that was compiled offline: the specialisation Triton makes of real arguments has the same key.

A stand-in driver plays the GPU, so that `kernel[grid](...)` runs to the launcher on a machine without one.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton
from stand_in_driver import Driver, Tensor
from triton.runtime import driver
from tune_kernels.kernels import bundle, registry
from tune_kernels.kernels.attention import attention_launch
from tune_kernels.kernels.linear import linear_kernel, linear_launch
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import LinearSchedule
from tune_kernels.shapes.model import AttentionShape, LinearShape

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(triton.knobs.runtime.interpret, reason="interpreting")]
RECIPE = load_recipe("fp8-v1")
SHAPE = LinearShape(256, 512, "e4m3", bias=True)
SCHEDULE = LinearSchedule(BLOCK_N=64, BLOCK_K=128, num_stages=3, num_warps=4)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    stand_in = Driver(90)
    monkeypatch.setattr(driver, "_active", stand_in)
    linear_kernel.device_caches.clear()
    yield stand_in
    linear_kernel.device_caches.clear()


def arguments(rows: int, stride: int = 512) -> dict[str, Any]:
    return {"x_ptr": Tensor("float8_e4m3fn"), "w_ptr": Tensor("float8_e4m3fn"), "x_scale_ptr": Tensor("float32"),
            "w_scale_ptr": Tensor("float32"), "bias_ptr": Tensor("bfloat16"), "out_ptr": Tensor("bfloat16"),
            "rows": rows, "stride_xm": stride, "stride_xt": 16, "stride_wn": stride, "stride_om": 256, "stride_os": 16}


def make_bundle(folder: Path, schedule: LinearSchedule = SCHEDULE) -> str:
    from tune_kernels.tuner.offline.compile import compile_task, make_task

    task = make_task("qkv", "sm_90", SHAPE, schedule, RECIPE.numerics, folder)
    assert compile_task(task).artefact == task.key
    return task.key


@pytest.mark.parametrize("schedule", [SCHEDULE, replace(SCHEDULE, pdl=True), replace(SCHEDULE, blocks_per_sm=2, maxnreg=64)],
                         ids=["plain", "pdl", "persistent"])
def test_launches_of_1_to_9_rows_and_any_stride_take_the_one_artefact(tmp_path: Path, gpu: Driver,
                                                                      schedule: LinearSchedule) -> None:
    make_bundle(tmp_path, schedule)
    bundle.install(linear_kernel, tmp_path)
    launch = linear_launch(SHAPE, schedule, RECIPE.numerics)
    for rows in range(1, 10):
        launch((4,), **arguments(rows, stride=512 + 16 * rows))
    assert gpu.launched == ["linear_kernel"] * 9
    kernels = {id(k) for k in linear_kernel.device_caches[0][0].values()}
    assert len(kernels) == 1


def test_what_was_not_compiled_is_named(tmp_path: Path, gpu: Driver) -> None:
    make_bundle(tmp_path)
    bundle.install(linear_kernel, tmp_path)
    other = linear_launch(SHAPE, replace(SCHEDULE, num_warps=8), RECIPE.numerics)
    with pytest.raises(bundle.BundleError, match="no artefact"):
        other((4,), **arguments(1))


def test_an_unaligned_pointer_does_not_take_the_aligned_artefact(tmp_path: Path, gpu: Driver) -> None:
    make_bundle(tmp_path)
    bundle.install(linear_kernel, tmp_path)
    launch = linear_launch(SHAPE, SCHEDULE, RECIPE.numerics)
    with pytest.raises(bundle.BundleError, match="no artefact"):
        launch((4,), **{**arguments(1), "x_ptr": Tensor("float8_e4m3fn", address=4100)})


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_artefact_is_named_not_loaded(tmp_path: Path, gpu: Driver, damage: str) -> None:
    """The loaded cubin is the written one."""
    key = make_bundle(tmp_path)
    cubin = tmp_path / "artefacts" / key / "linear_kernel.cubin"
    data = bytearray(cubin.read_bytes())
    if damage == "remove":
        cubin.unlink()
    else:
        data[len(data) // 2] ^= 1
        cubin.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    bundle.install(linear_kernel, tmp_path)
    with pytest.raises(bundle.BundleError, match=r"to do: run tune-kernels --offline"):
        linear_launch(SHAPE, SCHEDULE, RECIPE.numerics)((4,), **arguments(1))


def test_comments_and_docstrings_do_not_change_the_digest() -> None:
    plain = "def f(x):\n    return x + 1\n"
    dressed = 'def f(x):\n    """Says a thing."""\n    # and another\n\n    return x + 1  # here\n'
    assert bundle.normalised_source(plain) == bundle.normalised_source(dressed)
    assert bundle.normalised_source(plain) != bundle.normalised_source(plain.replace("1", "2"))
    assert bundle.normalised_source("def f(x):\n    if x:\n        y = 1\n    z = 2\n") != bundle.normalised_source(
        "def f(x):\n    if x:\n        y = 1\n        z = 2\n")


def test_a_called_function_counts_for_the_digest() -> None:
    assert "_linear_tile" in bundle.jitted_sources(linear_kernel)
    assert "load_weights" in bundle.jitted_sources(linear_kernel)


def test_every_constant_option_and_type_changes_the_key() -> None:
    """Kernel source, shape, schedule, target and flags are all in the key."""
    changes = [{"BLOCK_N": 128}, {"BLOCK_K": 64}, {"num_stages": 4}, {"num_warps": 8}, {"split_k": 2},
               {"orientation": "activations_as_m"}, {"row_tile": 8}, {"blocks_per_sm": 2}, {"load": "tma"}, {"pdl": True},
               {"maxnreg": 64}]
    launches = [linear_launch(SHAPE, replace(SCHEDULE, **c), RECIPE.numerics) for c in [{}, *changes]]
    launches += [linear_launch(s, SCHEDULE, RECIPE.numerics) for s in (
        replace(SHAPE, N=512), replace(SHAPE, K=1024), replace(SHAPE, bias=False), replace(SHAPE, dtype="bf16"))]
    launches.append(linear_launch(SHAPE, SCHEDULE, replace(RECIPE.numerics, enable_fp_fusion=True)))
    keys = {bundle.artefact_key(launch, capability) for launch in launches for capability in (90, 100, 103)}
    assert len(keys) == 3 * len(launches)


def test_persistent_blocks_an_sm_share_one_artefact() -> None:
    """The grid is the launcher's, so 2 and 3 blocks an SM are one kernel."""
    keys = {bundle.artefact_key(linear_launch(SHAPE, replace(SCHEDULE, blocks_per_sm=n), RECIPE.numerics), 90) for n in (2, 3)}
    assert len(keys) == 1


def test_row_counts_are_never_specialised() -> None:
    """Triton specialises integers that are 1 or divide by 16; a decode launch must not notice its row count."""
    for launch in (linear_launch(SHAPE, SCHEDULE, RECIPE.numerics),
                   attention_launch(AttentionShape(28, 4, 128),
                                    registry.default_schedule(RECIPE, "attention", "sm_90"), RECIPE.numerics)):
        names = {p.name: p.num for p in launch.kernel.params}
        assert (names["rows"],) not in launch.attributes()
        assert launch.kernel.params[names["rows"]].do_not_specialize
