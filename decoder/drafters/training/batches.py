"""Sequences as tensors, and their order in training, which depends on the seed and the step alone."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .answers import Answer

BUCKET = 16  # batches whose sequences are sorted by length together, which saves padding


@dataclass(frozen=True)
class Batch:
    """ids [B, T], padded on the right with 0; starts [B]: of the answers; lengths [B]: of the sequences."""

    ids: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor


def collate(answers: Sequence[Answer], device: torch.device) -> Batch:
    """The answers as one batch on the device."""
    ids = torch.zeros(len(answers), max(len(a.ids) for a in answers), dtype=torch.long)
    for row, answer in enumerate(answers):
        ids[row, :len(answer.ids)] = answer.ids.long()
    return Batch(ids.to(device), torch.tensor([a.start for a in answers], device=device),
                 torch.tensor([len(a.ids) for a in answers], device=device))


def epoch(answers: Sequence[Answer], size: int, seed: int, number: int) -> list[list[int]]:
    """Indices of the answers of each batch in epoch `number`: every answer once, similar lengths together."""
    shuffle = random.Random(f"{seed}/epoch/{number}")
    order = list(range(len(answers)))
    shuffle.shuffle(order)
    batches: list[list[int]] = []
    for start in range(0, len(order), size * BUCKET):
        near = sorted(order[start:start + size * BUCKET], key=lambda i: (len(answers[i].ids), i))
        batches += [near[i:i + size] for i in range(0, len(near), size)]
    shuffle.shuffle(batches)
    return batches
