#!/usr/bin/env python
"""Checks and times the certified head against the plain one on a GPU.

    python scripts/certified_head.py [--model SHAPE]... [--rows 1000000] [--real FILE.npz] [--search] [--out FILE.json]

Per shape: random and adversarial hidden rows whose winners and values must be the plain head's bit for bit; ids computed again
and launches with a row that isn't bounded; times of both heads, alone and at the end of a decode pass, replayed in turn.
--real: a real head and its hidden rows: q [N, K] int8, scale [N, K / 32] fp16, w = q scale; x [rows, K], the bits of bf16.
--search: a few schedules of the screen, for the first shape. Prints a line per measurement, then one JSON line. Without a GPU, in
Triton's interpreter, times mean nothing. Exit 1 if a row differs.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from common import parser, publish, run
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.on_gpu.profile import pass_launches
from tune_kernels.decoder.selection import Options, select_schedules
from tune_kernels.kernels.certified_head import certified_head, new_certified_scratch
from tune_kernels.kernels.layout import ROWS, Activation, Weights
from tune_kernels.kernels.lm_head import lm_head, new_scratch
from tune_kernels.kernels.screen import screen_bytes, screen_weights
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import HeadSchedule, ScreenSchedule
from tune_kernels.shapes.model import CertifiedHeadShape, load_model_shape

RECIPE = load_recipe("fp8-v1")
SCREEN = ScreenSchedule(BLOCK_N=64, BLOCK_K=256, num_stages=4, num_warps=4, pdl=True)
CANDIDATES = [replace(SCREEN, BLOCK_N=n, BLOCK_K=k, num_stages=s) for n, k, s in (
    (64, 256, 4), (64, 256, 3), (64, 128, 6), (64, 128, 4), (64, 512, 3), (128, 128, 4), (128, 256, 3), (128, 128, 6))]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IN_GRAPH, TURNS, WARM_UP = (16, 21, 3) if DEVICE == "cuda" else (2, 1, 0)  # launches of one graph; replays of each
COPIES = {True: 4, False: 1}  # of a head that L2 could hold, so that each launch reads memory
L2_BYTES = 200e6
HEAD, ADVERSARIAL = "head", "adversarial head"
TOKENS = 400  # in the cache, about, of a decode pass


@dataclass(frozen=True)
class Checked:
    """One kind of row. differing: rows whose winner or value differs; rescored: ids computed again for one row; unbounded: share
    of rows that the screen couldn't bound."""

    kind: str
    rows: int
    differing: int
    median_rescored: float
    worst_rescored: int
    unbounded: float


class Heads:
    """Both heads of w [N, K] bf16 over the same rows."""

    def __init__(self, w: torch.Tensor, plain: HeadSchedule, screen: ScreenSchedule) -> None:
        (N, K), self.screen, self.plain_schedule = w.shape, screen, plain
        copies = COPIES[w.numel() * 2 < L2_BYTES]
        self.weights = [Weights(w if i == 0 else w.clone()) for i in range(copies)]
        self.screens = [screen_weights(v.w, screen.product) for v in self.weights]
        self.x = torch.zeros(ROWS, K, dtype=torch.bfloat16, device=w.device)
        self.scratch, self.plain_scratch = new_certified_scratch(N, K, w.device), new_scratch(N, plain, w.device)

    def plain(self, rows: int, copy: int = 0) -> torch.Tensor:
        return lm_head(Activation(self.x[None, :rows]), self.weights[copy % len(self.weights)], schedule=self.plain_schedule,
                       numerics=RECIPE.numerics, scratch=self.plain_scratch)

    def certified(self, rows: int, copy: int = 0) -> torch.Tensor:
        at = copy % len(self.weights)
        return certified_head(Activation(self.x[None, :rows]), self.weights[at], self.screens[at], schedule=self.screen,
                              head=self.plain_schedule, numerics=RECIPE.numerics, scratch=self.scratch)


class Repeated:
    """Stands for a graph where there is no GPU."""

    def __init__(self, launches: Callable[[], object]) -> None:
        self.replay = launches


Graph: TypeAlias = torch.cuda.CUDAGraph | Repeated


