"""Tiny random models for the `triton` backend, which its kernels run in Triton's interpreter or on a GPU, and their drafters."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tune_kernels.decoder import Decoder
from tune_kernels.decoder.drafters.eagle3 import Eagle3Drafter
from tune_kernels.decoder.drafters.eagle3_checkpoint import random_eagle3
from tune_kernels.decoder.selection import Options
from tune_kernels.schedules.recipe import Recipe
from tune_kernels.schedules.schedule import AttentionSchedule, HeadSchedule, LinearSchedule, MergeSchedule, Schedule
from tune_kernels.shapes.model import ModelShape

CHUNK = 16
CAPACITY = 48  # slots
PROMPT = [5, 9, 2, 40, 7, 61, 33, 4]  # eight tokens, so that rounds cross a chunk's edge
WIDE = ModelShape("wide", "qwen2", 64, 96, 2, 4, 2, 16, 96, 1e4, 1e-6, True, False, 256, "tests")
SHAPE = replace(WIDE, name="tiny", num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32)  # for whole requests: quick
DEEP = replace(SHAPE, name="deep", num_layers=7, qkv_bias=False)  # the fewest layers for EAGLE-3
EAGLE = replace(DEEP, name="eagle", architecture="eagle3", num_layers=1, target_hidden_size=64, draft_vocab_size=48)
LINEAR = LinearSchedule(BLOCK_N=64, BLOCK_K=32, num_stages=2, num_warps=4, split_k=2)
SCHEDULES: dict[str, Schedule] = {
    "qkv": LINEAR, "o": LINEAR, "down": LINEAR, "gate_up": replace(LINEAR, split_k=1), "fc": LINEAR,
    "attention": AttentionSchedule(chunk=CHUNK, TILE=32, BLOCK_N=16, num_stages=1, num_warps=4),
    "merge": MergeSchedule(BLOCK_D=16, splits=1, num_warps=1),
    "lm_head": HeadSchedule(BLOCK_N=32, BLOCK_K=32, num_stages=2, num_warps=4)}
Load = Callable[..., Decoder]


def loader(device: str, recipe_of: Callable[..., Recipe]) -> Load:
    """A function of recipe name, shape, backend, changes of the schedules; then options of Decoder.load."""
    def decoder(recipe: str = "bf16", shape: ModelShape = SHAPE, backend: str = "triton",
                changes: dict[str, Schedule] | None = None, **options: Any) -> Decoder:
        return Decoder.load("random:0", shape, recipe_of(recipe, CHUNK), backend=backend, device=device,
                            overrides={**SCHEDULES, **(changes or {})}, **{"capacity": CAPACITY, **options})
    return decoder


def restored(decoder: Decoder) -> Iterator[Decoder]:
    """For a fixture: undoes a test's changes to a decoder that others share."""
    kept = dict(vars(decoder))
    yield decoder
    vars(decoder).update(kept)


def eagle_decoder(load: Load, recipe: str, drafter_changes: dict[str, Schedule] | None = None) -> tuple[Decoder, Eagle3Drafter]:
    """A target with a random EAGLE-3 drafter. drafter_changes: of the drafter's schedules."""
    decoder = load(recipe, DEEP)
    decoder.drafter = random_eagle3(1, EAGLE, decoder.model, decoder.model.device, CAPACITY,
                                    Options(overrides={**SCHEDULES, **(drafter_changes or {})}))
    return decoder, decoder.drafter
