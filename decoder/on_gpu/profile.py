"""The time of a decode pass by kind of kernel: each kind alone, in a graph over all layers, and the pass without it.

The launches of a kind read each layer's own weights, so these come from memory and not from L2. The times of all kinds may add up
to more than the pass, since launches of different kinds overlap in it. A kind adds to the pass: its time less the time without
it.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence

import torch

from ..backend import KernelTime, PassProfile
from .cache import DeviceCache, Pass
from .graphs import on
from .layer import Launched, launch_all
from .network import DeviceNetwork

READ_BYTES = 4 << 30  # of the buffer for the read ceiling: far more than L2 holds
REPLAYS, WARM_UP = 25, 3


def read_ceiling_tb_s(device: torch.device) -> float:
    """The read rate of a reduction over READ_BYTES, in TB/s."""
    buffer = torch.ones(READ_BYTES // 4, dtype=torch.float32, device=device)
    with on(device):
        return READ_BYTES / median_us(lambda: buffer.sum()) / 1e6


def median_us(run: Callable[[], object], replays: int = REPLAYS) -> float:
    """Median time of `run` on the current GPU, in microseconds."""
    for _ in range(WARM_UP):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in events)


def graph_us(model: DeviceNetwork, cache: DeviceCache, launches: Iterable[Launched]) -> float:
    """Median time of the launches in a graph of their own, in microseconds."""
    held = list(launches)
    with model.lock, torch.inference_mode(), on(model.device):
        launch_all(held)
        return median_us(cache.graphs.capture(lambda: launch_all(held)).replay)


def pass_launches(model: DeviceNetwork, cache: DeviceCache, rows: int, length: int) -> list[Launched]:
    """The launches of a decode pass of `rows` rows after `length` tokens, and of the head."""
    model.inputs.upload([0] * rows, length)
    chunks = cache.chunks_for(length + rows)
    launches = model.launches(model.decode, model.inputs.row_tokens, Pass(cache, model.inputs.length, rows, chunks))
    return [*launches, ("lm_head", lambda: model.launch_head(model.decode.space.final[:rows]))]


def pass_us(model: DeviceNetwork, cache: DeviceCache, rows: int, length: int) -> float:
    """Time of one pass, in microseconds."""
    return graph_us(model, cache, pass_launches(model, cache, rows, length))


def profile(model: DeviceNetwork, cache: DeviceCache, rows: int, length: int, ceiling_tb_s: float) -> list[KernelTime]:
    """One row per kind of kernel, in the order of the pass."""
    launches = pass_launches(model, cache, rows, length)
    whole = graph_us(model, cache, launches)
    read = read_bytes(model, length + rows)
    found = []
    for kind in dict.fromkeys(kind for kind, _ in launches):
        own = [launched for launched in launches if launched[0] == kind]
        time_us = graph_us(model, cache, own)
        without_us = graph_us(model, cache, [launched for launched in launches if launched[0] != kind])
        bandwidth = read.get(kind, 0) / time_us / 1e6
        found.append(KernelTime(kind, len(own), time_us, whole - without_us, time_us / whole, read.get(kind, 0), bandwidth,
                             bandwidth / ceiling_tb_s))
    return found


def read_bytes(model: DeviceNetwork, tokens: int) -> dict[str, int]:
    """Bytes that a pass reads, by kind: weights, and the keys and values of `tokens` tokens."""
    found = {kernel: sum(layer.linears[kernel].nbytes for layer in model.layers) for kernel in ("qkv", "o", "gate_up", "down")}
    shape = model.shape
    found["attention"] = 2 * 2 * shape.num_layers * tokens * shape.num_kv_heads * shape.head_dim
    found["lm_head"] = model.device_head.read_bytes
    return found


def pass_profile(model: DeviceNetwork, cache: DeviceCache, rows: Sequence[int]) -> PassProfile:
    """See backend.Model.pass_profile."""
    ceiling, length = read_ceiling_tb_s(model.device), min(cache.capacity // 2, 512)
    return PassProfile(ceiling, length, {n: profile(model, cache, n, length, ceiling) for n in rows})
