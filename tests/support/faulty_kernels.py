"""A kernel of one's own whose knob FAULT is the fault of a candidate: y = 2 x, by eight programs per row of which one works."""

import triton
import triton.language as tl
from tune_kernels import Kernel, Scalar, Tensor

PROGRAMS = 8
FAULTS = ("none", "wrong", "one element", "race", "ticket", "neighbour", "past the end", "nothing", "unmasked")


@triton.jit
def double(x_ptr, y_ptr, ticket_ptr, rows, H, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    row, program = tl.program_id(0), tl.program_id(1)
    offs = tl.arange(0, BLOCK)
    mask = offs < H
    x = tl.load(x_ptr + row * H + offs, mask=mask, other=0.0)
    y = 2.0 * x
    if FAULT == "wrong":
        y = y * 1.1
    if FAULT == "one element":
        y = tl.where((offs == 3) & (row == 0), y + 1.0, y)
    if FAULT == "race":
        y = y * (1.0 + program * 1e-5)
    if FAULT == "ticket":
        y = y * (1.0 + (tl.atomic_add(ticket_ptr, 1) & 63) * 1e-6)
    if FAULT == "neighbour":
        y = y + tl.load(x_ptr + (row + 1) % rows * H + offs, mask=mask, other=0.0) * 1e-6
    if FAULT == "past the end":
        tl.store(y_ptr + rows * H + offs, y, mask=offs < 1)
    if FAULT == "unmasked":
        y = y + 0.0 * tl.load(x_ptr + rows * H + offs)
    if FAULT == "race":
        tl.store(y_ptr + row * H + offs, y, mask=mask)
    elif FAULT != "nothing":
        tl.store(y_ptr + row * H + offs, y, mask=mask & (program == 0))


def make(*faults: str, **changes: object) -> Kernel:
    """Candidates with these faults."""
    described: dict[str, object] = {
        "arguments": {"x_ptr": Tensor("fp32", "rows", "H"), "y_ptr": Tensor("fp32", "rows", "H", output=True),
                      "ticket_ptr": Tensor("i32", 1), "rows": Scalar("i32", "rows"), "H": Scalar("i32", "H")},
        "shapes": [{"rows": rows, "H": 96} for rows in (5, 3, 2)],
        "knobs": [{"FAULT": fault, "BLOCK": block, "num_warps": 4} for fault in faults for block in (128, 256)],
        "grid": lambda shape, knobs: (shape["rows"], PROGRAMS), "reference": lambda x: 2 * x, "max_rms_error": 1e-4,
        "rows": "rows", "name": "double"}
    return Kernel(double, **{**described, **changes})  # type: ignore[arg-type]


kernel = make(*FAULTS)
few = make("none", "wrong", name="few", shapes=[{"rows": rows, "H": 96} for rows in (5, 2)])
