"""The fixed buffers of passes and rounds on the device: the rows to feed and their positions, and all that a pass computes.
Addresses never change, so that a pass can be captured in a graph."""

from dataclasses import dataclass

import torch

from ...kernels.layout import ENDS, FINISHED, LEFT, LENGTH, PAIR, ROUND, ROWS, STARTS, STATE, STRIDE, TIP, Activation
from ...schedules.schedule import StepSchedules
from ...shapes.model import ModelShape

NO_END = -2  # pads the list of end ids: neither a token nor the -1 of a row of NaN


class DeviceInputs:
    """row_tokens [ROWS], state [STATE], starts [STARTS * STRIDE], pair [PAIR], ends [ENDS] (see kernels/layout.py), all int32 in
    one buffer that one copy fills. length [1]: tokens in the cache, part of state."""

    def __init__(self, device: torch.device) -> None:
        sizes = (ROWS, STATE, STARTS * STRIDE, PAIR, ENDS)
        self.buffer = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.row_tokens, self.state, self.starts, self.pair, self.ends = self.buffer.split(sizes)
        self.length = self.state[LENGTH:LENGTH + 1]
        self.tip = self.state[TIP:TIP + 1]

    def upload(self, tokens: list[int], length: int) -> None:
        """Rows to feed and the number of tokens before them, for one pass."""
        rows = [*tokens, *[0] * (ROWS - len(tokens)), length]
        self.buffer[:ROWS + 1].copy_(torch.tensor(rows, dtype=torch.int32))

    def begin(self, tokens: list[int], left: int, ends: list[int], finished: bool = False) -> None:
        """A request's first round. tokens: of the sequence, the last one in no cache yet; left: tokens that may still be emitted;
        ends: ids that end it. finished: rounds leave the state as it is."""
        assert len(ends) <= ENDS
        before, pending = tokens[-2:]
        length = len(tokens) - 1
        state = [0] * STATE
        state[LENGTH], state[TIP], state[LEFT], state[ROUND], state[FINISHED] = length, 0, left, 0, int(finished)
        starts = [0] * (STARTS * STRIDE)
        starts[::STRIDE] = [length - 1, *range(length - 1, length + STARTS - 2)]
        values = [pending, *[0] * (ROWS - 1), *state, *starts, before, pending, *[0] * (PAIR - 2), *ends,
                  *[NO_END] * (ENDS - len(ends))]
        self.buffer.copy_(torch.tensor(values, dtype=torch.int32))

    def start(self, index: int) -> torch.Tensor:
        """starts[index] as a kernel's length: 0 is the length before the round, 1 + i is the length now, less one, plus i."""
        return self.starts[index * STRIDE:index * STRIDE + 1]


@dataclass(frozen=True)
class Verified:
    """The last verification as a drafter reads it, at fixed addresses: inputs, as `accept` left them; winners [row tile] int32
    and features [ROWS, 3 H] bf16 of its rows."""

    inputs: DeviceInputs
    winners: torch.Tensor
    features: torch.Tensor

    def like(self, device: torch.device) -> "Verified":
        """Room for a copy."""
        return Verified(DeviceInputs(device), torch.zeros_like(self.winners, device=device),
                        torch.zeros_like(self.features, device=device))

    def copy_from(self, other: "Verified") -> None:
        """Copies another's values, in the order of the current streams."""
        self.inputs.buffer.copy_(other.inputs.buffer, non_blocking=True)
        self.winners.copy_(other.winners, non_blocking=True)
        self.features.copy_(other.features, non_blocking=True)


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
