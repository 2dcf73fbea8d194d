#!/usr/bin/env python
"""Times AR, SD and SSD on one GPU, with random weights, against the memory's floor.

    python scripts/bench_decode.py [--model qwen2.5-7b] [--schedules DIR | --allow-untuned] [--out FILE.json]

Measures everything in one run, with the read ceiling. Random weights serve for time and bits, not for text. Acceptance is
scripted: the drafter does all its work, then its proposals are overwritten; --tau and --hit-rate set the tokens per round and the
share of branches that hit. Verification is unchanged, and the tokens equal AR's. With a second GPU, SSD also runs with its
drafter there. Prints a table, then one JSON line; `python scripts/figures.py` makes docs/figures.md from the record.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import triton
from common import parser, publish, run
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.bench.bench import scripted_hits, scripted_pattern
from tune_kernels.decoder.drafter import Drafter
from tune_kernels.decoder.drafters.load import DrafterPlan, load_drafter
from tune_kernels.decoder.drafters.scripted import ScriptedDrafter
from tune_kernels.decoder.loading import torch_device
from tune_kernels.decoder.on_gpu.graphs import WARM_UP
from tune_kernels.decoder.on_gpu.profile import (
    graph_us,
    median_us,
    pass_launches,
    pass_us,
    profile,
    read_bytes,
    read_ceiling_tb_s,
)
from tune_kernels.decoder.rows import Appended
from tune_kernels.decoder.selection import Options
from tune_kernels.decoder.stats import Stats
from tune_kernels.kernels.activation import segments, swiglu
from tune_kernels.kernels.fixed import FIXED
from tune_kernels.kernels.norm import Residual, norm
from tune_kernels.kernels.rope import rope_append
from tune_kernels.tuner.on_gpu.worker import gpu_state

PROMPT, NEW_TOKENS, REPEATS, DRAFT_LENGTH, BRANCHES = 128, 512, 5, 4, 4
FP8_PEAK = 1979e12  # FLOP/s, dense, of the H200's data sheet; two e4m3 terms an activation make two products of each
SCHEMA = "tune-kernels/decode-bench/1"

Record = dict[str, Any]  # as its JSON has it
DrafterOf = Callable[[list[int]], ScriptedDrafter]  # of the known tokens, prompt included
Mode = tuple[str, DrafterOf | None]


def prompt(length: int, vocab_size: int) -> list[int]:
    return [(i * 7919 + 13) % vocab_size for i in range(length)]


def decode_rates(decoder: Decoder, modes: dict[str, Mode], ids: list[int], repeats: int) -> dict[str, Record]:
    """Medians per mode: all in turn, `repeats` times after WARM_UP runs of each. modes: by name in the record. capture_s: of all
    runs, the time in which graphs were captured before a first round."""
    expected: list[int] = []
    captures = dict.fromkeys(modes, 0.0)
    runs: dict[str, list[Stats]] = {name: [] for name in modes}
    for repeat in range(-WARM_UP, repeats):
        for name, (mode, make) in modes.items():
            decoder.drafter = make(expected) if make else None
            count = NEW_TOKENS + 1  # the first token is the prompt's
            result = decoder.generate(ids, mode, max_new_tokens=count, draft_length=DRAFT_LENGTH, branches=BRANCHES,
                                      ignore_eos=True)
            captures[name] += result.stats.capture_s
            expected = expected or [*ids, *result.token_ids]
            if [*ids, *result.token_ids] != expected:
                raise SystemExit(f"{name}: tokens differ from AR's")
            if repeat >= 0:
                runs[name].append(result.stats)
    return {name: {**rates(stats), "capture_s": captures[name]} for name, stats in runs.items()}


def rates(runs: list[Stats]) -> Record:
    """Medians over runs."""
    def median(figure: Callable[[Stats], float]) -> float:
        return statistics.median(figure(s) for s in runs)

    return {"tokens_per_s": median(lambda s: s.decode_tokens_per_s), "samples": [s.decode_tokens_per_s for s in runs],
            "tokens_per_s_with_prefill": median(lambda s: (s.emitted + 1) / (s.decode_s + s.prefill_s)),
            "tokens_per_round": runs[0].tokens_per_round, "round_us": median(lambda s: 1e6 * s.decode_s / s.rounds),
            "host_us_per_round": median(lambda s: 1e6 * s.host_s / s.rounds), "prefill_ms": median(lambda s: 1e3 * s.prefill_s),
            "hit_rate": runs[0].hit_rate, "same_tokens_as_ar": True,
            **{f"{part}_us": median(lambda s, part=part: 1e6 * getattr(s, f"{part}_s") / s.rounds)  # type: ignore[misc]
               for part in ("draft", "verify", "overlap", "sync")}}


def replayed_rounds(decoder: Decoder) -> dict[str, float]:
    """Microseconds per round, from back-to-back replays of the graphs that the last requests of each draft length ran."""
    found = {}
    for (_, draft_length, chunks, _, batch), graph in decoder.model.rounds.graphs.graphs.items():
        found[f"K={draft_length}, {chunks} chunks"] = median_us(graph.replay) / batch
    return found


def ssd_parts(decoder: Decoder) -> dict[str, float]:
    """Microseconds per graph of SSD's rounds, from back-to-back replays, each alone on the GPU."""
    ssd = decoder.model.rounds.ssd
    graphs = {**ssd.graphs.graphs, **ssd.target_graphs.graphs}
    return {" ".join(str(part) for part in key): median_us(graph.replay) for key, graph in graphs.items()}


