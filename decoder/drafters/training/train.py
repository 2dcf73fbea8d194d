"""A training run: the target's answers, training, the published files, the card and the curve."""

import math
from pathlib import Path

import torch

from ....shapes.files import replace_text
from ...checkpoint.loader import load_checkpoint
from ...checkpoint.weights import fingerprint
from ...errors import LoadError
from ...request.tokenizer import load_tokenizer
from ..card import Card, DataFacts, KindResult, TargetFacts, TrainingFacts, hardware_of, versions, write_card
from ..eagle3_checkpoint import expected_tensors as eagle3_tensors
from ..identity import identity_of
from .answers import TEMPERATURES, Answer, Sampler, load_answers, save_answers
from .curve import Line, curve_svg
from .export import WEIGHTS, drafter_shape, stored_network, write_drafter
from .prompts import PromptSet, load_prompts
from .settings import Settings, Sizes, cpu_hours
from .target import Target
from .tau import Tau, measure_tau
from .trainer import Progress, Trainer
from .work import Work

HELD_OUT, CURVE = "held-out.safetensors", "curve.svg"


def train_drafter(settings: Settings, sizes: Sizes, device: torch.device, progress: Progress) -> Card:
    """Trains a drafter, writes it with its card and curve, and returns the card.

    Raises:
        LoadError: the target can't be loaded or has no tokenizer; the folder holds a drafter, another run or anything else; the
            prompts can't be read.
        NumericsError: the loss became NaN or infinite.
    """
    work = Work(settings)
    checkpoint = load_checkpoint(settings.weights, None, torch.device("cpu"))
    assert checkpoint.path is not None  # random weights need a shape, so load_checkpoint refuses them
    tokenizer = load_tokenizer(checkpoint.path)
    weights = fingerprint(checkpoint.tensors)
    prompts = load_prompts(settings.prompts, settings.seed)
    work.claim(sizes, weights, prompts)
    target = Target(checkpoint, tokenizer, device, torch.bfloat16 if sizes.bf16 else torch.float32)
    progress(f"target {checkpoint.source}, features after layers {', '.join(map(str, target.layers))}; "
             f"{len(prompts.training)} prompts, {len(prompts.held_out)} held out")
    sampler = Sampler(target, prompts, settings.seed, sizes.answer_batch, sizes.new_tokens)
    answers, held_out = gather(sampler, sizes, work, progress)
    trainer = Trainer(target, answers, held_out, sizes, work)
    taus = trainer.run(progress)
    facts = TargetFacts(checkpoint.source, identity_of(target.shape, tokenizer), weights, target.layers)
    return publish(trainer, taus, facts, prompts, progress)


def refuse_cpu(settings: Settings) -> None:
    """Raises LoadError with an estimate of the training time on this CPU."""
    checkpoint = load_checkpoint(settings.weights, None, torch.device("cpu"))
    shape = checkpoint.config.shape
    sizes = eagle3_tensors(drafter_shape(shape, settings.draft_vocab), own_embedding=False)
    hours, speed = cpu_hours(sum(t.numel() for t in checkpoint.tensors.values()), sum(math.prod(s) for s in sizes.values()))
    raise LoadError(f"no GPU: on this CPU ({speed / 1e9:.0f} GFLOP/s) a useful drafter of {shape.name} takes about "
                    f"{hours:.0f} hours", expected="a GPU, where SmolLM2's takes minutes",
                    action="run on a GPU, or pass --device cpu to train on this CPU for --minutes")


