"""Fixes faults of Triton's interpreter (3.6 to 3.9) for tests.

bf16 lives there as 16-bit integers, and arithmetic runs on the integers; fp32 to bf16 truncates; fp32 to e4m3 neither rounds
nor saturates; `tl.dot` is `np.matmul`, whose BLAS can give a row other bits at another position. A launch patches
`triton.language` while it runs, so two threads can't launch at once.
"""

import threading
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

TORCH = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2,
         tl.float32: torch.float32, tl.float16: torch.float16}
UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
SIGNED: dict[int, Any] = {1: np.uint8, 2: np.int16, 4: np.int32}
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
E4M3_MAX = 448.0


def to_torch(data: np.ndarray, kind: Any) -> torch.Tensor:
    size = TORCH[kind].itemsize
    return torch.from_numpy(np.ascontiguousarray(data).view(SIGNED[size])).view(TORCH[kind])


def exact(handle: Any) -> np.ndarray:
    """Any float operand as fp32, which holds fp8, fp16 and bf16 exactly."""
    kind = handle.dtype.scalar
    if kind in TORCH and kind != tl.float32:
        return to_torch(handle.data, kind).float().numpy().reshape(handle.data.shape)
    return handle.data


def install() -> None:
    """Replace the interpreter's conversion, product, bf16 arithmetic and launch. Once a process."""
    if getattr(interpreter, "repaired", False):
        return
    interpreter.repaired = True
    convert_before = interpreter._convert_float
    builder = interpreter.InterpreterBuilder
    binary_before, si_to_fp_before = builder.binary_op, builder.create_si_to_fp

    def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        nearest = rounding in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        if not (source in TORCH and target in TORCH and nearest):
            return convert_before(data, source, target, rounding)
        values = to_torch(data, source).float()
        if target == tl.float8e4nv:
            values = values.clamp(-E4M3_MAX, E4M3_MAX)  # cvt.rn.satfinite
        out = values.to(TORCH[target])
        size = out.element_size()
        return out.view(INTEGER[size]).numpy().view(UNSIGNED[size]).reshape(data.shape)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        """k in order, elementwise."""
        if np.issubdtype(d.data.dtype, np.integer):
            return interpreter.TensorHandle(a.data.astype(d.data.dtype) @ b.data.astype(d.data.dtype) + d.data, d.dtype.scalar)
        x, y = exact(a), exact(b)
        total = np.zeros_like(d.data)
        for k in range(x.shape[-1]):
            total += x[..., :, k, None] * y[..., None, k, :]
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return binary_before(self, left, right, op)
        wide = [interpreter.TensorHandle(exact(h), tl.float32) for h in (left, right)]
        out = binary_before(self, *wide, op)
        if out.data.dtype != np.float32:
            return out
        return interpreter.TensorHandle(convert(out.data, tl.float32, tl.bfloat16, None), tl.bfloat16)

    def si_to_fp(self: Any, source: Any, target: Any) -> Any:
        if target.scalar != tl.bfloat16:
            return si_to_fp_before(self, source, target)
        data = convert(source.data.astype(np.float32), tl.float32, tl.bfloat16, None)
        return interpreter.TensorHandle(data, tl.bfloat16)

    launching = threading.RLock()
    launch_before = interpreter.GridExecutor.__call__

    def launch(self: Any, *arguments: Any, **named: Any) -> Any:
        with launching:
            return launch_before(self, *arguments, **named)

    interpreter.GridExecutor.__call__ = launch
    interpreter._convert_float = convert
    builder.create_dot, builder.binary_op, builder.create_si_to_fp = create_dot, binary_op, si_to_fp
