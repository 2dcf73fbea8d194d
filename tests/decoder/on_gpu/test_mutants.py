"""Seeded bugs of the device path, each with the one check that must catch it: verdicts, branch selection, likely outcomes, rows,
the reference, and whole requests of SD and SSD. In Triton's interpreter alone: there, random weights give tokens that tell the
bugs apart."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same_bytes
from triton_models import CAPACITY, PROMPT, SHAPE, Load, loader, restored
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.drafter import likely_outcomes
from tune_kernels.decoder.drafters.ngram import NGramDrafter
from tune_kernels.decoder.drafters.scripted import ScriptedDrafter
from tune_kernels.decoder.errors import NumericsError
from tune_kernels.decoder.on_gpu import rounds
from tune_kernels.decoder.on_gpu.branches import DeviceBranches
from tune_kernels.decoder.on_gpu.buffers import DeviceInputs
from tune_kernels.decoder.on_gpu.cache import DeviceCache, Pass
from tune_kernels.decoder.on_gpu.layer import Decode, launch_all
from tune_kernels.decoder.on_gpu.network import DeviceNetwork
from tune_kernels.decoder.on_gpu.proposals import NGramProposal, proposal_of
from tune_kernels.decoder.on_gpu.ssd_rounds import SsdRounds
from tune_kernels.decoder.on_gpu.verification import Record, Verification, read_record
from tune_kernels.decoder.rows import Appended
from tune_kernels.kernels import ngram
from tune_kernels.kernels.layout import (
    COUNT,
    DRAFT,
    FINISHED,
    HEADER,
    LEFT,
    LENGTH,
    MADE,
    ROUND,
    ROWS,
    STRIDE,
    TIP,
    TOKEN,
)
from tune_kernels.schedules.recipe import Recipe

pytestmark = [pytest.mark.interpreter, pytest.mark.skipif(torch.cuda.is_available(), reason="of the interpreter's tokens")]
Patch = pytest.MonkeyPatch
BEFORE = [3, 4, 5]  # the sequence in front of a verdict
TOKENS = 7  # of a request: two rounds of three tokens each after the first token


# Checks. Each raises AssertionError for the first problem.

@dataclass(frozen=True)
class Verdict:
    """A verified draft: the target's winners after the pending token and each drafted one, and the right verdict."""

    draft: list[int]
    winners: list[int]
    left: int
    ends: list[int]
    accepted: int
    emitted: int
    finished: bool


VERDICTS = [
    Verdict([7, 8, 9], [7, 8, 9, 1], 20, [], 3, 4, False),
    Verdict([7, 8, 9], [7, 8, 2, 1], 20, [], 2, 3, False),
    Verdict([7, 8, 9], [6, 8, 9, 1], 20, [], 0, 1, False),
    Verdict([7, 8, 9], [7, 8, 9, 1], 20, [8], 3, 2, True),
    Verdict([7, 8, 9], [7, 8, 9, 1], 20, [1], 3, 4, True),
    Verdict([7, 8, 9], [7, 2, 9, 1], 20, [9], 1, 2, False),
    Verdict([7, 8, 9], [7, 8, 9, 1], 4, [], 3, 4, True),
    Verdict([7, 8, 9], [7, 8, 9, 1], 5, [], 3, 4, False),
    Verdict([7, 8, 9], [7, 8, 9, 1], 2, [], 3, 2, True),
    Verdict([7], [7, 4], 20, [], 1, 2, False),
    Verdict([], [4], 20, [], 0, 1, False),
    Verdict([-1, 8], [5, 8, 1], 20, [], 0, 1, False),
]


