"""Settings of a training run: the user's choices, and the sizes of its parts."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

# About the work that took a drafter of SmolLM2-135M past 3 tokens per round at K = 4 on held-out prompts.
ANSWER_TOKENS, TRAINED_TOKENS = 2e6, 20e6


@dataclass(frozen=True)
class Settings:
    """weights: of the target, as for a decoder; out: a new folder, or one that an interrupted run left; minutes: all of the
    run, loading included; draft_vocab: rows of the drafter's head; prompts: a file, or None for the shipped ones; storage:
    bf16 or int8."""

    weights: str
    out: Path
    minutes: float = 10.0
    draft_vocab: int = 8192
    prompts: Path | None = None
    seed: int = 0
    storage: str = "bf16"


@dataclass(frozen=True)
class Sizes:
    """answer_batch: prompts answered at once; new_tokens: most of an answer; batch: sequences of a training step; unroll:
    drafted tokens that training looks ahead; draft_length: K of the reported tau; answer_share: of the minutes that answers
    take; evaluations: how often tau is measured and a checkpoint written; bf16: products in bf16.
    answer_batches, steps: fixed numbers instead of those that the minutes allow."""

    answer_batch: int
    new_tokens: int
    batch: int
    bf16: bool
    unroll: int = 5
    draft_length: int = 4
    answer_share: float = 0.35
    evaluations: int = 16
    learning_rate: float = 1e-3
    warm_up: int = 100  # steps
    answer_batches: int | None = None
    steps: int | None = None


GPU = Sizes(answer_batch=1536, new_tokens=256, batch=32, bf16=True)
CPU = Sizes(answer_batch=16, new_tokens=96, batch=8, bf16=False)


def sizes_for(device: torch.device) -> Sizes:
    return GPU if device.type == "cuda" else CPU


def cpu_hours(target_parameters: int, drafter_parameters: int) -> tuple[float, float]:
    """(hours that a drafter worth having takes on this CPU, operations per second), by arithmetic and one measured product."""
    speed = measured_flops()
    per_token = 2 * target_parameters + 6 * GPU.unroll * drafter_parameters
    return (ANSWER_TOKENS * 2 * target_parameters + TRAINED_TOKENS * per_token) / speed / 3600, speed


def measured_flops(size: int = 1024) -> float:
    """Operations per second of one fp32 product on this CPU, best of three."""
    a = torch.ones(size, size)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
