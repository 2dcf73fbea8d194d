"""The full model for the gate: the decoder's GPU backend with candidates in place, in the worker process.

The tuner's only import of the decoder. Prompts are token ids from an integer hash, which need no tokenizer; their lengths cross
chunk edges. SD and SSD run with a scripted drafter: it proposes AR's tokens up to a scripted position, then a wrong one, and
covers every number of accepted tokens."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from ....schedules.schedule import Schedule
from ... import pool
from ...errors import GpuError
from .gpu_state import read_state
from .process import at_work, install
from .tasks import Answer
from .values import hashed

if TYPE_CHECKING:
    from ....decoder import Decoder
    from ....decoder.request.stream import Result

T = TypeVar("T")
Chosen = tuple[tuple[str, Schedule], ...]  # schedules by kernel, in the decoder's order
Tokens = dict[str, list[list[int]]]  # by mode, of each prompt
Times = dict[str, list[tuple[float, float]]]  # by mode, (old, new) us per token
PROMPT_LENGTHS = (17, 100, 250, 510, 1000, 2040)
NEW_TOKENS = 48  # of each prompt in the token check
TIMED_PROMPT, TIMED_TOKENS = 128, 96  # of one timed request
DRAFT_LENGTH = 4
ACCEPTED = (2, 0, 4, 1, 3)  # correct draft tokens, round by round
CAPACITY = 4096
WALL_SECONDS = 180  # per task: makes weights, captures graphs, compiles kernels that a partial bundle lacks
FIRST_ID = 100  # lower ids are often special tokens


@dataclass(frozen=True)
class Loaded:
    """A model to load: a shape's name with random weights, or weights by path."""

    model: str
    weights: str
    recipe: str


@dataclass(frozen=True)
class ProbeTask:
    """Tokens under `old`, or times of `old` against `new`. words: as in tasks.CheckTask. new: empty in a task for tokens."""

    bundle: str
    words: str
    loaded: Loaded
    old: Chosen
    new: Chosen = ()
    repeats: int = 0


class Worker(Protocol):
    """The part of GpuMeasurer that a probe uses."""

    words: Path

    def ask(self, function: Callable[[ProbeTask], Answer[T]], task: ProbeTask, wall_seconds: float) -> "T | pool.Died": ...

    def words_of(self, died: pool.Died) -> str: ...


class GpuProbe:
    """See full_model.DecoderProbe."""

    def __init__(self, worker: Worker, bundle: str, loaded: Loaded) -> None:
        self.worker, self.bundle, self.loaded = worker, bundle, loaded
        self.known: dict[Chosen, Tokens] = {}

    def tokens(self, schedules: Mapping[str, Schedule]) -> Tokens:
        """As DecoderProbe, with a cache by schedules."""
        chosen = _ordered(schedules)
        if chosen not in self.known:
            self.known[chosen] = self._ask(tokens_task, self._task(chosen))
        return self.known[chosen]

    def time_step(self, old: Mapping[str, Schedule], new: Mapping[str, Schedule], repeats: int) -> Times:
        """As DecoderProbe; empty if the decoder would run the same schedules."""
        if _ordered(old) == _ordered(new):
            return {}
        return self._ask(time_task, self._task(_ordered(old), _ordered(new), repeats))

    def _task(self, old: Chosen, new: Chosen = (), repeats: int = 0) -> ProbeTask:
        return ProbeTask(self.bundle, str(self.worker.words), self.loaded, old, new, repeats)

    def _ask(self, function: Callable[[ProbeTask], Answer[T]], task: ProbeTask) -> T:
        result = self.worker.ask(function, task, WALL_SECONDS)
        if isinstance(result, pool.Died):
            raise GpuError(f"the decoder crashed with these schedules in place: {self.worker.words_of(result)}",
                           expected="a decoder that runs", action="tune one kernel alone: tune-kernels --on-gpu --kernel NAME")
        return result