def gather(sampler: Sampler, sizes: Sizes, work: Work, progress: Progress) -> tuple[list[Answer], list[Answer]]:
    """(training answers, greedy answers to the held-out prompts). Those of an interrupted run come from its folder."""
    kinds = tuple(dict.fromkeys(p.kind for p in (*sampler.prompts.training, *sampler.prompts.held_out)))
    batches: list[list[Answer]] = []
    while (path := _answers_path(work, len(batches))).is_file():
        batches.append(load_answers(path, kinds))
    if not (work.folder / HELD_OUT).is_file():
        last = 0.0
        while _more_answers(len(batches), last, sizes, work):
            began = work.seconds
            batches.append(sampler.sample(len(batches), batches[-1] if batches else []))
            save_answers(_answers_path(work, len(batches) - 1), batches[-1], kinds)
            work.note_seconds()
            last = work.seconds - began
            progress(f"answers {sum(map(len, batches))}, {sum(a.tokens for b in batches for a in b)} tokens, "
                     f"{sum(a.tokens for a in batches[-1]) / last:.0f} tokens/s, {work.seconds:.0f} of {work.limit:.0f} s")
        save_answers(work.folder / HELD_OUT, sampler.held_out(), kinds)
    return [a for batch in batches for a in batch if a.tokens > 1], load_answers(work.folder / HELD_OUT, kinds)


def _answers_path(work: Work, number: int) -> Path:
    return work.folder / f"answers-{number:04d}.safetensors"


def _more_answers(done: int, last: float, sizes: Sizes, work: Work) -> bool:
    """Whether another batch of answers is due. done: batches so far; last: seconds of the last one."""
    if sizes.answer_batches is not None:
        return done < sizes.answer_batches
    return done == 0 or work.seconds + last / 2 < sizes.answer_share * work.limit


def publish(trainer: Trainer, taus: dict[str, Tau], target: TargetFacts, prompts: PromptSet, progress: Progress) -> Card:
    """Writes the drafter, measures tau of the written one, then writes curve and card. The weights are moved last: a folder with
    weights is complete."""
    settings, network = trainer.work.settings, trainer.network
    out, draft = settings.out, trainer.work.folder / "drafter"
    write_drafter(draft, network, trainer.target.layers, settings.storage)
    stored = measure_tau(stored_network(draft, network), trainer.target, trainer.held_out, trainer.sizes.draft_length)
    card = Card(target, data_facts(trainer, prompts), training_facts(trainer), results_of(taus), results_of(stored),
                settings.storage, (draft / WEIGHTS).stat().st_size, hardware_of(trainer.target.device), versions())
    points = trainer.history
    loss = Line("loss", [(p.step, p.loss) for p in points if math.isfinite(p.loss)])
    lines = [Line(kind, [(p.step, p.tau[kind]) for p in points]) for kind in points[-1].tau]
    title = f"EAGLE-3 drafter of {target.source.removeprefix('path:')}"
    replace_text(out / CURVE, curve_svg(title, loss, lines))
    write_card(out, card, CURVE)
    for path in sorted(draft.iterdir()):  # config.json, then model.safetensors
        path.replace(out / path.name)
    draft.rmdir()
    progress(f"{out}: tau {card.tau():.3f} from the stored weights ({settings.storage}, {card.bytes} bytes)")
    return card


def results_of(taus: dict[str, Tau]) -> tuple[KindResult, ...]:
    """The card's results."""
    return tuple(KindResult(kind, t.draft_length, t.emitted, t.rounds, round(t.tokens_per_round, 4),
                            tuple(round(a, 4) for a in t.acceptance)) for kind, t in taus.items())


def data_facts(trainer: Trainer, prompts: PromptSet) -> DataFacts:
    """The card's facts on the data."""
    answers = trainer.answers
    return DataFacts(prompts.source, prompts.digest, len(prompts.training), len(prompts.held_out), len(answers),
                     sum(a.tokens for a in answers), TEMPERATURES, len(trainer.network.ids), round(trainer.coverage, 4))


def training_facts(trainer: Trainer) -> TrainingFacts:
    """The card's facts on the training."""
    sizes = trainer.sizes
    return TrainingFacts(trainer.seed, trainer.step, sizes.batch, sizes.unroll, sizes.learning_rate,
                         round(trainer.work.seconds, 1), sum(p.numel() for p in trainer.network.parameters()),
                         round(trainer.history[-1].loss, 4))