def against_scaled_mm(decoder: Decoder, ceiling: float) -> list[Record]:
    """Each linear, alone and with its reader, against torch._scaled_mm (per tensor, 16 rows) with the same reader, over all
    layers."""
    model, rows = decoder.model, DRAFT_LENGTH + 1
    space, shape, numerics = model.decode.space, model.shape, model.recipe.numerics
    one = torch.ones((), device=model.device)
    launches = pass_launches(model, decoder.cache, rows, PROMPT)
    act = torch.empty_like(space.act)
    amax = torch.empty(space.rows, segments(shape.intermediate_size), device=model.device)
    found = []
    for kernel in ("qkv", "o", "gate_up", "down"):
        own = [launched for launched in launches if launched[0] == kernel]
        weights = [layer.linears[kernel] for layer in model.layers]
        x = torch.randn(16, weights[0].w.shape[1], device=model.device).to(torch.float8_e4m3fn)
        outs = [torch.empty(1, 16, weights[0].w.shape[0], dtype=torch.bfloat16, device=model.device) for _ in range(2)]

        def theirs(w: torch.Tensor, x: torch.Tensor = x, out: torch.Tensor = outs[0]) -> Callable[[], object]:
            return lambda: torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, out=out[0])

        def reader(part: torch.Tensor, index: int, kernel: str = kernel) -> Callable[[], object]:
            if kernel == "qkv":
                return lambda: rope_append(part, decoder.cache.rope, model.inputs.length, rows=rows, q=space.q,
                                           cache=(decoder.cache.keys[index], decoder.cache.values[index]),
                                           schedule=FIXED["rope"].schedule, numerics=numerics)
            if kernel == "gate_up":
                return lambda: swiglu(part[0], act, amax, rows=rows, schedule=FIXED["swiglu"].schedule, numerics=numerics)
            return lambda: norm(Residual(space.x, part), model.final_norm, shape.rms_norm_eps,
                                space.hidden, rows=rows, schedule=FIXED["norm"].schedule,
                                numerics=numerics)

        ours_part = {"qkv": space.qkv, "o": space.y_o, "down": space.y_down}.get(kernel)
        mine, other, mine_pair, other_pair = [], [], [], []
        for index, (launched, packed) in enumerate(zip(own, weights)):
            mine.append(launched)
            other.append(("scaled_mm", theirs(packed.w)))
            mine_pair += [launched] + ([("reader", reader(ours_part, index))] if ours_part is not None else [])
            other_pair += [("scaled_mm", theirs(packed.w)), ("reader", reader(outs[0], index))]
        times = [graph_us(model, decoder.cache, part) / len(weights) for part in (mine, other, mine_pair, other_pair)]
        found.append({"kernel": kernel, "N": weights[0].w.shape[0], "K": weights[0].w.shape[1], "time_us": times[0],
                      "scaled_mm_us": times[1], "over_scaled_mm": times[1] / times[0], "with_reader_us": times[2],
                      "scaled_mm_with_reader_us": times[3], "over_scaled_mm_with_reader": times[3] / times[2],
                      "ceiling_share": weights[0].nbytes / times[0] / 1e6 / ceiling})
    return found


