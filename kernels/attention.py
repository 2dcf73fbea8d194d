"""Split-KV decode attention for grouped queries: one fp32 partial per chunk of keys, which `merge` combines.

    For query row r at position length + r and each head h of KV head h // group, over the keys j of one chunk,
    j <= length + r:  s_j = scale * q . k_j,  m = max s_j,  l = sum exp(s_j - m),  acc = sum exp(s_j - m) v_j
    (flash-decoding: Dao, Haziza, Massa, Sizov 2023; online softmax: Milakov, Gimelshein 2018, arXiv 1805.02867).

    q [rows, num_heads, head_dim] bf16; k_cache, v_cache [slots, num_kv_heads, head_dim] bf16 with their own strides;
    length [1] int32 on the device: tokens in the cache before the first query row. The keys of the query rows are
    already in the cache, at slots length .. length + rows - 1.
    Partials: acc [chunks, ROWS, num_heads, head_dim], m and l [chunks, ROWS, num_heads], fp32; m is an exponent of two.

A row at a position below `chunk` has all its keys in one chunk. Its attention is finished here, with the merge's bytes, and the
merge skips it.

A launch over more than FOLD chunks is persistent: each program computes one chunk after another, and loads the next chunk's keys
during the computation. The bytes of a chunk are the same either way.

All query heads of one KV head, for all rows, share one tile of TILE rows: each key is read once, and 64 rows or more reach the
tensor core's fast path. A row's place in the tile depends on the row alone.

Row invariance: a row's key steps are those with at least one key it may see, in order; a later step doesn't change its bits.
Slots past the cursor may hold anything, even NaN: the loads are masked, not only the scores.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..schedules.recipe import Numerics
from ..schedules.schedule import AttentionSchedule, FixedSchedule
from ..shapes.model import AttentionShape, KernelShape, PersistentAttentionShape
from .layout import FOLD, ROWS
from .operation import (
    AtLeast,
    Constant,
    Instructions,
    Launch,
    Operand,
    Operation,
    common_contract,
    first_problem,
    num_sms,
    options,
    power_of_two,
    require,
    require_contract,
    sizes_of,
    tensor_core,
)

if TYPE_CHECKING:
    import torch

PERSISTENT_STAGES = 2  # chunks in shared memory at once, in a persistent launch
PERSISTENT_TILE = 64  # maximum of a persistent launch's TILE
PERSISTENT_SCHEDULE = FixedSchedule(num_warps=4, pdl=True)
PROGRAMS_PER_SM = 4  # of a persistent launch: twice as many as fit in shared memory, so that no SM is idle at the end

TYPES = {**dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), "*bf16"), "length_ptr": "*i32",
         **dict.fromkeys(("acc_ptr", "m_ptr", "l_ptr"), "*fp32"), "scale": "fp32", "rows": "i32",
         **dict.fromkeys(("stride_qm", "stride_qh", "stride_kt", "stride_kh", "stride_vt", "stride_vh"), "i32")}


@triton.jit
def attention_step(q, k, v, offs_n, n0, last, m, l, acc, scale):
    """Adds one step of keys, k [HEAD_DIM, BLOCK_N] and v [BLOCK_N, HEAD_DIM], to the running softmax of every row."""
    s = tl.dot(q, k) * (scale * 1.4426950408889634)  # log2(e): exp2 is the hardware's exponential
    s = tl.where(offs_n[None, :] <= last[:, None], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m - m_safe)
    p = tl.exp2(s - m_safe[:, None])
    sees = n0 <= last
    l = tl.where(sees, l * alpha + tl.sum(p, 1), l)
    acc = tl.where(sees[:, None], tl.dot(p.to(v.dtype), v, acc * alpha[:, None]), acc)
    return m_new, l, acc


@triton.jit
def leave_partials(acc_ptr, m_ptr, l_ptr, chunk, row, head, partial, m, l, acc, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                   ROWS: tl.constexpr):
    """Stores one chunk's partials, for rows with several chunks."""
    offs_d = tl.arange(0, HEAD_DIM)
    out = (chunk * ROWS + row) * NUM_HEADS + head
    tl.store(m_ptr + out, m, mask=partial)
    tl.store(l_ptr + out, l, mask=partial)
    tl.store(acc_ptr + out[:, None].to(tl.int64) * HEAD_DIM + offs_d[None, :], acc, mask=partial[:, None])


