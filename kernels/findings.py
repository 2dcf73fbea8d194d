"""Kernels that demonstrate a compiler's fault. No decoder launches them; `--kernel` and a space take their names.

    merge_one_block     the merge with all `splits` partials in one tile [splits, BLOCK_D]: 512 x 128 fp32 values don't fit the
                        registers of 4 warps and spill
    gate_up_one_term    gate_up with activations in one e4m3 term: with a row tile of 8 the tile is 8 columns wide, and some
                        versions of Triton silently fall back to the FP16 instruction for it
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import triton
import triton.language as tl

from ..schedules.recipe import Numerics
from ..schedules.schedule import MergeSchedule
from ..shapes.model import KernelShape, MergeShape, ModelShape
from . import linear, merge
from .layout import ROWS
from .operation import AnyOperation, Constant, Launch, Operation, first_problem, no_tensor_core, options, power_of_two


@triton.jit(do_not_specialize=["chunk"])
def one_block_merge_kernel(acc_ptr, m_ptr, l_ptr, length_ptr, o_ptr, chunk, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                           ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr):
    """o = sum_c 2^(m_c - m) acc_c / sum_c 2^(m_c - m) l_c over at most SPLITS chunks, layouts as in kernels/merge.py.
    Grid: (rows, heads, head_dim / BLOCK_D)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    offs_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_c = tl.arange(0, SPLITS)
    there = offs_c < (tl.load(length_ptr) + row) // chunk + 1
    base = (offs_c * ROWS + row) * NUM_HEADS + head
    m_c = tl.load(m_ptr + base, mask=there, other=float("-inf"))
    l_c = tl.load(l_ptr + base, mask=there, other=0.0)
    acc_c = tl.load(acc_ptr + base[:, None].to(tl.int64) * HEAD_DIM + offs_d[None, :], mask=there[:, None], other=0.0)
    weight = tl.exp2(m_c - tl.max(m_c, 0))
    o = tl.sum(acc_c * weight[:, None], 0) / tl.sum(l_c * weight, 0)
    tl.store(o_ptr + (row * NUM_HEADS + head) * HEAD_DIM + offs_d, o.to(o_ptr.dtype.element_ty))


def one_block_contract(shape: MergeShape, schedule: MergeSchedule) -> str | None:
    """The reason why a schedule doesn't fit a shape, or None."""
    return first_problem(merge.merge_contract(shape, replace(schedule, splits=1)),
                         power_of_two("splits", schedule.splits, 2, 512))


def one_block_launch(shape: MergeShape, schedule: MergeSchedule, numerics: Numerics) -> Launch:
    """The artefact of one shape and schedule."""
    types = {**dict.fromkeys(("acc_ptr", "m_ptr", "l_ptr"), "*fp32"), "length_ptr": "*i32", "o_ptr": "*bf16", "chunk": "i32"}
    constants: dict[str, Constant] = {"NUM_HEADS": shape.num_heads, "HEAD_DIM": shape.head_dim, "ROWS": ROWS,
                                      "BLOCK_D": schedule.BLOCK_D, "SPLITS": schedule.splits}
    return Launch(one_block_merge_kernel, types, constants, options(schedule, numerics))


@dataclass(frozen=True)
class Finding:
    """One kernel. shape: its shape in a model."""

    operation: AnyOperation
    shape: Callable[[ModelShape], KernelShape]


FINDINGS: dict[str, Finding] = {
    "merge_one_block": Finding(
        Operation(one_block_merge_kernel, MergeSchedule, one_block_contract, one_block_launch, no_tensor_core),
        lambda model: model.merge_shape),
    "gate_up_one_term": Finding(linear.OPERATION, lambda model: replace(model.linear_shapes(terms=1)["gate_up"], swiglu=False)),
}
