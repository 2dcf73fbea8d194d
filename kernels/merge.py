"""Merge of split-KV partials: o = sum_c 2^(m_c - m) acc_c / sum_c 2^(m_c - m) l_c, m = max_c m_c.

    acc [chunks, ROWS, num_heads, head_dim], m and l [chunks, ROWS, num_heads], fp32, from `attention`;
    length [1] int32; o [rows, num_heads, head_dim] bf16.

Chunks are merged in index order in groups of FOLD, and groups in index order: the order depends on a row's own keys alone.
`splits` is the number of partials that are loaded at once; it doesn't change the bits. A row merges the chunks with keys that it
may see, (length + row) // chunk + 1 of them: neither other rows nor the buffer's capacity matter. A chunk that is empty for a row
(m = -inf, l = 0) adds exactly nothing. A row with all its keys in one chunk was finished by `attention` and is skipped.

Before a launch over more than FOLD chunks, `fold` merges each group to one partial, all groups in parallel. The 1,297 chunks of
83,000 tokens then cost 73 latencies (32 in a group, 41 groups) instead of 1,297. For a row of one group the second pass
multiplies by 1 and adds 0: both ways give the same bytes.

One block merges BLOCK_D of a head's dimensions.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..schedules.recipe import Numerics
from ..schedules.schedule import FixedSchedule, MergeSchedule
from ..shapes.model import MergeShape
from .attention import Partials, new_groups
from .layout import FOLD, ROWS
from .operation import (
    AtLeast,
    Constant,
    Launch,
    Operand,
    Operation,
    common_contract,
    first_problem,
    no_tensor_core,
    options,
    power_of_two,
    require_contract,
    require_rows,
    sizes_of,
)

if TYPE_CHECKING:
    import torch

FOLD_SPLITS = 16  # partials that a block of `fold` loads at once
FOLD_SCHEDULE = FixedSchedule(num_warps=1, pdl=True)


@triton.jit
def merge_range(acc_ptr, m_ptr, l_ptr, first, end, row, head, offs_d, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr):
    """(m, l, acc) of the partials first .. end - 1 of one row and head, merged in order."""
    m = float("-inf")
    l = 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for c0 in tl.range(first, end, SPLITS):
        for i in tl.static_range(SPLITS):  # unrolled: the loads of SPLITS partials overlap
            there = c0 + i < end
            base = ((c0 + i) * ROWS + row) * NUM_HEADS + head
            m_c = tl.load(m_ptr + base, mask=there, other=float("-inf"))
            l_c = tl.load(l_ptr + base, mask=there, other=0.0)
            acc_c = tl.load(acc_ptr + base.to(tl.int64) * HEAD_DIM + offs_d, mask=there & (offs_d < HEAD_DIM), other=0.0)
            m_new = tl.maximum(m, m_c)
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            old = tl.exp2(m - m_safe)
            new = tl.exp2(m_c - m_safe)
            l = l * old + l_c * new
            acc = acc * old + acc_c * new
            m = m_new
    return m, l, acc


@triton.jit(do_not_specialize=["chunk"])
def fold_kernel(acc_ptr, m_ptr, l_ptr, length_ptr, group_acc_ptr, group_m_ptr, group_l_ptr, chunk, NUM_HEADS: tl.constexpr,
                HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, FOLD: tl.constexpr, PDL: tl.constexpr):
    """One partial per FOLD chunks. group_acc_ptr, group_m_ptr, group_l_ptr: layouts as of the partials. A group past a row's keys
    writes nothing. Grid: (rows, heads, groups)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    group = tl.program_id(2)
    offs_d = tl.arange(0, HEAD_DIM)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    used = (tl.load(length_ptr) + row) // chunk + 1
    first = group * FOLD
    if first < used:
        m, l, acc = merge_range(acc_ptr, m_ptr, l_ptr, first, tl.minimum(first + FOLD, used), row, head, offs_d, NUM_HEADS,
                                HEAD_DIM, ROWS, HEAD_DIM, SPLITS)
        place = (group * ROWS + row) * NUM_HEADS + head
        tl.store(group_m_ptr + place, m)
        tl.store(group_l_ptr + place, l)
        tl.store(group_acc_ptr + place * HEAD_DIM + offs_d, acc)


