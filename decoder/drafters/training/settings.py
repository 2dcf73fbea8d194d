"""Settings of a training run: the user's choices, and the sizes of batches and steps."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

# Approximate work to train a drafter of SmolLM2-135M to 3 tokens per round at K = 4 on held-out prompts.
ANSWER_TOKENS, TRAINED_TOKENS = 2e6, 20e6


@dataclass(frozen=True)
class Settings:
    """The user's choices. weights: the target's, as for a decoder; out: a new folder, or that of an interrupted run; minutes: of
    the whole run, loading included; draft_vocab: rows of the drafter's head; prompts: a file, or None for the shipped ones;
    storage: bf16 or int8."""

    weights: str
    out: Path
    minutes: float = 10.0
    draft_vocab: int = 8192
    prompts: Path | None = None
    seed: int = 0
    storage: str = "bf16"


@dataclass(frozen=True)
class Sizes:
    """answer_batch: prompts answered at once; new_tokens: most tokens of an answer; batch: sequences per training step; bf16:
    whether products are bf16; unroll: drafted tokens per row in training; draft_length: K of the reported tau; answer_share:
    share of the minutes for answers; evaluations: measurements of tau, each with a checkpoint. answer_batches, steps: fixed
    numbers, None for as many as the minutes allow."""

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
    """The sizes for a GPU or a CPU."""
    return GPU if device.type == "cuda" else CPU


def cpu_hours(target_parameters: int, drafter_parameters: int) -> tuple[float, float]:
    """(hours to train a useful drafter on this CPU, its operations per second), estimated from one measured product."""
    speed = measured_flops()
    per_token = 2 * target_parameters + 6 * GPU.unroll * drafter_parameters
    return (ANSWER_TOKENS * 2 * target_parameters + TRAINED_TOKENS * per_token) / speed / 3600, speed


def measured_flops(size: int = 1024) -> float:
    """Operations per second of an fp32 product [size, size] on this CPU, best of three."""
    a = torch.ones(size, size)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
