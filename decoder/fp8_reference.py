"""An independent FP8 linear for the reference check: Hugging Face's model with its projections replaced by it.

Written against the definition alone, and importing nothing of the project: the stored weights (e4m3 with one scale
per output channel) are dequantised, activations are quantised and dequantised per row, and the product runs in fp32.
It must never share code with what it judges.
"""

import torch
from torch import nn

LARGEST = 448.0  # of e4m3


def round_to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3 value, ties to even, by arithmetic: 3 mantissa bits from 2^-6 up, steps of 2^-9 below."""
    _, exponent = torch.frexp(x)
    step = torch.exp2((exponent - 1).clamp(min=-6).to(x.dtype) - 3)
    return (torch.round(x / step) * step).clamp(-LARGEST, LARGEST)


def fake_quantise(x: torch.Tensor) -> torch.Tensor:
    """x [rows, K] through e4m3 and back, one scale a row."""
    peak = x.abs().max(dim=-1, keepdim=True).values
    scale = torch.where(peak == 0, torch.ones_like(peak), peak / LARGEST)
    return round_to_e4m3(x / scale) * scale


class FakeQuantisedLinear(nn.Module):
    """y = fake_quantise(x) @ fake_quantise(w).T + bias, in fp32 (fp64 where x is fp64), returned in x's type."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = fake_quantise(linear.weight.detach().float())  # no parameter: keeps its type when the model's changes
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K]; [..., N]."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        y = (fake_quantise(x.to(wide)) @ self.weight.to(wide).T).to(x.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def replace_projections(model: nn.Module) -> nn.Module:
    """Every projection of a Hugging Face Qwen2 or Llama model as a FakeQuantisedLinear; the head stays."""
    for module in model.modules():
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name.endswith("_proj"):
                setattr(module, name, FakeQuantisedLinear(child))
    return model
