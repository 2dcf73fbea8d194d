"""Kernels of one's own that a GPU can tell apart: a norm, a softmax and a matrix product, each with a few schedules."""

import own_kernels
import triton
import triton.language as tl
from tune_kernels import Kernel, Scalar, Tensor


@triton.jit
def softmax(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    greatest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + offs, mask=offs < N, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(greatest, x)
        scale = tl.where(higher == float("-inf"), 0.0, tl.exp(greatest - higher))
        total = total * scale + tl.where(x == float("-inf"), 0.0, tl.exp(x - higher))
        greatest = higher
    most = tl.max(greatest, 0)
    whole = tl.sum(total * tl.exp(greatest - most), 0)
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + offs, mask=offs < N, other=float("-inf")).to(tl.float32)
        tl.store(y_ptr + row * N + offs, (tl.exp(x - most) / whole).to(tl.bfloat16), mask=offs < N)


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + offs_m[:, None] * K + k + offs_k[None, :], mask=offs_m[:, None] < M, other=0.0)
        b = tl.load(b_ptr + offs_n[None, :] * K + k + offs_k[:, None])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc.to(tl.bfloat16), mask=offs_m[:, None] < M)


norm_kernel = Kernel(
    own_kernels.norm, name="rms_norm",
    arguments={"x_ptr": Tensor("bf16", "rows", "H"), "w_ptr": Tensor("bf16", "H"),
               "y_ptr": Tensor("bf16", "rows", "H", output=True), "stride": Scalar("i32", "H"), "H": Scalar("i32", "H"),
               "eps": Scalar("fp32", 1e-6)},
    shapes=[{"rows": rows, "H": 4096} for rows in (16, 4096)], knobs={"BLOCK": 4096, "num_warps": [1, 4, 8, 16]},
    grid=lambda shape, knobs: (shape["rows"],), contract=lambda shape, knobs: None if knobs["BLOCK"] >= shape["H"] else "short",
    reference=lambda x, w, eps: x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w, max_rms_error=4e-3, rows="rows")

softmax_kernel = Kernel(
    softmax, name="softmax",
    arguments={"x_ptr": Tensor("bf16", "rows", "N"), "y_ptr": Tensor("bf16", "rows", "N", output=True), "N": Scalar("i32", "N")},
    shapes=[{"rows": 1024, "N": 32768}], knobs={"BLOCK": [1024, 4096, 8192], "num_warps": [4, 8, 16]},
    grid=lambda shape, knobs: (shape["rows"],), reference=lambda x: x.softmax(-1), max_rms_error=4e-3, rows="rows")

matmul_kernel = Kernel(
    matmul, name="matmul",
    arguments={"a_ptr": Tensor("bf16", "M", "K"), "b_ptr": Tensor("bf16", "N", "K"),
               "c_ptr": Tensor("bf16", "M", "N", output=True), **{name: Scalar("i32", name) for name in "MNK"}},
    shapes=[{"M": 512, "N": 4096, "K": 4096}],
    knobs=[{"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 64, "num_warps": 4 if m * n <= 64 * 128 else 8, "num_stages": stages}
           for m, n in ((64, 64), (64, 128), (128, 128), (128, 256)) for stages in (2, 4)],
    grid=lambda shape, knobs: (-(-shape["M"] // knobs["BLOCK_M"]), shape["N"] // knobs["BLOCK_N"]),
    instructions={"sm_90": {"required": ["HGMMA"]}}, reference=lambda a, b: a @ b.T, max_rms_error=4e-3, rows="M")
