"""An independent FP8 linear for the reference check; it replaces the projections of Hugging Face's model.

It is written from the definition, imports nothing of the project and must never share code with the decoder. Weights are e4m3
with one scale per output channel, found by least squares. Activations are two e4m3 terms, the second the remainder of the first,
with one power of two per row as their scale. Both are quantised and dequantised by arithmetic, without the e4m3 type, and the
product runs in fp32.
"""

import torch
from torch import nn

LARGEST = 448.0  # largest e4m3 value
FRACTIONS = 8  # candidates for a weight's scale per octave


def round_to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3 value, ties to even: 3 mantissa bits from 2^-6 up, steps of 2^-9 below."""
    _, exponent = torch.frexp(x)
    step = torch.exp2((exponent - 1).clamp(min=-6).to(x.dtype) - 3)
    return (torch.round(x / step) * step).clamp(-LARGEST, LARGEST)


def fake_quantise_weights(w: torch.Tensor) -> torch.Tensor:
    """w [N, K] in fp32, quantised to e4m3 and back. A row's scale is the best of FRACTIONS candidates, from the smallest that
    doesn't saturate up to an octave more."""
    peak = w.abs().max(dim=1, keepdim=True).values
    smallest = torch.where(peak == 0, torch.ones_like(peak), peak / LARGEST)
    trials = [smallest * 2.0 ** (i / FRACTIONS) for i in range(FRACTIONS)]
    errors = [(round_to_e4m3(w / s).double() * s.double() - w.double()).square().sum(dim=1) for s in trials]
    best = torch.stack(errors).argmin(dim=0)
    scale = torch.stack(trials)[best, torch.arange(len(w))]
    return round_to_e4m3(w / scale) * scale


def fake_quantise_activations(x: torch.Tensor) -> torch.Tensor:
    """x [..., K], quantised to two e4m3 terms and back. A row's scale puts its largest value into [128, 256)."""
    peak = x.abs().max(dim=-1, keepdim=True).values
    _, exponent = torch.frexp(peak)  # peak = m * 2^exponent, 1/2 <= m < 1
    scale = torch.exp2((exponent - 8).clamp(min=-126).to(x.dtype))
    first = round_to_e4m3(x / scale)
    second = round_to_e4m3((x / scale - first) * 16)
    return (first + second / 16) * scale


class FakeQuantisedLinear(nn.Module):
    """y = x @ w.T + bias with both operands fake-quantised, in fp32 (fp64 if x is fp64), rounded to x's type at the end. stored:
    the checkpoint's weights are e4m3 already and stay unchanged."""

    def __init__(self, linear: nn.Linear, stored: bool = False) -> None:
        super().__init__()
        # A plain tensor, not a parameter: it keeps its type when the model's changes.
        wide = linear.weight.detach().float()
        self.weight = wide if stored else fake_quantise_weights(wide)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] to [..., N]."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        y = fake_quantise_activations(x.to(wide)) @ self.weight.to(wide).T
        return (y if self.bias is None else y + self.bias.to(wide)).to(x.dtype)


def replace_projections(model: nn.Module, stored: bool = False) -> nn.Module:
    """Replaces every projection of a Hugging Face model by a FakeQuantisedLinear, not the head. stored: see there."""
    for module in model.modules():
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name.endswith("_proj"):
                setattr(module, name, FakeQuantisedLinear(child, stored))
    return model
