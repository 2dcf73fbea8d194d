"""Every kernel against its oracle, written by hand in numpy: small odd shapes, unequal strides, poisoned outputs.

The kernels' own references, which the tuner and the other tests use, are compared with nothing of theirs here.
"""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracles
import pytest
from helpers import strided
from tune_kernels.kernels import accept, activation, attention, branch_selection, linear, lm_head, merge, norm, prefill, rope
from tune_kernels.kernels.layout import (
    COUNT,
    DRAFT,
    ENDS,
    FINISHED,
    FOLD,
    HEADER,
    HIT,
    LEFT,
    LENGTH,
    MADE,
    PAIR,
    RECORD,
    ROUND,
    ROWS,
    STARTS,
    STATE,
    STRIDE,
    TABLE,
    TIP,
    TOKEN,
    Activation,
    Weights,
)
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import AttentionSchedule, FixedSchedule, HeadSchedule, LinearSchedule, MergeSchedule

pytestmark = pytest.mark.interpreter
NUMERICS = load_recipe("fp8-v1").numerics
FIXED: dict[str, Any] = {"schedule": FixedSchedule(num_warps=1), "numerics": NUMERICS}
EPS, THETA = 1e-6, 1e4
NAN = float("nan")


def numbers(tensor: Any) -> Any:
    """The values of a tensor as fp64 in numpy."""
    return None if tensor is None else tensor.float().double().cpu().numpy()


def draw(*size: int, seed: int, spread: int = 3) -> Any:
    import torch

    gen = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=gen) * torch.exp2(torch.randint(-spread, spread + 1, (*size[:-1], 1), generator=gen))


def nan(*size: int, like: str = "bfloat16", device: str) -> Any:
    import torch

    return torch.full(size, NAN, device=device).to(getattr(torch, like))


def close(found: Any, expected: Any, bits: int) -> None:
    """Each value within 2^-bits of the row's largest magnitude; NaN never passes."""
    values = numbers(found)
    assert values.shape == expected.shape
    for row, wanted in zip(values.reshape(len(values), -1), expected.reshape(len(values), -1)):
        worst = np.abs(row - wanted).max()
        assert worst <= np.abs(wanted).max() * 2.0**-bits, f"{worst} of {np.abs(wanted).max()}"


def ints(values: list[int], device: str) -> Any:
    import torch

    return torch.tensor(values, dtype=torch.int32, device=device)


def operands(N: int, K: int, rows: int, terms: int, fp8: bool, device: str) -> tuple[Activation, Weights]:
    """NaN between the rows; the second term a sixteenth of the first, as quantisation makes them."""
    import torch

    kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
    x = strided(draw(terms, rows, K, seed=N).to(device).to(kind), 16)
    w = strided(draw(N, K, seed=K).to(device).to(kind), 48)
    scale, w_scale = ((draw(n, seed=n).abs() + 0.3).to(device) if fp8 else None for n in (rows, N))
    return Activation(x, scale), Weights(w, w_scale, draw(N, seed=7).to(device).bfloat16())


def expected_linear(x: Activation, w: Weights) -> Any:
    return oracles.linear(numbers(x.values), numbers(w.w), numbers(x.scale), numbers(w.scale), numbers(w.bias))


LINEAR = LinearSchedule(BLOCK_N=32, BLOCK_K=32, num_stages=2, num_warps=4)


@pytest.mark.parametrize("schedule", [
    LINEAR, replace(LINEAR, split_k=2), replace(LINEAR, orientation="activations_as_m", row_tile=8), replace(LINEAR, load="tma"),
    replace(LINEAR, preload=True, split_k=3), replace(LINEAR, blocks_per_sm=1)], ids=str)
@pytest.mark.parametrize(("terms", "fp8"), [(1, False), (1, True), (2, True)])
def test_linear(schedule: LinearSchedule, terms: int, fp8: bool, device: str) -> None:
    x, w = operands(48, 80, 3, terms, fp8, device)
    y = linear.linear(x, w, schedule=schedule, numerics=NUMERICS)
    close(y if schedule.split_k == 1 else y.double().sum(0), expected_linear(x, w), 8 if schedule.split_k == 1 else 11)


