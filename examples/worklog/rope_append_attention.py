"""RoPE, KV append and decode attention in one kernel, the fusion that looks free and isn't.

    q, k = rotate(q), rotate(k);  k, v to slot `length` of the cache;  o = softmax(q k^T / sqrt(D)) v over length + 1 keys

One block per KV head holds the group's query heads as rows of one tile and walks over all keys. Compare its shared memory and its
blocks per SM with those of `attention`, which splits the keys over blocks and leaves RoPE and append to a kernel of their own: a
fused block keeps stages of K and V in shared memory, and only num_kv_heads blocks run at all.
"""

import triton
import triton.language as tl
from tune_kernels import Kernel, Scalar, Tensor


@triton.jit
def rotated(x_ptr, cos_ptr, sin_ptr, row, offs, D: tl.constexpr):
    """[rows, D] in fp32: pair i is (i, i + D / 2)."""
    HALF: tl.constexpr = D // 2
    x = tl.load(x_ptr + row * D + offs).to(tl.float32)
    other = tl.load(x_ptr + row * D + (offs + HALF) % D).to(tl.float32)
    cos, sin = tl.load(cos_ptr + offs % HALF), tl.load(sin_ptr + offs % HALF)
    return x * cos + tl.where(offs < HALF, -other, other) * sin


@triton.jit
def rope_append_attention(q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, k_cache_ptr, v_cache_ptr, length_ptr, o_ptr, scale,
                          SLOTS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Grid: (num_kv_heads,). GROUP query heads share a KV head."""
    head = tl.program_id(0)
    length = tl.load(length_ptr)
    row, offs = tl.arange(0, GROUP)[:, None], tl.arange(0, D)[None, :]
    q = (rotated(q_ptr + head * GROUP * D, cos_ptr, sin_ptr, row, offs, D) * (scale * 1.4426950408889634)).to(tl.bfloat16)
    one = tl.arange(0, 1)[:, None]
    k_new = rotated(k_ptr + head * D, cos_ptr, sin_ptr, one, offs, D).to(tl.bfloat16)
    base = head * SLOTS * D
    tl.store(k_cache_ptr + base + length * D + offs, k_new)
    tl.store(v_cache_ptr + base + length * D + offs, tl.load(v_ptr + head * D + offs))
    tl.debug_barrier()  # the block reads back the slot that it wrote
    m = tl.full((GROUP,), float("-inf"), tl.float32)
    l = tl.zeros((GROUP,), tl.float32)
    acc = tl.zeros((GROUP, D), tl.float32)
    for start in range(0, length + 1, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        k = tl.load(k_cache_ptr + base + key[None, :] * D + tl.arange(0, D)[:, None], mask=key[None, :] <= length, other=0.0)
        s = tl.where(key[None, :] <= length, tl.dot(q, k), float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        p, shrink = tl.exp2(s - new[:, None]), tl.exp2(m - new)
        v = tl.load(v_cache_ptr + base + key[:, None] * D + offs, mask=key[:, None] <= length, other=0.0)
        acc = tl.dot(p.to(tl.bfloat16), v, acc * shrink[:, None])
        l = l * shrink + tl.sum(p, 1)
        m = new
    tl.store(o_ptr + head * GROUP * D + row * D + offs, (acc / l[:, None]).to(tl.bfloat16))


kernel = Kernel(
    rope_append_attention,
    arguments={"q_ptr": Tensor("bf16", "kv_heads", "group", "D"), "k_ptr": Tensor("bf16", "kv_heads", "D"),
               "v_ptr": Tensor("bf16", "kv_heads", "D"), "cos_ptr": Tensor("fp32", "D // 2"), "sin_ptr": Tensor("fp32", "D // 2"),
               "k_cache_ptr": Tensor("bf16", "kv_heads", "slots", "D", output=True),
               "v_cache_ptr": Tensor("bf16", "kv_heads", "slots", "D", output=True), "length_ptr": Tensor("i32", 1),
               "o_ptr": Tensor("bf16", "kv_heads", "group", "D", output=True),
               "scale": lambda shape, knobs: shape["D"] ** -0.5,
               "SLOTS": Scalar("constexpr", "slots"), "GROUP": Scalar("constexpr", "group"), "D": Scalar("constexpr", "D")},
    shapes=[{"kv_heads": 4, "group": 16, "D": 128, "slots": 4096}],
    knobs={"BLOCK_N": [64, 128, 256], "num_warps": [4], "num_stages": [2, 3, 4]},
    grid=lambda shape, knobs: (shape["kv_heads"],),
)
