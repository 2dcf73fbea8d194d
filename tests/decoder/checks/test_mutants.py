"""Seeded bugs, each with the check that must catch it and, by name, the check that must stay green.

A mutant is a change that a plausible mistake would make, switched on by monkeypatching. `agreement` compares
decoders with AR on the mutated code; `reference` compares the mutated model with Hugging Face; `acceptance` compares
a scripted or self-drafting case with its exact expected acceptance, for bugs that only make decoding slower;
`drafts` compares EAGLE-3 drafts with an independent implementation (tests/decoder/test_eagle3.py).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.checkpoint.loader import load_checkpoint
from tune_kernels.decoder.checks.agreement import Agreement
from tune_kernels.decoder.checks.check import run_checks
from tune_kernels.decoder.checks.reference import compare_with_reference, reference_model
from tune_kernels.decoder.drafters.small_model import SmallModelDrafter
from tune_kernels.decoder.errors import NumericsError
from tune_kernels.decoder.on_torch import layer, model, ops
from tune_kernels.decoder.on_torch.cache import KVCache
from tune_kernels.decoder.request import session
from tune_kernels.decoder.request.drafting import Drafting
from tune_kernels.schedules.recipe import Recipe

Patch = pytest.MonkeyPatch


def v_with_ks_strides(patch: Patch) -> None:
    """K leaves RoPE as [rows, heads, head_dim]; were it [rows, head_dim, heads] instead, a
    kernel that takes K's strides for both would read V's heads interleaved: consistently wrong, so all decoders
    agree."""
    def wrong(rows: Any, index: int, k: torch.Tensor, v: torch.Tensor, append: Any = layer.append) -> None:
        _, heads, head_dim = v.shape
        append(rows, index, k, v.contiguous().as_strided(v.shape, (heads * head_dim, 1, heads)))
    patch.setattr(layer, "append", wrong)


def rollback_one_too_far(patch: Patch) -> None:
    """Where tokens are rejected, the last accepted token's keys go with them."""
    rollback = KVCache.rollback
    patch.setattr(KVCache, "rollback", lambda self, cursor: rollback(self, cursor - (cursor < self.cursor)))


def rollback_one_too_short(patch: Patch) -> None:
    """Where tokens are rejected, the first one's keys stay."""
    rollback = KVCache.rollback
    patch.setattr(KVCache, "rollback", lambda self, cursor: rollback(self, cursor + (cursor < self.cursor)))


def stale_slot_read(patch: Patch) -> None:
    """Each row sees one slot too many, whatever lies there."""
    add = ops.Attention.add
    patch.setattr(ops.Attention, "add", lambda self, index, k, v, first: add(self, index, k, v, first + 1))
    patch.setattr(KVCache, "read", lambda self, layer, index, filled: (self.keys[layer, index], self.values[layer, index]))


def eos_passed(patch: Patch) -> None:
    """Only the last token of a round is looked at for an end."""
    def push(self: session.Session, tokens: list[int], entries: list[Any]) -> int:
        rules = self.output.rules
        for count, token in enumerate(tokens):
            quiet = dataclasses.replace(rules, eos_ids=frozenset(), stop_ids=frozenset())
            self.output.rules = rules if count == len(tokens) - 1 else quiet
            self.tokens.append(token)
            self.output.push(token)
            if self.finished:
                return count + 1
        return len(tokens)
    patch.setattr(session.Session, "push", push)


def bonus_token_dropped(patch: Patch) -> None:
    """After a full accept the target's own token isn't emitted; the next round finds it
    again."""
    verify = session.Session.verify

    def wrong(self: session.Session, draft: list[int]) -> Any:
        outcome = verify(self, draft)
        if draft and outcome.accepted == len(draft):
            self.cache.rollback(self.cache.cursor - 1)
            return dataclasses.replace(outcome, accepted=outcome.accepted - 1, emitted=outcome.emitted[:-1])
        return outcome
    patch.setattr(session.Session, "verify", wrong)


