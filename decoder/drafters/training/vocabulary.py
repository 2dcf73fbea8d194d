"""The draft vocabulary: the tokens that the target emits most often, and the published maps to the target's vocabulary."""

from collections.abc import Sequence

import torch

from .answers import Answer


def draft_vocabulary(answers: Sequence[Answer], size: int, limit: int) -> torch.Tensor:
    """The target ids [size] of a draft vocabulary, ascending: the most frequent ids in the answers, lower ids first among equals.
    limit: ids of the tokenizer."""
    counts = token_counts(answers, limit)
    order = torch.argsort(counts, descending=True, stable=True)
    return order[:size].sort().values


def coverage(answers: Sequence[Answer], ids: torch.Tensor, limit: int) -> float:
    """The share of the answers' tokens in the draft vocabulary `ids`, 0..1."""
    counts = token_counts(answers, limit)
    return float(counts[ids].sum() / counts.sum())


def token_counts(answers: Sequence[Answer], limit: int) -> torch.Tensor:
    """[limit]: occurrences of each id in the answers, without their prompts."""
    return torch.bincount(torch.cat([a.ids[a.start:] for a in answers]).long(), minlength=limit)[:limit]


def vocabulary_maps(ids: torch.Tensor, vocab_size: int) -> dict[str, torch.Tensor]:
    """d2t int64 [V_d]: offsets, target id = i + d2t[i]; t2d bool [V]: membership. ids [V_d]: target ids, ascending."""
    member = torch.zeros(vocab_size, dtype=torch.bool)
    member[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": member}