class Bench:
    """A tiny model with its equal as drafter."""

    def __init__(self, decoder: Decoder, torch_decoder: Decoder) -> None:
        self.decoder, self.torch_decoder = decoder, torch_decoder
        self.model: Any = decoder.model
        self.drafter: Any = decoder.drafter
        self.ar = decoder.generate(PROMPT, "ar", max_new_tokens=TOKENS, logprobs=0).token_ids

    def verdicts(self) -> None:
        """Record, state, places and rows after `accept`, for every kind of outcome."""
        with torch.inference_mode():
            verification = Verification(self.model, self.decoder.cache)  # type: ignore[arg-type]
            inputs = self.model.inputs
            for case in VERDICTS:
                inputs.begin(BEFORE, case.left, case.ends)
                inputs.row_tokens[1:1 + len(case.draft)] = torch.tensor(case.draft, dtype=torch.int32)
                self.model.verified.winners[:len(case.winners)] = torch.tensor(case.winners, dtype=torch.int32)
                verification.accept(len(case.draft))
                verification.fetch(0, 1)
                record = read_record(verification.host[0].tolist(), len(case.draft))
                emitted = case.winners[:case.emitted]
                assert record == Record(emitted, case.accepted, case.finished, record.hit, len(case.draft),
                                        -1 in case.draft), case
                state, after = inputs.state.tolist(), len(BEFORE) + case.accepted
                assert [state[i] for i in (LENGTH, TIP, LEFT, ROUND, FINISHED)] == \
                    [after, case.accepted, case.left - case.emitted, 1, case.finished], case
                assert inputs.starts[::STRIDE][:4].tolist() == [len(BEFORE) - 1, after - 1, after, after + 1], case
                before = case.winners[case.accepted - 1] if case.accepted else BEFORE[-1]
                assert inputs.pair[:2].tolist() == [before, case.winners[case.accepted]], case
                assert int(inputs.row_tokens[0]) == case.winners[case.accepted], case

    def lookups(self) -> None:
        """The device's n-gram drafts are those of Python, round after round, whatever was accepted."""
        with torch.inference_mode():
            verification = Verification(self.model, self.decoder.cache)  # type: ignore[arg-type]
            plan = rounds.RoundPlan(NGramDrafter(), None, 4, 0, frozenset())
            proposal: Any = proposal_of(plan, verification)
            inputs, winners, tokens = self.model.inputs, self.model.verified.winners, [7, 5, 6, 9, 2, 6, 8, 1, 5, 6]
            inputs.begin(tokens, 100, [])
            proposal.begin(tokens, self.model.verified)
            for accepted, recovery in ((1, 5), (0, 9), (2, 3), (0, 7), (1, 2), (0, 4)):
                proposal.draft(self.model.verified, 4, 100, verification.write_draft)
                right = NGramDrafter().draft(tokens, 4)
                draft = inputs.row_tokens[1:5].tolist()
                assert draft == [*right, *[-1] * (4 - len(right))], tokens
                assert accepted <= len(right) and right[accepted:accepted + 1] != [recovery]
                row = [*draft[:accepted], recovery]
                winners[:5] = torch.tensor([*row, *[0] * (5 - len(row))], dtype=torch.int32)
                verification.accept(4)
                tokens = [*tokens, *row]

    def selection(self) -> None:
        """Of the branches of this round, the one for its outcome; none of another round, count or token."""
        ssd = self._ssd(branches=3)
        inputs, table = self.model.inputs, ssd.table
        draft, winners = [7, 8], [7, 9, 1]  # outcome (1, 9)
        columns = {"the outcome": (1, 9, 0), "another count": (2, 9, 0), "another token": (1, 8, 0), "a round ago": (1, 9, -1)}
        for name, (count, token, made) in columns.items():
            inputs.begin(BEFORE, 20, [])
            inputs.row_tokens[1:3] = torch.tensor(draft, dtype=torch.int32)
            self.model.verified.winners[:3] = torch.tensor(winners, dtype=torch.int32)
            table.fill_(-1)
            table[COUNT, 1], table[TOKEN, 1], table[MADE, 1] = count, token, made
            table[DRAFT:DRAFT + 2, 1] = torch.tensor([50, 60], dtype=torch.int32)
            ssd.finish(2)
            ssd.verification.fetch(0, 1)
            record = read_record(ssd.verification.host[0].tolist(), 2)
            right = name == "the outcome"
            assert record.hit == right, name
            assert inputs.row_tokens[:3].tolist() == [9, *([50, 60] if right else draft)], name

    def outcomes(self) -> None:
        """Those of drafter.likely_outcomes, in its order, each branch at its place."""
        device = self.model.device
        inputs = DeviceInputs(device)
        branches = DeviceBranches(self.decoder.cache, self.model.decode, 5, None, lead=1)  # type: ignore[arg-type]
        for seed, draft in enumerate(([5, 3, 50], [20], [7, 5])):
            inputs.row_tokens[1:1 + len(draft)] = torch.tensor(draft, dtype=torch.int32)
            inputs.state[LENGTH], inputs.state[ROUND] = 11, 3
            logits = 3 * torch.randn(len(draft) + 1, 96, generator=torch.Generator().manual_seed(seed))
            for row, token in enumerate(draft[:-1]):
                logits[row, token] += 8  # the drafter is sure of its draft: later counts are likely
            branches.choose_outcomes(logits.to(device), inputs, len(draft))
            table = branches.table.cpu()
            found = list(zip(table[COUNT, :5].tolist(), table[TOKEN, :5].tolist()))
            assert found == likely_outcomes(list(logits.numpy()), draft, 5), draft
            assert table[MADE].eq(3).all(), draft
            assert branches.start(0)[::STRIDE].tolist() == [11 + 1 + count for count, _ in found], draft

    def rows(self) -> None:
        """A pass of 3 rows across a chunk's edge, as one by one; NaN in the free slots."""
        tokens, kept = [3, 50, 21], list[tuple[torch.Tensor, torch.Tensor]]()
        for sizes in ([3], [1, 1, 1]):
            cache = self.model.new_cache(CAPACITY)
            cache.buffer.fill_(torch.nan)
            prompt = [*PROMPT, 14, 8, 2, 77, 9, 1]
            self.model.prefill(prompt, Appended(cache, len(prompt)))
            finals = [self.model.forward(tokens[:1] if len(sizes) > 1 else tokens, Appended(cache, sizes[0])).final]
            finals += [self.model.forward([token], Appended(cache, 1)).final for token in tokens[1:] if len(sizes) > 1]
            kept.append((torch.cat(finals), cache.buffer[:, :, :len(prompt) + 3].clone()))
        assert not kept[0][0].isnan().any()
        for together, alone, name in zip(*kept, ("final", "cache")):
            assert_same_bytes(together, alone, name)

    def reference(self) -> None:
        """Logits near the torch backend's, over a prompt and a pass across a chunk's edge."""
        tokens, found = [*PROMPT, 14, 8, 2, 77, 9, 1, 3, 50, 21], []
        for decoder in (self.decoder, self.torch_decoder):
            cache = decoder.model.new_cache(CAPACITY)
            decoder.model.prefill(tokens[:14], Appended(cache, 14))
            found.append(decoder.model.logits(decoder.model.forward(tokens[14:], Appended(cache, 3)).final))
        assert not found[0].isnan().any()
        assert_close(*found, rms=1.5e-2, worst=8e-2)

    def sd(self) -> None:
        """AR's tokens, and a drafter that is always right."""
        self._request("sd", 3, [3, 2])

    def ssd(self) -> None:
        """The same, and every branch hits."""
        stats = self._request("ssd", 1, [1, 1, 1])
        assert (stats.branch_misses, stats.branch_hits) == (0, 2)

    def script(self) -> None:
        """Accepted counts, hits and misses are those of a script; the tokens AR's."""
        inner = self.drafter
        self.decoder.drafter = ScriptedDrafter([*PROMPT, *self.ar], [0, 2, 1], SHAPE.vocab_size, [False, True], inner)
        try:
            result = self.decoder.generate(PROMPT, "ssd", max_new_tokens=TOKENS, draft_length=2, branches=2)
        finally:
            self.decoder.drafter = inner
        assert result.token_ids == self.ar
        assert result.stats.accepted_per_round == [0, 2, 1]
        assert (result.stats.branch_hits, result.stats.branch_misses) == (1, 1)

    def broken_drafter(self) -> None:
        """F3: a drafter of NaN changes no token and is named."""
        weights = self.drafter.model.layers[-1].down.w
        kept = weights.clone()
        weights.fill_(torch.nan)
        try:
            result = self.decoder.generate(PROMPT, "sd", max_new_tokens=4, draft_length=2)
        finally:
            weights.copy_(kept)
        assert result.token_ids == self.ar[:4]
        assert result.stats.drafter_faults == result.stats.rounds
        assert any("NaN" in warning for warning in result.stats.warnings)

    def poisoned_token(self) -> None:
        """F3: a drafted token whose row of the target is NaN is rejected, and ends nothing."""
        inner = self.drafter
        self.decoder.drafter = ScriptedDrafter([*PROMPT, *self.ar], [1], SHAPE.vocab_size, inner=inner)
        kept = self.model.embedding[:2].clone()
        assert not {0, 1} & {*PROMPT, *self.ar}
        self.model.embedding[:2] = torch.nan  # a script's wrong tokens
        try:
            result = self.decoder.generate(PROMPT, "sd", max_new_tokens=4, draft_length=2)
        finally:
            self.model.embedding[:2] = kept
            self.decoder.drafter = inner
        assert result.token_ids == self.ar[:4]

    def _request(self, mode: str, draft_length: int, accepted: list[int]) -> Any:
        for cache in (self.decoder.cache, self.drafter.cache):
            cache.buffer.fill_(torch.nan)
        result = self.decoder.generate(PROMPT, mode, max_new_tokens=TOKENS, draft_length=draft_length, branches=1)
        assert result.token_ids == self.ar
        assert result.stats.acceptance == 1, result.stats.accepted_per_round
        assert result.stats.accepted_per_round == accepted
        return result.stats

    def _ssd(self, branches: int) -> SsdRounds:
        verification = Verification(self.model, self.decoder.cache)  # type: ignore[arg-type]
        proposal: Any = proposal_of(rounds.RoundPlan(self.drafter, None, 2, branches, frozenset()), verification)
        return SsdRounds(verification, proposal, branches)


