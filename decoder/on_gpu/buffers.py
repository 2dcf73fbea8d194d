"""The buffers of passes and rounds on the device: rows, positions, and intermediate results. Their addresses never change, as a
captured graph demands."""

from dataclasses import dataclass

import torch

from ...kernels.layout import ENDS, FINISHED, LEFT, LENGTH, PAIR, ROUND, ROWS, STARTS, STATE, STRIDE, TIP, Activation
from ...schedules.schedule import StepSchedules
from ...shapes.model import ModelShape

NO_END = -2  # pads the list of end ids; not -1, which marks a row of NaN


class DeviceInputs:
    """row_tokens [ROWS], state [STATE], starts [STARTS * STRIDE], pair [PAIR], ends [ENDS] (see kernels/layout.py): int32 views
    of one buffer, which one copy fills. length [1]: tokens in the cache, a view of state; tip [1]: likewise."""

    def __init__(self, device: torch.device) -> None:
        sizes = (ROWS, STATE, STARTS * STRIDE, PAIR, ENDS)
        self.buffer = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.row_tokens, self.state, self.starts, self.pair, self.ends = self.buffer.split(sizes)
        self.length = self.state[LENGTH:LENGTH + 1]
        self.tip = self.state[TIP:TIP + 1]

    def upload(self, tokens: list[int], length: int) -> None:
        """Writes the rows of one pass and the number of tokens before them. tokens: at most ROWS."""
        rows = [*tokens, *[0] * (ROWS - len(tokens)), length]
        self.buffer[:ROWS + 1].copy_(torch.tensor(rows, dtype=torch.int32))

    def begin(self, tokens: list[int], left: int, ends: list[int], finished: bool = False) -> None:
        """Writes the state before a request's first round.

        tokens: the sequence, at least two; its last token is in no cache yet. left: tokens that may still be emitted. ends: ids
        that end the request, at most ENDS. finished: marks the request as ended: rounds then don't change the state.
        """
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
        """starts[index] as a kernel's length [1] int32. Index 0: the length before the round; index 1 + i: the length now - 1 +
        i."""
        return self.starts[index * STRIDE:index * STRIDE + 1]


@dataclass(frozen=True)
class Verified:
    """The last verification, for the drafter to read, at fixed addresses. inputs: after `accept`; winners [row tile] int32 and
    features [ROWS, 3 H] bf16: of its rows."""

    inputs: DeviceInputs
    winners: torch.Tensor
    features: torch.Tensor

    def like(self, device: torch.device) -> "Verified":
        """Empty buffers for a copy on `device`."""
        return Verified(DeviceInputs(device), torch.zeros_like(self.winners, device=device),
                        torch.zeros_like(self.features, device=device))

    def copy_from(self, other: "Verified") -> None:
        """Copies the values of `other`, on the current stream."""
        self.inputs.buffer.copy_(other.inputs.buffer, non_blocking=True)
        self.winners.copy_(other.winners, non_blocking=True)
        self.features.copy_(other.features, non_blocking=True)


@dataclass(frozen=True)
class Splits:
    """split_k of the linears whose partials the next kernel sums."""

    qkv: int = 1
    o: int = 1
    down: int = 1


@dataclass(frozen=True)
class Workspace:
    """Buffers of a pass of up to `rows` rows.

    x [rows, H] bf16: the residual. entry, hidden, heads, act_q: inputs of qkv, gate_up, o and down, as [2, rows, K] terms in e4m3
    with scales, or [1, rows, K] bf16. entry holds `inputs` hidden sizes side by side and shares its scales with hidden. qkv, y_o,
    y_down: fp32 partials [split_k, rows, N], or bf16 [1, rows, N]. q [rows, heads, head_dim], act [rows, I], final [rows, H]:
    bf16. features [rows, 3 H] bf16, zeros at first: the first proposal reads rows that no pass has written, and a NaN there would
    reach other rows.
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
    """The buffers of a model of this shape. e4m3: whether linears read e4m3; inputs: hidden sizes side by side in the input of
    qkv (2 in an EAGLE-3 drafter)."""
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
    """split_k of a decode step's schedules."""
    return Splits(schedules.qkv.split_k, schedules.o.split_k, schedules.down.split_k)