@triton.jit
def leave_output(o_ptr, row, head, whole, l, acc, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Stores the merge's result for a single chunk: acc / l, unscaled."""
    offs_d = tl.arange(0, HEAD_DIM)
    tl.store(o_ptr + (row * NUM_HEADS + head)[:, None] * HEAD_DIM + offs_d[None, :],
             (acc / l[:, None]).to(o_ptr.dtype.element_ty), mask=whole[:, None])


@triton.jit(do_not_specialize=["rows"])
def attention_kernel(q_ptr, k_ptr, v_ptr, length_ptr, acc_ptr, m_ptr, l_ptr, o_ptr, scale, rows, stride_qm, stride_qh,
                     stride_kt, stride_kh, stride_vt, stride_vh, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
                     HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
                     BLOCK_N: tl.constexpr, PDL: tl.constexpr):
    """Grid: (num_kv_heads, chunks). A chunk past the keys writes nothing."""
    kv_head = tl.program_id(0)
    chunk = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    # The length and the keys before it are of earlier passes: they may be read before the dependency wait.
    length = tl.load(length_ptr)
    start = chunk * CHUNK
    offs_m = tl.arange(0, TILE)
    row = offs_m // GROUP
    head = kv_head * GROUP + offs_m % GROUP
    offs_d = tl.arange(0, HEAD_DIM)
    tile_n = tl.arange(0, BLOCK_N)
    last = length + row
    # The tile's offsets are constant; only the scalar base moves, which saves registers.
    k_base = k_ptr + kv_head * stride_kh + (tile_n[None, :] * stride_kt + offs_d[:, None])
    v_base = v_ptr + kv_head * stride_vh + (tile_n[:, None] * stride_vt + offs_d[None, :])
    m = tl.full((TILE,), float("-inf"), tl.float32)
    l = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, HEAD_DIM), tl.float32)
    offs_q = row[:, None] * stride_qm + head[:, None] * stride_qh + offs_d[None, :]
    end = tl.minimum(start + CHUNK, length + rows)
    live = (row < rows) & (start < length + rows)
    if PDL and CHUNK == BLOCK_N:
        offs_n = start + tile_n
        old = offs_n < length
        k_old = tl.load(k_base + tl.cast(start, tl.int64) * stride_kt, mask=old[None, :], other=0.0)
        v_old = tl.load(v_base + tl.cast(start, tl.int64) * stride_vt, mask=old[:, None], other=0.0)
        gdc_wait()
        q = tl.load(q_ptr + offs_q, mask=live[:, None], other=0.0)
        new = (offs_n >= length) & (offs_n < length + rows)
        k = tl.load(k_base + tl.cast(start, tl.int64) * stride_kt, mask=new[None, :], other=0.0)
        v = tl.load(v_base + tl.cast(start, tl.int64) * stride_vt, mask=new[:, None], other=0.0)
        m, l, acc = attention_step(q, tl.where(old[None, :], k_old, k), tl.where(old[:, None], v_old, v), offs_n, start, last,
                                    m, l, acc, scale)
    else:
        if PDL:
            gdc_wait()
        q = tl.load(q_ptr + offs_q, mask=live[:, None], other=0.0)
        for n0 in tl.range(start, end, BLOCK_N):
            offs_n = n0 + tile_n
            there = offs_n < length + rows
            k = tl.load(k_base + tl.cast(n0, tl.int64) * stride_kt, mask=there[None, :], other=0.0)
            v = tl.load(v_base + tl.cast(n0, tl.int64) * stride_vt, mask=there[:, None], other=0.0)
            m, l, acc = attention_step(q, k, v, offs_n, n0, last, m, l, acc, scale)
    if chunk == 0:
        leave_output(o_ptr, row, head, live & (last < CHUNK), l, acc, NUM_KV_HEADS * GROUP, HEAD_DIM)
    leave_partials(acc_ptr, m_ptr, l_ptr, chunk, row, head, live & (last >= CHUNK), m, l, acc, NUM_KV_HEADS * GROUP, HEAD_DIM,
                   ROWS)