# Mutants: accept.

def last_draft_not_judged(patch: Patch) -> None:
    """`accept` is told of one drafted token less: a full accept has no recovery token of its own."""
    accept = Verification.accept

    def wrong(self: Verification, draft_length: int, at: int = 0) -> None:
        kernel: Any = self._accept
        self._accept = lambda *given, draft_length, **more: kernel(  # type: ignore[assignment]
            *given, draft_length=max(draft_length - 1, 0), **more)
        accept(self, draft_length, at)
        self._accept = kernel
    patch.setattr(Verification, "accept", wrong)


def ends_not_uploaded(patch: Patch) -> None:
    """A request's end ids don't reach the device."""
    begin = DeviceInputs.begin
    patch.setattr(DeviceInputs, "begin", lambda self, tokens, left, ends, finished=False: begin(self, tokens, left, [], finished))


def one_token_too_many_left(patch: Patch) -> None:
    """The token of the prompt's pass isn't taken off the limit."""
    begin = DeviceInputs.begin
    patch.setattr(DeviceInputs, "begin",
                  lambda self, tokens, left, ends, finished=False: begin(self, tokens, left + 1, ends, finished))


def winners_one_row_late(patch: Patch) -> None:
    """The verdict reads winner i + 1 for row i."""
    accept = Verification.accept

    def wrong(self: Verification, draft_length: int, at: int = 0) -> None:
        winners = self.network.verified.winners
        winners.copy_(winners.roll(-1))
        accept(self, draft_length, at)
    patch.setattr(Verification, "accept", wrong)


