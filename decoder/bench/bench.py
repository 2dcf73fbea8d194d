"""`tune-kernels bench`: decode rates of AR, SD and SSD on the committed prompts.

Runs are interleaved: each repeat of each prompt decodes with every configuration in turn. A ratio to AR is the median over
prompts and repeats, each against the AR run of the same prompt and repeat. A run whose tokens differ from AR's fails the
benchmark. Rates are of decode alone; a second column includes the prompt. On a GPU, repeats that aren't timed come first: they
load kernels and capture graphs, at half a second per graph.

The naive decoders (naive.py) may run in turn with these, for comparison. They make as many tokens as AR. The share of their
requests with AR's tokens is shown and fails nothing.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

import torch

from ...shapes.fields import PositiveInt, read_fields
from ..checks.check import Countdown
from ..draft_length import MOST
from ..drafter import Drafter
from ..drafters.scripted import ScriptedDrafter
from ..engine import Decoder
from ..errors import RequestError
from ..loading import torch_device
from ..request.stream import Result
from ..stats import Stats, pooled
from .naive import Naive

NAIVE = "naive-"  # prefix of the naive decoders' modes
WINDOW = 1024  # tokens per figure of a long request
PATTERN = 20  # rounds before a scripted acceptance repeats


@dataclass(frozen=True)
class Prompt:
    """One prompt. kind: `code`, `prose` and the like; figures are given per kind."""

    name: str
    kind: str
    text: str


@dataclass(frozen=True)
class PromptsFile:
    """The prompts file. repeats: timed runs per prompt and configuration; tuning: for the choice of draft lengths."""

    repeats: PositiveInt
    evaluation: tuple[Prompt, ...] = ()
    tuning: tuple[Prompt, ...] = ()


@dataclass(frozen=True)
class Config:
    """One way to decode. mode: ar, sd, ssd, or one of them after `naive-`; draft_length: K, 0 for AR, AUTO."""

    mode: str
    draft_length: int | str

    @property
    def label(self) -> str:
        return f"{self.mode} K={self.draft_length}" if self.draft_length else self.mode

    @property
    def is_naive(self) -> bool:
        return self.mode.startswith(NAIVE)


@dataclass(frozen=True)
class Run:
    """One request in one configuration. repeat: negative while warming up."""

    config: Config
    prompt: Prompt
    repeat: int
    stats: Stats
    same_as_ar: bool


def load_prompts(path: Path, which: str) -> tuple[tuple[Prompt, ...], int]:
    """(prompts of the set `which`, repeats) of a prompts file.

    Raises:
        RequestError: not a prompts file, or one without this set.
    """
    file = read_fields(path, RequestError).read(PromptsFile)
    prompts = file.evaluation if which == "evaluation" else file.tuning
    if not prompts:
        raise RequestError(f"{path}: no [[{which}]]", expected="at least one prompt in the set",
                           action="name another file with --prompts")
    return prompts, file.repeats


def configs(modes: tuple[str, ...], draft_lengths: tuple[int | str, ...]) -> list[Config]:
    """Every mode with every draft length, AR first: the others are measured against it."""
    return [Config("ar", 0)] + [Config(mode, k) for mode in ("sd", "ssd") if mode in modes for k in draft_lengths]


def scripted_pattern(tau: float) -> list[int]:
    """Accepted tokens in each of PATTERN rounds, spread evenly, so that a round emits `tau` tokens on average."""
    target, pattern = tau - 1, list[int]()
    for i in range(1, PATTERN + 1):
        pattern.append(round(target * i) - sum(pattern))
    return pattern


def scripted_hits(rate: float) -> list[bool]:
    """Whether a branch hits, in each of PATTERN rounds, spread evenly. rate: share of hits, 0..1."""
    return [bool(hit) for hit in scripted_pattern(1 + rate)]


@dataclass(frozen=True)
class BenchPlan:
    """The runs of a benchmark. tau: tokens per round of a script in place of the drafter, or None; branches: of SSD."""

    prompts: tuple[Prompt, ...]
    repeats: int
    configs: list[Config]
    max_new_tokens: int
    tau: float | None
    branches: int


def run_all(decoder: Decoder, plan: BenchPlan, progress: Callable[[str], None], naive: Naive | None = None) -> Iterator[Run]:
    """Every run, interleaved. progress: called with a line per run: its name, the number of runs and the time left."""
    own, warm_up = decoder.drafter, decoder.model.warm_up_repeats
    per_prompt = len(plan.configs) * ((warm_up + plan.repeats) + (min(warm_up, 1) + plan.repeats if naive else 0))
    countdown = Countdown(per_prompt * len(plan.prompts))
    for repeat in range(-warm_up, plan.repeats):
        for prompt in plan.prompts:
            ids = prompt_ids(decoder, prompt.text)
            ar: Result | None = None
            simple = [replace(config, mode=NAIVE + config.mode) for config in plan.configs if naive and repeat >= -1]
            for config in [*plan.configs, *simple]:
                if config.is_naive and naive and ar:
                    tokens, stats = naive.run(config.mode.removeprefix(NAIVE), ids, len(ar.token_ids),
                                              config.draft_length if isinstance(config.draft_length, int) else MOST)
                else:
                    decoder.drafter = replaying(decoder, own, [*ids, *ar.token_ids], plan.tau) if ar else own
                    result = decoder.generate(ids, config.mode, max_new_tokens=plan.max_new_tokens, branches=plan.branches,
                                              draft_length=config.draft_length or 1)
                    tokens, stats, ar = result.token_ids, result.stats, ar or result
                    decoder.drafter = own
                phase = "warming up" if repeat < 0 else f"repeat {repeat + 1} of {plan.repeats}"
                progress(f"{phase}: {prompt.name}, {config.label} ({countdown.step()})")
                yield Run(config, prompt, repeat, stats, bool(ar) and tokens == ar.token_ids)


def replaying(decoder: Decoder, own: Drafter | None, sequence: list[int], tau: float | None) -> Drafter | None:
    """The decoder's drafter; with `tau`, a script of `tau` tokens per round over it. sequence: the recorded AR run."""
    return own if tau is None else ScriptedDrafter(sequence, scripted_pattern(tau), decoder.model.vocab_limit, inner=own)


