"""Checkpoints with FP8 projections: e4m3 with a scale per output channel or per tensor, in the formats of compressed-tensors and
FBGEMM. Values and scales are kept bit for bit, so no weight is quantised twice. A checkpoint's settings for activations are
ignored: a recipe's two e4m3 terms are more exact than one.

Refused by name: scales per block or group, other types, static activation scales, a quantised KV cache or head.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from ...shapes.fields import Fields
from ..errors import LoadError
from .weights import SCALE, Tensors

E4M3 = torch.float8_e4m3fn
NAN_BITS = 0x7F  # e4m3's NaN without its sign
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # each group becomes one linear
UNUSED = (".input_scale_ub",)  # FBGEMM: a bound on the scales of one-term activations
WITHOUT = "use the checkpoint that isn't quantised: a recipe quantises at load"


def check_quantisation(config: Fields) -> bool:
    """Whether a configuration declares FP8 projections.

    Raises:
        LoadError: it declares another quantisation.
    """
    if not config.table.get("quantization_config"):
        return False
    declared = config.inner("quantization_config")
    method = declared.get("quant_method", str)
    if method == "fbgemm_fp8":
        return True
    if method == "compressed-tensors":
        _check_compressed(declared)
        return True
    blocks = declared.table.get("weight_block_size")
    found = f"scales per block of {blocks}" if blocks else f"is {method!r}"
    raise declared.fail("quant_method", found, expected="compressed-tensors or fbgemm_fp8 with scales per output channel",
                        action="scales per block need a kernel that scales inside its loop over K; " * bool(blocks) + WITHOUT)


def _check_compressed(declared: Fields) -> None:
    layout = declared.get("format", str)
    if layout not in ("float-quantized", "naive-quantized"):
        raise declared.fail("format", f"is {layout!r}", expected="float-quantized", action=WITHOUT)
    if declared.table.get("kv_cache_scheme"):
        raise declared.fail("kv_cache_scheme", "a quantised KV cache is not supported", action=WITHOUT)
    groups = declared.inner("config_groups")
    for name in groups.table:
        weights = groups.inner(name).inner("weights")
        kind = (weights.get("type", str), weights.get("num_bits", int))
        if kind != ("float", 8):
            raise weights.fail("type", f"is {kind[0]} of {kind[1]} bits", expected="float of 8 bits", action=WITHOUT)
        strategy = weights.get("strategy", str)
        if strategy not in ("channel", "tensor"):
            raise weights.fail("strategy", f"is {strategy!r}", expected="channel or tensor",
                               action="scales inside a row need a kernel that scales inside its loop over K; " + WITHOUT)


def take_scales(tensors: Tensors, expected: Mapping[str, tuple[int, ...]], path: Path) -> dict[str, tuple[int, ...]]:
    """Checks the e4m3 tensors of a file and stores the scales of each as [N] fp32 under NAME + SCALE. Removes unused tensors.
    Returns the names and sizes of the scales.

    Raises:
        LoadError: no tensor is e4m3; an e4m3 tensor has no scales, holds NaN, isn't a projection, or belongs to a linear with
            other types; scales are misshapen or not positive and finite.
    """
    for name in [n for n in tensors if n.endswith(UNUSED)]:
        del tensors[name]
    names = [name for name, tensor in tensors.items() if tensor.dtype == E4M3 and name in expected]
    if not names:
        raise LoadError(f"{path}: the configuration declares FP8 and no tensor is e4m3", expected="e4m3 projections",
                        action=WITHOUT)
    for name in names:
        if not name.endswith("_proj.weight"):
            raise LoadError(f"{path}: {name} is e4m3", expected="e4m3 only in projections; the head and the embedding are bf16",
                            action=WITHOUT)
        tensors[name + SCALE] = _scales(tensors, name, path)
        for group in TOGETHER:
            base, _, part = name.removesuffix(".weight").rpartition(".")
            alone = [other for other in group if part in group and f"{base}.{other}.weight" not in names]
            if alone:
                raise LoadError(f"{path}: {name} is e4m3 and {', '.join(alone)} is not",
                                expected="all of them or none: they become one linear", action=WITHOUT)
    return {name + SCALE: expected[name][:1] for name in names}


def _scales(tensors: Tensors, name: str, path: Path) -> torch.Tensor:
    """The scales [N] fp32 of one e4m3 tensor [N, K]. Raises LoadError."""
    w, scale = tensors[name], tensors.get(name + SCALE)
    if scale is None or not scale.is_floating_point() or scale.numel() not in (1, w.shape[0]):
        found = "missing" if scale is None else f"{scale.dtype} {list(scale.shape)}"
        raise LoadError(f"{path}: {name + SCALE} is {found}", expected=f"[{w.shape[0]}, 1], a scale per output channel, or one")
    if bool((w.view(torch.uint8) & NAN_BITS == NAN_BITS).any()):
        raise LoadError(f"{path}: tensor {name} holds NaN", expected="finite weights")
    wide = scale.float().reshape(-1).expand(w.shape[0]).contiguous()
    if not bool(((wide > 0) & wide.isfinite()).all()):
        raise LoadError(f"{path}: {name + SCALE} holds a scale that isn't positive and finite", expected="positive scales")
    return wide


def dequantised(tensors: Tensors) -> Tensors:
    """The tensors with every e4m3 matrix multiplied by its scales, in fp32, and without the scales."""
    return {name: scaled(w, tensors.get(name + SCALE)) for name, w in tensors.items() if not name.endswith(SCALE)}


def scaled(w: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """w [N, K] times scale [N], in fp32; w itself without a scale."""
    return w if scale is None else w.float() * scale[:, None]
