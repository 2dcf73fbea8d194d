"""`tune-kernels verify`: runs the three kinds of checks and collects their evidence."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..checkpoint.loader import load_checkpoint
from ..checkpoint.weights import fingerprint
from ..engine import Decoder
from ..errors import RequestError
from ..loading import LoadOptions
from .agreement import Agreement
from .check import CheckResult, Countdown, run_checks
from .evidence import Evidence
from .quality import load_task, measure_text, task_check, text_checks
from .reference import compare_with_reference, reference_model
from .upgrade import require_evidence, require_promoted

AGREEMENT_PROMPT = 24  # tokens of the agreement checks' prompt
Report = Callable[[CheckResult, str], None]  # a result, and the progress of the run, such as " (12 of 233, 40 s left)"


@dataclass(frozen=True)
class Plan:
    """The model and its checks. weights, model, recipe, drafter, options: see Decoder.load; kinds: of checks; text: a file;
    context: tokens of it in the reference check; text_tokens: tokens of it in the quality check, None for all; task: see
    quality.load_task; promote: whether the promoted rows in use shall get the evidence."""

    weights: str
    model: str | None
    recipe: str
    drafter: str | None
    options: LoadOptions
    kinds: tuple[str, ...]
    text: Path
    task: Path
    context: int
    text_tokens: int | None
    promote: bool = False


def verify(plan: Plan, report: Report, progress: Callable[[str], None]) -> Evidence:
    """Runs the plan's checks. report: called with each result; progress: called with the step under way.

    Raises:
        LoadError: the model or its drafter can't be loaded.
        RequestError: a text or task can't be read; `promote` without the checks or rows that it needs.
    """
    if plan.promote:
        require_evidence(plan.weights, plan.kinds)
    checkpoint = load_checkpoint(plan.weights, plan.model, torch.device("cpu"))
    mark = fingerprint(checkpoint.tensors)
    decoder = Decoder.load(plan.weights, plan.model, plan.recipe, plan.drafter, **plan.options)
    ids = text_ids(decoder, plan)
    evidence = Evidence(decoder.source, mark, plan.recipe, decoder.model.notes.name,
                        in_use=require_promoted(decoder.model.notes) if plan.promote else ())
    linear = decoder.recipe.precision.linear

    def keep(results: Iterator[CheckResult], countdown: Countdown | None = None) -> None:
        for result in results:
            evidence.results.append(result)
            report(result, f" ({countdown.step()})" if countdown else "")

    if "agreement" in plan.kinds:
        agreement = Agreement(decoder, ids[:AGREEMENT_PROMPT])
        checks = list(agreement.checks())
        keep(run_checks("agreement", iter(checks)), Countdown(len(checks)))
        evidence.prompts = len(agreement.prompts)
        evidence.tokens_compared = agreement.tokens_compared
        evidence.tokens_hash = hashlib.sha256(json.dumps(agreement.emitted).encode()).hexdigest()
    if "reference" in plan.kinds:
        progress("loading Hugging Face's model")
        keep(compare_with_reference(decoder, reference_model(checkpoint, linear), ids[:plan.context], linear))
    del checkpoint
    if "quality" in plan.kinds:
        if decoder.tokenizer is None:
            evidence.not_run.append("quality: the model has no tokenizer")
        else:
            keep(quality(decoder, plan, ids, linear, progress))
    return evidence


def text_ids(decoder: Decoder, plan: Plan) -> list[int]:
    """The text's token ids; without a tokenizer, its bytes spread over the vocabulary. Raises RequestError if it can't be
    read."""
    try:
        text = plan.text.read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise RequestError(f"{plan.text}: {e}", expected="a text file", action="name one with --text") from None
    if decoder.tokenizer is None:
        size = decoder.model.vocab_limit
        return [(i * 7919 + byte * 104729) % size for i, byte in enumerate(text.encode()[:plan.context])]
    return decoder.tokenizer.encode(text)


def quality(decoder: Decoder, plan: Plan, ids: list[int], linear: str,
            progress: Callable[[str], None]) -> Iterator[CheckResult]:
    """The quality checks against an fp32 decoder of the same weights."""
    on_torch: LoadOptions = {**plan.options, "backend": "torch"}
    fp32 = decoder if linear == "fp32" else Decoder.load(plan.weights, plan.model, "fp32", None, **on_torch)
    part = ids[:plan.text_tokens]
    countdown = Countdown(len(part) - 1)
    tally = measure_text(decoder, fp32, part, lambda done: progress(f"quality text, tokens: {countdown.step(done)}"))
    yield from text_checks(tally, linear)
    progress("task")
    yield task_check(decoder, fp32, load_task(plan.task), linear)
