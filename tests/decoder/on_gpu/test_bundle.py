"""A bundle holds every artefact that the `triton` backend launches. A model and its drafters run on a GPU that a stand-in driver
plays: each launch is specialised by Triton as on a GPU, takes its artefact from the bundle and does nothing."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from promoted_rows import promoted
from stand_in_driver import Driver
from triton.runtime import driver
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.backend import RoundPlan
from tune_kernels.decoder.checkpoint.loader import load_checkpoint
from tune_kernels.decoder.drafters.eagle3 import Eagle3Drafter
from tune_kernels.decoder.drafters.eagle3_checkpoint import random_eagle3
from tune_kernels.decoder.drafters.ngram import NGramDrafter
from tune_kernels.decoder.drafters.small_model import SmallModelDrafter
from tune_kernels.decoder.loading import Loaded
from tune_kernels.decoder.on_gpu.eagle3 import TritonEagle3Model
from tune_kernels.decoder.on_gpu.model import TritonModel
from tune_kernels.decoder.on_gpu.proposals import proposal_of
from tune_kernels.decoder.on_gpu.rounds import DeviceRounds, speculative_step
from tune_kernels.decoder.on_gpu.ssd_rounds import SsdRounds
from tune_kernels.decoder.on_gpu.verification import Verification
from tune_kernels.decoder.request.request import Server
from tune_kernels.decoder.rows import Appended
from tune_kernels.decoder.selection import CERTIFIED, Options, select_schedules
from tune_kernels.kernels import bundle, registry
from tune_kernels.schedules import store
from tune_kernels.schedules.recipe import Recipe, load_recipe
from tune_kernels.schedules.schedule import HeadSchedule, LinearSchedule, MergeSchedule
from tune_kernels.schedules.store import PromotedFile
from tune_kernels.shapes.model import ModelShape
from tune_kernels.shapes.target import load_arch
from tune_kernels.tuner.offline.compile import compile_task, make_task
from tune_kernels.tuner.offline.space import Subject, with_fixed, with_those_in_place

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(triton.knobs.runtime.interpret, reason="interpreting")]
CPU = torch.device("cpu")
CAPACITY = 2300  # slots: more chunks of keys than one walk of the merge takes
MANY = 2200  # tokens that fill them
QWEN = ModelShape("qwen", "qwen2", 128, 192, 7, 4, 2, 64, 96, 1e4, 1e-6, True, False, 4096, "tests")
LLAMA = replace(QWEN, name="llama", architecture="llama", qkv_bias=False, tie_embeddings=True)
EAGLE = replace(QWEN, name="eagle", architecture="eagle3", num_layers=1, qkv_bias=False, target_hidden_size=128,
                draft_vocab_size=48)
PROMOTED = {"down": LinearSchedule(64, 64, 2, 4, split_k=2), "lm_head": HeadSchedule(64, 32, 2, 4),
            "merge": MergeSchedule(BLOCK_D=16, splits=1, num_warps=1)}
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "draft_length": 3, "branches": 2}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """New memory holds zeros, as nothing is ever written to it."""
    stand_in = Driver(90)
    monkeypatch.setattr(driver, "_active", stand_in)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    for kernel in registry.jitted():
        kernel.device_caches.clear()
    yield stand_in
    for kernel in registry.jitted():
        kernel.device_caches.clear()


def make_bundle(folder: Path, model: ModelShape, recipe: Recipe, schedules: Path) -> None:
    """The fixed kernels that a sweep of a shipped space adds, compiled."""
    subject = Subject(model, recipe, list(model.kernel_shapes(recipe.linear_dtype, recipe.terms)), [load_arch("sm_90")])
    for one in with_fixed(with_those_in_place([], subject, store.search_path(schedules)), subject):
        assert one.problem is None, one
        record = compile_task(make_task(one.kernel, "sm_90", one.shape, one.schedule, recipe.numerics, folder))
        assert record.artefact, (one, record.failures)


def promote(folder: Path, model: ModelShape, recipe: Recipe) -> None:
    shapes = model.kernel_shapes(recipe.linear_dtype, recipe.terms)
    rows = tuple(promoted(kernel, shapes[kernel], schedule, model.name) for kernel, schedule in PROMOTED.items())
    store.promote(folder, PromotedFile("nvidia-h200", model.name, recipe.name, rows))


def make_decoder(model: ModelShape, recipe: Recipe, options: Options) -> Decoder:
    checkpoint = load_checkpoint("random:0", model, CPU)
    made = TritonModel(model, checkpoint.tensors, recipe, CPU, select_schedules(recipe, model, CPU, options), options)
    return Decoder(Loaded(Server(made, None, frozenset(), recipe, None, CAPACITY), "random:0"))


def run_all(decoder: Decoder, eagle: Eagle3Drafter, small: SmallModelDrafter) -> None:
    """Prompts and passes of any number of rows; AR, SD and SSD driven from Python; rounds on the device; logits."""
    model, network = decoder.model, eagle.model
    assert isinstance(model, TritonModel) and isinstance(network, TritonEagle3Model)
    layers = eagle.feature_layers
    for rows in (1, 5, 16, 17, 200):
        for wanted in ((), layers):
            final = model.prefill([1] * rows, Appended(model.new_cache(CAPACITY), rows), wanted).final
            model.forward([1] * rows, Appended(model.new_cache(CAPACITY), rows), wanted)
        assert model.logits(final).shape == (rows, 96)
    eagle.rows_over_target(final)
    for drafter in (None, eagle, small):
        for mode in ("sd", "ssd") if drafter else ("ar",):
            decoder.drafter = drafter
            assert decoder.generate([1, 2, 3], mode, **GREEDY).token_ids == [0] * 24
    cache: Any = decoder.cache
    verification = Verification(model, cache)
    features = torch.zeros(3, 3 * model.shape.hidden_size, dtype=torch.bfloat16)
    for tokens in (100, MANY):
        speculative_step(verification, None, 0, tokens, 0)
    ngram = proposal_of(RoundPlan(NGramDrafter(), None, 4, 0, frozenset()), verification)
    for draft_length in (1, 2, 15):
        speculative_step(verification, ngram, draft_length, 100, 0)
    for drafter in (eagle, small):
        proposal: Any = proposal_of(RoundPlan(drafter, features, 4, 3, frozenset()), verification)
        ssd = SsdRounds(verification, proposal, 3)
        for draft_length in (1, 2, 4, 14, 15):
            for script in (None, verification.tables):
                verification.script = script
                launch_round(ssd, draft_length, 100)
        launch_round(ssd, 4, MANY)


@torch.inference_mode()
def launch_round(ssd: SsdRounds, draft_length: int, tokens: int) -> None:
    """A round of SD, and SSD's own launches, after a miss and after a hit."""
    speculative_step(ssd.verification, ssd.proposal, draft_length, tokens, 0)
    ssd.proposal.draft(ssd.verification.network.verified, draft_length, tokens, ssd.verification.write_draft, keep=True)
    for drafted in (True, False):
        ssd.prepare(draft_length, tokens, drafted)
    ssd.finish(draft_length)