def naive_baseline(decoder: Decoder, weights: str, model: str | None, drafter: str | None, device: str | None) -> Naive:
    """The naive decoders with the same weights and drafter, in fp32 if the recipe is, else in bf16: Hugging Face's model has no
    FP8. Raises LoadError as `Naive`."""
    return Naive(weights, model, drafter, torch.float32 if decoder.recipe.precision.linear == "fp32" else torch.bfloat16,
                 torch_device(device))


def prompt_ids(decoder: Decoder, text: str) -> list[int]:
    """The text's ids, under the chat template if the model has one; without a tokenizer, the text's bytes."""
    if decoder.tokenizer is None:
        return [byte % decoder.model.vocab_limit for byte in text.encode()]
    if decoder.tokenizer.has_chat_template:
        return decoder.tokenizer.encode_chat([{"role": "user", "content": text}])
    return decoder.tokenizer.encode(text)


def differing(runs: list[Run]) -> list[str]:
    """The runs of the decoder, warming up or not, whose tokens differ from AR's."""
    return [f"{run.prompt.name}, {run.config.label}" + (", warming up" if run.repeat < 0 else "") for run in runs
            if not (run.same_as_ar or run.config.is_naive)]


class Times(TypedDict):
    """Milliseconds. t_v_ms: a verification; t_d_ms: a drafted token; t_sync_ms: the wait per round; t_o_ms: the rest of a round.
    `roofline` reads them."""

    t_v_ms: float
    t_d_ms: float
    t_sync_ms: float
    t_o_ms: float


class Row(Times):
    """One configuration over the prompts of one kind. Rates are medians over requests; tau, acceptance and hit rate are
    pooled."""

    config: str
    mode: str
    draft_length: int | str
    kind: str
    requests: int
    same_as_ar: int
    tokens_per_s: float
    tokens_per_s_with_prefill: float
    over_ar: float
    over_ar_low: float
    over_ar_high: float
    tokens_per_round: float
    acceptance: float
    hit_rate: float


class Window(TypedDict):
    """Tokens first..last of a long request. ms_a_token: milliseconds per token."""

    first: int
    last: int
    ms_a_token: float


def summary(runs: list[Run], kind: str | None = None) -> list[Row]:
    """One row per configuration, over the prompts of one kind or all. Warm-up runs don't count."""
    picked = [run for run in runs if kind in (None, run.prompt.kind) and run.repeat >= 0]
    base = {(r.prompt, r.repeat): r.stats for r in picked if r.config.mode == "ar"}
    rows: list[Row] = []
    for config in dict.fromkeys(run.config for run in picked):
        of = [run for run in picked if run.config == config]
        total = pooled([run.stats for run in of])
        over = [r.stats.decode_tokens_per_s / base[r.prompt, r.repeat].decode_tokens_per_s
                if base[r.prompt, r.repeat].decode_tokens_per_s else 0.0 for r in of]
        rows.append({
            "config": config.label, "mode": config.mode, "draft_length": config.draft_length, "kind": kind or "all",
            "requests": len(of), "same_as_ar": sum(r.same_as_ar for r in of),
            "tokens_per_s": statistics.median(r.stats.decode_tokens_per_s for r in of),
            "tokens_per_s_with_prefill": statistics.median(
                (r.stats.emitted + 1) / (r.stats.decode_s + r.stats.prefill_s) for r in of),
            "over_ar": statistics.median(over), "over_ar_low": interval(over)[0], "over_ar_high": interval(over)[1],
            "tokens_per_round": total.tokens_per_round, "acceptance": total.acceptance, "hit_rate": total.hit_rate,
            **times(total, config.mode)})
    return rows


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the median, with a confidence of at least 95% whatever the distribution: two of the values, by their ranks (binomial).
    The whole range where there are fewer than six."""
    ordered, outside, rank = sorted(values), 0.0, 0
    while rank < (len(ordered) - 1) // 2:
        outside += 2 * math.comb(len(ordered), rank) / 2 ** len(ordered)
        if outside > 0.05:
            break
        rank += 1
    at = max(rank - 1, 0)
    return ordered[at], ordered[-1 - at]


def times(total: Stats, mode: str) -> Times:
    """The times per round and drafted token. total: pooled over the runs of one configuration."""
    per_round = 1e3 / (total.rounds or 1)
    return {"t_v_ms": total.verify_s * per_round,
            "t_d_ms": 1e3 * total.draft_s / total.drafted if mode == "sd" and total.drafted else 0.0,
            "t_sync_ms": total.sync_s * per_round,
            "t_o_ms": (total.decode_s - total.verify_s - total.draft_s - total.sync_s) * per_round}


def long_run(decoder: Decoder, text: str, tokens: int) -> list[Window]:
    """Times one AR request of `tokens` tokens, ends ignored, in windows of WINDOW tokens. Raises RequestError if the cache has
    too few slots."""
    stats = decoder.generate(prompt_ids(decoder, text), "ar", max_new_tokens=tokens, ignore_eos=True).stats
    return [{"first": at + 1, "last": at + len(part), "ms_a_token": 1e3 * sum(part) / len(part)}
            for at in range(0, len(stats.round_s), WINDOW) if (part := stats.round_s[at:at + WINDOW])]
