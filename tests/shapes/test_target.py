"""GPU targets."""

import dataclasses

import pytest
from tune_kernels.shapes.errors import ShapeError
from tune_kernels.shapes.target import ARCHES, load_arch, load_sku, load_targets, sku_of, targets_named

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


@pytest.mark.parametrize(("word", "arch"), [
    ("sm_103", "sm_103"), ("sm_103a", "sm_103"), ("103", "sm_103"), ("sm103", "sm_103"), ("SM_90", "sm_90"), ("b300", "sm_103"),
    ("nvidia-b300", "sm_103"), ("H200", "sm_90"),
])
def test_a_target_goes_by_any_of_its_names(word: str, arch: str) -> None:
    """F33."""
    assert {target.arch for target in targets_named(word)} == {arch}


@pytest.mark.parametrize("word", ["sm_80", "", "h200 nvl", "sm_"])
def test_an_unknown_target_says_which_there_are(word: str) -> None:
    for read in (targets_named, load_arch):
        with pytest.raises(ShapeError, match="sm_103, sm_100, sm_90") as refused:
            read(word)
        assert repr(word) in str(refused.value)


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
