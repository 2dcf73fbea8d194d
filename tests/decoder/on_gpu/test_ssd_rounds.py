"""SSD's rounds on the device: the drafter's branches are those that Python makes pass by pass; every verdict on a hit and on a
miss; what is late or stale changes no token."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from triton_models import CAPACITY, PROMPT, SHAPE, Load, eagle_decoder, loader, restored
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.drafter import Branch, likely_outcomes
from tune_kernels.decoder.drafters.scripted import ScriptedDrafter
from tune_kernels.decoder.drafters.small_model import SmallModelDrafter
from tune_kernels.decoder.on_gpu.branches import DeviceBranches
from tune_kernels.decoder.on_gpu.buffers import DeviceInputs
from tune_kernels.decoder.on_gpu.graphs import Graphs
from tune_kernels.decoder.on_gpu.rounds import DeviceRounds
from tune_kernels.decoder.on_gpu.ssd_rounds import SsdRounds
from tune_kernels.decoder.on_gpu.verification import Verification
from tune_kernels.kernels.layout import COUNT, DRAFT, LENGTH, MADE, ROUND, TABLE, TOKEN
from tune_kernels.schedules.recipe import Recipe

pytestmark = pytest.mark.interpreter
K = 3
TOKENS = 21  # each accepted count of K = 3 twice
SLEEP = 3_000_000  # cycles, more than a round of the tiny model: who comes first changes


@pytest.fixture(scope="module")
def load(device: str, recipe_of: Callable[..., Recipe]) -> Load:
    return loader(device, recipe_of)


@pytest.fixture(scope="module")
def loaded(load: Load) -> Decoder:
    return load(drafter="random:0")


@pytest.fixture
def decoder(loaded: Decoder) -> Iterator[Decoder]:
    """A model with its equal as drafter; a test's changes are undone."""
    yield from restored(loaded)


@pytest.fixture(scope="module")
def expected(loaded: Decoder) -> list[int]:
    """AR's tokens after PROMPT."""
    return loaded.generate(PROMPT, "ar", max_new_tokens=TOKENS).token_ids


def recorded(patch: pytest.MonkeyPatch, place: Any, prepare: Callable[..., Branch]) -> list[Branch]:
    """The branches that each round prepares from now on. prepare: the branches of one call of place.prepare."""
    found: list[Branch] = []
    patch.setattr(place, "prepare", lambda *arguments: found.append(prepare(*arguments)) or found[-1])
    return found


def tables(patch: pytest.MonkeyPatch) -> list[Branch]:
    """The branches of each round on the device, which is launched round for round: a graph can't be looked into."""
    patch.setattr(Graphs, "run", lambda self, key, launches: launches())
    patch.setattr(Graphs, "prepare", lambda self, key, launches: None)
    prepare = SsdRounds.prepare

    def read(self: SsdRounds, length: int, most: int, drafted: bool) -> Branch:
        prepare(self, length, most, drafted)
        table = self.branches.table[:, :self.branches.count].tolist()
        return {(c, t): [row[b] for row in table[DRAFT:DRAFT + length]] for b, (c, t) in
                enumerate(zip(table[COUNT], table[TOKEN]))}
    return recorded(patch, SsdRounds, read)


def near(drafter: Any, noise: float) -> None:
    """A drafter that is often right and often wrong."""
    for layer in drafter.model.layers:
        w = layer.down.w
        w.copy_(w + noise * torch.randn(w.shape, generator=torch.Generator().manual_seed(3)).to(w))