@triton.jit(do_not_specialize=["chunk", "span"])
def merge_kernel(acc_ptr, m_ptr, l_ptr, length_ptr, o_ptr, amax_ptr, chunk, span, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                 ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr):
    """chunk: keys per attention block. span: keys per partial: a chunk or a group of chunks. amax_ptr [ROWS, parts] or None: the
    largest magnitude of each program's part of o. Grid: (rows, heads, head_dim / BLOCK_D)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    offs_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    last = tl.load(length_ptr) + row
    place = (row * NUM_HEADS + head) * HEAD_DIM + offs_d
    if last < chunk:  # attention has finished this row
        o = tl.load(o_ptr + place)
    else:
        _, l, acc = merge_range(acc_ptr, m_ptr, l_ptr, 0, last // span + 1, row, head, offs_d, NUM_HEADS, HEAD_DIM, ROWS, BLOCK_D,
                                SPLITS)
        o = (acc / l).to(o_ptr.dtype.element_ty)
        tl.store(o_ptr + place, o)
    if amax_ptr is not None:
        part = (row * NUM_HEADS + head) * (HEAD_DIM // BLOCK_D) + tl.program_id(2)
        tl.store(amax_ptr + part, tl.max(tl.abs(o.to(tl.float32)), 0))


def merge_contract(shape: MergeShape, schedule: MergeSchedule) -> str | None:
    """The reason why a schedule doesn't fit a shape, or None."""
    problem = first_problem(
        common_contract(schedule),
        power_of_two("BLOCK_D", schedule.BLOCK_D, 16, 256),
        power_of_two("splits", schedule.splits, 1, 64),
    )
    if problem:
        return problem
    if shape.head_dim % schedule.BLOCK_D:
        return f"BLOCK_D {schedule.BLOCK_D} doesn't divide head_dim {shape.head_dim}"
    return None


def merge_launch(shape: MergeShape, schedule: MergeSchedule, numerics: Numerics, amax: bool = True) -> Launch:
    """The artefact of one shape and schedule, the same for every row count, length and number of chunks."""
    types = {"acc_ptr": "*fp32", "m_ptr": "*fp32", "l_ptr": "*fp32", "length_ptr": "*i32", "o_ptr": "*bf16",
             "amax_ptr": "*fp32", "chunk": "i32", "span": "i32"}
    constants: dict[str, Constant] = {
        "NUM_HEADS": shape.num_heads, "HEAD_DIM": shape.head_dim, "ROWS": ROWS, "BLOCK_D": schedule.BLOCK_D,
        "SPLITS": schedule.splits, "PDL": schedule.pdl} | ({} if amax else {"amax_ptr": None})
    return Launch(merge_kernel, types, constants, options(schedule, numerics))


OPERATION = Operation(merge_kernel, MergeSchedule, merge_contract, merge_launch, no_tensor_core)


def fold_contract(shape: MergeShape, schedule: FixedSchedule) -> str | None:
    """The reason why a schedule doesn't fit a shape, or None."""
    return common_contract(schedule) or power_of_two("head_dim", shape.head_dim, 16, 256)


