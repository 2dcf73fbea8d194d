"""The CPU's kernels: matrix products whose bits follow from IEEE 754 alone, and operations that take torch dozens of calls.

    out[b, r, n] = (((0 + x[b, r, 0] * w[b, 0, n]) + x[b, r, 1] * w[b, 1, n]) + ...) + x[b, r, K-1] * w[b, K-1, n]

Every product and every sum is rounded to fp32, k in order from 0 to K-1. So an element's bits depend on its row and its column
alone, not on the number of rows or threads, the cut of the columns or the kind of CPU. (The payload of a NaN depends on the CPU.)
A library's product can't promise this: it cuts K by shape, threads and instruction set.

One vector holds 64 neighbouring columns, and each lane sums its own column: vector code keeps the order. numba compiles without
fast-math flags, so LLVM neither reorders sums nor fuses a product and a sum into one rounding.

`exp` and `tree_sum` are those of gpu.py, operation by operation, in one pass. `sqrt` is IEEE 754's; torch's is not.

Weights are float32, or bf16 as uint16, widened in the kernel: half the bytes, the same products. Importing this module imports
numba. Compiling takes under a second per kernel and type, once per machine: later processes load numba's cache from the disk.
"""

import functools
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, models, register_model
from numba.np.arrayobj import make_array

from . import gpu

if TYPE_CHECKING:
    from numba.core.base import BaseContext
    from numba.core.datamodel import DataModelManager
    from numba.core.typing import BaseContext as TypingContext
    from numba.core.typing import Signature

    Generate = Callable[[BaseContext, ir.IRBuilder, Signature, list[ir.Value]], ir.Value]
    Intrinsic = tuple[Signature, Generate]

LANES = 64  # columns of one vector; LLVM splits it into the CPU's registers
SMALL = 1 << 20  # multiplications; below, a second thread costs more (some 40 us) than it saves

# exp's constants in fp32, rounded as torch rounds them. x + ROUNDER - ROUNDER is x rounded to a whole number; the low bits of
# x + ROUNDER are that number.
LOWEST, LOG2_E, LN2_HIGH, LN2_LOW = (np.float32(c) for c in (gpu.EXP_LOWEST, gpu.LOG2_E, gpu.LN2_HIGH, gpu.LN2_LOW))
T7, T6, T5, T4, T3, T2, T1, T0 = (np.float32(c) for c in gpu.EXP_TERMS)
ROUNDER = np.float32(3 << 22)

FLOATS = ir.VectorType(ir.FloatType(), LANES)
INTS, HALVES = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.IntType(16), LANES)


class Lanes(types.Type):
    """A vector of LANES fp32 values in registers."""

    def __init__(self) -> None:
        super().__init__(name=f"Lanes{LANES}")


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):
    """The LLVM type of Lanes."""

    def __init__(self, manager: "DataModelManager", kind: types.Type) -> None:
        super().__init__(manager, kind, FLOATS)


lanes = Lanes()


def _pointer(context: "BaseContext", builder: ir.IRBuilder, kind: types.Array, array: ir.Value, at: ir.Value,
             vector: ir.VectorType) -> ir.Value:
    data = make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), vector.as_pointer())


@intrinsic
def zeros(typing: "TypingContext") -> "Intrinsic":
    """LANES zeros."""
    return lanes(), lambda context, builder, signature, args: ir.Constant(FLOATS, None)


@intrinsic
def load(typing: "TypingContext", array: types.Array, at: types.Integer) -> "Intrinsic":
    """array[at:at + LANES] as fp32. The array is float32, or uint16 with the bits of bf16."""
    def generate(context: "BaseContext", builder: ir.IRBuilder, signature: "Signature", args: list[ir.Value]) -> ir.Value:
        kind, (array, at) = signature.args[0], args
        if kind.dtype == types.float32:
            return builder.load(_pointer(context, builder, kind, array, at, FLOATS), align=4)
        halves = builder.load(_pointer(context, builder, kind, array, at, HALVES), align=2)
        return builder.bitcast(builder.shl(builder.zext(halves, INTS), ir.Constant(INTS, [16] * LANES)), FLOATS)
    assert array.dtype in (types.float32, types.uint16)
    return lanes(array, types.intp), generate


