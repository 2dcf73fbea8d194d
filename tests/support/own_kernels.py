"""Functions that the tests of kernels of one's own describe."""

import triton
import triton.language as tl


@triton.jit
def norm(x_ptr, w_ptr, y_ptr, stride, H, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + offs, mask=offs < H, other=0.0).to(tl.float32)
    r = 1 / tl.sqrt(tl.sum(x * x, 0) / H + eps)
    w = tl.load(w_ptr + offs, mask=offs < H, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * stride + offs, (x * r * w).to(tl.bfloat16), mask=offs < H)


@triton.autotune([triton.Config({"BLOCK": 1024}, num_warps=4), triton.Config({"BLOCK": 2048}, num_warps=8, num_stages=2,
                                                                              maxnreg=128)], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def scale(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(y_ptr + offs, tl.load(x_ptr + offs) * factor)
    else:
        tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n) * factor, mask=offs < n)


@triton.jit
def add_all(parts, bias_ptr, y_ptr, n, DTYPE: tl.constexpr, MODE: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(parts[0] + offs, mask=offs < n) + tl.load(parts[1] + offs, mask=offs < n)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + offs, mask=offs < n)
    if MODE == "double":
        y += y
    tl.store(y_ptr + offs, y.to(DTYPE), mask=offs < n)


@triton.jit
def copy_tiles(x, y, M, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0) * BLOCK_M
    if row < M:
        y.store([row, 0], x.load([row, 0]))