@pytest.mark.parametrize(("terms", "fp8"), [(1, False), (1, True), (2, True)])
def test_swiglu_as_epilogue_of_the_linear(terms: int, fp8: bool, device: str) -> None:
    """The maxima are those of the output, tile by tile."""
    x, w = operands(48, 80, 3, terms, fp8, device)
    if x.scale is not None and w.scale is not None:  # gates then lie where silu bends
        x, w = replace(x, scale=x.scale.clone().fill_(0.1)), replace(w, scale=w.scale.clone().fill_(0.3))
    amax = nan(3, 2, like="float32", device=device) if fp8 else None
    act = linear.linear(x, w, schedule=LINEAR, numerics=NUMERICS, swiglu=True, amax=amax)
    close(act, oracles.swiglu(expected_linear(x, w)), 6)
    if amax is not None:
        assert numbers(amax).tolist() == [[np.abs(row[:16]).max(), np.abs(row[16:]).max()] for row in numbers(act)]


def test_swiglu(device: str) -> None:
    gate_up, act = draw(3, 96, seed=1, spread=2).to(device).bfloat16(), nan(3, 48, device=device)
    amax = nan(3, activation.segments(48), like="float32", device=device)
    activation.swiglu(gate_up, act, amax, rows=3, **FIXED)
    close(act, oracles.swiglu(numbers(gate_up)), 7)
    assert numbers(amax).tolist() == np.abs(numbers(act)).max(1, keepdims=True).tolist()


@pytest.mark.parametrize("parts", [0, 3])
def test_quantise(parts: int, device: str) -> None:
    """Byte for byte, of rows of zeros, of subnormals and of the largest values too."""
    import torch

    x = draw(5, 48, seed=2, spread=9)
    x[1], x[2], x[3] = 0.0, x[2] * 2.0**-126, x[3] * 2.0**110
    x = x.to(device).bfloat16()
    out = Activation(nan(2, 5, 48, like="float8_e4m3fn", device=device), nan(5, like="float32", device=device))
    amax = torch.stack([part.amax(-1) for part in x.float().abs().tensor_split(parts, -1)], -1).contiguous() if parts else None
    activation.quantise(x, out, rows=5, amax=amax, **FIXED)
    terms, scales = oracles.quantise(numbers(x))
    assert numbers(out.scale).tolist() == scales.tolist()
    assert out.values.view(torch.uint8).cpu().tolist() == terms.tolist()


@pytest.mark.parametrize("split_k", [0, 1, 3])
@pytest.mark.parametrize("quantised", [False, True])
def test_norm(quantised: bool, split_k: int, device: str) -> None:
    """The residual and its copy bit for bit."""
    H, rows = 48, 3
    x, weight = draw(rows, H, seed=3).to(device).bfloat16(), draw(H, seed=4).to(device).bfloat16()
    partials = strided(draw(split_k, rows, H, seed=5).to(device), 16) if split_k else None
    partials = partials.bfloat16() if split_k == 1 else partials
    before = numbers(x)
    out = Activation(nan(2, rows, H, like="float8_e4m3fn", device=device), nan(rows, like="float32", device=device)) \
        if quantised else Activation(nan(1, rows, H, device=device))
    feature = nan(rows, 2 * H, device=device)[:, :H]
    norm.norm(norm.Residual(x, partials if split_k != 1 else strided(partials, 16)), weight, EPS, out, rows=rows, feature=feature,
              **FIXED)
    expected = oracles.residual(before, numbers(partials))
    assert numbers(x).tolist() == numbers(feature).tolist() == expected.tolist()
    h = oracles.rms_norm(expected, numbers(weight), EPS)
    if out.scale is None:
        close(out.values[0], h, 6)
    else:
        values = (numbers(out.values[0]) + numbers(out.values[1]) / 16) * numbers(out.scale)[:, None]
        assert np.abs(values - h).max() <= np.abs(h).max() * 2.0**-6
        for scale, row in zip(numbers(out.scale), h):
            assert scale in (oracles.row_scale(row) / 2, oracles.row_scale(row), 2 * oracles.row_scale(row))


