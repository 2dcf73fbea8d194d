"""AR, SD and SSD in their simplest form, on Hugging Face's model and growing cache, for comparison.

Nothing here is row-invariant. The cache grows by concatenation and is cropped after a rejection. A drafter is a loop of one-token
passes or a search through the text. SSD runs it in a thread, for the full accept alone. So SD and SSD may emit other tokens than
AR, above all in bf16. This module shares the loading of weights with the decoder, and nothing else. It ignores end ids and makes
as many tokens as requested.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import torch

from ...shapes.model import ModelShape
from ..checkpoint.loader import load_checkpoint
from ..checks.reference import hugging_face_model
from ..stats import MODES, Stats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOOKUP = 2  # tokens of the n-gram drafter's key


class Sequence:
    """A model with its growing cache. seconds: time spent in the model."""

    def __init__(self, model: "PreTrainedModel") -> None:
        from transformers import DynamicCache

        self.model, self.cache, self.seconds = model, DynamicCache(config=model.config), 0.0

    def feed(self, tokens: list[int]) -> list[int]:
        """Appends `tokens`. Returns the winning token after each of them."""
        started = time.perf_counter()
        with torch.inference_mode():
            ids = torch.tensor([tokens], device=self.model.device)
            winners: list[int] = self.model(ids, past_key_values=self.cache, use_cache=True).logits[0].argmax(-1).tolist()
        self.seconds += time.perf_counter() - started
        return winners

    def crop(self, length: int) -> None:
        """Keeps the first `length` tokens."""
        extra = self.cache.get_seq_length() - length
        if extra > 0:
            self.cache.crop(-extra)


class Draft(Protocol):
    """Proposes tokens for one request."""

    def propose(self, tokens: list[int], length: int) -> list[int]:
        """`length` tokens that may follow `tokens`, the whole sequence so far."""


class ModelDraft:
    """A drafter that is a model."""

    def __init__(self, model: "PreTrainedModel") -> None:
        self.sequence = Sequence(model)

    def propose(self, tokens: list[int], length: int) -> list[int]:
        """See Draft.propose."""
        self.sequence.crop(len(tokens) - 1)
        rest, drafted = tokens[self.sequence.cache.get_seq_length():], list[int]()
        while len(drafted) < length:
            drafted.append(self.sequence.feed(rest)[-1])
            rest = drafted[-1:]
        return drafted


class LookupDraft:
    """The continuation of the last earlier occurrence of the final LOOKUP tokens, filled up with the last token repeated."""

    def propose(self, tokens: list[int], length: int) -> list[int]:
        """See Draft.propose."""
        key = tokens[-LOOKUP:]
        found = next((i for i in range(len(tokens) - LOOKUP - 1, -1, -1) if tokens[i:i + LOOKUP] == key), None)
        after = [] if found is None else tokens[found + LOOKUP:found + LOOKUP + length]
        return after + tokens[-1:] * (length - len(after))


def autoregressive(model: "PreTrainedModel", prompt: list[int], limit: int) -> tuple[list[int], Stats]:
    """AR: (`limit` new tokens, their stats)."""
    sequence = Sequence(model)
    tokens = [sequence.feed(prompt)[-1]]
    stats = Stats(mode="naive-ar", prompt_tokens=len(prompt), prefill_s=sequence.seconds)
    started = time.perf_counter()
    while len(tokens) < limit:
        tokens.append(sequence.feed(tokens[-1:])[-1])
        stats.count_round(0, 0, 1)
    stats.decode_s, stats.verify_s = time.perf_counter() - started, sequence.seconds - stats.prefill_s
    return tokens, stats


def speculative(model: "PreTrainedModel", drafter: Draft, prompt: list[int], limit: int, length: int,
                worker: ThreadPoolExecutor | None = None) -> tuple[list[int], Stats]:
    """SD, or SSD with `worker`, a thread that drafts for the full accept: (`limit` new tokens, their stats). length: K."""
    target = Sequence(model)
    tokens, end = [*prompt, target.feed(prompt)[-1]], len(prompt) + limit
    stats = Stats(mode="naive-ssd" if worker else "naive-sd", prompt_tokens=len(prompt), prefill_s=target.seconds)
    started = time.perf_counter()
    draft = drafter.propose(tokens, length)
    while len(tokens) < end:
        stats.draft_s += time.perf_counter() - started - stats.decode_s
        following: Future[list[int]] | None = worker.submit(drafter.propose, tokens + draft, length + 1) if worker else None
        winners = target.feed([tokens[-1], *draft])
        accepted = next((i for i, token in enumerate(draft) if token != winners[i]), length)
        stats.count_round(length, accepted, min(accepted + 1, end - len(tokens)))
        tokens += winners[:accepted + 1]
        target.crop(len(tokens) - 1)
        guess = following.result() if following else []
        stats.decode_s = time.perf_counter() - started
        if guess and accepted == length and guess[0] == tokens[-1]:
            stats.branch_hits, draft = stats.branch_hits + 1, guess[1:]
        else:
            stats.branch_misses, draft = stats.branch_misses + bool(worker), drafter.propose(tokens, length)
    stats.verify_s = target.seconds - stats.prefill_s
    return tokens[len(prompt):end], stats


class Naive:
    """A model with its drafter, on one device in one type."""

    def __init__(self, weights: str, shape: str | ModelShape | None, drafter: str | None, dtype: torch.dtype,
                 device: torch.device) -> None:
        """drafter: `ngram`, weights, or None for the model itself.

        Raises:
            LoadError: weights that can't be loaded; an EAGLE-3 drafter, which isn't supported here.
        """
        self.dtype_name = str(dtype).removeprefix("torch.")
        self.model = self._load(weights, shape, dtype, device)
        self.lookup = drafter == "ngram"
        random = drafter is not None and drafter.startswith("random:")
        self.small = (self.model if drafter is None else None if self.lookup
                      else self._load(drafter, shape if random else None, dtype, device))

    @staticmethod
    def _load(weights: str, shape: str | ModelShape | None, dtype: torch.dtype, device: torch.device) -> "PreTrainedModel":
        return hugging_face_model(load_checkpoint(weights, shape, torch.device("cpu")), dtype).to(device)

    def run(self, mode: str, prompt: list[int], limit: int, length: int) -> tuple[list[int], Stats]:
        """(`limit` new tokens, their stats). mode: one of MODES; length: K."""
        assert mode in MODES
        if mode == "ar":
            return autoregressive(self.model, prompt, limit)
        drafter = LookupDraft() if self.lookup else ModelDraft(self.small)
        if mode == "sd":
            return speculative(self.model, drafter, prompt, limit, length)
        with ThreadPoolExecutor(1) as worker:
            return speculative(self.model, drafter, prompt, limit, length, worker)
