"""GPU targets."""

import dataclasses

import pytest
from tune_kernels.shapes.errors import ShapeError
from tune_kernels.shapes.target import ARCHES, load_arch, load_sku, load_targets

PER_SKU = {"name", "sms", "l2_bytes", "peak_tb_s", "measured_tb_s", "source"}


def test_shipped_skus() -> None:
    assert {t.name for t in load_targets()} == {"nvidia-h100", "nvidia-h200", "nvidia-b200", "nvidia-b300"}
    assert load_sku("nvidia-b300").arch == "sm_103"
    assert all(t.source for t in load_targets())


@pytest.mark.parametrize("arch", ARCHES)
def test_limits_are_the_same_for_every_sku_of_an_arch(arch: str) -> None:
    """load_arch takes any SKU of the arch, so what the inspection uses must not depend on which."""
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
    """Tuning 16."""
    with pytest.raises(ShapeError, match="nvidia-b300"):
        load_sku("nvidia-b30")
