"""One oracle per kernel, written by hand: loops over numpy scalars in fp64, apart from the project's own references.

Imports nothing of the project. Arrays hold the operands' values as fp64; where a kernel rounds, so does the oracle, by hand.
"""

import math
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray of fp64, or of int64 for ids
E4M3 = [(-1) ** (b >> 7) * (math.ldexp(b & 7, -9) if (b >> 3 & 15) == 0 else math.ldexp(8 + (b & 7), (b >> 3 & 15) - 10))
        for b in range(256)]  # the value of each byte; 0x7f and 0xff are NaN


def to_bf16(value: float) -> float:
    """The nearest bf16 value, ties to the even one; subnormals of bf16 included."""
    if value == 0 or not math.isfinite(value):
        return value
    exponent = max(math.frexp(value)[1] - 8, -133)  # of the last of 8 significant bits
    return math.ldexp(round(math.ldexp(value, -exponent)), exponent)


def to_fp32(value: float) -> float:
    return float(np.float32(value))


def to_e4m3(value: float) -> int:
    """The byte of the nearest e4m3 value, ties to the even one. value: at most 448 in magnitude."""
    bytes_ = range(128) if math.copysign(1, value) > 0 else range(128, 256)
    return min((b for b in bytes_ if b & 127 != 127), key=lambda b: (abs(E4M3[b] - value), b & 1))


def silu(x: float) -> float:
    return x / (1 + math.exp(-x)) if x > -700 else 0.0


def linear(x: Array, w: Array, x_scale: Array | None, w_scale: Array | None, bias: Array | None) -> Array:
    """x [terms, rows, K], w [N, K]: [rows, N]. The second term counts a sixteenth."""
    terms, rows, K = x.shape
    y = np.zeros((rows, len(w)))
    for r in range(rows):
        for n in range(len(w)):
            products = [(x[0, r, k] + (x[1, r, k] / 16 if terms == 2 else 0.0)) * w[n, k] for k in range(K)]
            y[r, n] = math.fsum(products)
            if x_scale is not None and w_scale is not None:
                y[r, n] *= x_scale[r] * w_scale[n]
            if bias is not None:
                y[r, n] += bias[n]
    return y


