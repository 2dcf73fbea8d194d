"""GPU targets."""

import dataclasses

import pytest
from tune_kernels.shapes.errors import ShapeError
from tune_kernels.shapes.target import ARCHES, load_arch, load_sku, load_targets, sku_of

PER_SKU = {"name", "gpus", "sms", "l2_bytes", "peak_tb_s", "measured_tb_s", "source"}


def test_shipped_skus() -> None:
    assert {t.name for t in load_targets()} == {"nvidia-h100", "nvidia-h200", "nvidia-b200", "nvidia-b300"}
    assert load_sku("nvidia-b300").arch == "sm_103"
    assert all(t.source for t in load_targets())


@pytest.mark.parametrize("arch", ARCHES)
def test_limits_are_the_same_for_every_sku_of_an_arch(arch: str) -> None:
    """load_arch takes any SKU of the arch: limits that the inspection uses must be the same for all."""
    limits = [{k: v for k, v in dataclasses.asdict(t).items() if k not in PER_SKU} for t in load_targets() if t.arch == arch]
    assert limits
    assert all(one == limits[0] for one in limits)
    assert load_arch(arch).capability == int(arch[3:])


@pytest.mark.parametrize(("name", "hint"), [
    ("sm_103a", "write sm_103"), ("103", "write sm_103"), ("sm103", "write sm_103"), ("SM_90", "write sm_90"),
    ("nvidia-b300", "its target is sm_103"), ("sm_80", "name a supported target"), ("", "name a supported target"),
])
def test_an_unknown_target_says_how_it_is_spelt(name: str, hint: str) -> None:
    with pytest.raises(ShapeError) as refused:
        load_arch(name)
    assert hint in str(refused.value)
    assert "sm_103, sm_100, sm_90" in str(refused.value)


def test_an_unlisted_gpu_gets_no_silent_default() -> None:
    with pytest.raises(ShapeError, match="nvidia-b300"):
        load_sku("nvidia-b30")


@pytest.mark.parametrize("gpu", ["NVIDIA H200 NVL", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GH200 480GB", "nvidia h200",
                                 "NVIDIA H200 ", "H200", ""])
def test_a_sku_is_an_exact_name(gpu: str) -> None:
    """F9: other memory and other clocks under a similar name are another SKU."""
    with pytest.raises(ShapeError) as refused:
        sku_of(gpu)
    assert repr(gpu) in str(refused.value)
    assert "add shapes/targets/SKU.toml" in str(refused.value)


def test_every_sku_is_found_by_its_names() -> None:
    assert sku_of("NVIDIA H200").name == "nvidia-h200"
    names = [name for target in load_targets() for name in target.gpus]
    assert len(names) == len(set(names))
    assert all(name in sku_of(name).gpus for name in names)