def _ordered(schedules: Mapping[str, Schedule]) -> Chosen:
    """The schedules of kernels that the decoder looks up: lm_head_logits runs under lm_head's."""
    from ....decoder.selection import KERNELS

    return tuple((k, schedules[k]) for k in KERNELS if k in schedules)


def tokens_task(task: ProbeTask) -> Answer[Tokens]:
    """Tokens of each prompt, by mode."""
    return at_work(task.words, lambda: tokens_of(decoder_of(task.bundle, task.loaded, task.old)))


def time_task(task: ProbeTask) -> Answer[Times]:
    """(old, new) us per token, by mode; old and new take turns, in alternating order."""
    def work() -> Times:
        old, new = (decoder_of(task.bundle, task.loaded, schedules) for schedules in (task.old, task.new))
        return times_of(old, new, task.repeats)

    return at_work(task.words, work)


@lru_cache(maxsize=2)
def decoder_of(bundle: str, loaded: Loaded, schedules: Chosen) -> "Decoder":
    """A decoder under these schedules, with kernels from the bundle. Raises LoadError."""
    from ....decoder import Decoder

    install(bundle)
    model = loaded.model if loaded.weights.startswith("random:") else None
    return Decoder.load(loaded.weights, model=model, recipe=loaded.recipe, backend="triton", capacity=CAPACITY,
                        allow_untuned=True, overrides=dict(schedules))


def prompt_of(length: int, vocabulary: int) -> list[int]:
    """`length` token ids from a hash, from FIRST_ID to vocabulary - 1."""
    return [FIRST_ID + int(v) % (vocabulary - FIRST_ID) for v in hashed(length, length)]


def _request(decoder: "Decoder", mode: str, prompt: list[int], new_tokens: int, reference: Sequence[int] = ()) -> "Result":
    """One request. reference: AR's tokens, for the scripted drafter."""
    from ....decoder.drafters.scripted import ScriptedDrafter

    decoder.drafter = ScriptedDrafter([*prompt, *reference], ACCEPTED, decoder.model.vocab_limit) if mode != "ar" else None
    return decoder.generate(prompt, mode, max_new_tokens=new_tokens, draft_length=DRAFT_LENGTH, ignore_eos=True)


def tokens_of(decoder: "Decoder") -> Tokens:
    """At most NEW_TOKENS tokens of every prompt in every mode."""
    found: Tokens = {"ar": [], "sd": [], "ssd": []}
    for length in PROMPT_LENGTHS:
        prompt = prompt_of(length, decoder.model.vocab_limit)
        found["ar"].append(list(_request(decoder, "ar", prompt, NEW_TOKENS).token_ids))
        for mode in ("sd", "ssd"):
            found[mode].append(list(_request(decoder, mode, prompt, NEW_TOKENS, found["ar"][-1]).token_ids))
    return found


def times_of(old: "Decoder", new: "Decoder", repeats: int) -> Times:
    """(old, new) us per token, by mode, without throttled pairs. repeats: pairs per mode."""
    prompt = prompt_of(TIMED_PROMPT, old.model.vocab_limit)
    reference = {id(d): list(_request(d, "ar", prompt, TIMED_TOKENS).token_ids) for d in (old, new)}
    found: Times = {"ar": [], "sd": []}
    for mode, pairs in found.items():
        for repeat in range(-1, repeats):  # the first warms up
            order = (old, new) if repeat % 2 else (new, old)
            times = {id(d): _token_us(d, mode, prompt, reference[id(d)]) for d in order}
            if repeat >= 0 and not read_state().throttled:
                pairs.append((times[id(old)], times[id(new)]))
    return found


def _token_us(decoder: "Decoder", mode: str, prompt: list[int], reference: Sequence[int]) -> float:
    """Decode time of a request, in us per emitted token. A request is synchronous."""
    started = time.perf_counter()
    stats = _request(decoder, mode, prompt, TIMED_TOKENS, reference).stats
    return float((time.perf_counter() - started - stats.prefill_s) / max(1, stats.emitted) * 1e6)