def last_drafts_keys_missing(patch: Patch) -> None:
    """After a full accept the drafter's cursor moves over a slot that was never written."""
    def wrong(self: SmallModelDrafter, outcome: Any) -> None:
        self.cache.cursor = outcome.base + outcome.accepted
    patch.setattr(SmallModelDrafter, "accept", wrong)


def other_rows_leak(patch: Patch) -> None:
    """The rows beside a row reach it by way of the activation scale."""
    def wrong(x: torch.Tensor, w: torch.Tensor, n: int, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ops.matmul(x * (1 + 1e-6 * (-x.shape[0] % 8)), w, n, bias)
    patch.setattr("tune_kernels.decoder.on_torch.linear.matmul", wrong)


def ties_to_the_highest(patch: Patch) -> None:
    """The one-row path takes the highest id among equals, the other paths the lowest."""
    def wrong(logits: torch.Tensor) -> torch.Tensor:
        lowest = ops.argmax(logits)
        if logits.shape[0] > 1:
            return lowest
        return logits.shape[-1] - 1 - ops.argmax(logits.flip(-1))
    patch.setattr(model, "argmax", wrong)


def kv_splits_by_rows(patch: Patch) -> None:
    """With more rows the keys are split into half as long parts."""
    add = ops.Attention.add

    def wrong(self: ops.Attention, index: int, k: torch.Tensor, v: torch.Tensor, first: int) -> None:
        if self.rows < 4:
            return add(self, index, k, v, first)
        half, whole = self.chunk // 2, self.chunk
        self.chunk = half
        for part in (0, 1):
            keys, values = k[:, :, part * half:(part + 1) * half], v[:, part * half:(part + 1) * half]
            add(self, 2 * index + part, keys.contiguous(), values.contiguous(), first)
        self.chunk = whole
        return None
    patch.setattr(ops.Attention, "add", wrong)


def late_reply(patch: Patch) -> None:
    """The branches of the round before are taken for this round's."""
    branches = Drafting.branches

    def wrong(self: Any, prepared: Any) -> Any:
        current = branches(self, prepared)
        before, self.before = getattr(self, "before", {}), current
        return before
    patch.setattr(Drafting, "branches", wrong)


def rope_pairs_adjacent(patch: Patch) -> None:
    """Pairs (i, i + 1) are turned in the place of (i, i + head_dim / 2), as if q and k were in a GGUF file's order."""
    rotate = layer.rotate

    def wrong(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        apart = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        low, high = rotate(apart, cos, sin).chunk(2, dim=-1)
        return torch.stack([low, high], dim=-1).flatten(-2)
    patch.setattr(layer, "rotate", wrong)


def stop_string_missed_across_tokens(patch: Patch) -> None:
    """The text is searched after a round and cut, the ids are not."""
    push = session.Session.push

    def wrong(self: session.Session, tokens: list[int], entries: list[Any]) -> int:
        kept = push(self, tokens, entries)
        if self.output.finish_reason == "stop" and kept < len(tokens):
            self.output.token_ids += tokens[kept:]
        return kept
    patch.setattr(session.Session, "push", wrong)


def cut_round_counted(patch: Patch) -> None:
    """The drafted tokens of a round that an end cut short count as accepted."""
    from tune_kernels.decoder.stats import Stats

    def wrong(self: Stats, drafted: int, accepted: int, kept: int) -> None:
        self.rounds += 1
        self.emitted += kept
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_per_round.append(accepted)
    patch.setattr(Stats, "count_round", wrong)


@dataclass(frozen=True)
class Mutant:
    """switch: turns the bug on. caught_by: the check that must fail; green: the checks that must not see it."""

    switch: Callable[[Patch], None]
    caught_by: str
    green: tuple[str, ...] = ()


MUTANTS = [
    Mutant(v_with_ks_strides, "reference", ("agreement", "acceptance")),
    Mutant(rope_pairs_adjacent, "reference", ("agreement", "acceptance")),
    Mutant(rollback_one_too_far, "agreement", ("reference",)),
    Mutant(rollback_one_too_short, "agreement", ("reference",)),
    Mutant(stale_slot_read, "agreement"),
    Mutant(eos_passed, "agreement", ("reference",)),
    Mutant(stop_string_missed_across_tokens, "agreement", ("reference", "acceptance")),
    Mutant(other_rows_leak, "agreement"),
    Mutant(ties_to_the_highest, "agreement", ("reference",)),
    Mutant(kv_splits_by_rows, "agreement"),
    Mutant(bonus_token_dropped, "acceptance", ("agreement", "reference")),
    Mutant(last_drafts_keys_missing, "acceptance", ("agreement", "reference")),
    Mutant(late_reply, "acceptance", ("agreement", "reference")),
    Mutant(cut_round_counted, "acceptance", ("agreement", "reference")),
]
PROMPT = [5, 9, 2, 40, 7, 11, 3, 60, 21, 33]


class Bench:
    """A tiny model on which the checks are red or green. Its head has every row twice, so that every winner ties."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder, self.recipe = folder, recipe
        self.decoder = Decoder.load(str(folder), recipe=recipe, capacity=200)

    def agreement(self) -> str:
        """The first problem, or an empty string."""
        for result in run_checks("agreement", Agreement(self.decoder, PROMPT).checks()):
            if not result.passed:
                return f"{result.name}: {result.detail}"
        return ""

    def reference(self) -> str:
        checkpoint = load_checkpoint(str(self.folder), None, torch.device("cpu"))
        tokens = [(i * 37 + 11) % 256 for i in range(50)]
        for result in compare_with_reference(self.decoder, reference_model(checkpoint, "fp32"), tokens, "fp32"):
            if not result.passed:
                return f"{result.name}: {result.detail}"
        return ""

    def acceptance(self) -> str:
        """Exact expected acceptance: a script, a model that drafts for itself, a round that an end cuts short."""
        run = Agreement(self.decoder, PROMPT)
        for mode in ("sd", "ssd"):
            stats = run.generate(PROMPT, mode, run.script([2, 4, 0, 4], hits=[True, False]), max_new_tokens=29,
                                 draft_length=4).stats
            found = (stats.accepted_per_round, stats.emitted, stats.branch_hits)
            if found != ([2, 4, 0, 4] * 2, 28, 4 if mode == "ssd" else 0):
                return f"{mode}: a script gave {found}"
            drafter = SmallModelDrafter(self.decoder.model, 200)
            drafter.cache.buffer.fill_(3.0)
            stats = run.generate(PROMPT, mode, drafter, max_new_tokens=26, draft_length=4).stats
            if (stats.accepted, stats.drafted, stats.rounds) != (20, 20, 5):
                return f"{mode}: drafting for itself, {stats.accepted} of {stats.drafted} in {stats.rounds} rounds"
            first = run.ar.token_ids.index(run.ar.token_ids[2])
            stats = run.generate(PROMPT, mode, run.script([4]), max_new_tokens=26, draft_length=4,
                                 stop_token_ids=[run.ar.token_ids[first]]).stats
            if (stats.accepted, stats.drafted) != (first, first):
                return f"{mode}: a round cut after {first} tokens counts {stats.accepted} of {stats.drafted}"
        return ""


@pytest.fixture(scope="module")
def bench(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory,
          recipe_of: Callable[..., Recipe]) -> Bench:
    from safetensors.torch import load_file, save_file

    folder = make_model(tmp_path_factory.mktemp("bench"), "llama", 1, num_hidden_layers=2, tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["lm_head.weight"]
    head[1:258:2] = head[0:257:2]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return Bench(folder, recipe_of("fp32"))


def test_every_check_is_green_without_a_mutant(bench: Bench) -> None:
    assert (bench.agreement(), bench.reference(), bench.acceptance()) == ("", "", "")
    assert sum(1 for _ in Agreement(bench.decoder, PROMPT).checks()) >= 161


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.switch.__name__)
def test_a_mutant_is_caught_by_the_check_it_names(mutant: Mutant, bench: Bench, monkeypatch: Patch) -> None:
    mutant.switch(monkeypatch)
    try:
        caught = getattr(bench, mutant.caught_by)()
    except NumericsError:  # what a stale slot holds is not ours to choose: it may be NaN
        caught = True
    assert caught, "not caught"
    for name in mutant.green:
        assert getattr(bench, name)() == ""