@triton.jit
def whole_chunk(q, k_ptr, v_ptr, chunk, end, last, scale, stride_kt, stride_vt, CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr):
    """(m, l, acc) of one chunk in one step: attention_step from an empty state, without its products with zero."""
    tile_n = tl.arange(0, CHUNK)
    offs_d = tl.arange(0, HEAD_DIM)
    n0 = chunk * CHUNK
    offs_n = n0 + tile_n
    there = offs_n < end
    k_base = k_ptr + tl.cast(n0, tl.int64) * stride_kt
    v_base = v_ptr + tl.cast(n0, tl.int64) * stride_vt
    k = tl.load(k_base + (tile_n[None, :] * stride_kt + offs_d[:, None]), mask=there[None, :], other=0.0)
    v = tl.load(v_base + (tile_n[:, None] * stride_vt + offs_d[None, :]), mask=there[:, None], other=0.0)
    s = tl.dot(q, k) * (scale * 1.4426950408889634)
    s = tl.where(offs_n[None, :] <= last[:, None], s, float("-inf"))
    m = tl.max(s, 1)
    p = tl.exp2(s - tl.where(m == float("-inf"), 0.0, m)[:, None])
    return m, tl.sum(p, 1), tl.dot(p.to(v.dtype), v)


@triton.jit(do_not_specialize=["rows"])
def walk_kernel(q_ptr, k_ptr, v_ptr, length_ptr, acc_ptr, m_ptr, l_ptr, o_ptr, scale, rows, stride_qm, stride_qh, stride_kt,
                stride_kh, stride_vt, stride_vh, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
                ROWS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr):
    """Persistent attention_kernel: a program computes one chunk after another and prefetches the next. Grid: (num_kv_heads, any
    number)."""
    kv_head = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    length = tl.load(length_ptr)
    end = length + rows
    offs_m = tl.arange(0, TILE)
    row = offs_m // GROUP
    head = kv_head * GROUP + offs_m % GROUP
    live = row < rows
    last = length + row
    k_head = k_ptr + kv_head * stride_kh
    v_head = v_ptr + kv_head * stride_vh
    q = tl.load(q_ptr + (row[:, None] * stride_qm + head[:, None] * stride_qh + tl.arange(0, HEAD_DIM)[None, :]),
                mask=live[:, None], other=0.0)
    for chunk in tl.range(tl.program_id(1), tl.cdiv(end, CHUNK), tl.num_programs(1), num_stages=STAGES):
        m, l, acc = whole_chunk(q, k_head, v_head, chunk, end, last, scale, stride_kt, stride_vt, CHUNK, HEAD_DIM)
        leave_partials(acc_ptr, m_ptr, l_ptr, chunk, row, head, live & (last >= CHUNK), m, l, acc, NUM_KV_HEADS * GROUP,
                       HEAD_DIM, ROWS)
    if (tl.program_id(1) == 0) & (length < CHUNK):  # outside the loop, where it would need too many registers on some targets
        m, l, acc = whole_chunk(q, k_head, v_head, 0, end, last, scale, stride_kt, stride_vt, CHUNK, HEAD_DIM)
        leave_output(o_ptr, row, head, live & (last < CHUNK), l, acc, NUM_KV_HEADS * GROUP, HEAD_DIM)


def attention_contract(shape: AttentionShape, schedule: AttentionSchedule) -> str | None:
    """The reason why a schedule doesn't fit a shape, or None."""
    problem = first_problem(
        common_contract(schedule),
        power_of_two("head_dim", shape.head_dim, 16, 256),
        power_of_two("TILE", schedule.TILE, 16, 256),
        power_of_two("BLOCK_N", schedule.BLOCK_N, 16, 256),
        power_of_two("chunk", schedule.chunk, 16, 4096),
    )
    if problem:
        return problem
    if schedule.chunk % schedule.BLOCK_N:
        return f"chunk {schedule.chunk} isn't a multiple of BLOCK_N {schedule.BLOCK_N}"
    if schedule.TILE < shape.group:
        return f"TILE {schedule.TILE} is less than the {shape.group} heads of a group"
    if schedule.num_stages > 8:
        return f"num_stages {schedule.num_stages} is more than 8"
    return None


def attention_launch(shape: AttentionShape, schedule: AttentionSchedule, numerics: Numerics) -> Launch:
    """The artefact of one shape and schedule, the same for every row count, length and cache layout."""
    constants = _heads(shape) | {"CHUNK": schedule.chunk, "TILE": schedule.TILE, "BLOCK_N": schedule.BLOCK_N, "PDL": schedule.pdl}
    return Launch(attention_kernel, TYPES, constants, options(schedule, numerics))