# Branch selection.

def branch_of_any_round(patch: Patch) -> None:
    """Every column claims to be of the round that was verified."""
    finish = SsdRounds.finish

    def wrong(self: SsdRounds, length: int) -> None:
        self.table[MADE].copy_(self.verification.network.inputs.state[ROUND].expand(ROWS))
        finish(self, length)
    patch.setattr(SsdRounds, "finish", wrong)


def count_not_compared(patch: Patch) -> None:
    """A branch serves whatever was accepted, if the token is right."""
    finish = SsdRounds.finish

    def wrong(self: SsdRounds, length: int) -> None:
        self.table[COUNT].fill_(1)
        finish(self, length)
    patch.setattr(SsdRounds, "finish", wrong)


def selected_one_token_late(patch: Patch) -> None:
    """The branch's drafted tokens are taken from its second one on."""
    finish = SsdRounds.finish

    def wrong(self: SsdRounds, length: int) -> None:
        self.table[DRAFT:].copy_(self.table[DRAFT:].roll(-1, 0))
        finish(self, length)
    patch.setattr(SsdRounds, "finish", wrong)


def selected_one_token_short(patch: Patch) -> None:
    """The last token of the branch stays behind."""
    finish = SsdRounds.finish

    def wrong(self: SsdRounds, length: int) -> None:
        kernel: Any = self._select
        self._select = lambda *given, draft_length, **more: kernel(  # type: ignore[assignment]
            *given, draft_length=draft_length - 1, **more)
        finish(self, length)
        self._select = kernel
    patch.setattr(SsdRounds, "finish", wrong)