@pytest.mark.parametrize("normed", [False, True])
def test_draft_norm(normed: bool, device: str) -> None:
    """Embedding and feature side by side; token -1 reads row 0."""
    H, tokens = 48, [2, -1, 4]
    embedding, feature = draw(5, H, seed=6).to(device).bfloat16(), draw(3, H, seed=7).to(device).bfloat16()
    weights = [draw(H, seed=s).to(device).bfloat16() for s in (8, 9)]
    x, out = nan(3, H, device=device), Activation(nan(1, 3, 2 * H, device=device))
    norm.draft_norm(norm.DraftEntry(embedding, *weights, EPS, normed), ints(tokens, device), feature, x, out, rows=3, **FIXED)
    left = oracles.rms_norm(numbers(embedding)[[2, 0, 4]], numbers(weights[0]), EPS)
    right = oracles.rms_norm(numbers(feature), numbers(weights[1]), EPS)
    close(out.values[0][:, :H], left, 6)
    close(out.values[0][:, H:], right, 6)
    close(x, right if normed else numbers(feature), 6 if normed else 40)


@pytest.mark.parametrize("rows", [3, 19])
@pytest.mark.parametrize("split_k", [1, 3])
def test_rope_append(split_k: int, rows: int, device: str) -> None:
    """Unequal strides of K and V; a launch of a few rows and one of a prompt's."""
    import torch

    heads, kv, dim, length = 3, 1, 32, 5
    qkv = strided(draw(split_k, rows, (heads + 2 * kv) * dim, seed=10, spread=1).to(device), 16)
    qkv = strided(qkv.bfloat16(), 16) if split_k == 1 else qkv
    angles = torch.arange(length + rows, dtype=torch.float64)[:, None] * THETA ** (-2 * torch.arange(dim // 2).double() / dim)
    tables = (angles.cos().float().to(device), angles.sin().float().to(device))
    q, slots = nan(rows, heads, dim, device=device), length + rows + 2
    k, v = nan(slots, kv, dim + 16, device=device)[..., :dim], nan(slots, kv, dim + 48, device=device)[..., :dim]
    rope.rope_append(qkv, tables, ints([length], device), rows=rows, q=q, cache=(k, v), **FIXED)
    y = oracles.residual(np.zeros((rows, qkv.shape[2])), numbers(qkv)).reshape(rows, -1, dim)
    turned = oracles.rotate(y[:, :heads + kv], length, THETA)
    close(q, turned[:, :heads], 7)
    close(k[length:length + rows], turned[:, heads:], 7)
    assert numbers(v[length:length + rows]).tolist() == y[:, heads + kv:].tolist()
    for cache in (k, v):
        assert cache[:length].isnan().all() and cache[length + rows:].isnan().all()


def cache(slots: int, kv: int, dim: int, live: int, device: str) -> tuple[Any, Any]:
    """No two strides are equal; NaN from slot `live` on."""
    k = draw(kv, slots, dim + 16, seed=11, spread=1).to(device).bfloat16()[:, :, :dim].transpose(0, 1)
    v = draw(slots, kv, dim + 48, seed=12, spread=1).to(device).bfloat16()[:, :, :dim]
    k[live:], v[live:] = NAN, NAN
    assert len({k.stride(0), k.stride(1), v.stride(0), v.stride(1)}) == 4
    return k, v


@pytest.mark.parametrize("many", [False, True], ids=["a chunk a program", "persistent"])
@pytest.mark.parametrize("length", [0, 14, 15, 33])
def test_attention_and_merge(length: int, many: bool, device: str) -> None:
    rows, heads, kv, dim = 3, 6, 2, 16
    k, v = cache(length + rows + 8, kv, dim, length + rows, device)
    q = strided(draw(rows, heads, dim, seed=13, spread=1).to(device).bfloat16(), 16)
    schedule = AttentionSchedule(chunk=16, TILE=16, BLOCK_N=16, num_stages=2, num_warps=4)
    chunks = FOLD + 1 if many else (length + rows - 1) // 16 + 1
    where = ints([length], device)
    partials = attention.attention(q, k, v, where, schedule=schedule, numerics=NUMERICS, chunks=chunks)
    o = merge.merge(partials, where, rows=rows, chunk=16, schedule=MergeSchedule(BLOCK_D=16, splits=2, num_warps=1),
                    numerics=NUMERICS, chunks=chunks)
    close(o, oracles.attention(numbers(q), numbers(k), numbers(v), length), 6)


@pytest.mark.parametrize("chunks", [3, FOLD + 2], ids=["merge", "fold and merge"])
def test_merge(chunks: int, device: str) -> None:
    rows, heads, dim, chunk = 2, 3, 16, 16
    acc = draw(chunks, ROWS, heads, dim, seed=14).to(device)
    m, l = draw(chunks, ROWS, heads, seed=15).to(device) * 4, draw(chunks, ROWS, heads, seed=16).to(device).abs() + 0.5
    length = chunks * chunk - rows
    found = merge.merge(attention.Partials(acc, m, l, nan(rows, heads, dim, device=device)), ints([length], device), rows=rows,
                        chunk=chunk, schedule=MergeSchedule(BLOCK_D=16, splits=4, num_warps=1), numerics=NUMERICS)
    close(found, oracles.merge(numbers(acc), numbers(m), numbers(l), length, rows, chunk), 7)


@pytest.mark.parametrize(("terms", "fp8"), [(1, False), (2, True)])
def test_lm_head(terms: int, fp8: bool, device: str) -> None:
    """Logits, and winners with ties, a limit inside a block, and ids of their own."""
    x, w = operands(45, 48, 3, terms, fp8, device)
    w = replace(w, bias=None)
    w.w[30] = w.w[17]
    w.w[40] = w.w[2]
    schedule = HeadSchedule(BLOCK_N=16, BLOCK_K=32, num_stages=2, num_warps=4)
    logits = lm_head.lm_head_logits(x, w, schedule=schedule, numerics=NUMERICS)
    close(logits, expected_linear(x, w), 11)
    ids = ints([7 * i % 45 for i in range(45)], device)
    for limit in (45, 31, 18, 5):
        expected = oracles.argmax(numbers(logits), limit)
        assert lm_head.lm_head(x, w, schedule=schedule, numerics=NUMERICS, limit=limit).tolist() == expected
        assert lm_head.lm_head(x, w, schedule=schedule, numerics=NUMERICS, limit=limit, ids=ids).tolist() == [
            7 * i % 45 for i in expected]


@pytest.mark.parametrize("schedule", [prefill.WIDE, prefill.NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize(("terms", "fp8"), [(1, False), (2, True)])
def test_prefill_linear(terms: int, fp8: bool, schedule: Any, device: str) -> None:
    x, w = operands(48, 80, 5, terms, fp8, device)
    out = nan(5, 64, device=device)[:, :48]
    prefill.prefill_linear(x, w, out, rows=5, schedule=schedule, numerics=NUMERICS)
    close(out, expected_linear(x, w), 7)


@pytest.mark.parametrize(("length", "rows"), [(0, 5), (61, 5)])
def test_prefill_attention(length: int, rows: int, device: str) -> None:
    heads, kv, dim = 6, 2, 16
    k, v = cache(length + rows + 8, kv, dim, length + rows, device)
    q, out = draw(rows, heads, dim, seed=17, spread=1).to(device).bfloat16(), nan(rows, heads, dim, device=device)
    prefill.prefill_attention(q, k, v, ints([length], device), out, rows=rows, numerics=NUMERICS)
    close(out, oracles.attention(numbers(q), numbers(k), numbers(v), length), 6)


def round_state(device: str, row_tokens: list[int], places: dict[int, int], ends: list[int]) -> Any:
    state = [-77] * STATE
    for place, value in places.items():
        state[place] = value
    return SimpleNamespace(row_tokens=ints([*row_tokens, *[-77] * (ROWS - len(row_tokens))], device), state=ints(state, device),
                           pair=ints([-77] * PAIR, device), starts=ints([-77] * (STARTS * STRIDE), device),
                           ends=ints([*ends, *[-2] * (ENDS - len(ends))], device))


@pytest.mark.parametrize(("winners", "draft", "ends", "left"), [
    ([5, 6, 7], [5, 6], [], 9), ([5, 6, 7], [5, 9], [], 9), ([5, 6, 7], [4, 6], [], 1), ([5, 6, 7], [5, 6], [6], 9),
    ([5, 6, 7], [5, 6], [9, 7], 9), ([5, 6, 7], [5, 6], [7], 2), ([5], [], [5], 3)])
def test_accept(winners: list[int], draft: list[int], ends: list[int], left: int, device: str) -> None:
    now = round_state(device, [3, *draft], {LENGTH: 20, LEFT: left, ROUND: 6, FINISHED: 0}, ends)
    records = ints([-77] * (4 * RECORD), device).view(4, RECORD)
    history = ints([-77] * 64, device)
    accept.accept(ints([*winners, *[-77] * (ROWS - len(winners))], device), now, records, history, draft_length=len(draft),
                  **FIXED)
    accepted, emitted, over = oracles.accept(winners, draft, ends, left)
    record = records[6 % 4].tolist()
    assert record[:HEADER + len(emitted)] == [len(emitted), accepted, int(over), *emitted]
    state = now.state.tolist()
    assert [state[i] for i in (LENGTH, TIP, LEFT)] == [21 + accepted, accepted, left - len(emitted)]
    assert [state[i] for i in (ROUND, FINISHED)] == [7, int(over)]
    assert now.row_tokens.tolist()[0] == winners[accepted]
    assert now.starts.tolist()[::STRIDE] == [20, *(20 + accepted + i for i in range(STARTS - 1))]


@pytest.mark.parametrize("step", [0, 2])
def test_draft_token(step: int, device: str) -> None:
    reference, rights = [7, 0, 9, 4, 5], [1, 3]
    for number in (0, 1):
        now = round_state(device, [3], {LENGTH: 1, ROUND: number}, [])
        accept.draft_token(ints([42], device), now, step=step, reference=ints(reference, device), accepted=ints(rights, device),
                           **FIXED)
        assert now.row_tokens.tolist()[1 + step] == oracles.scripted_token(42, reference, rights[number], 2 + step, step)


@pytest.mark.parametrize("outcome", [(1, 8), (2, 8), (0, 5), (1, 9)])
def test_branch_selection(outcome: tuple[int, int], device: str) -> None:
    columns = [(1, 8, 4, [21, 22]), (1, 8, 5, [31, 32]), (0, 5, 5, [41, 42]), (1, 8, 5, [51, 52])]
    table = ints([-1] * (TABLE * ROWS), device).view(TABLE, ROWS)
    for place, (count, token, made, draft) in enumerate(columns):
        table[COUNT, place], table[TOKEN, place], table[MADE, place] = count, token, made
        table[DRAFT:DRAFT + 2, place] = ints(draft, device)
    now = round_state(device, [outcome[1]], {TIP: outcome[0], ROUND: 6}, [])
    records = ints([-77] * (4 * RECORD), device).view(4, RECORD)
    branch_selection.select_branch(table, now, records, draft_length=2, **FIXED)
    draft = oracles.select(columns, *outcome, made=5)
    assert records[5 % 4, HIT].item() == int(draft is not None)
    assert now.row_tokens.tolist()[1:3] == (draft or [-77, -77])


def test_the_oracles_rounding_is_ieee() -> None:
    """Ties to even, subnormals, and the largest e4m3 value."""
    assert oracles.to_bf16(1 + 2.0**-8) == 1.0 and oracles.to_bf16(1 + 3 * 2.0**-8) == 1 + 2.0**-6
    assert oracles.to_bf16(2.0**-133) == 2.0**-133 and oracles.to_bf16(2.0**-134) == 0.0
    assert [oracles.E4M3[oracles.to_e4m3(v)] for v in (448, 1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, -0.3)] == [
        448, 1.0, 1.25, 0.0, 2.0**-8, -0.3125]
    assert math.isclose(oracles.silu(-800), 0.0)