def fold_launch(shape: MergeShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """The artefact of one shape, the same for every row count, length and number of groups."""
    names = ("acc_ptr", "m_ptr", "l_ptr", "group_acc_ptr", "group_m_ptr", "group_l_ptr")
    types = {**dict.fromkeys(names, "*fp32"), "length_ptr": "*i32", "chunk": "i32"}
    constants: dict[str, Constant] = {"NUM_HEADS": shape.num_heads, "HEAD_DIM": shape.head_dim, "ROWS": ROWS,
                                      "SPLITS": FOLD_SPLITS, "FOLD": FOLD, "PDL": schedule.pdl}
    return Launch(fold_kernel, types, constants, options(schedule, numerics))


FOLDING = Operation(fold_kernel, FixedSchedule, fold_contract, fold_launch, no_tensor_core)


def merge(partials: Partials, length: "torch.Tensor", *, rows: int, chunk: int, schedule: MergeSchedule, numerics: Numerics,
          amax: "torch.Tensor | None" = None, chunks: int | None = None) -> "torch.Tensor":
    """Finishes the attention output in `partials.o` and returns its rows, [rows, num_heads, head_dim] bf16.

    Args:
        partials: of `attention`, contiguous. length: [1] int32 on the device. chunk: keys per partial. amax: output, [>= rows,
        parts(shape, schedule)] fp32, the largest magnitude of each part of a row; may have more columns if
            rows is 1.
        chunks: number that attention was launched over, chunks * chunk >= length + rows; None: as many as partials.acc has.

    Raises:
        ContractError: tensors, shape and schedule don't fit each other.
    """
    chunks = len(partials.acc) if chunks is None else chunks
    shape = MergeShape(*sizes_of("acc", partials.acc, 4)[2:])
    require_rows(rows, ROWS)
    require_contract(OPERATION, shape, schedule)
    launch = merge_launch(shape, schedule, numerics, amax is not None)
    pieces = parts(shape, schedule)
    arguments = launch.arguments({
        **partials.operands(chunks, rows), "length_ptr": Operand(length, (1,)),
        "amax_ptr": Operand(amax, (AtLeast(rows), AtLeast(pieces) if rows == 1 else pieces))})
    span = chunk
    if chunks > FOLD:
        arguments |= _fold(partials, length, rows, chunk, chunks, numerics)
        span = chunk * FOLD
    launch((rows, shape.num_heads, shape.head_dim // schedule.BLOCK_D), chunk=chunk, span=span, **arguments)
    return partials.o[:rows]


def _fold(partials: Partials, length: "torch.Tensor", rows: int, chunk: int, chunks: int,
          numerics: Numerics) -> "dict[str, object]":
    """Merges each group to one partial, and returns these as arguments of the merge."""
    acc, m, l = partials.groups or new_groups(partials.acc)
    shape, groups = MergeShape(*acc.shape[2:]), triton.cdiv(chunks, FOLD)
    require_contract(FOLDING, shape, FOLD_SCHEDULE)
    launch = fold_launch(shape, FOLD_SCHEDULE, numerics)
    names = ("acc_ptr", "m_ptr", "l_ptr")
    read = partials.operands(chunks, rows)
    written = Partials(acc, m, l, partials.o).operands(groups, rows)
    launch((rows, shape.num_heads, groups), chunk=chunk, **launch.arguments({
        **{name: read[name] for name in names}, "length_ptr": Operand(length, (1,)),
        **{f"group_{name}": written[name] for name in names}}))
    return {"acc_ptr": acc, "m_ptr": m, "l_ptr": l}


def parts(shape: MergeShape, schedule: MergeSchedule) -> int:
    """Number of parts of a row, each with its largest magnitude."""
    return shape.num_heads * (shape.head_dim // schedule.BLOCK_D)


def aligned_parts(parts: int) -> int:
    """Columns of maxima that align every row to 16 bytes, for launches of one row each."""
    return triton.cdiv(parts, 4) * 4


def merge_reference(acc: "torch.Tensor", m: "torch.Tensor", l: "torch.Tensor", length: int, *, rows: int,
                    chunk: int) -> "torch.Tensor":
    """`merge` in fp64, all chunks at once: [rows, num_heads, head_dim]. m: exponents of two, as of `attention`."""
    import torch

    out = torch.empty((rows, *acc.shape[2:]), dtype=torch.float64, device=acc.device)
    for r in range(rows):
        used = (length + r) // chunk + 1
        weights = torch.exp2(m[:used, r].double() - m[:used, r].double().amax(0))
        total = (weights * l[:used, r].double()).sum(0)
        out[r] = (weights[..., None] * acc[:used, r].double()).sum(0) / total[:, None]
    return out
