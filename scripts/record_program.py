#!/usr/bin/env python
"""A program for record_on_gpu.py: a sum, a scale with a heuristic, an autotuned product. Prints the largest errors as JSON."""

import json
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, offs < n) + tl.load(y_ptr + offs, offs < n), offs < n)


@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def scale(x_ptr, out_ptr, factor, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs) if EVEN else tl.load(x_ptr + offs, offs < n)
    tl.store(out_ptr + offs, x * factor, offs < n)


@triton.autotune([triton.Config({"BLOCK_N": n}, num_warps=w) for n in (16, 32) for w in (2, 4)], key=["N"])
@triton.jit
def product(x_ptr, w_ptr, y_ptr, N, K: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    offs_m, offs_n, offs_k = tl.arange(0, 16), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, K)
    w = tl.load(w_ptr + offs_n[None, :] * K + offs_k[:, None], offs_n[None, :] < N, 0.0)
    y = tl.dot(tl.load(x_ptr + offs_m[:, None] * K + offs_k), w)
    tl.store(y_ptr + offs_m[:, None] * N + offs_n[None, :], y.to(tl.bfloat16), offs_n[None, :] < N)


def main() -> None:
    def error(found: Any, expected: Any) -> float:
        return float((found.float() - expected.float()).abs().max())

    torch.manual_seed(0)
    x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    total, doubled = torch.empty_like(x), torch.empty_like(x)
    for _ in range(100):
        add[(triton.cdiv(1000, 256),)](x, y, total, 1000, BLOCK=256)
    scale[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, doubled, 2.0, 1000, BLOCK=128)
    a, w = torch.randn(16, 64, device="cuda").bfloat16(), torch.randn(96, 64, device="cuda").bfloat16()
    b = torch.empty(16, 96, device="cuda", dtype=torch.bfloat16)
    product[lambda meta: (triton.cdiv(96, meta["BLOCK_N"]),)](a, w, b, 96, K=64)
    torch.cuda.synchronize()
    print(json.dumps({"add": error(total, x + y), "scale": error(doubled, x * 2), "product": error(b, a.float() @ w.float().T)}))


if __name__ == "__main__":
    main()
