"""`tune-kernels verify`: the three checks, counted apart, and their evidence as JSON."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..checkpoint.loader import load_checkpoint
from ..checkpoint.weights import fingerprint
from ..engine import Decoder
from ..errors import RequestError
from .agreement import Agreement
from .check import CheckResult, Countdown, run_checks
from .evidence import Evidence
from .quality import load_task, measure_text, task_check, text_checks
from .reference import compare_with_reference, reference_model
from .upgrade import require_evidence, require_promoted

AGREEMENT_PROMPT = 24  # tokens of the text that the agreement checks begin with
Report = Callable[[CheckResult, str], None]  # a result, and where the run stands, such as " (12 of 233, 40 s left)"


@dataclass(frozen=True)
class Plan:
    """What to verify. text: the file whose beginning is the context and whose whole is the quality text; promote: whether the
    promoted rows in use are to have the evidence."""

    weights: str
    model: str | None
    recipe: str
    drafter: str | None
    backend: str | None
    device: str | None
    capacity: int | None
    kinds: tuple[str, ...]
    text: Path
    task: Path
    context: int
    text_tokens: int | None
    schedules: str | None = None
    allow_untuned: bool = False
    no_graphs: bool = False
    drafter_device: str | None = None
    promote: bool = False


def verify(plan: Plan, report: Report, progress: Callable[[str], None]) -> Evidence:
    """Runs the plan's checks; `report` sees each result as it comes.

    Raises:
        LoadError, RequestError: what can't be loaded or read; a plan to promote what these checks can't prove.
    """
    if plan.promote:
        require_evidence(plan.weights, plan.kinds)
    checkpoint = load_checkpoint(plan.weights, plan.model, torch.device("cpu"))
    mark = fingerprint(checkpoint.tensors)
    decoder = load_decoder(plan, plan.recipe, plan.drafter)
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
            evidence.not_run.append("quality: random weights have no tokenizer and nothing to be good at")
        else:
            keep(quality(decoder, plan, ids, linear, progress))
    return evidence


def load_decoder(plan: Plan, recipe: str, drafter: str | None) -> Decoder:
    """The plan's model under a recipe."""
    return Decoder.load(plan.weights, model=plan.model, recipe=recipe, drafter=drafter, backend=plan.backend, device=plan.device,
                        drafter_device=plan.drafter_device, capacity=plan.capacity, schedules=plan.schedules,
                        allow_untuned=plan.allow_untuned, graphs=not plan.no_graphs)


def text_ids(decoder: Decoder, plan: Plan) -> list[int]:
    """The text's token ids; without a tokenizer, bytes spread over the vocabulary."""
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
    fp32 = decoder if linear == "fp32" else load_decoder(replace(plan, backend="torch"), "fp32", None)
    part = ids[:plan.text_tokens]
    countdown = Countdown(len(part) - 1)
    tally = measure_text(decoder, fp32, part, lambda done: progress(f"quality text, tokens: {countdown.step(done)}"))
    yield from text_checks(tally, linear)
    progress("task")
    yield task_check(decoder, fp32, load_task(plan.task), linear)
