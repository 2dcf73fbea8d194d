"""The fixed buffers of one pass. Addresses never change, so that a pass can be captured in a graph."""

from dataclasses import dataclass

import torch

from ...schedules.schedule import StepSchedules
from ...shapes.model import ModelShape


@dataclass(frozen=True)
class Workspace:
    """Buffers of a pass of up to `rows` rows.

    x: the residual [rows, H]. entry, hidden, heads, act_q: what qkv, gate_up, o and down read, [2, rows, K] terms in e4m3 with
    x_scale, heads_scale, act_scale [rows], or [1, rows, K] bf16 (entry has `inputs` hidden sizes side by side). qkv, y_o,
    y_down: fp32 partials [split_k, rows, N], or bf16 [1, rows, N]. q [rows, heads, head_dim]; act [rows, I] and final [rows, H]
    bf16; features [rows, 3 H], zeros at first: the first proposal reads more rows than there are, and a NaN would reach others.
    """

    rows: int
    x: torch.Tensor
    entry: torch.Tensor
    hidden: torch.Tensor
    x_scale: torch.Tensor | None
    qkv: torch.Tensor
    q: torch.Tensor
    heads: torch.Tensor
    heads_scale: torch.Tensor | None
    y_o: torch.Tensor
    act: torch.Tensor
    act_q: torch.Tensor
    act_scale: torch.Tensor | None
    y_down: torch.Tensor
    final: torch.Tensor
    features: torch.Tensor


def new_workspace(shape: ModelShape, rows: int, e4m3: bool, split_k: dict[str, int], device: torch.device,
                  inputs: int = 1) -> Workspace:
    """split_k: of qkv, o and down in this phase. inputs: hidden sizes side by side that qkv reads (2 in an EAGLE-3 drafter)."""
    narrow = torch.float8_e4m3fn if e4m3 else torch.bfloat16
    H, inner = shape.hidden_size, shape.intermediate_size
    wide = shape.num_heads * shape.head_dim
    qkv = wide + 2 * shape.num_kv_heads * shape.head_dim

    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def narrowed(N: int) -> torch.Tensor:
        return empty(2 if e4m3 else 1, rows, N, dtype=narrow)

    def scale() -> torch.Tensor | None:
        return empty(rows, dtype=torch.float32) if e4m3 else None

    def linear(kernel: str, N: int) -> torch.Tensor:
        split = split_k[kernel]
        return empty(split, rows, N, dtype=torch.float32 if split > 1 else torch.bfloat16)

    act = empty(rows, inner)
    return Workspace(
        rows=rows, x=empty(rows, H), entry=narrowed(inputs * H), hidden=narrowed(H), x_scale=scale(), qkv=linear("qkv", qkv),
        q=empty(rows, shape.num_heads, shape.head_dim), heads=narrowed(wide), heads_scale=scale(),
        y_o=linear("o", H), act=act,
        act_q=narrowed(inner) if e4m3 else act[None], act_scale=scale(), y_down=linear("down", H),
        final=empty(rows, H), features=torch.zeros(rows, 3 * H, dtype=torch.bfloat16, device=device))


def splits(schedules: StepSchedules) -> dict[str, int]:
    """split_k of the linears whose partials a reader sums."""
    return {"qkv": schedules.qkv.split_k, "o": schedules.o.split_k, "down": schedules.down.split_k}
