"""Fused causal attention over a prompt: o = softmax(q k^T / sqrt(D)) v per head, q, k, v and o [heads, T, D] bf16, with the
running maximum and sum of FlashAttention (Dao et al., 2022, algorithm 1)."""

import triton
import triton.language as tl
from tune_kernels import Kernel, Scalar, Tensor


@triton.jit
def attention(q_ptr, k_ptr, v_ptr, o_ptr, T, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    base = tl.program_id(1).to(tl.int64) * T * D
    first = tl.program_id(0) * BLOCK_M
    offs_m, offs_d = first + tl.arange(0, BLOCK_M), tl.arange(0, D)
    q = tl.load(q_ptr + base + offs_m[:, None] * D + offs_d[None, :], mask=offs_m[:, None] < T, other=0.0)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    for start in range(0, tl.minimum(first + BLOCK_M, T), BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        k = tl.load(k_ptr + base + offs_n[None, :] * D + offs_d[:, None], mask=offs_n[None, :] < T, other=0.0)
        s = tl.dot(q, k) * (scale * 1.4426950408889634)
        s = tl.where(offs_n[None, :] <= offs_m[:, None], s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        shrink = tl.exp2(m - new)
        v = tl.load(v_ptr + base + offs_n[:, None] * D + offs_d[None, :], mask=offs_n[:, None] < T, other=0.0)
        acc = tl.dot(p.to(tl.bfloat16), v, acc * shrink[:, None])
        l = l * shrink + tl.sum(p, 1)
        m = new
    tl.store(o_ptr + base + offs_m[:, None] * D + offs_d[None, :], (acc / l[:, None]).to(tl.bfloat16), mask=offs_m[:, None] < T)


def reference(q, k, v, scale, **rest):
    """In fp64."""
    import torch

    s = (q @ k.transpose(-1, -2)) * scale
    later = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
    return torch.softmax(s.masked_fill(later, float("-inf")), -1) @ v


SIZES = ("heads", "T", "D")
kernel = Kernel(
    attention,
    arguments={"q_ptr": Tensor("bf16", *SIZES), "k_ptr": Tensor("bf16", *SIZES), "v_ptr": Tensor("bf16", *SIZES),
               "o_ptr": Tensor("bf16", *SIZES, output=True), "T": Scalar("i32", "T"), "D": Scalar("constexpr", "D"),
               "scale": lambda shape, knobs: shape["D"] ** -0.5},
    shapes=[{"heads": 32, "T": 2048, "D": 128}],
    knobs={"BLOCK_M": [64, 128], "BLOCK_N": [32, 64], "num_warps": [4, 8], "num_stages": [2, 3]},
    grid=lambda shape, knobs: (triton.cdiv(shape["T"], knobs["BLOCK_M"]), shape["heads"]),
    reference=reference, max_rms_error=8e-3, rows="heads",
)