def _heads(shape: AttentionShape | PersistentAttentionShape) -> dict[str, Constant]:
    return {"NUM_KV_HEADS": shape.num_kv_heads, "GROUP": shape.num_heads // shape.num_kv_heads, "HEAD_DIM": shape.head_dim,
            "ROWS": ROWS}


def attention_instructions(shape: KernelShape, arch: str) -> Instructions:
    """Both products are bf16."""
    return tensor_core("bf16", arch)


def attention_shared_bytes(shape: AttentionShape, schedule: AttentionSchedule) -> int:
    """Lower bound: one tile of keys."""
    return schedule.BLOCK_N * shape.head_dim * 2


OPERATION = Operation(attention_kernel, AttentionSchedule, attention_contract, attention_launch, attention_instructions,
                      attention_shared_bytes, early_reads=("length_ptr", "k_ptr", "v_ptr"))  # keys of earlier passes


def persistent_contract(shape: PersistentAttentionShape, schedule: FixedSchedule) -> str | None:
    """The reason why a schedule doesn't fit a shape, or None."""
    if shape.TILE > PERSISTENT_TILE:
        return f"TILE {shape.TILE} is more than {PERSISTENT_TILE}, the rows that four warps have registers for"
    heads = AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim)
    return attention_contract(heads, AttentionSchedule(shape.chunk, shape.TILE, shape.chunk, PERSISTENT_STAGES,
                                                       schedule.num_warps))


def persistent_launch(shape: PersistentAttentionShape, schedule: FixedSchedule, numerics: Numerics) -> Launch:
    """The artefact of one shape, as attention_launch."""
    constants = _heads(shape) | {"CHUNK": shape.chunk, "TILE": shape.TILE, "STAGES": PERSISTENT_STAGES, "PDL": schedule.pdl}
    return Launch(walk_kernel, TYPES, constants, options(schedule, numerics))


PERSISTENT = Operation(walk_kernel, FixedSchedule, persistent_contract, persistent_launch, attention_instructions)


def persistent_shape(shape: AttentionShape, schedule: AttentionSchedule) -> PersistentAttentionShape | None:
    """The shape of the persistent launch that replaces attention under this schedule over many chunks, or None."""
    if schedule.chunk != schedule.BLOCK_N or schedule.TILE > PERSISTENT_TILE:
        return None
    return PersistentAttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, schedule.chunk, schedule.TILE)