def graph_of(launches: Callable[[], object]) -> Graph:
    launches()
    if DEVICE == "cpu":
        return Repeated(launches)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    return graph


def replay_us(graph: Graph) -> float:
    if isinstance(graph, Repeated):
        started = time.perf_counter()
        graph.replay()
        return 1e6 * (time.perf_counter() - started)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end)


def in_turn(graphs: dict[str, Graph], launches: int) -> dict[str, float]:
    """Median microseconds of one of the launches of each graph."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(-WARM_UP, TURNS):
        for name, graph in graphs.items():
            us = replay_us(graph)
            if turn >= 0:
                times[name].append(us / launches)
    return {name: statistics.median(samples) for name, samples in times.items()}


def kinds(w: torch.Tensor) -> dict[str, Callable[[int], torch.Tensor]]:
    """How to make n rows [n, K] of each kind, for a head w."""
    (N, K), device = w.shape, w.device

    def normal(n: int) -> torch.Tensor:
        return torch.randn(n, K, device=device)

    def some(n: int, share: float) -> torch.Tensor:
        return torch.rand(n, K, device=device) < share

    def rows_of_w(n: int) -> torch.Tensor:
        return w[torch.randint(N, (n,), device=device)].float()

    def pairs(n: int) -> torch.Tensor:
        x = normal(n)
        x[:, 1::2] = -x[:, ::2] * (1 + 2**-7)
        return x

    def broken(n: int) -> torch.Tensor:
        x = normal(n)
        x[torch.arange(n), torch.randint(K, (n,), device=device)] = torch.tensor(
            [float("nan"), float("inf"), float("-inf"), 3e38], device=device).repeat(n)[:n]
        return x

    return {"normal": normal, "outliers": lambda n: normal(n) * (1 + 29 * (torch.rand(1, K, device=device) < 0.002)),
            "great outliers": lambda n: normal(n) * (1 + 2000 * some(n, 0.001)),
            "few values": lambda n: normal(n) * some(n, 0.01), "between two ids": lambda n: rows_of_w(n) + rows_of_w(n),
            "an id's row": rows_of_w, "cancelling": pairs, "every size": lambda n: normal(n) * torch.exp2(40 * normal(n)),
            "small": lambda n: normal(n) * 2.0**-75, "subnormal": lambda n: normal(n) * 2.0**-130,
            "large": lambda n: normal(n) * 2.0**90, "zeros": lambda n: 0 * normal(n), "no numbers": broken}


def check(heads: Heads, kind: str, make: Callable[[int], torch.Tensor], count: int) -> Checked:
    """`count` rows of one kind, ROWS a launch; then one row a launch."""
    device, K = heads.x.device, heads.x.shape[1]
    pool = torch.zeros(IN_GRAPH, ROWS, K, dtype=torch.bfloat16, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    logged = torch.zeros(IN_GRAPH, 2, dtype=torch.int64, device=device)

    def compare() -> None:
        for rows_of_launch in pool:
            heads.x.copy_(rows_of_launch)
            plain, found = heads.plain(ROWS), heads.certified(ROWS)
            values = [s.best.amax(1).view(torch.int32) for s in (heads.plain_scratch, heads.scratch.winners)]
            wrong.add_(((plain != found) | (values[0] != values[1])).sum())

    def count_alone() -> None:
        for at in range(IN_GRAPH):
            heads.x[0].copy_(pool[at, 0])
            heads.scratch.counts.zero_()
            heads.certified(1)
            logged[at, 0], logged[at, 1] = heads.scratch.counts[:-1].sum(), heads.scratch.counts[-1]

    graphs = [graph_of(part) for part in (compare, count_alone)]
    wrong.zero_()
    rescored: list[int] = []
    unbounded: list[int] = []
    done = 0
    while done < count:
        pool.copy_(make(IN_GRAPH * ROWS).bfloat16().view_as(pool))
        graphs[0].replay()
        done += IN_GRAPH * ROWS
        if len(rescored) < 32 * IN_GRAPH:
            graphs[1].replay()
            rescored += logged[:, 0].tolist()
            unbounded += logged[:, 1].tolist()
    return Checked(kind, done, int(wrong), statistics.median(rescored), max(rescored), statistics.mean(unbounded))


def checks(heads: Heads, rows: int, real: torch.Tensor | None) -> Iterator[Checked]:
    """Most of the rows of the first kind, or real ones and points between two of them."""
    made = kinds(heads.weights[0].w)
    slow = ("zeros", "no numbers", "subnormal")  # read in full
    if real is not None:
        def given(n: int) -> torch.Tensor:
            return real[torch.randint(len(real), (n,), device=real.device)].float()

        def between(n: int) -> torch.Tensor:
            return torch.lerp(given(n), given(n), torch.rand(n, 1, device=DEVICE))

        made = {"real": given, "between real rows": between, **made}
    first = next(iter(made))
    for kind, make in made.items():
        share = 0.5 if kind == first else 0.002 if kind in slow else 0.5 / (len(made) - len(slow) - 1)
        yield check(heads, kind, make, max(1, int(rows * share)))


def adversarial(w: torch.Tensor) -> torch.Tensor:
    """A head with equal rows, rows of zeros, subnormals, outliers and great norms among the others."""
    w = w.clone()
    part = len(w) // 16
    some = [slice(i * part, i * part + min(part // 2, 64)) for i in range(8)]
    w[some[1]] = w[some[2]]
    w[some[3]] = 0
    w[some[4]] *= 2.0**-130
    w[some[5], 7] = 20
    w[some[6]] *= 1 + 2**-6
    w[some[7]] = -w[some[7]] * 8
    return w


def alone(heads: Heads, rows: int) -> dict[str, float]:
    """Times of both heads by themselves, over ordinary rows."""
    heads.x.copy_(torch.randn_like(heads.x.float()))

    def launches(head: Callable[[int, int], object]) -> Callable[[], None]:
        def repeated() -> None:
            for copy in range(IN_GRAPH):
                head(rows, copy)
        return repeated

    return in_turn({"plain_us": graph_of(launches(heads.plain)), "certified_us": graph_of(launches(heads.certified))}, IN_GRAPH)


def search(w: torch.Tensor, plain: HeadSchedule) -> list[dict[str, Any]]:
    """The candidates, each against the plain head in its run; the best first."""
    found = []
    for schedule in CANDIDATES:
        heads = Heads(w, plain, schedule)
        times = {rows: alone(heads, rows) for rows in (1, 5)}
        found.append({"schedule": asdict(schedule), "times": times, "ratio": times[1]["certified_us"] / times[1]["plain_us"]})
        print(f"  {schedule.BLOCK_N} x {schedule.BLOCK_K}, {schedule.num_stages} stages: " + "; ".join(
            f"{rows} rows {t['certified_us']:.1f} us, plain {t['plain_us']:.1f}" for rows, t in times.items()), flush=True)
        del heads
    return sorted(found, key=lambda row: float(row["ratio"]))


def step(model_name: str, screen: ScreenSchedule) -> list[dict[str, Any]]:
    """A decode pass with each head, replayed in turn."""
    decoder = Decoder.load("random:0", model_name, "fp8-v1", None, backend="triton", device=DEVICE, capacity=1024,
                           allow_untuned=True)
    model, cache, found = decoder.model, decoder.cache, []
    decoder.generate(list(range(TOKENS)), "ar", max_new_tokens=4, ignore_eos=True)  # the cache holds what no NaN reaches
    copy, scratch = screen_weights(model.head, screen.product), new_certified_scratch(*model.head.shape, model.device)
    for rows in (1, 5):
        launches = pass_launches(model, cache, rows, TOKENS - ROWS)

        def certified(rows: int = rows) -> object:
            return certified_head(Activation(model.decode.space.final[None, :rows]), Weights(model.head), copy, schedule=screen,
                                  head=model.head_schedule, numerics=RECIPE.numerics, scratch=scratch, limit=model.vocab_limit)

        def whole(last: list[Callable[[], object]], launches: list = launches) -> Callable[[], None]:
            def all_of_them() -> None:
                for launch in (*(launch for _, launch in launches[:-1]), *last):
                    launch()
            return all_of_them

        with model.lock, torch.inference_mode():
            graphs = {"plain_us": graph_of(whole([launches[-1][1]])), "certified_us": graph_of(whole([certified])),
                      "no_head_us": graph_of(whole([]))}
            times = in_turn(graphs, 1)
            scratch.counts.zero_()
            graphs["certified_us"].replay()
            found.append({"rows": rows, **times, "gain_us": times["plain_us"] - times["certified_us"],
                          "rescored": int(scratch.counts[:-1].sum()), "unbounded": int(scratch.counts[-1])})
        print(f"{model_name}: a pass of {rows} rows: " + ", ".join(f"{k} {v:.1f}" for k, v in times.items()), flush=True)
    return found


def real_head(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """(w, x) in bf16."""
    with np.load(path) as file:
        q, scale, x = (torch.from_numpy(file[name]).to(DEVICE) for name in ("q", "scale", "x"))
    w = (q.float().unflatten(1, (-1, 32)) * scale.float()[..., None]).flatten(1)
    return w.bfloat16(), x.view(torch.bfloat16)


def measure(name: str, w: torch.Tensor, real: torch.Tensor | None, screen: ScreenSchedule, rows: int) -> dict[str, Any]:
    """One head: times alone, checks."""
    plain = plain_schedule(name)
    heads = Heads(w, plain, screen)
    times = [{"rows": n, **alone(heads, n)} for n in (1, 5, ROWS)]
    for t in times:
        print(f"{name}: {t['rows']} rows alone: plain {t['plain_us']:.1f} us, certified {t['certified_us']:.1f}", flush=True)
    record: dict[str, Any] = {"model": name, "real": real is not None, "screen": asdict(screen), "alone": times,
                              "int8_bytes": screen_bytes(CertifiedHeadShape(*w.shape))}
    for label, these, share in ((HEAD, heads, 0.7), (ADVERSARIAL, Heads(adversarial(w), plain, screen), 0.3)):
        record[label] = []
        for checked in checks(these, int(rows * share), real if these is heads else None):
            record[label].append(asdict(checked))
            print(f"{name}, {label}: {checked}", flush=True)
    return record


def plain_schedule(name: str) -> HeadSchedule:
    return select_schedules(RECIPE, load_model_shape(name), torch.device(DEVICE), Options(allow_untuned=True)).schedules.lm_head


def release() -> None:
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--model", action="append", help="shapes, each with random weights (qwen2.5-7b and smollm2-135m)")
    options.add_argument("--rows", type=int, default=1_000_000, help="hidden rows to check, over all shapes")
    options.add_argument("--real", type=Path, help="a real head and hidden rows, for the last shape")
    options.add_argument("--search", action="store_true", help="try schedules of the screen first")
    options.add_argument("--no-step", action="store_true", help="leave the decode pass out")
    given = options.parse_args()
    torch.manual_seed(0)
    names, screen = given.model or ["qwen2.5-7b", "smollm2-135m"], SCREEN
    records: list[dict[str, Any]] = []
    sizes = [(shape.vocab_size, shape.hidden_size) for shape in map(load_model_shape, names)]
    cheap = [1 / (N * K) for N, K in sizes]  # a smaller head checks more rows
    for name, size, share in zip(names, sizes, cheap):
        w, real = (torch.randn(size, device=DEVICE) * size[1]**-0.5).bfloat16(), None
        if given.real and name == names[-1]:
            w, real = real_head(given.real)
        with torch.inference_mode():
            found = search(w, plain_schedule(name)) if given.search and name == names[0] else []
            screen = ScreenSchedule(**found[0]["schedule"]) if found else screen
            record = measure(name, w, real, screen, int(given.rows * share / sum(cheap)))
        del w, real
        release()
        records.append({**record, "search": found, "step": [] if given.no_step else step(name, screen)})
        release()
        publish({"models": records}, given.out)
    checked = [c for record in records for part in (HEAD, ADVERSARIAL) for c in record[part]]
    wrong, total = (sum(c[what] for c in checked) for what in ("differing", "rows"))
    print(f"{wrong} of {total:,} rows differ")
    publish({"gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE, "rows": total, "differing": wrong,
             "models": records}, given.out)
    return 1 if wrong else 0


if __name__ == "__main__":
    run(main)
