"""The `triton` backend on tiny random models, its kernels in Triton's interpreter or on a GPU: close to the `torch` backend; rows
alone as among others; AR, SD and SSD alike, whether rounds live on the device or are driven from Python."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_same_bytes
from triton_models import (
    CAPACITY,
    CHUNK,
    DEEP,
    EAGLE,
    LINEAR,
    PROMPT,
    SCHEDULES,
    SHAPE,
    WIDE,
    Load,
    eagle_decoder,
    loader,
    restored,
)
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.backend import RoundPlan
from tune_kernels.decoder.draft_length import DraftLength
from tune_kernels.decoder.drafter import Drafter
from tune_kernels.decoder.drafters.eagle3_checkpoint import random_eagle3
from tune_kernels.decoder.drafters.ngram import NGramDrafter
from tune_kernels.decoder.drafters.scripted import ScriptedDrafter
from tune_kernels.decoder.drafters.small_model import SmallModelDrafter
from tune_kernels.decoder.errors import LoadError, NumericsError, RequestError
from tune_kernels.decoder.on_gpu import model as triton_model
from tune_kernels.decoder.on_gpu import rounds, ssd_rounds, verification
from tune_kernels.decoder.on_gpu.cache import SLACK, DeviceCache, swapped_in
from tune_kernels.decoder.on_gpu.graphs import Graphs
from tune_kernels.decoder.on_gpu.rounds import DeviceRounds
from tune_kernels.decoder.rows import Appended, Branches
from tune_kernels.decoder.sampling import Chooser
from tune_kernels.decoder.selection import Options
from tune_kernels.decoder.stats import Stats
from tune_kernels.schedules.recipe import Recipe
from tune_kernels.schedules.schedule import Schedule

pytestmark = pytest.mark.interpreter
LONG = [*PROMPT, 14, 8, 2, 77]  # a single pass crosses a chunk's edge as well
TOKENS = 10  # of a request
# The recipes' tolerances between two implementations of one pass, of random weights: relative RMS and worst error of logits.
CLOSE = {"bf16": (1.5e-2, 8e-2), "fp8-v1": (1.5e-2, 8e-2)}
RECIPES = list(CLOSE)
WIDE_KINDS = {recipe: (recipe, WIDE) for recipe in RECIPES} | {"qwen3": ("fp8-v1", replace(WIDE, name="qwen3", qk_norm=True))}


@pytest.fixture(scope="session")
def load(device: str, recipe_of: Callable[..., Recipe]) -> Load:
    return loader(device, recipe_of)


@pytest.fixture(scope="session")
def wide(load: Load) -> dict[str, Decoder]:
    """One a recipe, and one whose heads are normed: several layers and KV heads."""
    return {kind: load(recipe, shape) for kind, (recipe, shape) in WIDE_KINDS.items()}


@pytest.fixture(scope="session")
def self_drafted(load: Load) -> Decoder:
    return load(drafter="random:0")


@pytest.fixture
def decoder(self_drafted: Decoder) -> Iterator[Decoder]:
    """A model with itself as drafter; what a test changes in it is put back."""
    yield from restored(self_drafted)


@pytest.fixture(scope="session")
def expected(self_drafted: Decoder) -> list[int]:
    """What AR emits after PROMPT, one driven pass a token: in the interpreter ids that don't repeat at first, so that they may be
    ends."""
    found = self_drafted.generate(PROMPT, "ar", max_new_tokens=TOKENS, logprobs=0).token_ids
    assert len(set(found[:6])) == 6 or self_drafted.model.device.type == "cuda", found
    return found


@pytest.fixture(autouse=True)
def short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rounds in flight when a request ends: each costs a second of the interpreter."""
    monkeypatch.setattr(rounds, "TOKENS_PER_BATCH", 2)


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on every round is driven from Python."""
    return lambda: monkeypatch.setattr(DeviceRounds, "start", lambda *_: None)


def fed(decoder: Decoder, tokens: list[int], rows: int = 0) -> Any:
    """(prefill's final rows, forward's) of a fresh cache: the last `rows` tokens are fed in one decode pass."""
    cache = decoder.model.new_cache(CAPACITY)
    first = len(tokens) - rows
    before = decoder.model.prefill(tokens[:first], Appended(cache, first)).final
    return before, decoder.model.forward(tokens[first:], Appended(cache, rows)).final if rows else None


@pytest.mark.parametrize("kind", WIDE_KINDS)
def test_logits_are_close_to_the_torch_backends(kind: str, wide: dict[str, Decoder], load: Load) -> None:
    """Prefill, and a decode pass whose rows cross a chunk's edge."""
    tokens = [*LONG, 3, 50, 21, 77, 9, 14, 88]
    recipe, shape = WIDE_KINDS[kind]
    ours, theirs = wide[kind], load(recipe, shape, "torch")
    for final, reference in zip(fed(ours, tokens, 7), fed(theirs, tokens, 7)):
        rms, worst = CLOSE[recipe]
        assert_close(ours.model.logits(final), theirs.model.logits(reference), rms=rms, worst=worst)


