"""Layer norm: y = (x - mean(x)) / sqrt(var(x) + eps) * w + b over rows of H values, a row in one block."""

import triton
import triton.language as tl
from tune_kernels import Kernel, Scalar, Tensor


@triton.jit
def layer_norm(x_ptr, w_ptr, b_ptr, y_ptr, H, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    inside = offs < H
    x = tl.load(x_ptr + row * H + offs, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, x - tl.sum(x, 0) / H, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 0) / H + eps)
    w = tl.load(w_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * H + offs, (centred * scale * w + b).to(tl.bfloat16), mask=inside)


def reference(x, w, b, eps, **rest):
    """In fp64."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * w + b


kernel = Kernel(
    layer_norm,
    arguments={"x_ptr": Tensor("bf16", "rows", "H"), "w_ptr": Tensor("bf16", "H"), "b_ptr": Tensor("bf16", "H"),
               "y_ptr": Tensor("bf16", "rows", "H", output=True), "H": Scalar("i32", "H"), "eps": 1e-5,
               "BLOCK": lambda shape, knobs: triton.next_power_of_2(shape["H"])},
    shapes=[{"rows": 4096, "H": 5120}],
    knobs={"num_warps": [4, 8, 16]},
    grid=lambda shape, knobs: (shape["rows"],),
    reference=reference, max_rms_error=4e-3, rows="rows",
)
