"""Helpers of several test files. Imported as a plain module: tests/conftest.py puts this folder on the path."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def assert_same_bytes(found: Any, expected: Any, what: str = "") -> None:
    """Compare two tensors bit for bit; name the first coordinate that differs."""
    import torch

    assert found.shape == expected.shape and found.dtype == expected.dtype, (what, found.shape, expected.shape)
    a, b = (t.detach().cpu().contiguous().view(torch.uint8).reshape(*t.shape, -1) for t in (found, expected))
    different = (a != b).any(-1)
    if different.any():
        where = tuple(different.nonzero()[0].tolist())
        raise AssertionError(f"{what}: {int(different.sum())} of {different.numel()} differ, first at {where}: "
                             f"{found[where].item()!r}, expected {expected[where].item()!r}")


def assert_close(found: "torch.Tensor", expected: "torch.Tensor", rms: float, worst: float, what: str = "") -> None:
    """Relative RMS error, and worst error in units of the expected values' RMS. NaN never passes."""
    a, b = found.double().cpu(), expected.double().cpu()
    scale = b.pow(2).mean().sqrt()
    error = (a - b).abs()
    found_rms, found_worst = float(error.pow(2).mean().sqrt() / scale), float(error.max() / scale)
    assert found_rms <= rms, f"{what}: relative RMS error {found_rms:.2e}, at most {rms:.0e}"
    assert found_worst <= worst, f"{what}: worst error {found_worst:.2e}, at most {worst:.0e}"


def strided(tensor: "torch.Tensor", padding: int, poison: float = float("nan")) -> "torch.Tensor":
    """The same values with `padding` extra elements, poisoned, at the end of each row."""
    import torch

    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + padding), poison, device=tensor.device)
    wide = wide.to(tensor.dtype)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]
