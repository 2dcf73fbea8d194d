"""The roofline of a decode step: the bytes that it reads, the time to read them, and the rates of AR, SD and SSD.

A step at batch 1 reads every weight once, and the keys and values of the context. Those bytes over the memory's bandwidth are its
floor. Equations (Leviathan et al. 2023; Kumar, Dao, May), for an independent acceptance a per token and a hit rate p:

    tau = (1 - a^(K+1)) / (1 - a)                          tokens per round
    AR  = 1 / t_v                                          tokens per second
    SD  = tau / (K t_d + t_v + t_o)
    SSD = tau / (t_v + t_o + t_sync + (1 - p) K t_d)       a hit hides K t_d, a miss pays it

At best SSD is (K t_d + t_v) / t_v times SD. Real acceptance isn't independent: prefer a measured tau.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...schedules.recipe import BYTES, Precision
from ...shapes.fields import read_table
from ...shapes.model import HeadShape, LinearShape, ModelShape
from ..draft_length import AUTO
from ..errors import RequestError


def step_bytes(shape: ModelShape, precision: Precision, context: int = 0) -> dict[str, int]:
    """Bytes that one step reads, by part: projections (e4m3 ones with an fp32 scale per channel), head, keys and values.

    context: tokens in the cache.
    """
    kernels = shape.kernel_shapes()
    projections = 0
    for name, kernel in kernels.items():
        if isinstance(kernel, LinearShape):
            layers = 1 if name == "fc" else shape.num_layers
            scales = 4 * kernel.N if precision.is_e4m3 else 0
            projections += layers * (kernel.N * kernel.K * BYTES[precision.linear] + scales)
    head = kernels["lm_head"]
    assert isinstance(head, HeadShape)
    kv = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * BYTES[precision.kv_cache] * context
    return {"projections": projections, "lm_head": head.N * head.K * BYTES[precision.lm_head], "kv_cache": kv}


def floor_ms(read: dict[str, int], bandwidth_tb_s: float) -> float:
    """The least time of a step, in milliseconds. read: bytes by part, see step_bytes."""
    return sum(read.values()) / (bandwidth_tb_s * 1e12) * 1e3


def tokens_per_round(acceptance: float, draft_length: int) -> float:
    """tau for an acceptance of 0..1 per token, 1..K+1. It counts the recovery token."""
    if acceptance == 1:
        return draft_length + 1.0
    return (1 - acceptance ** (draft_length + 1)) / (1 - acceptance)


@dataclass(frozen=True)
class Times:
    """Milliseconds. t_d: a drafted token; t_v: a verification; t_o: the rest of a round; t_sync: the wait for branches on a
    hit."""

    t_d: float
    t_v: float
    t_o: float = 0.0
    t_sync: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """Rates at one draft length, in tokens per second, and their ratios."""

    draft_length: int
    tau: float
    ar: float
    sd: float
    ssd: float
    sd_over_ar: float
    ssd_over_sd: float
    ssd_ceiling_over_sd: float


def predict(times: Times, draft_length: int, tau: float, hit_rate: float) -> Prediction:
    """The rates of AR, SD and SSD.

    Raises:
        RequestError: a negative time, t_v of 0, or a hit rate outside 0..1.
    """
    if not (times.t_v > 0 and min(times.t_d, times.t_o, times.t_sync) >= 0):
        raise RequestError(f"times of {asdict(times)} ms", expected="t_v above 0 and none below 0")
    if not 0 <= hit_rate <= 1:
        raise RequestError(f"a hit rate of {hit_rate}", expected="0 to 1")
    drafting = draft_length * times.t_d
    ar = 1e3 / times.t_v
    sd = 1e3 * tau / (drafting + times.t_v + times.t_o)
    ssd = 1e3 * tau / (times.t_v + times.t_o + times.t_sync + (1 - hit_rate) * drafting)
    return Prediction(draft_length, tau, ar, sd, ssd, sd / ar, ssd / sd, (drafting + times.t_v) / times.t_v)


def best(predictions: Sequence[Prediction], what: str = "sd") -> Prediction:
    """The prediction with the highest rate of `what` (ar, sd, ssd); the shorter draft length among equals."""
    return max(predictions, key=lambda p: (getattr(p, what), -p.draft_length))


def from_bench(path: Path) -> list[Prediction]:
    """Predictions from a file of `bench --out`, one per draft length, from its measured tau, times and hit rate.

    Raises:
        RequestError: the file can't be read, has no SD rows, or its rounds ran on the device, which doesn't time their parts.
    """
    record = read_table(path, RequestError)
    rows = {(r["mode"], r["draft_length"]): r for r in record.get("rows", [])
            if r.get("kind") == "all" and r["draft_length"] != AUTO}
    found = []
    for (mode, draft_length), sd in sorted(rows.items()):
        if mode == "sd":
            if not sd["t_v_ms"]:
                raise RequestError(f"{path}: SD's rounds ran on the device, which doesn't time their parts",
                                   expected="t_v and t_d of rounds driven from Python",
                                   action="bench --backend torch, or give --t-v and --t-d")
            ssd = rows.get(("ssd", draft_length), {})
            times = Times(sd["t_d_ms"], sd["t_v_ms"], max(sd["t_o_ms"], 0.0), ssd.get("t_sync_ms", 0.0))
            found.append(predict(times, draft_length, sd["tokens_per_round"], ssd.get("hit_rate", 0.0)))
    if not found:
        raise RequestError(f"{path}: no SD rows", expected="a file of `bench --out` with --mode sd")
    return found
