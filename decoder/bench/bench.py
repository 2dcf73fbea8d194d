"""`tune-kernels bench`: decode rates of AR, SD and SSD on the committed prompts.

Runs are interleaved: each repeat of each prompt decodes with every configuration in turn. A figure is the median
over prompts and repeats of the ratio to the AR run of the same prompt and repeat; outputs are compared, and a run
whose tokens differ fails the benchmark. Rates are of decode alone; a second column includes the prompt. On a GPU repeats
go before them that aren't timed: kernels get loaded and graphs captured, at half a second a graph.

The naive decoders (naive.py) may run in turn with them, for comparison: as many tokens as AR made, and the share of requests
with AR's tokens is shown, not demanded.
"""

import statistics
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch

from ..checks.check import Countdown
from ..drafter import Drafter
from ..drafters.scripted import ScriptedDrafter
from ..engine import Decoder
from ..errors import RequestError
from ..loading import torch_device
from ..request.stream import Result
from ..stats import Stats
from .naive import Naive

SETS = ("evaluation", "tuning")
NAIVE = "naive-"  # before a mode of the naive decoders
WINDOW = 1024  # tokens of a long request that one figure covers
PATTERN = 20  # rounds after which a scripted acceptance repeats


@dataclass(frozen=True)
class Config:
    """One way to decode: ar, sd, ssd, or naive- before one of them; draft_length 0 for AR."""

    mode: str
    draft_length: int

    @property
    def label(self) -> str:
        return f"{self.mode} K={self.draft_length}" if self.draft_length else self.mode

    @property
    def is_naive(self) -> bool:
        return self.mode.startswith(NAIVE)


@dataclass(frozen=True)
class Run:
    """One request of one configuration."""

    config: Config
    prompt: str
    kind: str
    repeat: int
    stats: Stats
    same_as_ar: bool


def load_prompts(path: Path, which: str) -> tuple[list[dict[str, str]], int]:
    """(prompts with name, kind and text; repeats). Raises RequestError for a file that isn't the prompts file."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        prompts = [{key: str(p[key]) for key in ("name", "kind", "text")} for p in table[which]]
        repeats = int(table["repeats"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise RequestError(f"{path}: {e}", expected=f"a prompts file with [[{which}]] and repeats",
                           action="name one with --prompts") from None
    return prompts, repeats


def configs(modes: tuple[str, ...], draft_lengths: tuple[int, ...]) -> list[Config]:
    """AR first: the others are measured against it."""
    return [Config("ar", 0)] + [Config(mode, k) for mode in ("sd", "ssd") if mode in modes for k in draft_lengths]


def scripted_pattern(tau: float) -> list[int]:
    """Accepted counts whose mean is tau - 1, spread evenly."""
    target, pattern = tau - 1, list[int]()
    for i in range(1, PATTERN + 1):
        pattern.append(round(target * i) - sum(pattern))
    return pattern


def scripted_hits(rate: float) -> list[bool]:
    """Which rounds' branches hit, so that their share is `rate`, spread evenly."""
    return [bool(hit) for hit in scripted_pattern(1 + rate)]


@dataclass(frozen=True)
class BenchPlan:
    """prompts: name, kind and text; tau: of a script in the drafter's place, or None; branches: of SSD."""

    prompts: list[dict[str, str]]
    repeats: int
    configs: list[Config]
    max_new_tokens: int
    tau: float | None
    branches: int


def run_all(decoder: Decoder, plan: BenchPlan, progress: Callable[[str], None], naive: Naive | None = None) -> Iterator[Run]:
    """Every run, interleaved; those that warm up have a negative repeat. progress: told each run, how many there are and the time
    left."""
    own, warm_up = decoder.drafter, decoder.model.warm_up_repeats
    per_prompt = len(plan.configs) * ((warm_up + plan.repeats) + (min(warm_up, 1) + plan.repeats if naive else 0))
    countdown = Countdown(per_prompt * len(plan.prompts))
    for repeat in range(-warm_up, plan.repeats):
        for prompt in plan.prompts:
            ids = prompt_ids(decoder, prompt["text"])
            ar: Result | None = None
            for config in [*plan.configs, *(naive_configs(plan.configs) if naive and repeat >= -1 else ())]:
                if config.is_naive and naive and ar:
                    tokens, stats = naive.run(config.mode.removeprefix(NAIVE), ids, len(ar.token_ids), config.draft_length)
                else:
                    decoder.drafter = replaying(decoder, own, [*ids, *ar.token_ids], plan.tau) if ar else own
                    result = decoder.generate(ids, config.mode, max_new_tokens=plan.max_new_tokens, branches=plan.branches,
                                              draft_length=config.draft_length or 1)
                    tokens, stats, ar = result.token_ids, result.stats, ar or result
                    decoder.drafter = own
                run = Run(config, prompt["name"], prompt["kind"], repeat, stats, bool(ar) and tokens == ar.token_ids)
                progress(f"{which_repeat(repeat, plan.repeats)}: {run.prompt}, {config.label} ({countdown.step()})")
                yield run


def replaying(decoder: Decoder, own: Drafter | None, sequence: list[int], tau: float | None) -> Drafter | None:
    """The decoder's drafter, overruled by a script of `tau` tokens per round where one is asked for."""
    return own if tau is None else ScriptedDrafter(sequence, scripted_pattern(tau), decoder.model.vocab_limit, inner=own)