@intrinsic
def store(typing: "TypingContext", array: types.Array, at: types.Integer, values: Lanes) -> "Intrinsic":
    """array[at:at + LANES] = values."""
    def generate(context: "BaseContext", builder: ir.IRBuilder, signature: "Signature", args: list[ir.Value]) -> ir.Value:
        array, at, values = args
        builder.store(values, _pointer(context, builder, signature.args[0], array, at, FLOATS), align=4)
        return context.get_dummy_value()
    return types.void(array, types.intp, lanes), generate


@intrinsic
def add_product(typing: "TypingContext", acc: Lanes, x: types.Float, w: Lanes) -> "Intrinsic":
    """acc + x * w in every lane, with two roundings."""
    def generate(context: "BaseContext", builder: ir.IRBuilder, signature: "Signature", args: list[ir.Value]) -> ir.Value:
        nothing = ir.Constant(FLOATS, ir.Undefined)
        first = builder.insert_element(nothing, args[1], ir.Constant(ir.IntType(32), 0))
        return builder.fadd(args[0], builder.fmul(builder.shuffle_vector(first, nothing, ir.Constant(INTS, None)), args[2]))
    return lanes(lanes, types.float32, lanes), generate


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    """A decorator: compiles with numba, and caches on disk if numba finds a writable folder."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:
        return njit(**options)(function)


class Product(NamedTuple):
    """The sizes of a product and the layout of its w: element (b, k, n) at b * batch_step + n // LANES * block_step + k * k_step
    + n % LANES."""

    rows: int
    depth: int
    columns: int
    batch_step: int
    block_step: int
    k_step: int


@_compiled
def multiply(x: np.ndarray, w: np.ndarray, out: np.ndarray, product: Product, first: int, last: int) -> None:
    """Computes units first..last - 1 of a product. A unit is all rows of LANES columns of one batch.

    Flat arrays: x [batches, rows, depth] and out [batches, rows, columns] in float32; w in float32 or uint16. Four rows share
    each load of w; of fewer, the last row is computed more than once.
    """
    rows, depth, columns, batch_step, block_step, k_step = product
    blocks = columns // LANES
    for unit in range(first, last):
        batch, block = unit // blocks, unit % blocks
        start = batch * batch_step + block * block_step
        row = 0
        while row < rows:
            x0, to = (batch * rows + row) * depth, (batch * rows + row) * columns + block * LANES
            at, left = start, rows - row - 1
            if left == 0:
                acc = zeros()
                for k in range(depth):
                    acc = add_product(acc, x[x0 + k], load(w, at))
                    at += k_step
                store(out, to, acc)
            else:
                r2, r3 = min(2, left), min(3, left)
                x1, x2, x3 = x0 + depth, x0 + r2 * depth, x0 + r3 * depth
                acc0, acc1, acc2, acc3 = zeros(), zeros(), zeros(), zeros()
                for k in range(depth):
                    column = load(w, at)
                    acc0 = add_product(acc0, x[x0 + k], column)
                    acc1 = add_product(acc1, x[x1 + k], column)
                    acc2 = add_product(acc2, x[x2 + k], column)
                    acc3 = add_product(acc3, x[x3 + k], column)
                    at += k_step
                store(out, to, acc0)
                store(out, to + columns, acc1)
                store(out, to + r2 * columns, acc2)
                store(out, to + r3 * columns, acc3)
            row += 4 if left else 1


@_compiled
def exp_into(x: np.ndarray, out: np.ndarray) -> None:
    """out[i] = e^x[i], float32."""
    for i in range(x.size):
        inside = x[i] if not x[i] < LOWEST else LOWEST
        shifted = inside * LOG2_E + ROUNDER
        n = shifted - ROUNDER
        r = inside - n * LN2_HIGH - n * LN2_LOW
        y = ((((((T7 * r + T6) * r + T5) * r + T4) * r + T3) * r + T2) * r + T1) * r + T0
        power = np.int32(np.float32(shifted).view(np.int32) + 127 << 23).view(np.float32)
        out[i] = y * power if not x[i] < LOWEST else np.float32(0)


@_compiled
def sqrt_into(x: np.ndarray, out: np.ndarray) -> None:
    """out[i] = the square root of x[i], float32, rounded once: LLVM's sqrt is IEEE 754's."""
    for i in range(x.size):
        out[i] = math.sqrt(x[i])


@_compiled
def tree_sum_into(x: np.ndarray, out: np.ndarray) -> None:
    """out[r] = the sum of x[r] by halving, filled up with zeros to a power of two. float32 or float64."""
    n = x.shape[1]
    half = 1
    while 2 * half < n:
        half *= 2
    part = np.empty(half, x.dtype)
    for r in range(x.shape[0]):
        size = half
        for i in range(size):
            part[i] = x[r, i] + (x[r, i + size] if i + size < n else 0)
        while size > 1:
            size //= 2
            for i in range(size):
                part[i] += part[i + size]
        out[r] = part[0]


@functools.lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of one process. A fork doesn't inherit threads, so a child makes its own. Their tasks never wait."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="products")


def _flat(tensor: torch.Tensor) -> np.ndarray:
    assert tensor.is_contiguous(), "operands of a product must be contiguous"
    assert tensor.dtype in (torch.float32, torch.bfloat16), tensor.dtype
    flat = tensor.view(-1)
    return (flat.view(torch.uint16) if tensor.dtype == torch.bfloat16 else flat).numpy()


def _product(x: torch.Tensor, w: torch.Tensor, columns: int, batch_step: int, block_step: int, k_step: int) -> torch.Tensor:
    """x [batches, rows, K] in fp32 times w, laid out as in Product: [batches, rows, columns]. torch.get_num_threads()
    threads share the units. One thread computes a unit, so their number changes the time alone."""
    batches, rows, depth = x.shape
    assert x.dtype == torch.float32 and columns % LANES == 0
    out = torch.empty(batches, rows, columns)
    run = functools.partial(multiply, _flat(x), _flat(w), _flat(out),
                            Product(rows, depth, columns, batch_step, block_step, k_step))
    units = batches * columns // LANES
    threads = 1 if out.numel() * depth < SMALL else min(torch.get_num_threads(), units)
    ends = [units * part // threads for part in range(threads + 1)]
    parts = list(pairwise(ends))[1:]
    others = [_pool(os.getpid()).submit(run, *part) for part in parts]
    run(0, ends[1])
    for other, part in zip(others, parts):
        if other.cancel():  # no thread has begun it
            run(*part)
        else:
            other.result()
    return out


def pack(w: torch.Tensor) -> torch.Tensor:
    """w [N, K] in fp32 or bf16 in the layout of `linear`: [N / LANES rounded up, K, LANES], zeros in the last block. Called once,
    at load."""
    padded = F.pad(w, (0, 0, 0, -w.shape[0] % LANES))
    return padded.view(-1, LANES, w.shape[1]).transpose(1, 2).contiguous()


def linear(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """x @ w.T of x [rows, K] in fp32 and w from `pack`: [rows, N rounded up to LANES] in fp32."""
    blocks, depth, _ = packed.shape
    assert x.shape[1] == depth, (x.shape, packed.shape)
    return _product(x[None], packed, blocks * LANES, 0, depth * LANES, LANES)[0]


def batched(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w per batch of x [batches, rows, K] in fp32 and w [batches, K, n] in fp32 or bf16: [batches, rows, n] in fp32."""
    n = w.shape[2]
    assert w.shape[:2] == (x.shape[0], x.shape[2]), (x.shape, w.shape)
    if n % LANES:
        w = F.pad(w, (0, -n % LANES))
    columns = w.shape[2]
    return _product(x, w, columns, w.shape[1] * columns, LANES, columns)[..., :n].contiguous()


def exp(x: torch.Tensor) -> torch.Tensor:
    """gpu.exp of x [...] in fp32."""
    x = x.contiguous()
    out = torch.empty_like(x)
    exp_into(_flat(x), _flat(out))
    return out


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """The square root of x [...] in fp32, rounded once. (torch 2.13 takes a library's on a CPU: 17% of the roots were an ulp off
    on one machine, and other ones on the next.)"""
    x = x.contiguous()
    out = torch.empty_like(x)
    sqrt_into(_flat(x), _flat(out))
    return out


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """gpu.tree_sum of x [..., n] in fp32 or fp64; [..., 1]."""
    if x.shape[-1] == 1:
        return x
    out = x.new_empty(*x.shape[:-1], 1)
    tree_sum_into(x.reshape(-1, x.shape[-1]).contiguous().numpy(), out.view(-1).numpy())
    return out
