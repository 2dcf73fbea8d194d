"""Row-invariant operations: each against a plain form, then bit for bit against fewer, other and poisoned rows."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tune_kernels.decoder.on_torch import cpu, ops
from tune_kernels.decoder.on_torch.linear import make_linear, quantise_weights, split
from tune_kernels.schedules.recipe import load_recipe


@dataclass(frozen=True)
class Case:
    recipe: str
    N: int
    K: int


SIZES = ((16, 64), (49, 576), (200, 33), (7, 130), (576, 576))
CASES = [Case(recipe, n, k) for recipe in ("fp32", "bf16", "fp8-v1") for n, k in SIZES]


def same(x: torch.Tensor, y: torch.Tensor) -> None:
    """Bytes, with the first differing coordinate named."""
    assert x.dtype == y.dtype
    assert x.shape == y.shape
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    differ = (x.contiguous().view(width) != y.contiguous().view(width)).nonzero()
    at = tuple(differ[0].tolist()) if differ.numel() else ()
    assert not at, f"first difference at {at}: {x[at]} and {y[at]}"


def wide_range(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-8, 8, (rows, columns), generator=generator)
    return torch.randn(rows, columns, generator=generator) * torch.exp2(exponent.float())


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_linear_rows_alone_and_together(case: Case, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: row r of 1 to 16 rows has the bits of the same row alone."""
    monkeypatch.setattr(cpu, "SMALL", 0)
    precision = load_recipe(case.recipe).precision
    linear = make_linear(wide_range(case.N, case.K, 1), precision, wide_range(1, case.N, 2)[0])
    x = wide_range(16, case.K).to(linear.dtype)
    before = torch.get_num_threads()
    alone = torch.cat([linear(x[r:r + 1]) for r in range(16)])
    try:
        torch.set_num_threads(threads)
        for rows in range(1, 17):
            same(linear(x[:rows]), alone[:rows])
            same(linear(x[16 - rows:]), alone[16 - rows:])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_linear_is_close_to_fp64(case: Case) -> None:
    """The bias is added before the one rounding: a second rounding would break the bound of half a bf16 step."""
    precision = load_recipe(case.recipe).precision
    w, x, bias = wide_range(case.N, case.K, 1), wide_range(3, case.K), 100 * wide_range(1, case.N, 2)[0]
    linear = make_linear(w, precision, bias)
    x, bias = x.to(linear.dtype), bias.to(linear.dtype)
    y = linear(x).double()
    if case.recipe == "fp8-v1":
        w_q, w_scale = quantise_weights(w)
        hi, lo, x_scale = split(x)
        w = w_q.double() * w_scale.double()[:, None]
        x = (hi.double() + lo.double() / 16) * x_scale.double()
    else:
        w = w.to(linear.dtype)
    expected = x.double() @ w.double().T + bias.double()
    summed = 1e-6 * (x.double().abs() @ w.double().abs().T + bias.double().abs())  # fp32 sums
    rounding = 0 if case.recipe == "fp32" else 2**-8 * expected.abs()
    assert ((y - expected).abs() <= rounding * (1 + 1e-6) + summed).all()


def test_weights_take_the_best_of_their_scales() -> None:
    """Saturates nothing, keeps zero rows, and no scale between amax / 448 and twice that does better by much."""
    w = torch.cat([wide_range(20, 64), torch.stack([torch.linspace(-3e4, 3e4, 64), torch.zeros(64), torch.full((64,), 1e-30)])])
    q, scale = quantise_weights(w)
    assert scale[21] == 1
    assert torch.equal(q[21].float(), torch.zeros(64))

    def error(scale: torch.Tensor) -> torch.Tensor:
        back = (w / scale).to(torch.float8_e4m3fn).double() * scale
        assert torch.isfinite(back).all()
        return (back - w).square().sum(-1)
    first = torch.where(w.abs().amax(-1, keepdim=True) > 0, w.abs().amax(-1, keepdim=True) / 448, 1.0)
    tried = torch.stack([error(first * 2 ** (j / 8)) for j in range(8)])
    assert torch.equal(error(scale[:, None]), tried.amin(0))
    assert (tried.amin(0) < tried[0]).any()


def test_two_terms_are_exact_for_bf16() -> None:
    """Every bf16 value from 2^-13 of a row's largest up, for the largest at both ends of its octave and in the middle;
    within 2^-21 of the largest below."""
    magnitudes = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for top in (1.0, 1.375, 1.9921875, 3e38, 2.0**-100, 6.1e-5):
        values = magnitudes[magnitudes <= top]
        x = torch.cat([values[-1:], values, -values])[None]
        hi, lo, scale = split(x)
        assert hi.float().abs().max() <= 256
        error = ((hi.double() + lo.double() / 16) * scale.double() - x.double()).abs()
        largest = float(x.double().max())
        assert (error[x.double().abs() >= 2.0**-13 * largest] == 0).all()
        assert error.max() <= 2.0**-21 * largest