@pytest.mark.parametrize("kind", WIDE_KINDS)
def test_rows_alone_and_together(kind: str, wide: dict[str, Decoder]) -> None:
    """A pass of 6 rows, the same as one by one and as 2 and 4, features included."""
    model, tokens, layers = wide[kind].model, [3, 50, 21, 77, 9, 14], (0, 1)
    prompt: Any = model.new_cache(CAPACITY)
    model.prefill(LONG, Appended(prompt, len(LONG)))

    def passes(*sizes: int) -> tuple[Any, Any, Any]:
        cache: Any = model.new_cache(CAPACITY)
        cache.buffer.fill_(torch.nan)
        cache.buffer[:, :, :len(LONG)] = prompt.buffer[:, :, :len(LONG)]
        cache.cursor = len(LONG)
        parts, at = [], 0
        for size in sizes:
            parts.append(model.forward(tokens[at:at + size], Appended(cache, size), layers))
            at += size
        kept = cache.buffer[:, :, :len(LONG) + len(tokens)].clone()
        return torch.cat([p.final for p in parts]), torch.cat([p.features for p in parts if p.features is not None]), kept

    whole = passes(6)
    for sizes in ([1] * 6, [2, 4]):
        for name, found, expected in zip(("final", "features", "cache"), passes(*sizes), whole):
            assert_same_bytes(found, expected, f"{name} of passes {sizes}")