def drafted_token_as_recovery(patch: Patch) -> None:
    """A branch for an outcome that can't be: the drafted token itself."""
    columns = DeviceBranches.columns
    patch.setattr(DeviceBranches, "columns", lambda self, tokens: (columns(self, tokens)[0], columns(self, tokens)[1] & False))


def branches_at_one_place(patch: Patch) -> None:
    """Branches begin after the whole draft, however little of it is accepted."""
    choose = DeviceBranches.choose_outcomes

    def wrong(self: DeviceBranches, logits: torch.Tensor, inputs: DeviceInputs, length: int) -> None:
        choose(self, logits, inputs, length)
        places = inputs.length + self.lead + length + self.steps[:length, None]
        self.starts[:length, :, 0].copy_(places.expand(length, self.count))
    patch.setattr(DeviceBranches, "choose_outcomes", wrong)


# Cache append and padding of rows.

def one_row_appended(patch: Patch) -> None:
    """Only the first row's keys and values are written."""
    rope = Decode.mix

    def wrong(self: Decode, index: int, weights: Any, at: Any) -> Iterator[Any]:
        for kind, launch in rope(self, index, weights, at):
            yield kind, launch
            if kind == "rope" and at.rows > 1:
                at.cache.buffer[:, index, int(at.length) + 1:int(at.length) + at.rows] = 0
    patch.setattr(Decode, "mix", wrong)


def keys_one_slot_late(patch: Patch) -> None:
    """In every path alike, so that all decoders agree: the keys go to the slot after the values'."""
    def wrong(self: Decode, index: int, weights: Any, at: Any) -> Iterator[Any]:
        cache = at.cache
        yield "rope", lambda: self.rope_append(self.space.qkv, cache.rope, at.length, rows=at.rows, q=self.space.q,
                                               cache=(cache.keys[index, 1:], cache.values[index, :-1]))
        yield from self.attend(index, at)
    patch.setattr(Decode, "mix", wrong)