def first_token(decoder: Decoder, length: int, ceiling: float) -> dict[str, float]:
    """Milliseconds to the first token of a prompt, against the roofline: the larger of reading the weights and multiplying."""
    ids, model = prompt(length, decoder.model.shape.vocab_size), decoder.model
    samples = []
    for _ in range(WARM_UP + REPEATS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        decoder.cache.clear()
        final = model.prefill(ids, Appended(decoder.cache, length)).final
        model.greedy(final[-1:])
        samples.append(time.perf_counter() - started)
    read = read_bytes(model, length)
    weights = sum(read[k] for k in ("qkv", "o", "gate_up", "down"))
    floor = max((weights + read["lm_head"]) / ceiling / 1e12, 2 * 2 * weights * length / FP8_PEAK)
    seconds = statistics.median(samples[WARM_UP:])
    return {"prompt": length, "ms": 1e3 * seconds, "roofline_ms": 1e3 * floor, "roofline_share": floor / seconds}


def measure(options: argparse.Namespace) -> Record:
    """The whole record."""
    device = torch_device("cuda")
    ceiling = read_ceiling_tb_s(device)
    torch.cuda.empty_cache()
    choice = Options(options.schedules, options.allow_untuned)
    decoder = Decoder.load(f"random:{options.seed}", options.model, "fp8-v1", None, backend="triton", device="cuda",
                           capacity=4096, schedules=options.schedules, allow_untuned=options.allow_untuned)
    model, ids = decoder.model, prompt(PROMPT, decoder.model.shape.vocab_size)
    pattern = scripted_pattern(options.tau)

    def drafter_on(place: torch.device) -> Drafter:
        name = f"random:{options.seed}:{options.drafter}"
        return load_drafter(name, DrafterPlan(model, None, place, 4096, choice))

    def scripted(own: Drafter, hit_rate: float = 1.0) -> DrafterOf:
        return lambda known: ScriptedDrafter(known, pattern, model.vocab_limit, scripted_hits(hit_rate), own)

    def ssd(own: Drafter) -> dict[str, Mode]:
        return {"ssd": ("ssd", scripted(own)), "ssd_misses": ("ssd", scripted(own, options.hit_rate))}

    own = drafter_on(device)
    ar: dict[str, Mode] = {"ar": ("ar", None)}
    found = decode_rates(decoder, {**ar, "sd": ("sd", scripted(own)), **ssd(own)}, ids, REPEATS)
    replays, parts = replayed_rounds(decoder), ssd_parts(decoder)
    if options.rates_only:
        return {"schema": SCHEMA, "model": options.model, "drafter": options.drafter, "gpu": torch.cuda.get_device_name(),
                "read_ceiling_tb_s": ceiling, "decode": found, "replayed_round_us": replays, "ssd_parts_us": parts}
    two = None
    if torch.cuda.device_count() > 1:  # not in turns with one GPU's: graphs are kept for one drafter at a time
        two = decode_rates(decoder, {**ar, **ssd(drafter_on(torch.device("cuda:1")))}, ids, REPEATS)
    rows_us = {rows: pass_us(model, decoder.cache, rows, PROMPT + NEW_TOKENS // 2) for rows in range(1, model.max_rows + 1)}
    read = read_bytes(model, PROMPT + NEW_TOKENS // 2)
    eager = Decoder.load(f"random:{options.seed}", options.model, "fp8-v1", None, backend="triton", device="cuda", capacity=1024,
                         schedules=options.schedules, allow_untuned=options.allow_untuned, graphs=False)
    plain = [eager.generate(ids, "ar", max_new_tokens=65, ignore_eos=True) for _ in range(2)]
    graphed = decoder.generate(ids, "ar", max_new_tokens=65, ignore_eos=True)
    if plain[1].token_ids != graphed.token_ids:
        raise SystemExit("tokens with and without graphs differ")
    del eager
    return {
        "schema": SCHEMA, "model": options.model, "drafter": options.drafter, "weights": decoder.source, "recipe": "fp8-v1",
        "gpu": torch.cuda.get_device_name(), "driver": gpu_state.this_machine().driver, "torch": torch.__version__,
        "triton": triton.__version__, "read_ceiling_tb_s": ceiling, "step_bytes": sum(read.values()),
        "floor_us": sum(read.values()) / ceiling / 1e6, "prompt": PROMPT, "new_tokens": NEW_TOKENS, "repeats": REPEATS,
        "draft_length": DRAFT_LENGTH, "scripted_tau": options.tau, "decode": found, "two_gpus": two, "replayed_round_us": replays,
        "ssd_parts_us": parts, "rows_us": rows_us, "verify_over_ar": rows_us[DRAFT_LENGTH + 1] / rows_us[1],
        "launches_per_pass": len(pass_launches(model, decoder.cache, 1, PROMPT)),
        "no_graphs": {"tokens_per_s": plain[1].stats.decode_tokens_per_s, "same_tokens": True,
                      "graphs_tokens_per_s": graphed.stats.decode_tokens_per_s},
        "linears": against_scaled_mm(decoder, ceiling), "first_token": [first_token(decoder, n, ceiling) for n in (PROMPT, 2048)],
        "profile": {str(rows): [asdict(row) for row in profile(model, decoder.cache, rows, PROMPT + NEW_TOKENS // 2, ceiling)]
                    for rows in (1, DRAFT_LENGTH + 1)},
        "schedules": list(model.notes.schedules)}


def table(record: Record) -> str:
    """Markdown."""
    ar, sd = (record["decode"][mode] for mode in ("ar", "sd"))
    ssd = [(where, runs[mode]) for where, runs in (("the same GPU", record["decode"]), ("a second GPU", record.get("two_gpus")))
           if runs for mode in ("ssd", "ssd_misses")]
    k, chunks = record["draft_length"], record["replayed_round_us"]
    gap = {mode: min(1 - us / record["decode"][mode]["round_us"] for key, us in chunks.items() if key.startswith(f"K={n},"))
           for mode, n in (("ar", 0), ("sd", k))}
    rows = [
        ("AR", f"{ar['tokens_per_s']:.0f} tokens/s", f"{ar['tokens_per_s_with_prefill']:.0f}"),
        (f"SD, K = {k}, scripted tau {sd['tokens_per_round']:.2f}", f"{sd['tokens_per_s']:.0f} tokens/s",
         f"{sd['tokens_per_s_with_prefill']:.0f}"),
        *((f"SSD, the drafter on {where}, K = {k}, {100 * s['hit_rate']:.0f}% of branches hit",
           f"{s['tokens_per_s']:.0f} tokens/s", f"{s['tokens_per_s_with_prefill']:.0f}") for where, s in ssd),
        ("AR step over the floor of its bytes", f"{ar['round_us'] / record['floor_us']:.2f}", ""),
        (f"verification of {k + 1} rows over one row", f"{record['verify_over_ar']:.3f}", ""),
        ("round not spent in its graph: AR, SD", f"{100 * gap['ar']:.1f}%, {100 * gap['sd']:.1f}%", ""),
        ("without graphs", f"{record['no_graphs']['tokens_per_s']:.0f} tokens/s, same tokens", "")]
    rows += [(f"first token, prompt of {f['prompt']}", f"{f['ms']:.1f} ms ({100 * f['roofline_share']:.0f}% of the roofline)", "")
             for f in record["first_token"]]
    lines = ["| | | with the prompt |", "|---|---|---|", *(f"| {a} | {b} | {c} |" for a, b, c in rows), "",
             "| linear | us | share of the read ceiling | `_scaled_mm` over it | with its reader |", "|---|---|---|---|---|"]
    lines += [f"| {r['kernel']} {r['N']} x {r['K']} | {r['time_us']:.1f} | {r['ceiling_share']:.2f} | "
              f"{r['over_scaled_mm']:.2f} | {r['over_scaled_mm_with_reader']:.2f} |" for r in record["linears"]]
    for count, kinds in record["profile"].items():
        lines += ["", f"| rows: {count} | launches | us each, alone | share of the pass | us each in the pass | TB/s |",
                  "|---|---|---|---|---|---|"]
        lines += [f"| {r['kind']} | {r['launches']} | {r['time_us'] / r['launches']:.2f} | {100 * r['share']:.1f}% | "
                  f"{r['adds_us'] / r['launches']:.2f} | {r['bandwidth_tb_s']:.2f} |" for r in kinds]
    return "\n".join(lines)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--model", default="qwen2.5-7b", help="the target's shape")
    options.add_argument("--drafter", default="qwen2.5-7b-eagle3", help="the drafter's shape")
    options.add_argument("--seed", type=int, default=0, help="of the weights")
    options.add_argument("--tau", type=float, default=2.54, help="scripted tokens per round")
    options.add_argument("--hit-rate", type=float, default=0.645, help="share of branches that hit, in the run with misses")
    options.add_argument("--schedules", metavar="DIR", help="promoted schedules; without it those that ship")
    options.add_argument("--allow-untuned", action="store_true", help="the recipe's defaults where nothing was promoted")
    options.add_argument("--rates-only", action="store_true", help="decode rates on one GPU and their graphs alone; no table")
    given = options.parse_args()
    record = measure(given)
    if not given.rates_only:
        print(table(record))
    publish(record, given.out)
    return 0


if __name__ == "__main__":
    run(main)
