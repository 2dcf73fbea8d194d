"""FP8 matrix product with block scales: y = x @ w.T, x [M, K] e4m3 with a scale per row and 128 values of K, w [N, K] e4m3
with a scale per 128 x 128 block, y [M, N] bf16. Each 128 values of K are multiplied by the FP8 instruction, scaled, and added
in fp32."""

import triton
import triton.language as tl
from tune_kernels import Kernel, Scalar, Tensor

GROUP = 128  # values of K that share a scale


@triton.jit
def scaled_matmul(x_ptr, w_ptr, x_scale_ptr, w_scale_ptr, y_ptr, M, N, K, GROUP_K: tl.constexpr, BLOCK_M: tl.constexpr,
                  BLOCK_N: tl.constexpr):
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, GROUP_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(0, K // GROUP_K):
        k = group * GROUP_K + offs_k
        x = tl.load(x_ptr + offs_m[:, None] * K + k[None, :], mask=offs_m[:, None] < M, other=0.0)
        w = tl.load(w_ptr + offs_n[None, :] * K + k[:, None], mask=offs_n[None, :] < N, other=0.0)
        x_scale = tl.load(x_scale_ptr + offs_m * (K // GROUP_K) + group, mask=offs_m < M, other=0.0)
        w_scale = tl.load(w_scale_ptr + (pid_n * BLOCK_N // GROUP_K) * (K // GROUP_K) + group)
        acc += tl.dot(x, w) * (x_scale * w_scale)[:, None]
    inside = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tl.store(y_ptr + offs_m[:, None] * N + offs_n[None, :], acc.to(tl.bfloat16), mask=inside)


def reference(x, w, x_scale, w_scale, **rest):
    """In fp64."""
    w_scale = w_scale.repeat_interleave(GROUP, 0)[: len(w)].repeat_interleave(GROUP, 1)
    return (x * x_scale.repeat_interleave(GROUP, 1)) @ (w * w_scale).T


def contract(shape, knobs):
    """A block's columns share a scale, and groups are whole."""
    if shape["K"] % GROUP or GROUP % knobs["BLOCK_N"]:
        return f"K {shape['K']} and {GROUP} are no multiples of {GROUP} and BLOCK_N {knobs['BLOCK_N']}"
    return None


kernel = Kernel(
    scaled_matmul,
    arguments={"x_ptr": Tensor("e4m3", "M", "K"), "w_ptr": Tensor("e4m3", "N", "K"),
               "x_scale_ptr": Tensor("fp32", "M", "K // 128"),
               "w_scale_ptr": Tensor("fp32", "(N + 127) // 128", "K // 128"), "y_ptr": Tensor("bf16", "M", "N", output=True),
               "M": Scalar("i32", "M"), "N": Scalar("i32", "N"), "K": Scalar("i32", "K"), "GROUP_K": GROUP},
    shapes=[{"M": 4096, "N": 4096, "K": 4096}],
    knobs={"BLOCK_M": [64, 128], "BLOCK_N": [64, 128], "num_warps": [4, 8], "num_stages": [2, 3]},
    grid=lambda shape, knobs: (triton.cdiv(shape["M"], knobs["BLOCK_M"]), triton.cdiv(shape["N"], knobs["BLOCK_N"])),
    contract=contract,
    instructions={"sm_90": {"required": ["QGMMA"], "forbidden": ["HMMA"]},
                  **{arch: {"required": ["UTCQMMA"], "forbidden": ["HMMA"]} for arch in ("sm_100", "sm_103")}},
    reference=reference, max_rms_error=4e-3, rows="M",
)