def swiglu(gate_up: Array) -> Array:
    """gate_up [rows, 2 N], 8 gates, then their 8 ups, and so on: [rows, N]."""
    rows, columns = gate_up.shape
    act = np.zeros((rows, columns // 2))
    for r in range(rows):
        for i in range(columns // 2):
            gate = 16 * (i // 8) + i % 8
            act[r, i] = silu(gate_up[r, gate]) * gate_up[r, gate + 8]
    return act


def row_scale(row: Array) -> float:
    """A power of two, 2^(floor(log2 amax) - 7); that of the smallest scale for rows of zeros and tiny values."""
    amax = max(abs(v) for v in row)
    return math.ldexp(1.0, max(math.frexp(amax)[1] - 1 if amax else -119, -119) - 7)


def quantise(x: Array) -> tuple[Array, Array]:
    """x [rows, N] as bytes of two e4m3 terms [2, rows, N], and scales [rows]."""
    terms, scales = np.zeros((2, *x.shape), np.int64), np.zeros(len(x))
    for r, row in enumerate(x):
        scales[r] = row_scale(row)
        for i, v in enumerate(row):
            terms[0, r, i] = to_e4m3(v / scales[r])
            terms[1, r, i] = to_e4m3((v / scales[r] - E4M3[terms[0, r, i]]) * 16)
    return terms, scales


def residual(x: Array, partials: Array | None) -> Array:
    """x [rows, H] and partials [split_k, rows, H], added in index order in fp32, rounded to bf16, added, rounded."""
    out = x.copy()
    for r in range(len(x)):
        for i in range(x.shape[1]):
            if partials is not None:
                y = partials[0, r, i]
                for s in range(1, len(partials)):
                    y = to_fp32(y + partials[s, r, i])
                out[r, i] = to_bf16(to_fp32(x[r, i] + to_bf16(y)))
    return out


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """[rows, H], unrounded."""
    h = np.zeros(x.shape)
    for r, row in enumerate(x):
        root = math.sqrt(math.fsum(v * v for v in row) / len(row) + eps)
        for i, v in enumerate(row):
            h[r, i] = v / root * weight[i]
    return h


def rotate(y: Array, first: int, theta: float) -> Array:
    """y [rows, heads, dim]: row r at position first + r; pair i is (i, i + dim / 2)."""
    rows, heads, dim = y.shape
    out = np.zeros(y.shape)
    for r in range(rows):
        for h in range(heads):
            for i in range(dim // 2):
                angle = (first + r) * theta ** (-2 * i / dim)
                a, b = y[r, h, i], y[r, h, i + dim // 2]
                out[r, h, i] = a * math.cos(angle) - b * math.sin(angle)
                out[r, h, i + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attention(q: Array, k: Array, v: Array, length: int) -> Array:
    """q [rows, heads, dim], k and v [slots, kv_heads, dim]: [rows, heads, dim]. Row r sees slots 0 .. length + r."""
    rows, heads, dim = q.shape
    out = np.zeros(q.shape)
    for r in range(rows):
        for h in range(heads):
            kv = h * k.shape[1] // heads
            scores = [math.fsum(q[r, h, d] * k[j, kv, d] for d in range(dim)) / math.sqrt(dim) for j in range(length + r + 1)]
            weights = [math.exp(s - max(scores)) for s in scores]
            for d in range(dim):
                out[r, h, d] = math.fsum(p * v[j, kv, d] for j, p in enumerate(weights)) / math.fsum(weights)
    return out


def merge(acc: Array, m: Array, l: Array, length: int, rows: int, chunk: int) -> Array:
    """Partials acc [chunks, ROWS, heads, dim], m and l [chunks, ROWS, heads]; m counts powers of two: [rows, heads, dim]."""
    _, _, heads, dim = acc.shape
    out = np.zeros((rows, heads, dim))
    for r in range(rows):
        used = range((length + r) // chunk + 1)
        for h in range(heads):
            top = max(m[c, r, h] for c in used)
            total = math.fsum(2 ** (m[c, r, h] - top) * l[c, r, h] for c in used)
            for d in range(dim):
                out[r, h, d] = math.fsum(2 ** (m[c, r, h] - top) * acc[c, r, h, d] for c in used) / total
    return out


def argmax(logits: Array, limit: int) -> list[int]:
    """The lowest of the ids with the greatest logit below `limit`; NaN never wins, a row of nothing else gives -1."""
    found = []
    for row in logits:
        best = -1
        for token in range(min(limit, len(row))):
            if not math.isnan(row[token]) and (best < 0 or row[token] > row[best]):
                best = token
        found.append(best)
    return found


def accept(winners: list[int], draft: list[int], ends: list[int], left: int) -> tuple[int, list[int], bool]:
    """(accepted drafts, emitted tokens, whether the request is over)."""
    accepted = 0
    while accepted < len(draft) and draft[accepted] == winners[accepted]:
        accepted += 1
    emitted: list[int] = []
    over = False
    for token in winners[:accepted + 1]:
        if len(emitted) == left:
            break
        emitted.append(token)
        if token in ends:
            over = True
            break
    return accepted, emitted, over or len(emitted) == left


def scripted_token(token: int, reference: list[int], right: int, at: int, step: int) -> int:
    """Drafted token `step` at place `at` of a recorded sequence: the recorded one while the script says right, else another."""
    recorded = reference[min(at, len(reference) - 1)]
    if step < right:
        return recorded
    return 1 if recorded == 0 else 0


def select(columns: list[tuple[int, int, int, list[int]]], accepted: int, token: int, made: int) -> list[int] | None:
    """The draft of the first column (accepted count, recovery token, round, draft) that was prepared for this outcome."""
    for count, recovery, number, draft in columns:
        if (count, recovery, number) == (accepted, token, made):
            return draft
    return None