@pytest.mark.parametrize("kind", WIDE_KINDS)
def test_prefill_gives_the_same_bytes_however_it_is_cut_or_filled_up(kind: str, wide: dict[str, Decoder],
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt cut into other chunks, a tail of one token, NaN in the rows that fill a pass up: the same keys and outputs."""
    model, prompt = wide[kind].model, PROMPT[:7]
    monkeypatch.setattr(triton_model, "FEWEST_ROWS", 2)

    def cut(*sizes: int) -> tuple[Any, Any, Any]:
        cache: Any = model.new_cache(CAPACITY)
        cache.buffer.fill_(torch.nan)
        parts, at = [], 0
        for size in sizes:
            parts.append(model.prefill(prompt[at:at + size], Appended(cache, size), (1,)))
            at += size
        kept = cache.buffer[:, :, :len(prompt)].clone()
        return torch.cat([p.final for p in parts]), torch.cat([p.features for p in parts if p.features is not None]), kept

    whole = cut(len(prompt))  # filled up to 8 rows
    for sizes in ([1, 6], [4, 2, 1]):
        for name, found, expected in zip(("final", "features", "cache"), cut(*sizes), whole):
            assert_same_bytes(found, expected, f"{name} of {sizes}")
    monkeypatch.setattr(triton_model, "FEWEST_ROWS", 2 * SLACK)  # more than there is room for: as many as there are
    for found, expected in zip(cut(len(prompt)), whole):
        assert_same_bytes(found, expected, "not filled up")


def test_ar_in_rounds_on_the_device(decoder: Decoder, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ids as driven, when records go around their ring as well."""
    ring = rounds.IN_FLIGHT * rounds.TOKENS_PER_BATCH
    assert ring < TOKENS
    monkeypatch.setattr(verification, "RING", ring)
    model: Any = decoder.model
    model.rounds = None
    result = decoder.generate(PROMPT, "ar", max_new_tokens=TOKENS)
    model.rounds = None
    assert result.token_ids == expected
    assert result.stats.rounds == result.stats.emitted == TOKENS - 1
    assert decoder.cache.cursor == len(PROMPT) + TOKENS - 1


def scripted(expected: list[int], accepted: list[int], inner: Drafter | None = None) -> ScriptedDrafter:
    return ScriptedDrafter([*PROMPT, *expected], accepted, SHAPE.vocab_size, inner=inner)


@pytest.mark.parametrize("mode", ["on the device", "driven", "ssd"])
def test_a_model_that_drafts_for_itself(mode: str, decoder: Decoder, expected: list[int], driven: Callable[[], None]) -> None:
    """Acceptance 1, so no key of the drafter's cache is missing or stale; a second request sees
    nothing of the first."""
    if mode == "driven":
        driven()
    decoder.generate([1, 2, 3], "ssd" if mode == "ssd" else "sd", max_new_tokens=4, draft_length=3)
    decoder.cache.buffer.fill_(torch.nan)  # type: ignore[attr-defined]
    decoder.drafter.cache.buffer.fill_(torch.nan)  # type: ignore[union-attr]
    result = decoder.generate(PROMPT, "ssd" if mode == "ssd" else "sd", max_new_tokens=TOKENS - 1, draft_length=3, branches=2)
    assert result.token_ids == expected[:TOKENS - 1]
    assert result.stats.acceptance == 1
    assert result.stats.accepted_per_round == [3, 3]
    if mode == "ssd":
        assert result.stats.branch_hits == 1


@pytest.mark.parametrize("scripted", [False, True], ids=["its own", "a script"])
def test_ngrams(scripted: bool, decoder: Decoder, expected: list[int], driven: Callable[[], None]) -> None:
    """The drafts of the device are those of Python, also where the sequence ends a draft early; SSD runs as SD and says so. The
    history of an earlier request is gone."""
    prompt = [*PROMPT, *expected[:4], *PROMPT]
    options: Any = {"max_new_tokens": 5, "draft_length": 3}
    ar = decoder.generate(prompt, "ar", **options).token_ids
    own = NGramDrafter()
    decoder.drafter = ScriptedDrafter([*prompt, *ar], [1, 2], SHAPE.vocab_size, inner=own) if scripted else own
    decoder.generate([3, 3, 3, 3], "sd", max_new_tokens=2, draft_length=3)
    found = [decoder.generate(prompt, mode, **options) for mode in ("sd", "ssd")]
    driven()
    right = decoder.generate(prompt, "sd", **options)
    for result in found:
        assert result.token_ids == right.token_ids == ar
        assert result.stats.mode == "sd" and result.stats.drafter_faults == 0
        assert result.stats.accepted_per_round[:-1] == right.stats.accepted_per_round[:-1]  # towards its end, Python drafts less
        assert result.stats.drafted > 0
    if scripted:
        assert found[0].stats.accepted_per_round == [1, 2]
    assert rounds.NOTHING_TO_HIDE in found[1].stats.warnings and rounds.NOTHING_TO_HIDE not in found[0].stats.warnings


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_a_script_alone(mode: str, decoder: Decoder, expected: list[int]) -> None:
    """Driven: exactly the accepted counts that it says."""
    decoder.drafter = scripted(expected, [2, 0, 3, 1])
    result = decoder.generate(PROMPT, mode, max_new_tokens=TOKENS, draft_length=3)
    assert result.token_ids == expected
    assert result.stats.accepted_per_round == [2, 0, 3, 0]  # the last round has room for one token


@pytest.mark.parametrize("mode", ["on the device", "driven", "ssd"])
def test_a_script_in_the_place_of_a_model(mode: str, decoder: Decoder, expected: list[int], driven: Callable[[], None]) -> None:
    """The drafter works, its proposals are overwritten, and acceptance is the script's."""
    inner, decoder.drafter = decoder.drafter, scripted(expected, [2, 0, 3, 1], decoder.drafter)
    if mode == "driven":
        driven()
    result = decoder.generate(PROMPT, "ssd" if mode == "ssd" else "sd", max_new_tokens=TOKENS - 1, draft_length=3, branches=2)
    assert result.token_ids == expected[:TOKENS - 1]
    assert result.stats.accepted_per_round == [2, 0, 3]
    decoder.drafter = inner
    again = decoder.generate(PROMPT, "sd", max_new_tokens=TOKENS - 1, draft_length=3)
    assert again.stats.accepted_per_round == [3, 3], "a script that is gone still shows"


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
@pytest.mark.parametrize("at", [0, 1, 3, 4])
def test_an_end_at_each_offset_of_a_round(at: int, mode: str, decoder: Decoder, expected: list[int]) -> None:
    """An end that is accepted, or is the recovery token, stops there, at the limit as well; the limit
    likewise. On the device, of three drafted tokens; in SSD, drafted by a branch from the second round on."""
    at = expected.index(expected[at])  # on a GPU random weights emit other tokens: one that came before ends there
    stopped = decoder.generate(PROMPT, mode, max_new_tokens=TOKENS, draft_length=3, stop_token_ids=[expected[at]])
    assert (stopped.token_ids, stopped.finish_reason) == (expected[:at + 1], "stop")
    limited = decoder.generate(PROMPT, mode, max_new_tokens=at + 1, draft_length=3)
    assert (limited.token_ids, limited.finish_reason) == (expected[:at + 1], "length")
    for result in (stopped, limited):
        assert result.stats.emitted == at and result.stats.accepted <= result.stats.drafted
    if at == 3:
        decoder.eos_ids = frozenset([expected[at]])
        ended = decoder.generate(PROMPT, mode, max_new_tokens=at + 1, draft_length=3)
        assert (ended.token_ids, ended.finish_reason) == (expected[:at + 1], "eos")


def test_more_ends_than_the_device_holds_are_driven(decoder: Decoder, expected: list[int]) -> None:
    others = sorted(set(range(SHAPE.vocab_size)) - set(expected))
    result = decoder.generate(PROMPT, "sd", max_new_tokens=6, draft_length=3, stop_token_ids=[*others, expected[3]])
    assert len(others) >= rounds.ENDS
    assert (result.token_ids, result.finish_reason) == (expected[:expected.index(expected[3]) + 1], "stop")


def test_the_last_slot_of_the_cache_is_used(load: Load) -> None:
    """Rounds in flight write past the capacity, into the slack."""
    decoder = load(drafter="random:0", capacity=len(PROMPT) + 3)
    outs = [decoder.generate(PROMPT, mode, max_new_tokens=4, draft_length=7).token_ids for mode in ("ar", "sd", "ssd")]
    assert outs[0] == outs[1] == outs[2]
    with pytest.raises(RequestError, match=f"the KV cache has {len(PROMPT) + 3}"):
        decoder.generate(PROMPT, "ar", max_new_tokens=5)


def test_fp8_rounds(load: Load, driven: Callable[[], None]) -> None:
    """The other recipe: AR, SD in both kinds of rounds, SSD."""
    decoder = load("fp8-v1", drafter="random:0")
    outs = [decoder.generate(PROMPT[:5], mode, max_new_tokens=5, draft_length=3, branches=2).token_ids
            for mode in ("ar", "sd", "ssd")]
    driven()
    outs.append(decoder.generate(PROMPT[:5], "sd", max_new_tokens=5, draft_length=3).token_ids)
    assert outs == [outs[0]] * 4


@pytest.mark.parametrize("recipe", RECIPES)
def test_eagle3(recipe: str, load: Load, driven: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are wrong and, under a script, right: the same ids in AR, in both kinds of rounds, and in SSD. The
    drafter's proposals are the same in both kinds. With stale features acceptance falls and no token differs."""
    monkeypatch.setattr(rounds, "IN_FLIGHT", 1)  # rounds in flight at the end cost much here and are tested above
    decoder, drafter = eagle_decoder(load, recipe)
    prompt = PROMPT[:3]
    ar = decoder.generate(prompt, "ar", max_new_tokens=6, logprobs=0).token_ids
    decoder.drafter = ScriptedDrafter([*prompt, *ar], [1, 2], DEEP.vocab_size, inner=drafter)
    script = decoder.generate(prompt, "sd", max_new_tokens=6, draft_length=2)
    assert script.token_ids == ar
    assert script.stats.accepted_per_round == [1, 2]
    decoder.drafter = drafter
    found = decoder.generate(prompt, "sd", max_new_tokens=3, draft_length=2)
    ssd = decoder.generate(prompt, "ssd", max_new_tokens=3, draft_length=2, branches=1)
    driven()
    again = decoder.generate(prompt, "sd", max_new_tokens=3, draft_length=2)
    assert found.token_ids == ssd.token_ids == again.token_ids == ar[:3]
    assert found.stats.accepted_per_round == again.stats.accepted_per_round


def test_eagle3_is_close_to_the_torch_backends(load: Load) -> None:
    """Its features reduced, and its logits over the drafter's vocabulary."""
    drafters = []
    for backend in ("triton", "torch"):
        decoder = load("fp8-v1", DEEP, backend)
        drafters.append(random_eagle3(1, EAGLE, decoder.model, decoder.model.device, CAPACITY, Options(overrides=SCHEDULES)))
    rms, worst = CLOSE["fp8-v1"]
    features = torch.randn(5, 3 * DEEP.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    reduced = [drafter.model.reduce(features.to(drafter.model.embedding.device)) for drafter in drafters]
    assert_close(*reduced, rms=rms, worst=worst)
    found = []
    for drafter in drafters:
        step = drafter.model.forward(PROMPT[:5], reduced[0], Appended(drafter.model.new_cache(CAPACITY), 5))
        found.append(torch.from_numpy(drafter.rows_over_target(step.final)))
    known = found[1].isfinite()
    assert torch.equal(found[0].isfinite(), known) and int(known.sum()) == 5 * (EAGLE.draft_vocab_size or 0)
    assert_close(found[0][known], found[1][known], rms=rms, worst=worst)


@pytest.mark.parametrize("mode", ["ar", "driven", "sd"])
def test_nan_is_an_error(mode: str, load: Load, driven: Callable[[], None]) -> None:
    """After the prompt, so that rounds meet it."""
    decoder = load(drafter="random:0" if mode == "sd" else None)
    if mode == "driven":
        driven()
    prefill = decoder.model.prefill

    def then_nan(*arguments: Any) -> Any:
        found = prefill(*arguments)
        decoder.model.layers[-1].down.w.fill_(torch.nan)  # type: ignore[attr-defined]
        return found

    decoder.model.prefill = then_nan  # type: ignore[method-assign]
    with pytest.raises(NumericsError, match="NaN"):
        decoder.generate(PROMPT, "sd" if mode == "sd" else "ar", max_new_tokens=4, draft_length=2)


def test_nan_in_the_prompt_is_an_error(load: Load) -> None:
    decoder = load()
    decoder.model.embedding[PROMPT[0]] = torch.nan
    with pytest.raises(NumericsError, match="NaN"):
        decoder.generate(PROMPT[:1], "ar", max_new_tokens=2)


def test_infinity_is_no_answer(load: Load) -> None:
    """F4: a finite head whose products overflow."""
    model: Any = load().model
    final = torch.ones(2, SHAPE.hidden_size, dtype=torch.bfloat16, device=model.device)
    final[1] = 0
    model.head[7] = 3e38
    assert model.head.isfinite().all()
    assert model.greedy(final) == [-1, 0]


def test_a_draft_longer_than_a_pass_is_refused(load: Load) -> None:
    """By attention's tile."""
    narrow = replace(SCHEDULES["attention"], TILE=16)
    decoder = load(drafter="ngram", changes={"attention": narrow})
    assert decoder.model.max_rows == 8
    with pytest.raises(RequestError, match="draft_length is 8"):
        decoder.generate(PROMPT, "sd", max_new_tokens=2, draft_length=8)
    assert len(decoder.generate(PROMPT, "sd", max_new_tokens=2, draft_length=7).token_ids) == 2


@pytest.mark.parametrize("kind", ["model", "eagle3"])
def test_a_draft_longer_than_the_drafters_pass_is_refused(kind: str, load: Load) -> None:
    """The drafter's own tile, whatever the target's; also under a script that stands for it. AR doesn't ask."""
    narrow = {"attention": replace(SCHEDULES["attention"], TILE=16)}
    if kind == "model":
        decoder = load()
        decoder.drafter = SmallModelDrafter(load(changes=narrow).model, CAPACITY)
    else:
        decoder, _ = eagle_decoder(load, "bf16", drafter_changes=narrow)
    for mode in ("sd", "ssd"):
        with pytest.raises(RequestError, match=f"draft_length is 8: a pass of drafter {kind} takes 8 rows\nexpected: 1 to 7"):
            decoder.generate(PROMPT, mode, max_new_tokens=2, draft_length=8)
    decoder.drafter = ScriptedDrafter(PROMPT, [0], 96, inner=decoder.drafter)
    with pytest.raises(RequestError, match="a pass of drafter scripted takes 8 rows"):
        decoder.generate(PROMPT, "sd", max_new_tokens=2, draft_length=8)
    assert decoder.generate(PROMPT, "ar", max_new_tokens=1, draft_length=8).token_ids


def test_nan_of_a_drafter_is_an_error(load: Load) -> None:
    """Of one that Python drives. On the device the verification refuses such a draft."""
    decoder, drafter = eagle_decoder(load, "bf16")
    final = torch.full((2, EAGLE.hidden_size), torch.nan, dtype=torch.bfloat16, device=decoder.model.device)
    assert drafter.model.greedy(final) == [-1, -1]
    with pytest.raises(NumericsError, match="the drafter's logits hold NaN"):
        drafter.choose(final, [0, 1])


def test_a_row_tile_of_a_schedule_bounds_a_pass(load: Load) -> None:
    """Linears with 8 rows a launch verify at most 7 drafted tokens."""
    narrow: dict[str, Schedule] = {"down": replace(LINEAR, row_tile=8)}
    assert load(changes=narrow).model.max_rows == 8


def test_an_attention_chunk_that_is_not_the_recipes_is_refused(load: Load) -> None:
    """The cache counts chunks of the recipe's size: another one would merge partials that nobody wrote."""
    attention = replace(SCHEDULES["attention"], chunk=2 * CHUNK)
    with pytest.raises(LoadError, match=f"attention's chunk is {2 * CHUNK}"):
        load(changes={"attention": attention})


class State:
    """A request under way, without an engine. tokens: the last one is in no cache yet."""

    def __init__(self, tokens: list[int], count: int) -> None:
        self.tokens, self.remaining, self.stats = list(tokens), count, Stats()

    @property
    def finished(self) -> bool:
        return self.remaining == 0

    def push(self, tokens: list[int]) -> int:
        kept = tokens[:self.remaining]
        self.tokens += kept
        self.remaining -= len(kept)
        return len(kept)


def device_request(decoder: Decoder, mode: str, count: int) -> tuple[State, Any]:
    """PROMPT's next `count` tokens, and their rounds, which haven't begun."""
    state, drafter = State(PROMPT, count), decoder.drafter if mode != "ar" else None
    decoder.cache.clear()
    decoder.model.prefill(PROMPT[:-1], Appended(decoder.cache, len(PROMPT) - 1))
    if drafter is not None:
        drafter.start(PROMPT, None, Chooser())
    plan = RoundPlan(drafter, None, 0 if mode == "ar" else 1, 2 if mode == "ssd" else 0, frozenset())
    return state, decoder.model.device_rounds(state, decoder.cache, plan)


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_graphs_are_captured_before_the_first_round(mode: str, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """F29: every number of chunks that the request reaches; none in its rounds. The rounds that load kernels move nothing: the
    tokens are those of rounds without graphs."""
    model: Any = decoder.model
    model.rounds = None
    expected, loop = device_request(decoder, mode, 8)
    list(loop)
    captured: list[int] = []

    class Held(Graphs):
        """Graphs on a CPU: a captured pass is launched again."""

        def __init__(self, enabled: bool, device: torch.device) -> None:
            super().__init__(enabled, device)
            self.enabled = True

        def capture(self, launches: Callable[[], None]) -> Any:
            captured.append(len(captured))
            return SimpleNamespace(replay=launches)
    for place in (rounds, ssd_rounds):
        monkeypatch.setattr(place, "Graphs", Held)
    model.rounds = None
    state, loop = device_request(decoder, mode, 8)
    graphs: Any = model.rounds.ssd.target_graphs if mode == "ssd" else model.rounds.graphs
    before = len(captured)
    assert {key[2] for key in graphs.graphs if key[0] != "finish"} == {1, 2}, "chunks"
    list(loop)
    model.rounds = None
    assert len(captured) == before
    assert state.tokens == expected.tokens


def test_rounds_on_the_device_leave_the_callers_inference_mode_alone(decoder: Decoder) -> None:
    """Between the pieces of a stream the caller's code runs: its tensors are its own."""
    for _ in device_request(decoder, "ar", 2)[1]:
        assert not torch.is_inference_mode_enabled()


def test_nothing_is_locked_between_rounds(decoder: Decoder) -> None:
    """F2: a request that is left alone, or dropped, keeps no other thread from the model."""
    _, loop = device_request(decoder, "ar", 4)
    next(loop)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(decoder.model.lock.acquire, False).result()  # type: ignore[attr-defined]
        pool.submit(decoder.model.lock.release).result()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["model", "eagle3"])
@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_a_drafter_that_overflows_changes_nothing(kind: str, mode: str, load: Load) -> None:
    """F3: finite weights whose activations overflow: NaN in the drafter's logits, and tokens that are none, in every draft."""
    if kind == "model":
        decoder, prompt = load(drafter="random:0"), PROMPT
        layer: Any = decoder.drafter.model.layers[-1]  # type: ignore[union-attr]
    else:
        decoder, drafter = eagle_decoder(load, "bf16")
        prompt, layer = PROMPT[:3], drafter.model.layer  # type: ignore[attr-defined]
    layer.gate_up.w.mul_(1e25)
    assert layer.gate_up.w.isfinite().all()
    ar = decoder.generate(prompt, "ar", max_new_tokens=4)
    result = decoder.generate(prompt, mode, max_new_tokens=4, draft_length=2, branches=2)
    assert result.token_ids == ar.token_ids
    assert result.stats.drafter_faults == result.stats.rounds == 3
    assert any("NaN" in warning and decoder.drafter.name in warning for warning in result.stats.warnings)  # type: ignore[union-attr]
    assert ar.stats.drafter_faults == 0


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_nan_in_a_rejected_row_ends_nothing(mode: str, decoder: Decoder, expected: list[int]) -> None:
    """F3: a drafted token, never emitted, whose row of the target's embedding is NaN. Its values reach the rows before it in the
    same pass, so the request goes on without drafts."""
    wrong = [token for token in (0, 1) if token not in {*PROMPT, *expected}]
    assert wrong[:1] == [0] or decoder.model.device.type == "cuda"
    decoder.drafter = scripted(expected, [1], decoder.drafter)
    kept = decoder.model.embedding[wrong].clone()
    decoder.model.embedding[wrong] = torch.nan
    result = decoder.generate(PROMPT, mode, max_new_tokens=5, draft_length=2, branches=2)
    decoder.model.embedding[wrong] = kept
    assert result.token_ids == expected[:5]
    if wrong[:1] == [0]:
        assert result.stats.drafter_faults == 1
        assert any("goes on without drafts" in warning for warning in result.stats.warnings)


def test_rope_is_tabled_for_the_cache_and_not_for_the_models_positions(recipe_of: Callable[..., Recipe]) -> None:
    """F7: a model of 1e9 positions; a position's angles are the same in a short table and in a long one."""
    shape, cpu = replace(SHAPE, max_position=10**9), torch.device("cpu")
    short, long = (DeviceCache(shape, capacity, recipe_of("bf16", CHUNK), cpu).rope for capacity in (CAPACITY, 3000))
    assert len(short[0]) == 256 and len(long[0]) >= 3000 + SLACK
    for few, many in zip(short, long):
        assert_same_bytes(few, many[:len(few)])


def test_a_drafter_with_fewer_positions_than_the_request_is_driven(decoder: Decoder) -> None:
    """Rounds on the device would write past its cache."""
    decoder.drafter = SmallModelDrafter(decoder.drafter.model, len(PROMPT) + 2)  # type: ignore[union-attr]
    assert device_request(decoder, "sd", 4)[1] is None
    assert device_request(decoder, "sd", 3)[1] is not None


def test_fp32_is_refused(load: Load) -> None:
    with pytest.raises(LoadError, match="recipe fp32 on the triton backend"):
        load("fp32")


@pytest.mark.parametrize(("tokens", "chunks"), [(1, 1), (16, 1), (17, 2), (32, 2), (33, 4), (64, 4), (65, 7), (112, 7)])
def test_chunks_for(tokens: int, chunks: int, recipe_of: Callable[..., Recipe]) -> None:
    """Enough for the tokens, few different ones, never more than the cache has."""
    cache = DeviceCache(SHAPE, CAPACITY, recipe_of("bf16", CHUNK), torch.device("cpu"))
    assert cache.chunks == -(-(CAPACITY + SLACK) // CHUNK) == 7
    assert cache.chunks_for(tokens) == chunks
    assert cache.chunks_for(tokens) * CHUNK >= tokens


@pytest.mark.parametrize("fails", [False, True])
def test_standing_in_gives_the_slots_back(fails: bool, recipe_of: Callable[..., Recipe]) -> None:
    """The branch's tokens stand in the cache for one pass; then its new token is its own and the cache is as it was, even
    where the pass fails."""
    cache: Any = DeviceCache(SHAPE, CAPACITY, recipe_of("bf16", CHUNK), torch.device("cpu"))
    cache.buffer.normal_()
    before = cache.buffer.clone()
    rows = Branches(cache, [10, 7], 3)
    rows.keys.normal_()
    rows.values.normal_()
    for done in range(3):
        for branch, length in enumerate((10, 7)):
            new = torch.randn(2, SHAPE.num_layers, SHAPE.num_kv_heads, SHAPE.head_dim).bfloat16()
            own = rows.keys[:, branch, :done].clone(), rows.values[:, branch, :done].clone()
            try:
                with swapped_in(cache, rows.groups[branch].own):
                    assert torch.equal(cache.keys[:, length:length + done], own[0])
                    assert torch.equal(cache.values[:, length:length + done], own[1])
                    cache.buffer[:, :, length + done] = new
                    if fails:
                        raise RequestError("no pass")
                assert_same_bytes(torch.stack([rows.keys[:, branch, done], rows.values[:, branch, done]]), new)
            except RequestError:
                assert fails
            assert_same_bytes(cache.buffer, before, f"step {done}, branch {branch}")
        rows.finish()


def test_scales_of_weights_are_those_of_the_cpu(device: str) -> None:
    """A GPU divides by a number as it multiplies by the reciprocal: one last bit of a scale moved 51 weights of a layer."""
    from tune_kernels.decoder.on_torch.linear import quantise_weights

    gen = torch.Generator().manual_seed(7)
    w = torch.randint(-8, 8, (256, 96), generator=gen) * torch.rand(256, 1, generator=gen)  # few levels a row, so many ties
    for found, expected in zip(quantise_weights(w.to(device)), quantise_weights(w)):
        assert_same_bytes(found.cpu(), expected)


@pytest.mark.parametrize("kind", ["ngram", "model", "eagle3"])
def test_auto_changes_the_length_from_round_to_round(kind: str, load: Load, decoder: Decoder,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Any order of draft lengths gives AR's tokens and the drafts of a drafter that missed nothing: one that is the target is
    right to the last token. Records go around their ring in the middle of a batch. A drafter with a cache is left for good at the
    first round of AR."""
    monkeypatch.setattr(verification, "RING", 5)
    if kind == "eagle3":
        decoder, _ = eagle_decoder(load, "bf16")
    model: Any = decoder.model
    model.rounds = None
    prompt = PROMPT[:3] if kind == "eagle3" else [*PROMPT, *PROMPT[:4]]
    tokens = 8 if kind == "eagle3" else 14
    lengths = {"ngram": [1, 0, 3, 2, 0, 1, 2], "model": [1, 3, 2, 0, 5], "eagle3": [3, 1, 2, 1, 3]}[kind]
    if kind == "ngram":
        decoder.drafter = NGramDrafter()
    asked = iter(lengths)
    monkeypatch.setattr(DraftLength, "next", lambda self: next(asked, 1))
    ar = decoder.generate(prompt, "ar", max_new_tokens=tokens).token_ids
    result = decoder.generate(prompt, "sd", max_new_tokens=tokens, draft_length="auto")
    model.rounds = None
    assert result.token_ids == ar
    assert result.stats.drafter_faults == 0
    taken = result.stats.rounds_by_draft_length
    assert sum(taken.values()) == result.stats.rounds and len(taken) > 2
    if kind == "model":
        assert result.stats.acceptance == 1
        assert set(taken) == {1, 2, 3, 0}
