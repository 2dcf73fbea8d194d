"""Check 3, quality: does the model keep its quality under the recipe's precision?

Perplexity, top-1 agreement and KL divergence against fp32, on a public-domain text of more than 20,000 tokens, in windows of
their own context each. And a small task, `capitals`: the model ranks four answers by log-probability.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ...shapes.fields import read_fields
from ..engine import Decoder
from ..errors import RequestError
from ..rows import Appended
from .check import CheckResult, result

WINDOW = 512  # tokens per context; it crosses a chunk boundary once
PASS = 128  # rows per pass


@dataclass(frozen=True)
class Item:
    """One question of the task. subject: goes into the question; answer: the right one."""

    subject: str
    answer: str
    others: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """question: with one `{}` for the subject."""

    name: str
    question: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Bounds:
    """Limits against fp32. perplexity: largest ratio; top1: least agreement, 0..1; kl: largest mean divergence, in nats; items:
    most items of the task that may be lost."""

    perplexity: float
    top1: float
    kl: float
    items: int


BOUNDS = {"fp32": Bounds(1.0, 1.0, 0.0, 0), "bf16": Bounds(1.01, 0.96, 0.005, 1), "e4m3": Bounds(1.02, 0.90, 0.03, 2)}


@dataclass
class Tally:
    """Sums over positions. nll, nll_fp32: negative log-likelihood of the next token, in nats; same: positions with equal winners;
    kl: divergence from fp32, in nats."""

    positions: int = 0
    nll: float = 0.0
    nll_fp32: float = 0.0
    same: int = 0
    kl: float = 0.0


def measure_text(decoder: Decoder, fp32: Decoder, ids: list[int], progress: Callable[[int], None]) -> Tally:
    """Runs both models over the text, window by window. progress: called with the positions done."""
    tally = Tally()
    for start in range(0, len(ids) - 1, WINDOW):
        window = ids[start:start + WINDOW + 1]
        inputs, targets = window[:-1], torch.tensor(window[1:])
        rows = ((p, p) for p in _rows(decoder, inputs)) if decoder is fp32 else zip(_rows(decoder, inputs), _rows(fp32, inputs))
        for (p, q), at in zip(rows, range(0, len(inputs), PASS)):
            index = targets[at:at + PASS, None]
            tally.positions += len(index)
            tally.nll -= float(p.gather(-1, index).sum())
            tally.nll_fp32 -= float(q.gather(-1, index).sum())
            tally.same += int((p.argmax(-1) == q.argmax(-1)).sum())
            tally.kl += float((q.exp() * (q - p)).sum())
        progress(tally.positions)
    return tally


def _rows(decoder: Decoder, tokens: list[int]) -> Iterator[torch.Tensor]:
    """Log-probabilities [PASS, V] in fp64 on the CPU, pass by pass."""
    model = decoder.model
    cache = model.new_cache(len(tokens))
    for start in range(0, len(tokens), PASS):
        part = tokens[start:start + PASS]
        logits = model.logits(model.forward(part, Appended(cache, len(part))).final)[:, :model.vocab_limit]
        yield torch.log_softmax(logits.double(), dim=-1).cpu()


def text_checks(tally: Tally, linear: str) -> Iterator[CheckResult]:
    """Checks perplexity, agreement and divergence against BOUNDS. linear: the recipe's precision of the projections."""
    bounds, n = BOUNDS[linear], tally.positions
    ours, plain = math.exp(tally.nll / n), math.exp(tally.nll_fp32 / n)
    yield result("quality", "perplexity", ours <= bounds.perplexity * plain,
                 f"{ours:.4f} over {n} tokens; fp32 {plain:.4f}; ratio {ours / plain:.5f} (bound {bounds.perplexity})",
                 perplexity=ours, fp32=plain, tokens=n)
    share = tally.same / n
    yield result("quality", "top-1 agreement with fp32", share >= bounds.top1, f"{share:.5f} (bound {bounds.top1})",
                 top1=share)
    kl = max(tally.kl / n, 0.0)
    yield result("quality", "KL divergence from fp32", kl <= bounds.kl, f"{kl:.3e} nats per token (bound {bounds.kl})",
                 kl_nats=kl)


def load_task(path: Path) -> Task:
    """The task in a TOML file. Raises RequestError if it can't be read or isn't a task."""
    return read_fields(path, RequestError).read(Task)


def right_answers(decoder: Decoder, task: Task) -> int:
    """Number of items whose right answer has the highest mean log-probability per token after the question."""
    return sum(_is_right(decoder, task.question.format(item.subject), [item.answer, *item.others]) for item in task.items)


def _is_right(decoder: Decoder, question: str, answers: list[str]) -> bool:
    assert decoder.tokenizer is not None
    asked = decoder.tokenizer.encode(question)
    scores = []
    for answer in answers:
        ids = decoder.tokenizer.encode(f" {answer}")
        rows = torch.cat(list(_rows(decoder, (asked + ids)[:-1])))[len(asked) - 1:]
        scores.append(float(rows.gather(-1, torch.tensor(ids)[:, None]).mean()))
    return scores[0] > max(scores[1:])


def task_check(decoder: Decoder, fp32: Decoder, task: Task, linear: str) -> CheckResult:
    """Checks that the recipe loses at most BOUNDS.items items against fp32."""
    ours, n = right_answers(decoder, task), len(task.items)
    plain = ours if decoder is fp32 else right_answers(fp32, task)
    return result("quality", f"task {task.name}", ours >= plain - BOUNDS[linear].items,
                  f"{ours} of {n} items right; fp32 {plain}", right=ours, fp32=plain, items=n)
