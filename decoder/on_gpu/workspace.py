"""The fixed buffers of one pass. Addresses never change, so that a pass can be captured in a graph."""

from dataclasses import dataclass

import torch

from ...kernels.layout import Activation
from ...schedules.schedule import StepSchedules
from ...shapes.model import ModelShape


@dataclass(frozen=True)
class Splits:
    """split_k of the linears whose partials their reader sums."""

    qkv: int = 1
    o: int = 1
    down: int = 1


@dataclass(frozen=True)
class Workspace:
    """Buffers of a pass of up to `rows` rows.

    x: the residual [rows, H]. entry, hidden, heads, act_q: inputs of qkv, gate_up, o and down, [2, rows, K] terms in e4m3 with
    scales, or [1, rows, K] bf16; entry has `inputs` hidden sizes side by side, and shares its scales with hidden. qkv, y_o,
    y_down: fp32 partials [split_k, rows, N], or bf16 [1, rows, N]. q [rows, heads, head_dim]; act [rows, I] and final [rows, H]
    bf16; features [rows, 3 H], zeros at first: the first proposal reads more rows than there are, and a NaN would reach others.
    """

    rows: int
    x: torch.Tensor
    entry: Activation
    hidden: Activation
    qkv: torch.Tensor
    q: torch.Tensor
    heads: Activation
    y_o: torch.Tensor
    act: torch.Tensor
    act_q: Activation
    y_down: torch.Tensor
    final: torch.Tensor
    features: torch.Tensor


def new_workspace(shape: ModelShape, rows: int, e4m3: bool, splits: Splits, device: torch.device, inputs: int = 1) -> Workspace:
    """inputs: hidden sizes side by side that qkv reads (2 in an EAGLE-3 drafter)."""
    H, inner = shape.hidden_size, shape.intermediate_size
    wide = shape.num_heads * shape.head_dim

    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def scale() -> torch.Tensor | None:
        return empty(rows, dtype=torch.float32) if e4m3 else None

    def narrowed(N: int, scale: torch.Tensor | None) -> Activation:
        return Activation(empty(2 if e4m3 else 1, rows, N, dtype=torch.float8_e4m3fn if e4m3 else torch.bfloat16), scale)

    def linear(split_k: int, N: int) -> torch.Tensor:
        return empty(split_k, rows, N, dtype=torch.float32 if split_k > 1 else torch.bfloat16)

    act, x_scale = empty(rows, inner), scale()
    return Workspace(
        rows=rows, x=empty(rows, H), entry=narrowed(inputs * H, x_scale), hidden=narrowed(H, x_scale),
        qkv=linear(splits.qkv, wide + 2 * shape.num_kv_heads * shape.head_dim), q=empty(rows, shape.num_heads, shape.head_dim),
        heads=narrowed(wide, scale()), y_o=linear(splits.o, H), act=act,
        act_q=narrowed(inner, scale()) if e4m3 else Activation(act[None]), y_down=linear(splits.down, H),
        final=empty(rows, H), features=torch.zeros(rows, 3 * H, dtype=torch.bfloat16, device=device))


def splits_of(schedules: StepSchedules) -> Splits:
    """Those of a decode step."""
    return Splits(schedules.qkv.split_k, schedules.o.split_k, schedules.down.split_k)
