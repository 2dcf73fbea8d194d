"""RMS norm as one finds it, under @triton.autotune, and its description for tune-kernels: y = x / sqrt(mean(x^2) + eps) * w.

    tune-kernels --offline --kernel examples/my_norm.py --target sm_103
"""

import triton
import triton.language as tl
from tune_kernels import Kernel, Scalar, Stride, Tensor


@triton.autotune([triton.Config({"BLOCK": block}, num_warps=warps) for block in (1024, 4096) for warps in (4, 8)], key=["H"])
@triton.jit
def rms_norm(x_ptr, w_ptr, y_ptr, stride, H, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, H, BLOCK):
        x = tl.load(x_ptr + row * stride + start + offs, mask=start + offs < H, other=0.0).to(tl.float32)
        total += x * x
    scale = 1 / tl.sqrt(tl.sum(total, 0) / H + eps)
    for start in range(0, H, BLOCK):
        inside = start + offs < H
        x = tl.load(x_ptr + row * stride + start + offs, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + start + offs, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * stride + start + offs, (x * scale * w).to(tl.bfloat16), mask=inside)


def reference(x, w, eps, **rest):
    """In fp64."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w


kernel = Kernel(
    rms_norm,
    arguments={"x_ptr": Tensor("bf16", "rows", "H"), "w_ptr": Tensor("bf16", "H"),
               "y_ptr": Tensor("bf16", "rows", "H", output=True),
               "stride": Stride("x_ptr", 0), "H": Scalar("i32", "H"), "eps": 1e-6},
    shapes=[{"rows": rows, "H": 4096} for rows in (1, 16)],
    grid=lambda shape, knobs: (shape["rows"],),
    reference=reference, max_rms_error=4e-3, rows="rows",
)
