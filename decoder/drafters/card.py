"""The card of a trained drafter: data, settings and results, as card.json and as card.md."""

import dataclasses
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

from ...shapes.fields import read_fields
from ...shapes.files import replace_text
from ..errors import LoadError
from .identity import TargetIdentity

JSON, MARKDOWN = "card.json", "card.md"
PACKAGES = ("tune-kernels", "torch", "transformers", "safetensors")


@dataclass(frozen=True)
class TargetFacts:
    """source: the checkpoint's name, without its folder; weights: fingerprint of its tensors; feature_layers: that the drafter
    reads."""

    source: str
    identity: TargetIdentity
    weights: str
    feature_layers: tuple[int, ...]


@dataclass(frozen=True)
class DataFacts:
    """prompts: the file's name; answers, answer_tokens: used in training; coverage: share of the held-out answers' tokens in the
    draft vocabulary, 0..1."""

    prompts: str
    prompts_sha256: str
    training_prompts: int
    held_out_prompts: int
    answers: int
    answer_tokens: int
    temperatures: tuple[float, ...]
    draft_vocabulary: int
    coverage: float


@dataclass(frozen=True)
class TrainingFacts:
    """batch: answers per step; unroll: drafted tokens per row; seconds: of the whole run; loss: mean over the steps between
    the last two evaluations."""

    seed: int
    steps: int
    batch: int
    unroll: int
    learning_rate: float
    seconds: float
    parameters: int
    loss: float


@dataclass(frozen=True)
class KindResult:
    """tau and acceptance by drafted position, on greedy answers to held-out prompts. kind: `all` for all kinds."""

    kind: str
    draft_length: int
    tokens: int
    rounds: int
    tau: float
    acceptance: tuple[float, ...]


@dataclass(frozen=True)
class Card:
    """results: of the trained weights; stored_results: of the weights in the file; bytes: of the file."""

    target: TargetFacts
    data: DataFacts
    training: TrainingFacts
    results: tuple[KindResult, ...]
    stored_results: tuple[KindResult, ...]
    storage: str
    bytes: int
    hardware: str
    versions: Mapping[str, str]
    schema: Literal["tune-kernels/drafter-card/1"] = "tune-kernels/drafter-card/1"

    def tau(self, kind: str = "all") -> float:
        """tau of the stored weights."""
        return next(r.tau for r in self.stored_results if r.kind == kind)


def hardware_of(device: torch.device) -> str:
    """The GPU's name, or the CPU with its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def versions() -> dict[str, str]:
    """The versions of Python and of PACKAGES."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def write_card(folder: Path, card: Card, curve: str) -> None:
    """Writes card.json and card.md. curve: name of the picture beside them."""
    replace_text(folder / JSON, json.dumps(dataclasses.asdict(card), indent=2, sort_keys=True) + "\n")
    replace_text(folder / MARKDOWN, as_markdown(card, curve))


def read_card(folder: Path) -> Card:
    """The card in `folder`.

    Raises:
        LoadError: no card, or one of another schema.
    """
    return read_fields(folder / JSON, LoadError).read(Card)


def as_markdown(card: Card, curve: str) -> str:
    """The card as Markdown."""
    data, training = card.data, card.training
    rows = [("target", f"{card.target.source}, features after layers {', '.join(map(str, card.target.feature_layers))}"),
            ("target's weights", card.target.weights), ("target's sizes", card.target.identity.shape),
            ("target's vocabulary", card.target.identity.vocabulary),
            ("prompts", f"{data.prompts}: {data.training_prompts} for training, {data.held_out_prompts} held out"),
            ("answers", f"{data.answers}, {data.answer_tokens} tokens, sampled from the target at temperatures "
             f"{', '.join(map(str, data.temperatures))}"),
            ("draft vocabulary", f"{data.draft_vocabulary} tokens, {100 * data.coverage:.1f}% of the held-out answers"),
            ("training", f"{training.steps} steps of {training.batch} answers, {training.unroll} drafted tokens unrolled, "
             f"learning rate {training.learning_rate:g}, seed {training.seed}, {training.seconds:.0f} s in all"),
            ("parameters", f"{training.parameters}"), ("stored", f"{card.storage}, {card.bytes} bytes"),
            ("hardware", card.hardware), ("versions", ", ".join(f"{n} {v}" for n, v in card.versions.items()))]
    lines = ["# An EAGLE-3 drafter", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), "",
             "Tokens per round (tau) and acceptance by drafted position, greedy, on the target's answers to held-out prompts:",
             "", *_table(card.stored_results, "stored weights"), "", *_table(card.results, "weights as trained"), "",
             f"![loss and tau by training step]({curve})", ""]
    return "\n".join(lines)


def _table(results: Sequence[KindResult], title: str) -> list[str]:
    length = results[0].draft_length
    head = [f"{title}, K = {length}", "tokens", "rounds", "tau", *(f"acceptance {i + 1}" for i in range(length))]
    rows = [[r.kind, str(r.tokens), str(r.rounds), f"{r.tau:.3f}", *(f"{a:.3f}" for a in r.acceptance)] for r in results]
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
