"""Check 3, quality: does the model keep its quality under this precision?

A fixed public-domain text of more than 20,000 tokens: perplexity, top-1 agreement and KL divergence against fp32, in
windows that start afresh. And one small task, `capitals`: four answers, ranked by log-probability.
"""

import math
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ...shapes.fields import Table
from ..engine import Decoder
from ..errors import RequestError
from ..rows import Appended
from .check import CheckResult, result

WINDOW = 512  # tokens per context; crosses a chunk boundary once
PASS = 128  # rows per pass


@dataclass(frozen=True)
class Bounds:
    """perplexity: largest ratio to fp32's; top1: least agreement with fp32; kl: largest mean divergence, in nats;
    items: most items of the task that may be lost against fp32."""

    perplexity: float
    top1: float
    kl: float
    items: int


BOUNDS = {"fp32": Bounds(1.0, 1.0, 0.0, 0), "bf16": Bounds(1.01, 0.96, 0.005, 1), "e4m3": Bounds(1.02, 0.90, 0.03, 2)}


@dataclass
class Tally:
    """Sums over positions. nll: of the next token under the recipe and under fp32, in nats."""

    positions: int = 0
    nll: float = 0.0
    nll_fp32: float = 0.0
    same: int = 0
    kl: float = 0.0


def measure_text(decoder: Decoder, fp32: Decoder, ids: list[int], progress: Callable[[int], None]) -> Tally:
    """Both models over the text, window by window."""
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
    """Log-probabilities [PASS, V] in fp64, pass by pass."""
    model = decoder.model
    cache = model.new_cache(len(tokens))
    for start in range(0, len(tokens), PASS):
        part = tokens[start:start + PASS]
        logits = model.logits(model.forward(part, Appended(cache, len(part))).final)[:, :model.vocab_limit]
        yield torch.log_softmax(logits.double(), dim=-1).cpu()


def text_checks(tally: Tally, linear: str) -> Iterator[CheckResult]:
    """Perplexity, agreement and divergence within the recipe's bounds."""
    bounds, n = BOUNDS[linear], tally.positions
    ours, plain = math.exp(tally.nll / n), math.exp(tally.nll_fp32 / n)
    yield result("quality", "perplexity", ours <= bounds.perplexity * plain,
                 f"{ours:.4f} over {n} tokens; fp32 {plain:.4f}; ratio {ours / plain:.5f} (bound {bounds.perplexity})",
                 perplexity=ours, fp32=plain, tokens=n)
    share = tally.same / n
    yield result("quality", "top-1 agreement with fp32", share >= bounds.top1, f"{share:.5f} (bound {bounds.top1})",
                 top1=share)
    kl = max(tally.kl / n, 0.0)
    yield result("quality", "KL divergence from fp32", kl <= bounds.kl, f"{kl:.3e} nats a token (bound {bounds.kl})",
                 kl_nats=kl)


def load_task(path: Path) -> Table:
    """The task: `name`, `question` with one place for the item, `items` with `subject`, `answer` and `others`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise RequestError(f"{path}: {e}", expected="the task's TOML file") from None


def right_answers(decoder: Decoder, task: Table) -> int:
    """Items whose right answer has the highest log-probability after the question."""
    return sum(_is_right(decoder, task["question"].format(item["subject"]), [item["answer"], *item["others"]])
               for item in task["items"])


def _is_right(decoder: Decoder, question: str, answers: list[str]) -> bool:
    assert decoder.tokenizer is not None
    asked = decoder.tokenizer.encode(question)
    scores = []
    for answer in answers:
        ids = decoder.tokenizer.encode(f" {answer}")
        rows = torch.cat(list(_rows(decoder, (asked + ids)[:-1])))[len(asked) - 1:]
        scores.append(float(rows.gather(-1, torch.tensor(ids)[:, None]).mean()))
    return scores[0] > max(scores[1:])


def task_check(decoder: Decoder, fp32: Decoder, task: Table, linear: str) -> CheckResult:
    """The recipe loses at most a few items against fp32."""
    ours, n = right_answers(decoder, task), len(task["items"])
    plain = ours if decoder is fp32 else right_answers(fp32, task)
    return result("quality", f"task {task['name']}", ours >= plain - BOUNDS[linear].items,
                  f"{ours} of {n} items right; fp32 {plain}", right=ours, fp32=plain, items=n)
