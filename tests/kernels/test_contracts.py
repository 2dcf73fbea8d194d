"""F25: every launcher refuses a tensor of another type, layout, size, device or alignment than its kernel addresses.

Each launcher runs once as it should; then each of its tensors is damaged in each way, and nothing may be launched.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tune_kernels.kernels import (
    accept,
    activation,
    attention,
    branch_selection,
    linear,
    lm_head,
    merge,
    ngram,
    norm,
    prefill,
    rope,
)
from tune_kernels.kernels.layout import ENDS, PAIR, RECORD, ROWS, STARTS, STATE, STRIDE, TABLE, Activation, Weights
from tune_kernels.kernels.operation import ContractError, Launch
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import AttentionSchedule, FixedSchedule, HeadSchedule, LinearSchedule, MergeSchedule

pytestmark = pytest.mark.interpreter
NUMERICS = load_recipe("fp8-v1").numerics
FIXED: dict[str, Any] = {"schedule": FixedSchedule(num_warps=1), "numerics": NUMERICS}
LINEAR = LinearSchedule(BLOCK_N=32, BLOCK_K=32, num_stages=2, num_warps=4)
N, K, HEADS, KV, DIM = 32, 64, 4, 2, 16
Tensors = dict[str, Any]


def make(device: str, **sizes: tuple[Any, ...]) -> Tensors:
    """Tensors of ones: name=(dtype, size...)."""
    import torch

    kinds = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "fp32": torch.float32, "i32": torch.int32}
    return {name: torch.ones(*size, device=device).to(kinds[kind]) for name, (kind, *size) in sizes.items()}


def now_of(t: Tensors) -> Any:
    return SimpleNamespace(**{name: t.get(name) for name in ("row_tokens", "pair", "state", "starts", "ends")})


ROUND_STATE: Any = {"row_tokens": ("i32", ROWS), "state": ("i32", STATE), "records": ("i32", 4, RECORD)}
CACHE: Any = {"k": ("bf16", 20, KV, DIM), "v": ("bf16", 20, KV, DIM), "length": ("i32", 1)}
ATTENTION = AttentionSchedule(chunk=16, TILE=16, BLOCK_N=16, num_stages=2, num_warps=4)
PARTIALS: Any = {"acc": ("fp32", 2, ROWS, HEADS, DIM), "m": ("fp32", 2, ROWS, HEADS), "l": ("fp32", 2, ROWS, HEADS),
                 "o": ("bf16", 3, HEADS, DIM)}

W: Any = {"x": ("e4m3", 2, 3, K), "w": ("e4m3", N, K), "x_scale": ("fp32", 3), "w_scale": ("fp32", N)}
HEAD = HeadSchedule(BLOCK_N=32, BLOCK_K=32, num_stages=2, num_warps=4)
ON: dict[str, Any] = {"schedule": LINEAR, "numerics": NUMERICS}


def x_of(t: Tensors) -> Activation:
    return Activation(t["x"], t.get("x_scale"))


def w_of(t: Tensors) -> Weights:
    return Weights(t["w"], t.get("w_scale"), t.get("bias"))


def out_of(t: Tensors) -> Activation:
    return Activation(t["out"], t.get("scale"))


def partials_of(t: Tensors) -> attention.Partials:
    return attention.Partials(t["acc"], t["m"], t["l"], t["o"])


CASES: dict[str, tuple[dict[str, Any], Callable[[Tensors], object]]] = {
    "linear": (
        {**W, "bias": ("bf16", N), "out": ("bf16", 3, N)},
        lambda t: linear.linear(x_of(t), w_of(t), out=t["out"], **ON)),
    "linear with swiglu": (
        {**W, "out": ("bf16", 3, N // 2), "amax": ("fp32", 3, 1)},
        lambda t: linear.linear(x_of(t), w_of(t), amax=t["amax"], out=t["out"], swiglu=True, **ON)),
    "lm_head": (
        {"x": ("bf16", 1, 3, K), "w": ("bf16", N, K), "ids": ("i32", N), "best": ("fp32", 3, 1), "best_id": ("i32", 3, 1),
         "tokens": ("i32", 3)},
        lambda t: lm_head.lm_head(x_of(t), w_of(t), ids=t["ids"], schedule=HEAD, numerics=NUMERICS,
                                  scratch=lm_head.HeadScratch(t["best"], t["best_id"], t["tokens"]))),
    "lm_head_logits": (
        {"x": ("bf16", 1, 3, K), "w": ("bf16", N, K)},
        lambda t: lm_head.lm_head_logits(x_of(t), w_of(t), schedule=HEAD, numerics=NUMERICS)),
    "attention": (
        {"q": ("bf16", 3, HEADS, DIM), **CACHE, **PARTIALS},
        lambda t: attention.attention(t["q"], t["k"], t["v"], t["length"], schedule=ATTENTION, numerics=NUMERICS, chunks=2,
                                      out=partials_of(t))),
    "merge": (
        {"length": ("i32", 1), **PARTIALS, "amax": ("fp32", 3, HEADS)},
        lambda t: merge.merge(partials_of(t), t["length"], rows=3, chunk=16, numerics=NUMERICS, amax=t["amax"],
                              schedule=MergeSchedule(BLOCK_D=16, splits=1, num_warps=1))),
    "norm": (
        {"x": ("bf16", 3, K), "weight": ("bf16", K), "out": ("e4m3", 2, 3, K), "scale": ("fp32", 3), "part": ("fp32", 2, 3, K),
         "feature": ("bf16", 3, K)},
        lambda t: norm.norm(norm.Residual(t["x"], t["part"]), t["weight"], 1e-6, out_of(t), rows=3, feature=t["feature"],
                            **FIXED)),
    "norm of an embedding": (
        {"x": ("bf16", 3, K), "weight": ("bf16", K), "out": ("bf16", 1, 3, K), "tokens": ("i32", 3), "embedding": ("bf16", 5, K)},
        lambda t: norm.norm(norm.Residual(t["x"], tokens=t["tokens"], embedding=t["embedding"]), t["weight"], 1e-6, out_of(t),
                            rows=3, **FIXED)),
    "draft_norm": (
        {"embedding": ("bf16", 5, K), "a": ("bf16", K), "b": ("bf16", K), "tokens": ("i32", 3), "feature": ("bf16", 3, K),
         "x": ("bf16", 3, K), "out": ("bf16", 1, 3, 2 * K)},
        lambda t: norm.draft_norm(norm.DraftEntry(t["embedding"], t["a"], t["b"], 1e-6, False), t["tokens"], t["feature"], t["x"],
                                  out_of(t), rows=3, **FIXED)),
    "rope_append": (
        {"qkv": ("bf16", 1, 3, (HEADS + 2 * KV) * DIM), "cos": ("fp32", 20, DIM // 2), "sin": ("fp32", 20, DIM // 2),
         "q": ("bf16", 3, HEADS, DIM), **CACHE},
        lambda t: rope.rope_append(t["qkv"], (t["cos"], t["sin"]), t["length"], rows=3, q=t["q"], cache=(t["k"], t["v"]),
                                   **FIXED)),
    "swiglu": (
        {"gate_up": ("bf16", 3, 2 * N), "act": ("bf16", 3, N), "amax": ("fp32", 3, 1)},
        lambda t: activation.swiglu(t["gate_up"], t["act"], t["amax"], rows=3, **FIXED)),
    "quantise": (
        {"x": ("bf16", 3, K), "out": ("e4m3", 2, 3, K), "scale": ("fp32", 3), "amax": ("fp32", 3, 2)},
        lambda t: activation.quantise(t["x"], out_of(t), rows=3, amax=t["amax"], **FIXED)),
    "prefill_linear": (
        {**W, "bias": ("bf16", N), "out": ("bf16", 3, N)},
        lambda t: prefill.prefill_linear(x_of(t), w_of(t), t["out"], rows=3, numerics=NUMERICS)),
    "prefill_attention": (
        {"q": ("bf16", 3, HEADS, DIM), **CACHE, "out": ("bf16", 3, HEADS, DIM)},
        lambda t: prefill.prefill_attention(t["q"], t["k"], t["v"], t["length"], t["out"], rows=3, numerics=NUMERICS)),
    "accept": (
        {"winners": ("i32", 3), **ROUND_STATE, "pair": ("i32", PAIR), "starts": ("i32", STARTS * STRIDE), "ends": ("i32", ENDS),
         "history": ("i32", ROWS + 1)},
        lambda t: accept.accept(t["winners"], now_of(t), t["records"], t["history"], draft_length=2, **FIXED)),
    "draft_token": (
        {"token": ("i32", 1), "row_tokens": ("i32", ROWS), "state": ("i32", STATE), "reference": ("i32", 9),
         "accepted": ("i32", 9)},
        lambda t: accept.draft_token(t["token"], now_of(t), step=0, reference=t["reference"], accepted=t["accepted"], **FIXED)),
    "ngram": (
        {"history": ("i32", ROWS + 1), "row_tokens": ("i32", ROWS), "state": ("i32", STATE)},
        lambda t: ngram.ngram_draft(t["history"], now_of(t), draft_length=2, **FIXED)),
    "select_branch": (
        {"table": ("i32", TABLE, ROWS), **ROUND_STATE, "hits": ("i32", 9)},
        lambda t: branch_selection.select_branch(t["table"], now_of(t), t["records"], draft_length=2, hits=t["hits"], **FIXED)),
}
ONE = ("length", "token")  # of one entry: nothing to step along, and no axis to cut
ANY_LENGTH = {"embedding", "reference", "accepted", "hits", "records", "k", "v", "cos", "sin"}  # of the first axis


SIZE_OF_THE_LAUNCH = {("linear", "x"), ("linear with swiglu", "x"), ("lm_head_logits", "w"), ("attention", "q"), ("merge", "acc")}
# Their first axis is the number of terms, logits, rows or chunks of the launch: a shorter one is a smaller launch.


def strided(tensor: Any) -> Any:
    """Every second entry of the last axis."""
    return tensor.repeat_interleave(2, -1)[..., ::2] if tensor.element_size() > 1 else tensor.float().repeat_interleave(2, -1).to(
        tensor.dtype)[..., ::2]


def unaligned(tensor: Any) -> Any:
    """The same values, one entry into an allocation."""
    import torch

    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:]
    return room.view(tensor.shape).copy_(tensor)


def damages(name: str, tensor: Any) -> dict[str, Any]:
    """A tensor in every way that a kernel doesn't address."""
    import torch

    found = {"another type": tensor.double(), "off 16 bytes": unaligned(tensor), "another device": tensor.to("meta"),
             "one axis more": tensor[None]}
    if name not in ONE:
        found["every second entry"] = strided(tensor)
        if tensor.dim() > 1 or name not in ANY_LENGTH:
            found["one entry"] = tensor.flatten()[:1]
        if name not in ANY_LENGTH:
            found["too short"] = tensor[:-1].clone()
        if tensor.dim() == 2 and tensor.shape[0] > 1 < tensor.shape[1]:
            found["transposed"] = torch.empty(tensor.shape[::-1], dtype=tensor.dtype, device=tensor.device).t()
    return found