def test_two_terms_of_rows_without_a_scale() -> None:
    """All zero, and so small that 1 / scale would overflow: finite, and zero stays zero."""
    x = torch.stack([torch.zeros(8), torch.full((8,), 1e-40), torch.full((8,), -0.0)]).bfloat16()
    hi, lo, scale = split(x)
    assert (scale == 2.0**-126).all()
    assert (hi[::2].float() == 0).all()
    assert (lo[::2].float() == 0).all()
    assert torch.allclose((hi.float() + lo.float() / 16) * scale, x.float(), atol=2.0**-130)


def test_exp_is_exact_where_it_must_be_and_close_elsewhere() -> None:
    """e^0 is 1 (a merge with an empty chunk changes nothing), -inf gives 0."""
    assert ops.exp(torch.tensor([0.0, -0.0, -torch.inf, -1e30, -88.0])).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    x = torch.linspace(-87, 20, 100_001)
    expected = x.double().exp()
    assert ((ops.exp(x.clone()).double() - expected).abs() / expected).max() < 4 * 2**-24


@pytest.mark.parametrize("size", [1, 2, 3, 64, 576, 1000])
def test_elementwise_and_norm_rows(size: int) -> None:
    """Norm, SwiGLU and the sums have the same bits alone and among others."""
    x, weight = wide_range(9, size), wide_range(1, size, 3)[0]
    for op in (lambda x: ops.rms_norm(x, weight, 1e-5), ops.silu, ops.tree_sum, lambda x: ops.exp(-x.abs())):
        whole = op(x.clone())
        for r in range(9):
            same(op(x[r:r + 1].clone()), whole[r:r + 1])
    reference = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert torch.allclose(ops.rms_norm(x, weight, 1e-5).double(), reference, rtol=1e-5)
    assert torch.allclose(ops.silu(x).double(), torch.nn.functional.silu(x.double()), rtol=1e-5, atol=1e-30)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, chunk: int) -> torch.Tensor:
    """q [rows, heads, d]; k, v [tokens, kv_heads, d]: chunks as the cache gives them."""
    state = ops.Attention(q, k.shape[1], chunk)
    for index in range((first + q.shape[0] - 1) // chunk + 1):
        part = slice(index * chunk, min((index + 1) * chunk, first + q.shape[0]))
        k_chunk = k.new_zeros(k.shape[1], k.shape[2], chunk)
        v_chunk = v.new_zeros(v.shape[1], chunk, v.shape[2])
        filled = part.stop - part.start
        k_chunk[:, :, :filled], v_chunk[:, :filled] = k[part].permute(1, 2, 0), v[part].permute(1, 0, 2)
        state.add(index, k_chunk, v_chunk, first)
    return state.result()


@settings(max_examples=60, deadline=None)
@given(first=st.integers(0, 70), rows=st.integers(1, 16), group=st.sampled_from([1, 3, 4, 7]),
       chunk=st.sampled_from([16, 32]), seed=st.integers(0, 1000))
def test_attention_rows_and_reference(first: int, rows: int, group: int, chunk: int, seed: int) -> None:
    """Any length around a chunk boundary, any rows: the bits of each row alone, near fp64."""
    generator = torch.Generator().manual_seed(seed)
    tokens = first + rows
    q = torch.randn(rows, 2 * group, 16, generator=generator) * 3
    k, v = (torch.randn(tokens, 2, 16, generator=generator) for _ in range(2))
    out = attention(q, k, v, first, chunk)
    for r in range(rows):
        same(out[r:r + 1], attention(q[r:r + 1], k[:first + r + 1], v[:first + r + 1], first + r, chunk))
    mask = torch.arange(tokens)[None, :] <= torch.arange(first, tokens)[:, None]
    wide = [t.double().repeat_interleave(group if t is not q else 1, dim=1).transpose(0, 1) for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=mask).transpose(0, 1)
    assert torch.allclose(out.double(), expected, atol=2e-6)


def test_merge_with_an_empty_chunk_changes_nothing() -> None:
    """The one-chunk result is the bytes that merging with an empty chunk gives."""
    old = (torch.randn(4, 3, 5, 1), torch.rand(4, 3, 5, 1) + 1, torch.randn(4, 3, 5, 16))
    empty = (torch.full((4, 3, 5, 1), -torch.inf), torch.zeros(4, 3, 5, 1), torch.zeros(4, 3, 5, 16))
    for kept, given_part in zip(ops.merge(old, empty), old):
        same(kept, given_part + 0.0)


def test_argmax_takes_the_lowest_id_on_ties() -> None:
    """Of equal logits the lowest id wins, whatever the distance between them."""
    for size in (2, 17, 272, 49152):
        x = torch.zeros(3, size)
        x[1, size // 2] = x[1, size - 1] = 5
        x[2, size - 1] = 1
        assert ops.argmax(x).tolist() == [0, size // 2, size - 1]
    assert ops.argmax(torch.tensor([[1.0, float("nan")]])).item() == 2
