"""int8 rows: the error of a value is at most half its row's scale; contradictions are refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tune_kernels.decoder.drafters.eagle3_checkpoint import read_tensors
from tune_kernels.decoder.drafters.int8 import dequantise_rows, quantise_rows
from tune_kernels.decoder.errors import LoadError


def tensors() -> dict[str, torch.Tensor]:
    w = torch.randn(5, 48, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 5)[:, None]
    return {"w": w, "zero": torch.zeros(3, 4), "norm": torch.ones(7), "ids": torch.arange(4)}


def test_a_value_comes_back_within_half_a_scale(tmp_path: Path) -> None:
    stored = quantise_rows(tensors())
    assert stored["w"].dtype == torch.int8 and stored["w_scale"].shape == (5, 1)
    save_file(stored, tmp_path / "model.safetensors")
    found = read_tensors(tmp_path)
    assert set(found) == set(tensors())
    assert bool(((found["w"] - tensors()["w"]).abs() <= stored["w_scale"] * 0.5001).all())
    for name in ("zero", "norm", "ids"):
        assert torch.equal(found[name], tensors()[name])
    again = quantise_rows(found)
    assert torch.equal(again["w"], stored["w"])


@pytest.mark.parametrize(("change", "message"), [
    ({"w_scale": None}, "w is int8"),
    ({"w": torch.ones(5, 48)}, "w_scale has no int8 tensor"),
    ({"w": None}, "w_scale has no int8 tensor"),
    ({"w_scale": torch.ones(5)}, "w is int8"),
    ({"w_scale": torch.ones(5, 1).double()}, "w is int8"),
    ({"w_scale": -torch.ones(5, 1)}, "isn't positive"),
    ({"w_scale": torch.full((5, 1), torch.nan)}, "isn't positive"),
])
def test_scales_and_int8_belong_together(change: dict[str, torch.Tensor | None], message: str) -> None:
    changed = {name: tensor for name, tensor in (quantise_rows(tensors()) | change).items() if tensor is not None}
    with pytest.raises(LoadError, match=message):
        dequantise_rows(changed, "here")