@pytest.mark.parametrize("launcher", CASES)
def test_a_launcher_refuses_what_its_kernel_does_not_address(launcher: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, launch = CASES[launcher]
    tensors = make(device, **sizes)
    launch(tensors)
    launched: list[str] = []
    monkeypatch.setattr(Launch, "__call__", lambda self, grid, **arguments: launched.append(self.kernel.__name__))
    for name, tensor in tensors.items():
        for damage, wrong in damages(name, tensor).items():
            if damage == "too short" and (launcher, name) in SIZE_OF_THE_LAUNCH:
                continue
            try:
                launch({**tensors, name: wrong})
            except ContractError:
                continue
            raise AssertionError(f"{launcher}: {name}, {damage}: launched {launched}")
    assert not launched


SCHEDULED = [name for name, (_, launch) in CASES.items() if "FIXED" in launch.__code__.co_names]


@pytest.mark.parametrize("launcher", SCHEDULED)
def test_a_launcher_asks_the_contract_of_its_schedule(launcher: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fixed kernels too, whose schedules a caller passes."""
    sizes, launch = CASES[launcher]
    monkeypatch.setitem(FIXED, "schedule", FixedSchedule(num_warps=3))
    with pytest.raises(ContractError, match="num_warps 3 is not a power of two"):
        launch(make(device, **sizes))


def test_the_fixed_kernels_are_all_asked() -> None:
    assert {"norm", "draft_norm", "rope_append", "swiglu", "quantise", "accept", "draft_token", "ngram",
            "select_branch"} <= set(SCHEDULED)


@pytest.mark.parametrize("w_scale", ["every second entry", "one entry", "another type"])
def test_scales_of_weights(w_scale: str, device: str) -> None:
    """The finding itself: such scales were read as if they were contiguous fp32."""
    tensors = make(device, **CASES["linear"][0])
    wrong = damages("w_scale", tensors["w_scale"])[w_scale]
    with pytest.raises(ContractError, match=r"w_scale is torch\.float(32|64)"):
        CASES["linear"][1]({**tensors, "w_scale": wrong})


def test_an_error_names_what_was_found_and_what_is_expected(device: str) -> None:
    tensors = make(device, **CASES["norm"][0])
    with pytest.raises(ContractError) as raised:
        CASES["norm"][1]({**tensors, "part": tensors["part"][:, :, ::2]})
    assert "part is torch.float32 [2, 3, 32] with strides [192, 64, 2]" in raised.value.found
    assert "torch.float32 [2, >= 3, 64], contiguous but for stride_ps (a positive multiple of 16)" in raised.value.expected