@pytest.mark.parametrize("kind", ["model", "eagle3", "eagle3 that hits"])
def test_the_branches_are_those_that_python_makes(kind: str, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row a pass or all in one, along a draft of its own or a selected one: the same outcomes in the same order, the same
    drafts, hit for hit."""
    count, length, tokens = (3, 3, 13) if kind == "model" else (2, 2, 8)
    if kind == "model":
        decoder = load(drafter="random:0")
        near(decoder.drafter, 0.3)
    else:
        decoder, eagle = eagle_decoder(load, "bf16")
        if kind == "eagle3 that hits":
            ar = decoder.generate(PROMPT[:3], "ar", max_new_tokens=tokens).token_ids
            decoder.drafter = ScriptedDrafter([*PROMPT[:3], *ar], [1, 2, 0], 96, inner=eagle)
    prompt = PROMPT[:3] if "eagle3" in kind else PROMPT
    options: dict[str, Any] = {"max_new_tokens": tokens, "draft_length": length, "branches": count}
    with monkeypatch.context() as patch:
        ours = tables(patch)
        on_device = decoder.generate(prompt, "ssd", **options)
    drafter: Any = getattr(decoder.drafter, "inner", None) or decoder.drafter
    with monkeypatch.context() as patch:
        patch.setattr(DeviceRounds, "start", lambda *_: None)
        theirs = recorded(patch, drafter, drafter.prepare)
        driven = decoder.generate(prompt, "ssd", **options)
    assert on_device.token_ids == driven.token_ids
    assert on_device.stats.accepted_per_round[:-1] == driven.stats.accepted_per_round[:-1]
    assert (on_device.stats.branch_hits, on_device.stats.branch_misses) == (driven.stats.branch_hits, driven.stats.branch_misses)
    whole = [b for b in theirs if b and len(next(iter(b.values()))) == length]  # towards its end, Python drafts less
    first = 1 if kind == "eagle3 that hits" else 0  # the first draft was overwritten after the drafter had walked its own
    assert len(whole) > 2 - first
    for number, (found, right) in enumerate(zip(ours[first:], whole[first:]), first):
        assert list(found.items()) == list(right.items()), f"round {number}"
    if kind == "model" and decoder.model.device.type == "cpu":  # on a GPU random weights draft other tokens
        assert on_device.stats.branch_hits and on_device.stats.branch_misses


def test_every_accepted_count_on_a_hit_and_on_a_miss(decoder: Decoder, expected: list[int]) -> None:
    """The tokens are AR's; accepted tokens and hits are the script's."""
    counts = [0, 0, 1, 1, 2, 2, 3, 3]
    decoder.drafter = ScriptedDrafter([*PROMPT, *expected], counts, SHAPE.vocab_size, [True, False], decoder.drafter)
    result = decoder.generate(PROMPT, "ssd", max_new_tokens=TOKENS, draft_length=K, branches=2)
    assert result.token_ids == expected
    assert result.stats.accepted_per_round == counts
    assert (result.stats.branch_hits, result.stats.branch_misses) == (4, 3)
    assert result.stats.overlap_s <= result.stats.decode_s


def slept(patch: pytest.MonkeyPatch, place: Any, name: str, device: str) -> None:
    """From now on, late on the stream that it runs on."""
    run = getattr(place, name)

    def late(*arguments: Any) -> Any:
        if device == "cuda":
            torch.cuda._sleep(SLEEP)
        return run(*arguments)
    patch.setattr(place, name, late)


@pytest.mark.parametrize("late", ["drafter", "target", "nobody, without graphs"])
def test_who_comes_first_changes_nothing(late: str, load: Load, device: str, expected: list[int],
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """A delay on either stream, graphs or none. On a GPU long enough to replay them."""
    tokens = TOKENS if device == "cuda" else 9
    if late == "drafter":
        slept(monkeypatch, SsdRounds, "prepare", device)
    if late == "target":
        slept(monkeypatch, Verification, "verify", device)
    decoder = load(drafter="random:0", graphs="graphs" not in late)
    for _ in range(2):
        result = decoder.generate(PROMPT, "ssd", max_new_tokens=tokens, draft_length=K, branches=2)
        assert result.token_ids == expected[:tokens]
        assert result.stats.acceptance == 1 and result.stats.hit_rate == 1


def test_a_stale_branch_is_never_served(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round has the same outcome, all accepted and then token 0; a round that prepared nothing finds
    the branches of the round before, and must not take them. Nor may a request take those of the one before it."""
    decoder = load(drafter="random:0", graphs=False)
    decoder.model.head.zero_()  # type: ignore[attr-defined]
    decoder.drafter.model.head.zero_()  # type: ignore[union-attr]
    decoder.drafter.cache.buffer.zero_()  # type: ignore[union-attr] # what a round that is skipped doesn't write must not be NaN
    prepare, calls = SsdRounds.prepare, list[int]()
    skipped = [2, 4, 7]  # the second request begins with call 6

    def sometimes(self: SsdRounds, *arguments: Any) -> None:
        calls.append(len(calls))
        if calls[-1] not in skipped:
            prepare(self, *arguments)
    monkeypatch.setattr(SsdRounds, "prepare", sometimes)
    for misses in (2, 1):
        result = decoder.generate(PROMPT, "ssd", max_new_tokens=13, draft_length=1, branches=2)
        assert result.token_ids == [0] * 13
        assert result.stats.acceptance == 1
        assert (result.stats.branch_misses, result.stats.branch_hits) == (misses, 5 - misses)


def test_the_target_may_draft_for_itself(decoder: Decoder, expected: list[int]) -> None:
    """One network, one set of buffers: the two take turns."""
    decoder.drafter = SmallModelDrafter(decoder.model, CAPACITY)
    result = decoder.generate(PROMPT, "ssd", max_new_tokens=9, draft_length=K, branches=2)
    assert result.token_ids == expected[:9]
    assert result.stats.acceptance == 1 and result.stats.branch_hits == 1
    assert not decoder.model.rounds.ssd.concurrent  # type: ignore[attr-defined]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_a_drafter_on_another_gpu(mode: str, load: Load, expected: list[int]) -> None:
    """Real drafts, and a script's hits and misses."""
    decoder = load(drafter="random:0", drafter_device="cuda:1")
    for _ in range(2):
        result = decoder.generate(PROMPT, mode, max_new_tokens=TOKENS, draft_length=K, branches=2)
        assert result.token_ids == expected
        assert result.stats.acceptance == 1
    decoder.drafter = ScriptedDrafter([*PROMPT, *expected], [0, 2, 3], SHAPE.vocab_size, [True, False], decoder.drafter)
    assert decoder.generate(PROMPT, mode, max_new_tokens=TOKENS, draft_length=K, branches=2).token_ids == expected


def test_another_number_of_branches(decoder: Decoder, expected: list[int]) -> None:
    """Each has its own buffers and graphs; more than a row tile are driven from Python."""
    for branches in (1, 16, 2):
        result = decoder.generate(PROMPT, "ssd", max_new_tokens=5, draft_length=1, branches=branches)
        assert result.token_ids == expected[:5]
        assert result.stats.hit_rate == 1
        assert decoder.model.rounds.ssd.branches.count == branches  # type: ignore[attr-defined]


@pytest.mark.parametrize("ids", [None, [0, 3, 5, 6, 10, 11, 12, 20, 30, 31, 50, 90]])
def test_likely_outcomes_on_the_device(ids: list[int] | None, decoder: Decoder, device: str) -> None:
    """Those of drafter.likely_outcomes, in its order; drafted tokens that the drafter doesn't know included."""
    cache: Any = decoder.model.new_cache(CAPACITY)
    known = None if ids is None else torch.tensor(ids, device=device)
    width = 96 if ids is None else len(ids)
    for seed, draft in enumerate(([5, 3, 50], [20], [0, 4, 6, 90], [7, 5, 3], [90, 0])):
        branches = DeviceBranches(cache, decoder.model.decode, 5, known, lead=1)  # type: ignore[attr-defined]
        inputs = DeviceInputs(torch.device(device))
        inputs.row_tokens[1:1 + len(draft)] = torch.tensor(draft, dtype=torch.int32)
        inputs.state[LENGTH], inputs.state[ROUND] = 11, 3
        logits = 3 * torch.randn(len(draft) + 1, width, generator=torch.Generator().manual_seed(seed))
        branches.choose_outcomes(logits.to(device), inputs, len(draft))
        over_target = torch.full((len(draft) + 1, 96), -torch.inf)
        over_target[:, torch.arange(96) if ids is None else torch.tensor(ids)] = logits
        right = likely_outcomes(list(over_target.numpy()), draft, 5)
        table = branches.table.cpu()
        found = list(zip(table[COUNT, :5].tolist(), table[TOKEN, :5].tolist()))
        reached = [key for key in right if all(ids is None or t in ids for t in draft[:key[0]])]  # the others are impossible
        assert [key for key in found if key in reached] == reached
        assert found[0][0] == len(draft) and len(set(found)) == 5
        assert table[MADE].eq(3).all() and table[TABLE - 1].eq(-1).all()
        for step in range(len(draft)):
            assert branches.start(step)[::4].tolist() == [11 + 1 + count + step for count, _ in found]


def test_stats_of_two_requests_are_their_own(decoder: Decoder, expected: list[int]) -> None:
    """A second request with the same buffers counts from zero."""
    runs = [copy.copy(decoder.generate(PROMPT, "ssd", max_new_tokens=9, draft_length=K, branches=2).stats) for _ in range(2)]
    for stats in runs:
        assert (stats.rounds, stats.emitted, stats.branch_hits, stats.branch_misses) == (2, 8, 1, 0)
        assert stats.accepted_per_round == [3, 3]
