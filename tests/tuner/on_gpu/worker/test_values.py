"""Probe values: the same everywhere, for ever. Were they to change, every promoted numerics class would be another one."""

import hashlib

import numpy as np
import pytest
from tune_kernels.tuner.on_gpu.worker import values


@pytest.mark.parametrize(("made", "digest"), [
    (values.hashed(1000, 7), "d701daed080751d7"), (values.normal(1000, 7), "fcefcab381beead3"),
    (values.wide(1000, 7, -8, 8), "bb782fc88d158279"), (values.wide_e4m3(1000, 7), "610dabf187f37fa1"),
])
def test_values_are_pinned(made: np.ndarray, digest: str) -> None:
    assert hashlib.sha256(made.tobytes()).hexdigest()[:16] == digest


def test_normal_values_are() -> None:
    found = values.normal(100_000, 1)
    assert abs(found.mean()) < 0.02
    assert abs(found.std() - 1) < 0.02


def test_wide_values_span_their_exponents_and_are_bf16() -> None:
    found = values.wide(100_000, 1, -8, 8)
    assert set(np.frexp(found)[1] - 1) == set(range(-8, 8))
    assert 0.45 < (found < 0).mean() < 0.55
    assert not (found.view(np.uint32) & 0xFFFF).any()


def test_wide_e4m3_values_are_all_the_finite_ones() -> None:
    found = set(values.wide_e4m3(100_000, 1).tolist())
    assert found == set(range(256)) - set(values.E4M3_NAN)


def test_seeds_differ() -> None:
    assert (values.hashed(1000, 1) != values.hashed(1000, 2)).mean() > 0.99


def test_a_large_operand_repeats_its_block_and_no_two_rows_are_equal() -> None:
    torch = pytest.importorskip("torch")
    block = values.wide_e4m3(97, 3)
    found = values.fill(block, (40, 16), torch.float8_e4m3fn, "cpu").view(torch.uint8)
    assert found.flatten().tolist() == np.resize(block, 640).tolist()
    assert len({tuple(r) for r in found.tolist()}) == 40
    small = values.fill(values.wide(97, 3, -4, 4), (3, 5), torch.bfloat16, "cpu")
    assert small.float().flatten().tolist() == values.wide(97, 3, -4, 4)[:15].tolist()
