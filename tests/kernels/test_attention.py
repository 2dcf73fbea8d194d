"""Attention and merge: against fp64 with unlike strides, around every chunk boundary, rows alone and among others."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
from helpers import assert_close, assert_same_bytes
from tune_kernels.kernels.attention import Partials, attention, attention_reference, max_rows, new_partials
from tune_kernels.kernels.layout import FOLD
from tune_kernels.kernels.merge import merge, merge_reference, parts
from tune_kernels.kernels.operation import ContractError
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import AttentionSchedule, MergeSchedule
from tune_kernels.shapes.model import AttentionShape, MergeShape

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.interpreter
NUMERICS = load_recipe("fp8-v1").numerics
CHUNK = 32
BASE = AttentionSchedule(chunk=CHUNK, TILE=32, BLOCK_N=16, num_stages=2, num_warps=4)
IN_ORDER = MergeSchedule(BLOCK_D=16, splits=1, num_warps=1)
ROWS = 5


@dataclass(frozen=True)
class Heads:
    kv: int
    group: int
    dim: int


HEADS = [Heads(2, 3, 16), Heads(2, 4, 32), Heads(3, 1, 16)]


def cache(heads: Heads, slots: int, device: str, poison_from: int, seed: int = 1) -> "tuple[torch.Tensor, torch.Tensor]":
    """k and v with no two strides equal, and NaN in every slot from `poison_from` on."""
    import torch

    gen = torch.Generator().manual_seed(seed)
    k = torch.randn(heads.kv, slots, heads.dim + 16, generator=gen).to(device).bfloat16()[:, :, : heads.dim].transpose(0, 1)
    v = torch.randn(slots, heads.kv, heads.dim + 32, generator=gen).to(device).bfloat16()[:, :, : heads.dim]
    k[poison_from:] = float("nan")
    v[poison_from:] = float("nan")
    assert len({k.stride(0), k.stride(1), v.stride(0), v.stride(1)}) == 4
    return k, v


def queries(heads: Heads, rows: int, device: str) -> "torch.Tensor":
    import torch

    gen = torch.Generator().manual_seed(2)
    wide = torch.randn(rows, heads.kv * heads.group, heads.dim + 16, generator=gen)
    return wide.to(device).bfloat16()[:, :, : heads.dim]


def run(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", length: int, device: str, schedule: AttentionSchedule = BASE,
        merging: MergeSchedule = IN_ORDER, extra_chunks: int = 0) -> "torch.Tensor":
    import torch

    chunks = (length + q.shape[0] - 1) // schedule.chunk + 1 + extra_chunks
    where = torch.tensor([length], dtype=torch.int32, device=device)
    partials = attention(q, k, v, where, chunks=chunks, schedule=schedule, numerics=NUMERICS)
    return merge(partials, where, rows=q.shape[0], chunk=schedule.chunk, schedule=merging, numerics=NUMERICS)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("length", [0, 1, 14, 30, 31, 32, 33, 62, 63, 64, 65])
def test_attention_equals_fp64_around_chunk_edges(heads: Heads, length: int, device: str) -> None:
    """Lengths across each chunk boundary, V addressed with its own strides."""
    k, v = cache(heads, 96, device, poison_from=length + ROWS)
    q = queries(heads, ROWS, device)
    found = run(q, k, v, length, device)
    assert_close(found, attention_reference(q, k, v, length), rms=6e-3, worst=5e-2, what=f"{heads} length {length}")


@pytest.mark.parametrize("length", [0, 13, 27, 28, 31, 32, 60, 63, 64])
def test_rows_alone_and_among_others(length: int, device: str) -> None:
    """Row r of a launch equals a launch of that row alone at its position: chunks and masks follow the row, not the launch."""
    heads = HEADS[0]
    k, v = cache(heads, 96, device, poison_from=length + 9)
    q = queries(heads, 9, device)
    whole = run(q, k, v, length, device)
    for r in range(9):
        alone = run(q[r:r + 1], k, v, length + r, device)
        assert_same_bytes(alone[0], whole[r], f"length {length}, row {r}")
    for rows in (2, 5):
        assert_same_bytes(run(q[:rows], k, v, length, device), whole[:rows], f"length {length}, {rows} rows")


@pytest.mark.parametrize("length", [0, 11, 16, 31])
def test_a_chunk_of_one_step(length: int, device: str) -> None:
    """Where chunk is BLOCK_N a block reads the keys of earlier passes before it waits, and its own pass's after: against fp64,
    rows alone and among others, with the bytes that it has without overlap."""
    heads = HEADS[0]
    plain = replace(BASE, chunk=16)
    overlapping = replace(plain, pdl=True)
    k, v = cache(heads, 96, device, poison_from=length + 9)
    q = queries(heads, 9, device)
    whole = run(q, k, v, length, device, overlapping)
    assert_close(whole, attention_reference(q, k, v, length), rms=6e-3, worst=5e-2)
    assert_same_bytes(run(q, k, v, length, device, plain), whole, "without overlap")
    for rows in range(1, 9):
        early_k, early_v = cache(heads, 96, device, poison_from=length + rows)
        assert_same_bytes(run(q[:rows], early_k, early_v, length, device, overlapping), whole[:rows], f"{rows} rows")
    for r in (3, 8):
        assert_same_bytes(run(q[r:r + 1], k, v, length + r, device, overlapping)[0], whole[r], f"row {r} alone")


@pytest.mark.parametrize("length", [20, 31, 40])
def test_merge_leaves_the_largest_of_each_piece(length: int, device: str) -> None:
    """Of finished rows as of merged ones; two pieces a head."""
    import torch

    heads = HEADS[1]
    k, v = cache(heads, 96, device, poison_from=length + ROWS)
    q = queries(heads, ROWS, device)
    where = torch.tensor([length], dtype=torch.int32, device=device)
    partials = attention(q, k, v, where, chunks=2, schedule=BASE, numerics=NUMERICS)
    count = parts(MergeShape(heads.kv * heads.group, heads.dim), IN_ORDER)
    amax = torch.full((16, count), float("nan"), device=device)
    o = merge(partials, where, rows=ROWS, chunk=CHUNK, schedule=IN_ORDER, numerics=NUMERICS, amax=amax)
    pieces = o.float().abs().reshape(ROWS, count, IN_ORDER.BLOCK_D).amax(-1)
    assert_same_bytes(amax[:ROWS], pieces)
    assert amax[ROWS:].isnan().all()


@pytest.mark.parametrize("splits", [1, 4, 16])
def test_an_empty_chunk_adds_exactly_nothing(splits: int, device: str) -> None:
    """Nor does a larger buffer: the capacity doesn't reach the bits."""
    heads = HEADS[0]
    k, v = cache(heads, 192, device, poison_from=45)
    q = queries(heads, ROWS, device)
    merging = replace(IN_ORDER, splits=splits)
    plain = run(q, k, v, 40, device, merging=merging)
    for extra in (1, 4):
        assert_same_bytes(run(q, k, v, 40, device, merging=merging, extra_chunks=extra), plain, f"{extra} more chunks")


