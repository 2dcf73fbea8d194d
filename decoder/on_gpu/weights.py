"""Weights in the layout of the GPU kernels: e4m3 with a scale per output channel, or bf16, row-major."""

from dataclasses import dataclass

import torch

from ...kernels.layout import Weights
from ...kernels.linear import interleave
from ...kernels.rope import HeadNorms
from ...schedules.recipe import Precision
from ...shapes.model import ModelShape
from ..checkpoint.fp8 import scaled
from ..checkpoint.weights import Tensors, pop_linear
from ..on_torch.linear import quantise_weights


@dataclass(frozen=True)
class Packed(Weights):
    """The weights of one linear on the device."""

    @property
    def nbytes(self) -> int:
        """Bytes that one pass reads."""
        return sum(t.numel() * t.element_size() for t in (self.w, self.scale, self.bias) if t is not None)


def token_table(w: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An embedding w [V, H] as bf16 on the device, with a row of zeros in memory before row 0: a row of NaN logits drafts token
    -1, and reading its embedding must give finite values."""
    if w.device == device and w.dtype == torch.bfloat16 and w.storage_offset() == w.shape[1]:
        return w  # has the row of zeros already
    table = torch.empty(w.shape[0] + 1, w.shape[1], dtype=torch.bfloat16, device=device)
    table[0] = 0
    table[1:] = w
    return table[1:]


def pack(w: torch.Tensor, precision: Precision, device: torch.device, bias: torch.Tensor | None = None,
         scale: torch.Tensor | None = None) -> Packed:
    """A linear's weights in the recipe's precision: w [N, K] and bias [N] in any float type; scale [N] fp32: of an e4m3 w."""
    bias = None if bias is None else bias.to(device, torch.bfloat16)
    if precision.is_e4m3:
        w_q, scale = quantise_weights(w.to(device)) if scale is None else (w.to(device).contiguous(), scale.to(device))
        return Packed(w_q, scale.contiguous(), bias)
    return Packed(scaled(w, scale).to(device, torch.bfloat16).contiguous(), None, bias)


@dataclass(frozen=True)
class PackedLayer:
    """One layer's weights. Norms [H] bf16; head_norms: None for a model that doesn't norm its heads."""

    input_norm: torch.Tensor
    qkv: Packed
    o: Packed
    post_norm: torch.Tensor
    gate_up: Packed
    down: Packed
    head_norms: HeadNorms | None = None

    @property
    def linears(self) -> dict[str, Packed]:
        """By kernel name."""
        return {"qkv": self.qkv, "o": self.o, "gate_up": self.gate_up, "down": self.down}


def pack_layer(tensors: Tensors, prefix: str, precision: Precision, shape: ModelShape, device: torch.device) -> PackedLayer:
    """Packs the layer of the tensors whose names begin with `prefix`, and consumes them. q, k, v become one linear; so do gate
    and up."""
    def packed(*names: str, bias: bool = False, interleaved: bool = False) -> Packed:
        w, b, scale = pop_linear(tensors, prefix, names, bias)
        if interleaved:
            w, scale = interleave(w), None if scale is None else interleave(scale)
        return pack(w, precision, device, b, scale)

    def vector(name: str) -> torch.Tensor:
        return tensors.pop(f"{prefix}{name}.weight").to(device, torch.bfloat16)

    head_norms = None
    if shape.qk_norm:
        head_norms = HeadNorms(vector("self_attn.q_norm"), vector("self_attn.k_norm"), shape.rms_norm_eps)
    return PackedLayer(input_norm=vector("input_layernorm"),
                       qkv=packed(*(f"self_attn.{name}_proj" for name in "qkv"), bias=shape.qkv_bias),
                       o=packed("self_attn.o_proj"), post_norm=vector("post_attention_layernorm"),
                       gate_up=packed("mlp.gate_proj", "mlp.up_proj", interleaved=True), down=packed("mlp.down_proj"),
                       head_norms=head_norms)
