"""A decoder with the certified head emits the plain head's tokens, and counts the ids that it computed again."""

from collections.abc import Callable

import pytest
import torch
from triton_models import PROMPT, SCHEDULES, Load, loader
from tune_kernels.decoder import Decoder
from tune_kernels.decoder.drafters.scripted import ScriptedDrafter
from tune_kernels.decoder.on_gpu.model import TritonModel
from tune_kernels.decoder.selection import CERTIFIED
from tune_kernels.schedules.recipe import Recipe
from tune_kernels.schedules.schedule import ScreenSchedule

pytestmark = pytest.mark.interpreter
SCREEN = ScreenSchedule(BLOCK_N=64, BLOCK_K=32, num_stages=2, num_warps=4)
NEW = 6


@pytest.fixture(scope="module")
def load(device: str, recipe_of: Callable[..., Recipe]) -> Load:
    return loader(device, recipe_of)


@pytest.fixture(scope="module")
def plain(load: Load) -> Decoder:
    return load()


@pytest.fixture(scope="module")
def certified(load: Load) -> Decoder:
    return load(changes={CERTIFIED: SCREEN})


@pytest.mark.parametrize("mode", ["ar", "sd"])
def test_tokens_are_the_plain_heads(mode: str, plain: Decoder, certified: Decoder) -> None:
    """AR, and a verification of several rows whose drafts are wrong in every other round."""
    expected = plain.generate(PROMPT, "ar", max_new_tokens=NEW, ignore_eos=True)
    certified.drafter = ScriptedDrafter([*PROMPT, *expected.token_ids], [2, 0], certified.model.vocab_limit)
    found = certified.generate(PROMPT, mode, max_new_tokens=NEW, ignore_eos=True, draft_length=3)
    assert found.token_ids == expected.token_ids
    assert found.stats.head_rescored >= NEW, "each winner is computed again, at least"
    assert found.stats.head_unbounded == 0
    assert (expected.stats.head_rescored, expected.stats.head_unbounded) == (0, 0)


def test_counts_are_of_one_request(certified: Decoder) -> None:
    counted = [certified.generate(PROMPT, "ar", max_new_tokens=NEW, ignore_eos=True).stats.head_rescored for _ in range(2)]
    assert counted[0] == counted[1] > 0


def test_stats_name_the_schedule_and_the_memory(plain: Decoder, certified: Decoder) -> None:
    notes = {row["kernel"]: row for row in certified.model.notes.schedules}
    shape = certified.model.shape
    assert notes[CERTIFIED]["origin"] == "override"
    assert notes[CERTIFIED]["memory_bytes"] == shape.vocab_size * (shape.hidden_size + 3 * 4), "int8, and three bounds in fp32"
    assert CERTIFIED not in {row["kernel"] for row in plain.model.notes.schedules}


def test_rows_without_an_answer_have_none(certified: Decoder, plain: Decoder) -> None:
    """NaN and infinity: what is read in full is judged as ever."""
    models = [certified.model, plain.model]
    final = torch.randn(4, models[0].shape.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    final[1, 3], final[2, 5] = float("nan"), float("inf")
    found, expected = (model.greedy(final.to(model.device)) for model in models)
    assert found == expected
    assert found[1] == -1
    assert models[0].head_counts()[1] == 1


def test_a_pass_reads_half_the_heads_bytes(certified: Decoder, plain: Decoder) -> None:
    assert isinstance(certified.model, TritonModel) and isinstance(plain.model, TritonModel)
    assert certified.model.device_head.read_bytes < plain.model.device_head.read_bytes


def test_the_plain_head_runs_unless_asked(plain: Decoder) -> None:
    assert CERTIFIED not in SCHEDULES
    assert isinstance(plain.model, TritonModel)
    assert plain.model.head_counts() == (0, 0)