def fewer_chunks_than_keys(patch: Patch) -> None:
    """Chunks are counted down: the last keys are in none."""
    patch.setattr(DeviceCache, "chunks_for", lambda self, tokens: max(tokens // self.chunk, 1))


def last_row_not_attended(patch: Patch) -> None:
    """Attention of several rows is launched for one of them too few."""
    attend = Decode.attend
    patch.setattr(Decode, "attend", lambda self, index, at: attend(self, index, replace(at, rows=max(at.rows - 1, 1))))


def padding_reaches_a_row(patch: Patch) -> None:
    """Rows of the tile that hold nothing add to the first row."""
    def wrong(self: Decode, weight: torch.Tensor, rows: int, last: bool, *more: Any, end: Any = Decode.end, **named: Any) -> None:
        end(self, weight, rows, last, *more, **named)
        if last and rows < 3:
            self.space.final[0] += 2**-5
    patch.setattr(Decode, "end", wrong)


# Rounds.

def records_from_the_first_slot(patch: Patch) -> None:
    """The host copies the record of the first round, whichever it waits for."""
    fetch = Verification.fetch

    def wrong(self: Verification, slot: int, count: int) -> Any:
        done = fetch(self, slot, count)
        self.host[slot:slot + count].copy_(self.records[:count])
        return done
    patch.setattr(Verification, "fetch", wrong)


def last_draft_not_fed(patch: Patch) -> None:
    """The drafter feeds the pending token alone; after a full accept the last drafted one has no keys."""
    def wrong(self: DeviceNetwork, cache: DeviceCache, inputs: DeviceInputs, length: int, chunks: int, write: Any) -> None:
        tokens = inputs.row_tokens
        for step in range(length):
            launch_all(self.launches(self.decode, tokens, Pass(cache, inputs.start(2 + step), 1, chunks)))
            tokens = self.launch_head(self.decode.space.final[:1])
            write(tokens, step)
    patch.setattr(DeviceNetwork, "launch_draft", wrong)


def drafts_in_the_wrong_rows(patch: Patch) -> None:
    """Each drafted token goes one row too far."""
    write = Verification.write_draft
    patch.setattr(Verification, "write_draft", lambda self, token, step: write(self, token, min(step + 1, ROWS - 2)))


def nan_beside_a_draft_ends_the_request(patch: Patch) -> None:
    """F3: the round in which the target has no answer is the last one."""
    emit = Record.emit

    def wrong(self: Record, request: Any) -> bool:
        if self.tokens and min(self.tokens) < 0:
            raise NumericsError("NaN", expected="finite logits")
        return emit(self, request)
    patch.setattr(Record, "emit", wrong)


def faults_not_counted(patch: Patch) -> None:
    """F3: a broken draft shows nowhere."""
    patch.setattr(Record, "emit", lambda self, request, emit=Record.emit: emit(replace(self, broken=False), request))


# n-gram look-up.

def shortest_match_chosen(patch: Patch) -> None:
    """The last occurrence of one token serves, though more of the ending occurred before."""
    patch.setattr(ngram, "LONGEST", 1)


def history_of_the_prompt_alone(patch: Patch) -> None:
    """The history holds no emitted token: it is stale after the first round."""
    accept = Verification.accept

    def wrong(self: Verification, draft_length: int, at: int = 0) -> None:
        kept = self.history.clone()
        accept(self, draft_length, at)
        self.history.copy_(kept)
    patch.setattr(Verification, "accept", wrong)


def looked_up_one_token_early(patch: Patch) -> None:
    """The key ends before the pending token."""
    draft = NGramProposal.draft

    def wrong(self: NGramProposal, source: Any, *given: Any, **more: Any) -> None:
        source.inputs.state[LENGTH] -= 1
        draft(self, source, *given, **more)
        source.inputs.state[LENGTH] += 1
    patch.setattr(NGramProposal, "draft", wrong)


def drafted_one_token_late(patch: Patch) -> None:
    """The draft begins one token after the match's continuation."""
    draft = NGramProposal.draft

    def wrong(self: NGramProposal, source: Any, length: int, *given: Any, **more: Any) -> None:
        draft(self, source, length + 1, *given, **more)
        source.inputs.row_tokens[1:1 + length] = source.inputs.row_tokens[2:2 + length].clone()
    patch.setattr(NGramProposal, "draft", wrong)


# SSD's rounds.

def mirror_not_published(patch: Patch) -> None:
    """The drafter reads the verification before the last one."""
    publish, held = SsdRounds._publish, list[int]()

    def wrong(self: SsdRounds) -> None:
        held.append(len(held))
        if len(held) < 2:
            publish(self)
    patch.setattr(SsdRounds, "_publish", wrong)


def entries_not_copied(patch: Patch) -> None:
    """Branches lack the entries that the round added to the sequence."""
    def wrong(self: DeviceBranches, inputs: DeviceInputs, length: int) -> None:
        self.buffer.index_fill_(3, (inputs.starts[:1] + self.steps[:2 * length + 2]).long(), 0)
    patch.setattr(DeviceBranches, "copy_round", wrong)


def hit_not_read(patch: Patch) -> None:
    """Every round drafts anew, and its record is counted as a miss."""
    def wrong(values: list[int], drafted: int, at: int = 0) -> Record:
        return replace(read_record(values, drafted, at), hit=False)
    patch.setattr("tune_kernels.decoder.on_gpu.ssd_rounds.read_record", wrong)


def accepted_from_the_wrong_place(patch: Patch) -> None:
    """A record's header is read one value too far."""
    def wrong(values: list[int], drafted: int, at: int = 0) -> Record:
        return replace(read_record(values, drafted, at), accepted=values[HEADER - 1])
    patch.setattr("tune_kernels.decoder.on_gpu.ssd_rounds.read_record", wrong)


@dataclass(frozen=True)
class Mutant:
    """switch: turns the bug on. caught_by: the check that must fail."""

    switch: Callable[[Patch], None]
    caught_by: str


MUTANTS = [
    Mutant(last_draft_not_judged, "verdicts"), Mutant(ends_not_uploaded, "verdicts"), Mutant(one_token_too_many_left, "verdicts"),
    Mutant(winners_one_row_late, "verdicts"),
    Mutant(branch_of_any_round, "selection"), Mutant(count_not_compared, "selection"),
    Mutant(selected_one_token_late, "selection"), Mutant(selected_one_token_short, "selection"),
    Mutant(drafted_token_as_recovery, "outcomes"), Mutant(branches_at_one_place, "outcomes"),
    Mutant(one_row_appended, "rows"), Mutant(last_row_not_attended, "rows"), Mutant(padding_reaches_a_row, "rows"),
    Mutant(keys_one_slot_late, "reference"), Mutant(fewer_chunks_than_keys, "reference"),
    Mutant(records_from_the_first_slot, "sd"), Mutant(last_draft_not_fed, "sd"), Mutant(drafts_in_the_wrong_rows, "sd"),
    Mutant(faults_not_counted, "broken_drafter"), Mutant(nan_beside_a_draft_ends_the_request, "poisoned_token"),
    Mutant(shortest_match_chosen, "lookups"), Mutant(history_of_the_prompt_alone, "lookups"),
    Mutant(looked_up_one_token_early, "lookups"), Mutant(drafted_one_token_late, "lookups"),
    Mutant(mirror_not_published, "ssd"), Mutant(entries_not_copied, "ssd"),
    Mutant(hit_not_read, "script"), Mutant(accepted_from_the_wrong_place, "script"),
]


@pytest.fixture(scope="module")
def load(device: str, recipe_of: Callable[..., Recipe]) -> Load:
    return loader(device, recipe_of)


@pytest.fixture(scope="module")
def loaded(load: Load) -> Bench:
    return Bench(load(drafter="random:0", graphs=False), load(backend="torch"))


@pytest.fixture
def bench(loaded: Bench, monkeypatch: Patch) -> Iterator[Bench]:
    """One batch in flight, as each costs a second of the interpreter. Rounds are made anew: they bind their kernels."""
    monkeypatch.setattr(rounds, "IN_FLIGHT", 1)
    loaded.model.rounds = None
    for _ in restored(loaded.decoder):
        yield loaded
    loaded.model.rounds = None


@pytest.mark.parametrize("check", sorted({mutant.caught_by for mutant in MUTANTS}))
def test_each_check_is_green_without_a_mutant(check: str, bench: Bench) -> None:
    getattr(bench, check)()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.switch.__name__)
def test_a_mutant_is_caught_by_the_check_it_names(mutant: Mutant, bench: Bench, monkeypatch: Patch) -> None:
    mutant.switch(monkeypatch)
    with pytest.raises((AssertionError, NumericsError, IndexError)):  # what a stale slot holds may be NaN
        getattr(bench, mutant.caught_by)()
