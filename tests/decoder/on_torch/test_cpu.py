"""F1 and F41: the results of the CPU's kernels are fixed by IEEE 754, whatever the rows, the threads, the load and the CPU."""

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tune_kernels.decoder import sampling
from tune_kernels.decoder.on_torch import cpu, gpu, ops
from tune_kernels.decoder.on_torch.linear import make_linear, quantise_weights, split
from tune_kernels.schedules.recipe import load_recipe

SIZES = [(49, 576), (200, 33), (1, 1), (64, 1), (65, 2), (576, 576), (1536, 576), (576, 1536)]  # N, K
BATCHED = [(3, 64, 256), (3, 256, 64), (2, 5, 16), (1, 7, 80), (2, 1, 1)]  # batches, K, n
THREADS = (1, 2, 3, 8)
FINGERPRINT = "9aaf760e2021a1f10c777090869cdcd62e2513158c53835ef8da48a3d50d4ecc"


def hashed(size: tuple[int, ...], seed: int, exponents: int = 16) -> np.ndarray:
    """float32 of both signs by an integer hash alone, over `exponents` powers of two around 1."""
    x = np.arange(np.prod(size), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed * 0x632BE5AB + 1)
    for shift in (30, 27):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(31)
    exponent = np.uint64(127 - exponents // 2) + (x >> np.uint64(40)) % np.uint64(exponents)
    bits = (x & np.uint64(0x807FFFFF)) | exponent << np.uint64(23)
    return bits.astype(np.uint32).view(np.float32).reshape(size)


def plain_sum(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x [rows, K] @ w [N, K].T by the definition: k in order, every product and every sum rounded."""
    acc = np.zeros((x.shape[0], w.shape[0]), np.float32)
    with np.errstate(all="ignore"):
        for k in range(x.shape[1]):
            acc = acc + x[:, k:k + 1] * w[None, :, k]
    return acc


def same(found: torch.Tensor | np.ndarray, expected: torch.Tensor | np.ndarray) -> None:
    """Bytes, with the first differing coordinate named; any NaN is a NaN."""
    one, other = (t.float().numpy() if isinstance(t, torch.Tensor) else t for t in (found, expected))
    assert one.shape == other.shape and one.dtype == other.dtype == np.float32
    differ = np.argwhere((one.view(np.uint32) != other.view(np.uint32)) & ~(np.isnan(one) & np.isnan(other)))
    assert not len(differ), f"first of {len(differ)} at {differ[0]}: {one[tuple(differ[0])]!r}, {other[tuple(differ[0])]!r}"


@pytest.fixture
def all_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """However small a product, threads share it; their number is put back at the end."""
    before = torch.get_num_threads()
    monkeypatch.setattr(cpu, "SMALL", 0)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_product_is_the_plain_sum_in_order_of_k(size: tuple[int, int], kind: str, all_threads: None) -> None:
    """F1: byte for byte against numpy, for any number of rows and threads, each row at every position."""
    w = torch.from_numpy(hashed(size, 1))
    w = w.bfloat16() if kind == "bf16" else w
    x, packed = hashed((16, size[1]), 2), cpu.pack(w)
    expected = plain_sum(x, w.float().numpy())
    for threads in THREADS:
        torch.set_num_threads(threads)
        for rows in (1, 2, 3, 4, 5, 8, 16):
            for first in {0, 1, 16 - rows} if rows < 16 else {0}:
                part = slice(first, first + rows)
                same(cpu.linear(torch.from_numpy(x[part]), packed)[:, :size[0]], expected[part])
    for row in range(16):
        same(cpu.linear(torch.from_numpy(x[row:row + 1]), packed)[:, :size[0]], expected[row:row + 1])


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("size", BATCHED, ids=str)
def test_attentions_products_are_plain_sums_too(size: tuple[int, int, int], kind: str, all_threads: None) -> None:
    batches, depth, _ = size
    w = torch.from_numpy(hashed(size, 3))
    w = w.bfloat16() if kind == "bf16" else w
    x = hashed((batches, 9, depth), 4)
    expected = np.stack([plain_sum(one, other.T) for one, other in zip(x, w.float().numpy())])
    for threads in THREADS:
        torch.set_num_threads(threads)
        for rows in (1, 3, 9):
            same(cpu.batched(torch.from_numpy(x[:, :rows].copy()), w), expected[:, :rows])


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8-v1"])
def test_a_linear_rounds_once_at_the_end(recipe: str) -> None:
    """The bias is added to the fp32 sum; bf16 values are multiplied as fp32, e4m3 ones with their scales after the sum."""
    precision = load_recipe(recipe).precision
    w, bias = torch.from_numpy(hashed((65, 130), 5)), torch.from_numpy(hashed((65,), 6))
    linear = make_linear(w, precision, bias)
    x, bias = torch.from_numpy(hashed((5, 130), 7)).to(linear.dtype), bias.to(linear.dtype).float()
    if precision.is_e4m3:
        w_q, w_scale = quantise_weights(w)
        hi, lo, scale = split(x)
        expected = plain_sum((hi.float() + lo.float() / 16).numpy(), w_q.float().numpy()) * scale.numpy() * w_scale.numpy()
    else:
        expected = plain_sum(x.float().numpy(), w.to(linear.dtype).float().numpy())
    same(linear(x), torch.from_numpy(expected + bias.numpy()).to(linear.dtype))


def test_denormals_infinities_and_nan() -> None:
    """No value is flushed, and an infinity or a NaN stays in its row and column."""
    x, w = hashed((6, 40), 8), hashed((70, 40), 9)
    x[0] *= np.float32(2.0**-140)
    x[1, 3], x[2, 0], x[3] = np.inf, np.nan, 0
    w[5] *= np.float32(2.0**-130)
    w[6, 39], w[69, 2], w[7] = -np.inf, np.nan, -0.0
    expected = plain_sum(x, w)
    tiny = np.abs(expected[np.isfinite(expected)])
    assert ((tiny > 0) & (tiny < 2.0**-126)).any() and np.isnan(expected).any() and np.isinf(expected).any()
    same(cpu.linear(torch.from_numpy(x), cpu.pack(torch.from_numpy(w)))[:, :70], expected)


def test_exp_and_tree_sum_are_the_torch_forms() -> None:
    """Byte for byte, at every alignment and in every tail."""
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -87.0, -87.00001, 88.0, 1e-40])
    x = torch.cat([special, torch.linspace(-100, 88, 100_003)])
    for first in range(20):
        same(cpu.exp(x[first:]), gpu.exp(x[first:].clone()))
    for n in (1, 2, 3, 33, 64, 576, 1000):
        values = torch.from_numpy(hashed((7, n), 10))
        values[3] = -0.0
        same(cpu.tree_sum(values), gpu.tree_sum(values))
        assert torch.equal(cpu.tree_sum(values.double()), gpu.tree_sum(values.double()))


def test_square_roots_are_rounded_once() -> None:
    """F1: torch's own are not, on some CPUs: they come from a library. Against numpy's fp64 roots, rounded."""
    x = torch.from_numpy(np.concatenate([np.abs(hashed((1 << 18,), 30, 254)), np.float32([0, 1e-45, 1e-40, np.inf, 4, 2])]))
    expected = np.sqrt(x.numpy().astype(np.float64)).astype(np.float32)
    same(cpu.sqrt(x), expected)
    for first in range(17):
        same(cpu.sqrt(x[first:first + 40]), expected[first:first + 40])


def test_the_gpus_products_are_the_same_function() -> None:
    """gpu.py's blocks and padding, on the CPU's library: near fp64, with bias, for rows on both sides of a block."""
    for rows in (1, 7, 8, 9, 17):
        x, w, bias = (torch.from_numpy(hashed(size, 14, 4)) for size in ((rows, 40), (33, 40), (33,)))
        found = gpu.linear(x, gpu.pad_columns(w), 33, bias)
        assert torch.allclose(found.double(), x.double() @ w.double().T + bias, atol=1e-4)
        left, right = (torch.from_numpy(hashed(size, 15, 4)) for size in ((3, rows, 40), (3, 40, 16)))
        assert torch.allclose(gpu.batched(left, right).double(), left.double() @ right.double(), atol=1e-4)


def test_two_threads_at_once(all_threads: None) -> None:
    """SSD's drafter calls beside the target; a caller may be a worker of some pool itself."""
    torch.set_num_threads(3)
    w, x = hashed((300, 100), 11), hashed((5, 100), 12)
    expected, packed, rows = plain_sum(x, w), cpu.pack(torch.from_numpy(w)), torch.from_numpy(x)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: cpu.linear(rows, packed), range(200)):
            same(found[:, :300], expected)


def test_kernels_compile_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba finds no folder for its cache: an install that is read-only, without a home."""
    njit = cpu.njit

    def unwritable(cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("no locator available")
        return njit(**options)
    monkeypatch.setattr(cpu, "njit", unwritable)
    out = np.zeros(2, np.float32)
    cpu._compiled(cpu.exp_into.py_func)(np.zeros(2, np.float32), out)
    assert out.tolist() == [1, 1]


def test_a_draw_does_not_depend_on_where_its_row_lies() -> None:
    """numpy's exp, log and sums of a row at other addresses."""
    logits = hashed((1003,), 13, 6)
    chooser = sampling.Chooser(0.7, 0.9, 5)
    expected = chooser.scores(logits, 3), sampling.log_softmax(logits)
    for offset in range(1, 17):
        moved = np.empty(1003 + offset, np.float32)[offset:]
        moved[:] = logits
        assert chooser.scores(moved, 3).tobytes() == expected[0].tobytes()
        assert sampling.log_softmax(moved).tobytes() == expected[1].tobytes()


def fingerprint() -> str:
    """SHA-256 of fixed inputs through every operation of a step, all defined by IEEE 754: no log, no cosine."""
    digest = hashlib.sha256()

    def take(out: torch.Tensor) -> None:
        digest.update(out.float().numpy().astype("<f4").tobytes())
    for n, k in SIZES:
        w, x = torch.from_numpy(hashed((n, k), 20)), torch.from_numpy(hashed((5, k), 21))
        for recipe in ("fp32", "bf16", "fp8-v1"):
            linear = make_linear(w, load_recipe(recipe).precision, w[:, 0].clone())
            take(linear(x.to(linear.dtype)))
        take(ops.rms_norm(x, w[0], 1e-5))
        take(ops.silu(x))
        take(ops.exp(-x.abs()))
    q, k, v = (torch.from_numpy(hashed(size, seed, 4)) for size, seed in (((5, 6, 64), 22), ((2, 64, 96), 23), ((2, 96, 64), 24)))
    for kind in (torch.float32, torch.bfloat16):
        state = ops.Attention(q, 2, 48)
        for index in range(2):
            part = slice(48 * index, 48 * index + 48)
            state.add(index, k[:, :, part].to(kind).contiguous(), v[:, part].to(kind).contiguous(), 70)
        take(state.result())
    return digest.hexdigest()


def test_another_cpu_would_give_the_same_bits() -> None:
    """F1: the committed digest was found on an AMD EPYC with numba 0.68.1 and on an Intel Xeon with numba 0.68.0; any other
    x86-64 or Arm CPU must find the same."""
    assert fingerprint() == FINGERPRINT


def product_after_fork() -> int:
    """0 if a child process, made after the threads have run, multiplies as its parent does; it has no threads but its own.
    (torch's own threads don't survive a fork: the child calls nothing of torch that may use them.)"""
    rows, packed = torch.from_numpy(hashed((5, 100), 25)), cpu.pack(torch.from_numpy(hashed((300, 100), 26)))
    expected = cpu.linear(rows, packed).numpy().tobytes()
    child = os.fork()
    if child == 0:
        os._exit(cpu.linear(rows, packed).numpy().tobytes() != expected)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_any_number_of_threads_under_load_and_after_a_fork() -> None:
    """F41: OMP_NUM_THREADS from 1 to 8, all processes at once on whatever cores there are."""
    script = ("import test_cpu; test_cpu.cpu.SMALL = 0; "
              "print(test_cpu.fingerprint(), test_cpu.product_after_fork())")
    running = []
    try:
        for threads in THREADS:
            environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(Path(__file__).parent)}
            running.append(subprocess.Popen([sys.executable, "-W", "ignore", "-c", script], env=environment, text=True,
                                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True))
        outs = [process.communicate(timeout=120) for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert [out.split() for out, _ in outs] == [[FINGERPRINT, "0"]] * len(THREADS), outs
