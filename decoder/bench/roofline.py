"""The physics of a decode step: the bytes it must read, the time that takes, and what SD and SSD can make of it.

A step at batch 1 reads every weight once and the keys and values of the context; it can't be faster than those bytes
over the memory's bandwidth. Equations (Leviathan et al. 2023; Kumar, Dao, May): tau = (1 - a^(K+1)) / (1 - a)
expected tokens a round for independent acceptance a; AR 1 / t_v; SD tau / (K t_d + t_v + t_o); SSD hides K t_d on a
hit and pays it on a miss: tau / (t_v + t_o + t_sync + (1 - p) K t_d); at best SSD is (K t_d + t_v) / t_v times SD.
Acceptance is not independent in practice: where tau was measured, use it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...schedules.recipe import BYTES, Precision
from ...shapes.fields import Table, read_table
from ...shapes.model import HeadShape, LinearShape, ModelShape
from ..errors import RequestError


def step_bytes(shape: ModelShape, precision: Precision, context: int = 0) -> dict[str, int]:
    """Bytes that one step reads: projections (with one fp32 scale a channel where e4m3), head, keys and values."""
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
    """Least time of a step in milliseconds."""
    return sum(read.values()) / (bandwidth_tb_s * 1e12) * 1e3


def tokens_per_round(acceptance: float, draft_length: int) -> float:
    """tau of a geometric acceptance, 1..K+1; counts the recovery token."""
    if acceptance == 1:
        return draft_length + 1.0
    return (1 - acceptance ** (draft_length + 1)) / (1 - acceptance)


@dataclass(frozen=True)
class Times:
    """In milliseconds: t_d a drafted token, t_v a verification, t_o the rest of a round, t_sync what a hit waits
    for."""

    t_d: float
    t_v: float
    t_o: float = 0.0
    t_sync: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """Of one draft length. Rates in tokens a second; ratios to AR and to SD."""

    draft_length: int
    tau: float
    ar: float
    sd: float
    ssd: float
    sd_over_ar: float
    ssd_over_sd: float
    ssd_ceiling_over_sd: float


def predict(times: Times, draft_length: int, tau: float, hit_rate: float) -> Prediction:
    """The three decoders' throughput.

    Raises:
        RequestError: a time that is negative or zero where it can't be, a hit rate outside 0..1.
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
    """The draft length with the highest rate, the shorter one among equals."""
    return max(predictions, key=lambda p: (getattr(p, what), -p.draft_length))


def from_bench(path: Path) -> list[Prediction]:
    """Predictions from the file that `bench --out` wrote: for each K its measured tau, times and hit rate.

    Raises:
        RequestError: no such file, or none with SD rows.
    """
    record = read_table(path, RequestError)
    rows = {(r["mode"], r["draft_length"]): r for r in record.get("rows", []) if r.get("kind") == "all"}
    found = []
    for (mode, draft_length), sd in sorted(rows.items()):
        if mode == "sd":
            if not sd["t_v_ms"]:
                raise RequestError(f"{path}: SD's rounds ran whole on the device, which doesn't time their parts",
                                   expected="t_v and t_d of rounds driven from Python",
                                   action="bench --backend torch, or give --t-v and --t-d")
            ssd = rows.get(("ssd", draft_length), {})
            times = Times(sd["t_d_ms"], sd["t_v_ms"], max(sd["t_o_ms"], 0.0), ssd.get("t_sync_ms", 0.0))
            found.append(predict(times, draft_length, sd["tokens_per_round"], ssd.get("hit_rate", 0.0)))
    if not found:
        raise RequestError(f"{path}: no SD rows", expected="a file of `bench --out` with --mode sd")
    return found


def to_dict(prediction: Prediction) -> Table:
    return asdict(prediction)