def which_repeat(repeat: int, repeats: int) -> str:
    return "warming up" if repeat < 0 else f"repeat {repeat + 1} of {repeats}"


def naive_baseline(decoder: Decoder, weights: str, model: str | None, drafter: str | None, device: str | None) -> Naive:
    """The same weights and drafter, in fp32 where the recipe is, else in bf16: Hugging Face's model has no FP8."""
    return Naive(weights, model, drafter, torch.float32 if decoder.recipe.precision.linear == "fp32" else torch.bfloat16,
                 torch_device(device))


def naive_configs(chosen: list[Config]) -> list[Config]:
    """The naive counterpart of each."""
    return [Config(NAIVE + config.mode, config.draft_length) for config in chosen]


def prompt_ids(decoder: Decoder, text: str) -> list[int]:
    """Under the chat template where there is one; without a tokenizer, the text's bytes as ids."""
    if decoder.tokenizer is None:
        return [byte % decoder.model.vocab_limit for byte in text.encode()]
    if decoder.tokenizer.has_chat_template:
        return decoder.tokenizer.encode_chat([{"role": "user", "content": text}])
    return decoder.tokenizer.encode(text)


def differing(runs: list[Run]) -> list[str]:
    """The runs whose tokens weren't AR's, warming up or not."""
    return [f"{run.prompt}, {run.config.label}" + (", warming up" if run.repeat < 0 else "") for run in runs
            if not (run.same_as_ar or run.config.is_naive)]


class Times(TypedDict):
    """t_v and t_d of `roofline`, in milliseconds: a verification, and a drafted token; t_sync: the wait per round; t_o: the
    rest."""

    t_v_ms: float
    t_d_ms: float
    t_sync_ms: float
    t_o_ms: float


class Row(Times):
    """Of one configuration over the prompts of one kind: medians of per-request figures; tau and acceptance pooled."""

    config: str
    mode: str
    draft_length: int
    kind: str
    requests: int
    same_as_ar: int
    tokens_per_s: float
    tokens_per_s_with_prefill: float
    over_ar: float
    tokens_per_round: float
    acceptance: float
    hit_rate: float


class Window(TypedDict):
    """Tokens first..last of a long request, and milliseconds per token."""

    first: int
    last: int
    ms_a_token: float


def summary(runs: list[Run], kind: str | None = None) -> list[Row]:
    """One row per configuration, over the prompts of one kind or all: medians of per-request figures; tau and acceptance
    pooled. Runs that warm up don't count."""
    picked = [run for run in runs if kind in (None, run.kind) and run.repeat >= 0]
    base = {(r.prompt, r.repeat): r.stats for r in picked if r.config.mode == "ar"}
    rows: list[Row] = []
    for config in dict.fromkeys(run.config for run in picked):
        of = [run for run in picked if run.config == config]
        total = {name: sum(getattr(r.stats, name) for r in of) for name in
                 ("emitted", "rounds", "drafted", "accepted", "branch_hits", "branch_misses")}
        asked = total["branch_hits"] + total["branch_misses"]
        rows.append({
            "config": config.label, "mode": config.mode, "draft_length": config.draft_length, "kind": kind or "all",
            "requests": len(of), "same_as_ar": sum(r.same_as_ar for r in of),
            "tokens_per_s": statistics.median(r.stats.decode_tokens_per_s for r in of),
            "tokens_per_s_with_prefill": statistics.median(
                (r.stats.emitted + 1) / (r.stats.decode_s + r.stats.prefill_s) for r in of),
            "over_ar": statistics.median(
                r.stats.decode_tokens_per_s / base[r.prompt, r.repeat].decode_tokens_per_s
                if base[r.prompt, r.repeat].decode_tokens_per_s else 0.0 for r in of),
            "tokens_per_round": total["emitted"] / total["rounds"] if total["rounds"] else 0.0,
            "acceptance": total["accepted"] / total["drafted"] if total["drafted"] else 0.0,
            "hit_rate": total["branch_hits"] / asked if asked else 0.0, **times(of, config)})
    return rows


def times(runs: list[Run], config: Config) -> Times:
    """Pooled over the runs."""
    rounds = sum(r.stats.rounds for r in runs) or 1
    drafted = sum(r.stats.drafted for r in runs)
    in_line = 1e3 * sum(r.stats.draft_s for r in runs)
    return {"t_v_ms": 1e3 * sum(r.stats.verify_s for r in runs) / rounds,
            "t_d_ms": in_line / drafted if config.mode == "sd" and drafted else 0.0,
            "t_sync_ms": 1e3 * sum(r.stats.sync_s for r in runs) / rounds,
            "t_o_ms": 1e3 * sum(r.stats.decode_s - r.stats.verify_s - r.stats.draft_s - r.stats.sync_s
                                for r in runs) / rounds}


def long_run(decoder: Decoder, text: str, tokens: int) -> list[Window]:
    """One AR request of `tokens` tokens, ends ignored: milliseconds a token in each window. Raises RequestError if the cache
    has no room."""
    stats = decoder.generate(prompt_ids(decoder, text), "ar", max_new_tokens=tokens, ignore_eos=True).stats
    return [{"first": at + 1, "last": at + len(part), "ms_a_token": 1e3 * sum(part) / len(part)}
            for at in range(0, len(stats.round_s), WINDOW) if (part := stats.round_s[at:at + WINDOW])]
