"""Input of a pass beside weights and cache, at fixed addresses on the device: the rows to feed and their positions."""

from dataclasses import dataclass

import torch

from ...kernels.layout import ENDS, FINISHED, LEFT, LENGTH, PAIR, ROUND, ROWS, STARTS, STATE, STRIDE, TIP

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