def max_rows(shape: AttentionShape, schedule: AttentionSchedule) -> int:
    """Maximum of query rows per launch."""
    return min(ROWS, schedule.TILE // shape.group)


@dataclass(frozen=True)
class Partials:
    """Output of `attention` and input of `merge`. acc: [chunks, ROWS, num_heads, head_dim] fp32. m, l: [chunks, ROWS, num_heads]
    fp32. o: [>= rows, num_heads, head_dim] bf16, finished for rows of one chunk. groups: buffers as acc, m and l, for one partial
    per FOLD chunks."""

    acc: "torch.Tensor"
    m: "torch.Tensor"
    l: "torch.Tensor"
    o: "torch.Tensor"
    groups: "tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None" = None

    def operands(self, chunks: int, rows: int) -> dict[str, Operand]:
        """The operands of both kernels."""
        num_heads, head_dim = sizes_of("acc", self.acc, 4)[2:]
        room = (AtLeast(chunks), ROWS, num_heads)
        return {"acc_ptr": Operand(self.acc, (*room, head_dim)), "m_ptr": Operand(self.m, room), "l_ptr": Operand(self.l, room),
                "o_ptr": Operand(self.o, (AtLeast(rows), num_heads, head_dim))}


def new_partials(shape: AttentionShape, chunks: int, rows: int, device: "torch.device | str") -> Partials:
    """Buffers for `chunks` chunks and `rows` rows."""
    import torch

    heads = (chunks, ROWS, shape.num_heads)
    acc = torch.empty((*heads, shape.head_dim), dtype=torch.float32, device=device)
    return Partials(acc, acc.new_empty(heads), acc.new_empty(heads),
                    torch.empty((rows, shape.num_heads, shape.head_dim), dtype=torch.bfloat16, device=device),
                    new_groups(acc) if chunks > FOLD else None)


def new_groups(acc: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """Buffers for one partial per FOLD chunks of acc [chunks, ROWS, num_heads, head_dim]."""
    groups = acc.new_empty((triton.cdiv(len(acc), FOLD), *acc.shape[1:]))
    return groups, acc.new_empty(groups.shape[:3]), acc.new_empty(groups.shape[:3])


def cache_operands(k_cache: "torch.Tensor", v_cache: "torch.Tensor", num_heads: int, head_dim: int) -> dict[str, Operand]:
    """The operands of keys and values [slots, num_kv_heads, head_dim], each with its own strides. Raises ContractError unless
    num_kv_heads divides num_heads."""
    slots, num_kv_heads, _ = sizes_of("k", k_cache, 3)
    require(num_kv_heads > 0 and num_heads % num_kv_heads == 0, f"{num_heads} heads and {num_kv_heads} KV heads",
            "KV heads that divide the heads")
    sizes = (slots, num_kv_heads, head_dim)
    return {"k_ptr": Operand(k_cache, sizes, ("stride_kt", "stride_kh")),
            "v_ptr": Operand(v_cache, sizes, ("stride_vt", "stride_vh"))}


def attention(q: "torch.Tensor", k_cache: "torch.Tensor", v_cache: "torch.Tensor", length: "torch.Tensor", *,
              schedule: AttentionSchedule, numerics: Numerics, chunks: int, out: Partials | None = None) -> Partials:
    """Attention of each row: partials, or the finished output if one chunk has all its keys. Layouts: see the module's docstring.

    Args:
        q: [rows, num_heads, head_dim] bf16, rows * group <= schedule.TILE.
        k_cache, v_cache: [slots, num_kv_heads, head_dim] bf16, strides multiples of 16.
        length: [1] int32, on the device.
        chunks: number to launch, enough for the last key; it doesn't change the bits.
        out: tensors to write to, instead of new ones.

    Raises:
        ContractError: tensors, shape and schedule don't fit each other.
    """
    rows, num_heads, head_dim = sizes_of("q", q, 3)
    shape = AttentionShape(num_heads, sizes_of("k", k_cache, 3)[1], head_dim)
    cache = cache_operands(k_cache, v_cache, num_heads, head_dim)
    require_contract(OPERATION, shape, schedule)
    require(1 <= rows <= max_rows(shape, schedule), f"{rows} rows",
            f"1 to {max_rows(shape, schedule)} with TILE {schedule.TILE} and a group of {shape.group}")
    if out is None:
        out = new_partials(shape, chunks, rows, q.device)
    persistent = persistent_shape(shape, schedule) if chunks > FOLD else None
    launch = (attention_launch(shape, schedule, numerics) if persistent is None
              else persistent_launch(persistent, PERSISTENT_SCHEDULE, numerics))
    arguments = launch.arguments({
        "q_ptr": Operand(q, (rows, num_heads, head_dim), ("stride_qm", "stride_qh")), **cache,
        "length_ptr": Operand(length, (1,)), **out.operands(chunks, rows)})
    programs = chunks if persistent is None else persistent_programs(shape, chunks, q)
    launch((shape.num_kv_heads, programs), scale=head_dim**-0.5, rows=rows, **arguments)
    return out


def persistent_programs(shape: AttentionShape, chunks: int, q: "torch.Tensor") -> int:
    """Programs per KV head that fill the GPU. Their number doesn't change the bits: each chunk is a separate partial."""
    return min(chunks, triton.cdiv(PROGRAMS_PER_SM * num_sms(q), shape.num_kv_heads))


def attention_reference(q: "torch.Tensor", k_cache: "torch.Tensor", v_cache: "torch.Tensor",
                        length: int) -> "torch.Tensor":
    """Attention in fp64: [rows, num_heads, head_dim]."""
    import torch

    rows, num_heads, head_dim = q.shape
    group = num_heads // k_cache.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for r in range(rows):
        keys = k_cache[: length + r + 1].double().repeat_interleave(group, 1)
        values = v_cache[: length + r + 1].double().repeat_interleave(group, 1)
        weights = torch.softmax(torch.einsum("hd,thd->ht", q[r].double(), keys) * head_dim**-0.5, -1)
        out[r] = torch.einsum("ht,thd->hd", weights, values)
    return out