def test_what_stands_past_the_cursor_never_shows(device: str) -> None:
    """Poisoned slots: 0 x NaN is NaN, so loads are masked, not scores alone."""
    heads = HEADS[0]
    q = queries(heads, ROWS, device)
    clean = run(q, *cache(heads, 96, device, poison_from=96), 40, device)
    assert_same_bytes(run(q, *cache(heads, 96, device, poison_from=45), 40, device), clean)


@pytest.mark.parametrize("merging", [MergeSchedule(16, 1, 1), MergeSchedule(16, 8, 4), MergeSchedule(16, 64, 4)], ids=str)
def test_merge_equals_fp64(merging: MergeSchedule, device: str) -> None:
    """Chunks of very different weight, some empty for some rows."""
    import torch

    gen = torch.Generator().manual_seed(5)
    chunks, heads, dim, chunk = 7, 3, 32, 32
    acc = torch.randn(chunks, 16, heads, dim, generator=gen).to(device)
    m = (torch.randn(chunks, 16, heads, generator=gen) * 8).to(device)
    l = torch.rand(chunks, 16, heads, generator=gen).to(device) + 0.5
    length = torch.tensor([30 + 3 * chunk], dtype=torch.int32, device=device)
    partials = Partials(acc, m, l, torch.full((ROWS, heads, dim), float("nan"), dtype=torch.bfloat16, device=device))
    found = merge(partials, length, rows=ROWS, chunk=chunk, schedule=merging, numerics=NUMERICS)
    assert_close(found, merge_reference(acc, m, l, int(length), rows=ROWS, chunk=chunk), rms=4e-3, worst=4e-2)


@pytest.mark.parametrize("chunks", [FOLD + 1, 2 * FOLD, 2 * FOLD + 5])
def test_groups_of_chunks_equal_fp64(chunks: int, device: str) -> None:
    """More chunks than one walk takes, with rows on both sides of the last group's edge."""
    import torch

    gen = torch.Generator().manual_seed(chunks)
    heads, dim, chunk = 3, 32, 16
    acc = torch.randn(chunks, 16, heads, dim, generator=gen).to(device)
    m = (torch.randn(chunks, 16, heads, generator=gen) * 8).to(device)
    l = torch.rand(chunks, 16, heads, generator=gen).to(device) + 0.5
    at = (chunks - 1) * chunk - 3  # row 3 opens the last chunk
    length = torch.tensor([at], dtype=torch.int32, device=device)
    partials = Partials(acc, m, l, torch.full((ROWS, heads, dim), float("nan"), dtype=torch.bfloat16, device=device))
    found = merge(partials, length, rows=ROWS, chunk=chunk, schedule=IN_ORDER, numerics=NUMERICS)
    assert_close(found, merge_reference(acc, m, l, at, rows=ROWS, chunk=chunk), rms=4e-3, worst=4e-2)