@pytest.mark.parametrize(("model", "recipe", "with_promoted"),
                         [(QWEN, "fp8-v1", False), (LLAMA, "fp8-v1", True), (QWEN, "bf16", False)],
                         ids=["qwen fp8-v1", "llama fp8-v1 promoted", "qwen bf16"])
def test_nothing_is_missing(model: ModelShape, recipe: str, with_promoted: bool, gpu: Driver, tmp_path: Path,
                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceRounds, "start", lambda *_: None)  # its records would stay empty: launched apart
    chosen = load_recipe(recipe)
    if with_promoted:
        promote(tmp_path / "schedules", model, chosen)
    for one in (model, EAGLE):
        make_bundle(tmp_path / "bundle", one, chosen, tmp_path / "schedules")
    for kernel in registry.jitted():
        bundle.install(kernel, tmp_path / "bundle")
    asked = {} if with_promoted else {CERTIFIED: registry.default_schedule(chosen, CERTIFIED, "sm_90")}
    options = Options(schedules=str(tmp_path / "schedules"), allow_untuned=True, overrides=asked)
    decoder = make_decoder(model, chosen, options)
    origins = {row["kernel"]: row["origin"] for row in decoder.model.notes.schedules}
    assert {k for k, origin in origins.items() if origin == "promoted"} == (set(PROMOTED) if with_promoted else set())
    eagle = random_eagle3(1, EAGLE, decoder.model, CPU, CAPACITY, options)
    small = SmallModelDrafter(make_decoder(model, chosen, options).model, CAPACITY)
    for normed_residual in (False, True):
        network: Any = eagle.model
        network.entry = replace(network.entry, normed_residual=normed_residual)
        run_all(decoder, eagle, small)
    unused = {kernel.__name__ for kernel in registry.jitted()} - set(gpu.launched)
    certified = set() if asked else {"head_digits_kernel", "head_screen_kernel", "head_rescore_kernel"}
    assert unused == certified | (set() if recipe == "fp8-v1" else {"quantise_kernel"})
