"""Weights as int8 with one scale per row, in a safetensors file: `NAME` int8 [N, K] beside `NAME_scale` fp32 [N, 1].

value = int8 * scale, scale = the row's largest magnitude / 127. A value's error is at most half a scale. The files take a quarter
of fp32's bytes. Drafters are stored so: their weights change the speed of a request and never its tokens.
"""

import torch

from ..checkpoint.weights import Tensors
from ..errors import LoadError

SCALE = "_scale"
LARGEST = 127  # symmetric: -128 is not used


def quantise_rows(tensors: Tensors) -> Tensors:
    """Every float matrix [N, K] as int8 with its scales; vectors and integer tensors unchanged."""
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or not tensor.is_floating_point():
            stored[name] = tensor
            continue
        scale = tensor.float().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / LARGEST
        stored[name] = (tensor.float() / scale).round().clamp(-LARGEST, LARGEST).to(torch.int8)
        stored[name + SCALE] = scale
    return stored


def dequantise_rows(tensors: Tensors, where: str) -> Tensors:
    """The tensors with every int8 matrix [N, K] as fp32, without the scales. where: the file, for errors.

    Raises:
        LoadError: an int8 tensor without scales, scales without an int8 tensor, scales that are misshapen or not positive.
    """
    found: Tensors = {}
    for name, tensor in tensors.items():
        base = name.removesuffix(SCALE)
        if base != name:
            if base not in tensors or tensors[base].dtype != torch.int8:
                raise LoadError(f"{where}: {name} has no int8 tensor {base}", expected="scales beside the tensor they scale")
            continue
        if tensor.dtype != torch.int8:
            found[name] = tensor
            continue
        scale = tensors.get(name + SCALE)
        if scale is None or tensor.ndim != 2 or tuple(scale.shape) != (tensor.shape[0], 1) or scale.dtype != torch.float32:
            raise LoadError(f"{where}: {name} is int8 {list(tensor.shape)}", expected=f"[N, K] beside {name}{SCALE}, fp32 [N, 1]")
        if not bool((scale > 0).all() & torch.isfinite(scale).all()):
            raise LoadError(f"{where}: {name}{SCALE} holds a scale that isn't positive and finite")
        found[name] = tensor.float() * scale
    return found