@pytest.mark.parametrize("used", [1, 2, FOLD - 1, FOLD])
def test_one_group_has_the_same_bytes_in_one_walk_and_in_two(used: int, device: str) -> None:
    """A graph that covers more chunks than a row has keys for: fold and merge, against the merge alone."""
    import torch

    gen = torch.Generator().manual_seed(used)
    heads, dim, chunk, room = 3, 32, 16, 2 * FOLD
    acc = torch.randn(room, 16, heads, dim, generator=gen).to(device)
    m = (torch.randn(room, 16, heads, generator=gen) * 8).to(device)
    l = torch.rand(room, 16, heads, generator=gen).to(device) + 0.5
    for tensor in (acc, m, l):
        tensor[used:] = float("nan")  # what no key stands for may hold anything
    finished = torch.randn(4, heads, dim, generator=gen).to(device, torch.bfloat16)
    length = torch.tensor([used * chunk - 4], dtype=torch.int32, device=device)

    def merged(chunks: int) -> "torch.Tensor":
        return merge(Partials(acc, m, l, finished.clone()), length, rows=4, chunk=chunk, schedule=IN_ORDER, numerics=NUMERICS,
                     chunks=chunks)

    assert_same_bytes(merged(room), merged(FOLD))
    assert merged(room).isfinite().all()


def test_one_chunk_is_finished_in_the_bytes_of_a_merge(device: str) -> None:
    """Row 0 sees chunk 0 alone and is finished at once; row 1, with the same query, opens chunk 1 and leaves a partial of
    chunk 0. That partial through a merge must be row 0."""
    import torch

    heads = HEADS[1]
    k, v = cache(heads, 96, device, poison_from=33)
    q = queries(heads, 2, device)
    q[1] = q[0]
    where = torch.tensor([CHUNK - 1], dtype=torch.int32, device=device)
    partials = attention(q, k, v, where, chunks=2, schedule=BASE, numerics=NUMERICS)
    finished = partials.o[0].clone()
    one = Partials(*(t[:1].repeat(2, *[1] * (t.dim() - 1)) for t in (partials.acc, partials.m, partials.l)), partials.o)
    one.m[1], one.l[1], one.acc[1] = float("-inf"), 0.0, 0.0  # an empty second chunk, so that the merge does its work
    merged = merge(one, where, rows=2, chunk=CHUNK, schedule=IN_ORDER, numerics=NUMERICS)
    assert_same_bytes(merged[1], finished)
    assert_same_bytes(merged[0], finished, "the merge leaves a finished row alone")


def test_too_many_rows_for_the_tile_are_refused(device: str) -> None:
    heads = HEADS[1]
    assert max_rows(AttentionShape(8, 2, 32), BASE) == 8
    k, v = cache(heads, 96, device, poison_from=96)
    with pytest.raises(ContractError, match="9 rows"):
        run(queries(heads, 9, device), k, v, 10, device)


def test_unaligned_strides_are_refused(device: str) -> None:
    import torch

    heads = HEADS[0]
    k, _ = cache(heads, 96, device, poison_from=96)
    v = torch.zeros(96, heads.kv, heads.dim + 8, dtype=torch.bfloat16, device=device)[:, :, : heads.dim]
    with pytest.raises(ContractError, match="stride_v"):
        run(queries(heads, 2, device), k, v, 10, device)


@pytest.mark.parametrize("length", [0, CHUNK - 2, 3 * CHUNK - 3, 3 * CHUNK])
def test_chunks_walked_over_have_the_bytes_of_chunks_alone(length: int, device: str) -> None:
    """A launch that covers more than FOLD chunks, against one that covers the keys."""
    import torch

    heads, schedule = HEADS[1], replace(BASE, BLOCK_N=CHUNK)
    k, v = cache(heads, 4 * CHUNK + 16, device, poison_from=length + ROWS)
    q = queries(heads, ROWS, device)
    where = torch.tensor([length], dtype=torch.int32, device=device)
    used = (length + ROWS - 1) // CHUNK + 1

    def left(chunks: int) -> list["torch.Tensor"]:
        shape = AttentionShape(q.shape[1], k.shape[1], heads.dim)
        out = new_partials(shape, FOLD + 1, ROWS, torch.device(device))
        for tensor in (out.acc, out.m, out.l, out.o):
            tensor.fill_(7.0)
        attention(q, k, v, where, chunks=chunks, schedule=schedule, numerics=NUMERICS, out=out)
        return [out.acc, out.m, out.l, out.o]

    for name, alone, walked in zip(("acc", "m", "l", "o"), left(used), left(FOLD + 1)):
        assert_same_bytes(walked, alone, name)
