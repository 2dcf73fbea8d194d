"""Check 1, agreement: do AR, SD and SSD emit the same tokens, whatever happens in a round?

Every request is compared with an AR run of the same options on the same decoder. Only the reference check finds a fault that all
three modes share.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Unpack

import torch

from ..backend import Hidden
from ..drafter import Branch, Drafter, Outcome, max_rows
from ..drafters.ngram import NGramDrafter
from ..drafters.scripted import ScriptedDrafter
from ..drafters.small_model import SmallModelDrafter
from ..engine import Decoder
from ..request.request import RequestOptions
from ..request.stream import Result
from ..rows import Appended, Rows
from ..sampling import Chooser
from .check import Check

LONGEST_DRAFT = 8  # K; a verification then has 9 rows
DELAY_S = 0.002  # longer than a tiny model's round, so the drafter may finish before or after the target
SPECULATIVE = ("sd", "ssd")
RunPass = Callable[[list[int], Rows], Hidden]  # forward or prefill of a model
EDGES = (256, 2048)  # contexts at which another decoder drifted: the ends of its first and eighth chunk


class Delayed:
    """A drafter that answers late, for the delay checks."""

    def __init__(self, inner: Drafter, seconds: float) -> None:
        self.inner, self.seconds, self.name, self.feature_layers = inner, seconds, inner.name, inner.feature_layers
        self.max_rows = max_rows(inner)

    def start(self, tokens: list[int], features: torch.Tensor | None, chooser: Chooser) -> None:
        """As inner."""
        self.inner.start(tokens, features, chooser)

    def draft(self, tokens: list[int], length: int) -> list[int]:
        """As inner, late."""
        time.sleep(self.seconds)
        return self.inner.draft(tokens, length)

    def accept(self, outcome: Outcome) -> None:
        """As inner."""
        self.inner.accept(outcome)

    def prepare(self, tokens: list[int], draft: list[int], branches: int, length: int) -> Branch:
        """As inner, late."""
        time.sleep(self.seconds)
        return self.inner.prepare(tokens, draft, branches, length)


class Agreement:
    """The checks of one decoder on one prompt of token ids. They don't change the decoder."""

    def __init__(self, decoder: Decoder, prompt: Sequence[int]) -> None:
        self.decoder, self.prompt = decoder, list(prompt)
        self.own = decoder.drafter
        # Rounds on the device need a drafter that works: the target drafts for itself, and a script overwrites its drafts.
        self.overruled = SmallModelDrafter(decoder.model, decoder.capacity) if decoder.model.has_device_rounds else None
        self.prompts: set[tuple[int, ...]] = set()
        self.tokens_compared = 0
        self.emitted: list[int] = []
        self.ar = self.generate(self.prompt, "ar", None, max_new_tokens=4 * LONGEST_DRAFT)

    def generate(self, prompt: Sequence[int], mode: str, drafter: Drafter | None, **options: Unpack[RequestOptions]) -> Result:
        """One request with `drafter` in place of the decoder's own. ignore_eos is True by default."""
        self.prompts.add(tuple(prompt))
        self.decoder.drafter = drafter
        try:
            asked: RequestOptions = {"ignore_eos": True, **options}
            return self.decoder.generate(list(prompt), mode, **asked)
        finally:
            self.decoder.drafter = self.own

    def script(self, accepted: Sequence[int], ar: Result | None = None, prompt: Sequence[int] | None = None,
               hits: Sequence[bool] = (True,)) -> ScriptedDrafter:
        """A scripted drafter that replays an AR run, by default that of this prompt."""
        return ScriptedDrafter([*(prompt or self.prompt), *(ar or self.ar).token_ids], accepted,
                               self.decoder.model.vocab_limit, hits, self.overruled)

    def same(self, result: Result, expected: Result) -> str:
        """The first difference, or an empty string."""
        self.tokens_compared += len(expected.token_ids)
        self.emitted += result.token_ids
        for index, (found, right) in enumerate(zip(result.token_ids, expected.token_ids)):
            if found != right:
                return f"token {index} is {found}, AR emits {right}"
        for name in ("token_ids", "text", "finish_reason", "logprobs"):
            if getattr(result, name) != getattr(expected, name):
                return f"{name} is {getattr(result, name)!r}, AR gives {getattr(expected, name)!r}"
        return ""

    def checks(self) -> Iterator[Check]:
        """Every check, cheapest first."""
        yield from self.widths()
        yield from self.prompt_chunking()
        yield from self.patterns()
        yield from self.limits()
        yield from self.ends()
        yield from self.boundaries()
        yield from self.reuse()
        yield from self.hits_and_delays()
        yield from self.drafters()
        yield from self.sampling()

    def widths(self) -> Iterator[Check]:
        """Rows alone and together, with anything in the free slots: the same logits."""
        def run(width: int, poison: float | None) -> str:
            model, tokens = self.decoder.model, [*self.prompt, *self.ar.token_ids]
            base = len(tokens) - width
            cache = model.new_cache(len(tokens))
            if poison is not None:
                cache.buffer.fill_(poison)
            for start in range(0, base, 64):
                part = tokens[start:min(start + 64, base)]
                model.forward(part, Appended(cache, len(part)))
            together = model.logits(model.forward(tokens[base:], Appended(cache, width)).final)
            cache.rollback(base)
            for row in range(width):
                alone = model.logits(model.forward(tokens[base + row:base + row + 1], Appended(cache, 1)).final)
                differ = (alone[0] != together[row]).nonzero()
                if differ.numel():
                    return f"row {row} of {width}: logit {int(differ[0])} differs"
            return ""

        for width in range(2, LONGEST_DRAFT + 2):
            yield Check(f"width {width}: rows alone and together", partial(run, width, None))
            yield Check(f"width {width}: NaN in every free slot", partial(run, width, torch.nan))

    def prompt_chunking(self) -> Iterator[Check]:
        """Tokens in passes of other sizes give the bits of one row per pass; a prompt in chunks, those of the whole prompt."""
        model, tokens = self.decoder.model, [*self.prompt, *self.ar.token_ids]

        def finals(run: RunPass, size: int) -> torch.Tensor:
            cache = model.new_cache(len(tokens))
            parts = [tokens[i:i + size] for i in range(0, len(tokens), size)]
            return torch.cat([run(part, Appended(cache, len(part))).final for part in parts])

        def compare(run: RunPass, size: int, right: int) -> str:
            differ = (finals(run, size) != finals(run, right)).any(-1).nonzero()
            return f"position {int(differ[0])} differs" if differ.numel() else ""

        for size in (2, 7, 8, 9, 64):
            yield Check(f"tokens in passes of {size} rows", partial(compare, model.forward, size, 1))
        for size in (1, 7, 16, 33):
            yield Check(f"prompt in chunks of {size} tokens", partial(compare, model.prefill, size, len(tokens)))

    def patterns(self) -> Iterator[Check]:
        """Every draft length with every number of accepted tokens."""
        def run(mode: str, length: int, accepted: int) -> str:
            limit = 2 * (accepted + 1) + length
            result = self.generate(self.prompt, mode, self.script([accepted]), max_new_tokens=limit, draft_length=length)
            return self.same(result, self.cut(limit))

        for mode in SPECULATIVE:
            for length in range(1, LONGEST_DRAFT + 1):
                for accepted in range(length + 1):
                    yield Check(f"{mode}: draft length {length}, {accepted} accepted", partial(run, mode, length, accepted))

    def cut(self, limit: int) -> Result:
        """The recorded AR run with a lower limit: greedy decoding does not look ahead."""
        limit = min(limit, len(self.ar.token_ids))
        ids = self.ar.token_ids[:limit]
        text = self.decoder.tokenizer.decode(ids) if self.decoder.tokenizer else None
        return Result(text, ids, "length", None, self.ar.stats)

    def limits(self) -> Iterator[Check]:
        """The limit at each offset of a round."""
        def run(mode: str, limit: int) -> str:
            result = self.generate(self.prompt, mode, self.script([4]), max_new_tokens=limit, draft_length=4)
            return self.same(result, self.cut(limit))

        for mode in SPECULATIVE:
            for limit in range(1, 12):
                yield Check(f"{mode}: at most {limit} new tokens", partial(run, mode, limit))

    def ends(self) -> Iterator[Check]:
        """End-of-sequence ids, stop ids and stop strings at each position of a draft."""
        def run(mode: str, kind: str, at: int) -> str:
            token = self.ar.token_ids[at]
            options: RequestOptions = {"max_new_tokens": 24, "draft_length": 4}
            if kind == "stop string":
                assert self.decoder.tokenizer is not None
                options["stop"] = self.decoder.tokenizer.decode(self.ar.token_ids[at:at + 2]) or "never"
            elif kind == "stop id":
                options["stop_token_ids"] = [token]
            else:
                options["ignore_eos"] = False
            kept, self.decoder.eos_ids = self.decoder.eos_ids, frozenset([token])
            try:
                expected = self.generate(self.prompt, "ar", None, **options)
                return self.same(self.generate(self.prompt, mode, self.script([4]), **options), expected)
            finally:
                self.decoder.eos_ids = kept

        kinds = ("end of sequence", "stop id") + (("stop string",) if self.decoder.tokenizer else ())
        for mode in SPECULATIVE:
            for kind in kinds:
                for at in range(6):
                    yield Check(f"{mode}: {kind} at token {at}", partial(run, mode, kind, at))

    def boundaries(self) -> Iterator[Check]:
        """Contexts that end at a chunk boundary or next to it, with drafts across it."""
        chunk = self.decoder.recipe.kv_chunk
        right: dict[int, tuple[list[int], Result]] = {}

        def run(mode: str, length: int) -> str:
            if length not in right:
                prompt = (self.prompt * (length // len(self.prompt) + 1))[:length]
                right[length] = prompt, self.generate(prompt, "ar", None, max_new_tokens=8)
            prompt, expected = right[length]
            drafter = self.script([3, 0, 2], expected, prompt)
            return self.same(self.generate(prompt, mode, drafter, max_new_tokens=8), expected)

        edges = {chunk, 2 * chunk, *EDGES}
        lengths = sorted({chunk - 4} | {edge + beside for edge in edges for beside in (-1, 0, 1)})
        for length in lengths:
            if length + 8 <= self.decoder.capacity:
                for mode in SPECULATIVE:
                    yield Check(f"{mode}: a context of {length} tokens", partial(run, mode, length))

    def reuse(self) -> Iterator[Check]:
        """A second request on the same drafter."""
        def run(mode: str, name: str) -> str:
            drafter = self.drafter(name)
            self.generate(self.prompt[::-1] * 2, mode, drafter, max_new_tokens=12)
            return self.same(self.generate(self.prompt, mode, drafter, max_new_tokens=12), self.cut(12))

        for mode in SPECULATIVE:
            for name in ("ngram", "itself"):
                yield Check(f"{mode}: a second request, drafter {name}", partial(run, mode, name))

    def hits_and_delays(self) -> Iterator[Check]:
        """Branches that hit, miss and alternate, from a drafter in time and a late one."""
        def run(hits: tuple[bool, ...], delay_s: float) -> str:
            drafter = Delayed(self.script([2, 4, 0, 1], hits=hits), delay_s)
            return self.same(self.generate(self.prompt, "ssd", drafter, max_new_tokens=20), self.cut(20))

        for hits in ((True,), (False,), (True, False), (False, False, True)):
            for delay_s in (0.0, DELAY_S):
                word = "".join("h" if hit else "m" for hit in hits)
                yield Check(f"ssd: branches {word}, {'late' if delay_s else 'in time'}",
                            partial(run, hits, delay_s))

    def drafter(self, name: str) -> Drafter:
        """A real drafter by name: `ngram`, `itself` (the target), or any other for the decoder's own."""
        if name == "ngram":
            return NGramDrafter()
        if name == "itself":
            return SmallModelDrafter(self.decoder.model, self.decoder.capacity)
        assert self.own is not None
        return self.own

    def drafters(self) -> Iterator[Check]:
        """Every real drafter."""
        def run(mode: str, name: str) -> str:
            return self.same(self.generate(self.prompt, mode, self.drafter(name), max_new_tokens=20), self.cut(20))

        names = ["ngram", "itself"] + ([f"own ({self.own.name})"] if self.own else [])
        for mode in SPECULATIVE:
            for name in names:
                yield Check(f"{mode}: drafter {name}", partial(run, mode, name))

    def sampling(self) -> Iterator[Check]:
        """Seeded draws and log-probabilities, bit for bit."""
        def run(mode: str, options: RequestOptions) -> str:
            options = {**options, "max_new_tokens": 12, "logprobs": 2}
            expected = self.generate(self.prompt, "ar", None, **options)
            drafter = self.script([3, 1], expected)
            return self.same(self.generate(self.prompt, mode, drafter, **options), expected)

        cases: dict[str, RequestOptions] = {"log-probabilities": {}, "temperature 1": {"temperature": 1.0, "seed": 5},
                                            "top-p 0.8": {"temperature": 0.8, "top_p": 0.8, "seed": 6}}
        for mode in SPECULATIVE:
            for name, options in cases.items():
                yield Check(f"{mode}: {name}", partial(run, mode, options))
