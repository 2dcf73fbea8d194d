"""The gate: what a candidate must show before it may be promoted, cheapest first, and who decides what.

    reference, rows, determinism, numerics class   in `measure`, for every candidate, before it is timed
    class rule                                     a schedule of another class never enters by speed
    decoder agreement                              AR, SD and SSD tokens: the incumbents', and each other's
    full model                                     old and new alternating; the interval must exclude a slowdown
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ....schedules.promoted import Checks, Paired
from ....schedules.recipe import Recipe
from ....schedules.schedule import Schedule
from .timing import paired

REPEATS = 7  # of old and new in the full model; an interval of fewer than 5 pairs says little
ORDER = ("launch", "reference", "rows", "determinism", "class", "recipe")


@dataclass(frozen=True)
class Failure:
    """What a candidate failed, and how it showed. stage: one of ORDER, crash or hang."""

    stage: str
    detail: str


@dataclass(frozen=True)
class Checked:
    """What the checks of one candidate found. checks: by kind, (run, passed); numerics_class: where all passed."""

    checks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    error: float | None = None
    numerics_class: str | None = None
    failure: Failure | None = None


def checked_to_dict(checked: Checked) -> dict[str, Any]:
    return {"checks": {kind: list(counts) for kind, counts in checked.checks.items()}, "error": _finite(checked.error),
            "numerics_class": checked.numerics_class,
            "failure": None if checked.failure is None else [checked.failure.stage, checked.failure.detail]}


def checked_from_dict(table: Mapping[str, Any]) -> Checked:
    """Raises KeyError, TypeError or ValueError where the table isn't one."""
    checks = {str(kind): (int(run), int(passed)) for kind, (run, passed) in table["checks"].items()}
    failure = None if table["failure"] is None else Failure(*map(str, table["failure"]))
    return Checked(checks, table["error"], table["numerics_class"], failure)


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None


def other_recipe(recipe: Recipe, schedule: Any) -> str | None:
    """Why a schedule belongs to another recipe: it orders sums otherwise than this one fixes. None where it doesn't. How K is
    split is no part of the recipe: it shows in the class."""
    fixed = {"row_tile": recipe.row_tile, "chunk": recipe.kv_chunk}
    for knob, value in fixed.items():
        found = getattr(schedule, knob, value)
        if found != value:
            return f"{knob} {found}; recipe {recipe.name} fixes {value}"
    return None


class DecoderProbe(Protocol):
    """The full model, for the part of the gate that needs it. Schedules: those of kernels that aren't the decoder's own."""

    def tokens(self, schedules: Mapping[str, Schedule]) -> Mapping[str, Sequence[Sequence[int]]]:
        """Tokens by mode (ar, sd, ssd): a list for each prompt of the prompt set."""

    def time_step(self, old: Mapping[str, Schedule], new: Mapping[str, Schedule],
                  repeats: int) -> Mapping[str, Sequence[tuple[float, float]]]:
        """By mode, (old, new) times of a token in us, measured in turns."""


@dataclass(frozen=True)
class Agreement:
    """What the full model said of new schedules in place of the old. failure: None where they may be promoted."""

    checks: Mapping[str, Checks]
    prompts: int
    tokens_compared: int
    tokens_sha256: str | None
    full_model: Mapping[str, Paired]
    failure: str | None = None


def ask_decoder(probe: DecoderProbe, old: Mapping[str, Schedule], new: Mapping[str, Schedule], *, other_class: bool = False,
                repeats: int = REPEATS) -> Agreement:
    """Tokens first, then time; the first thing that is wrong ends it.

    other_class: the bits of old and new differ, as where a recipe is founded, so their tokens may: AR, SD and SSD must still
    agree with each other.
    """
    after = probe.tokens(new)
    modes, prompts = list(after), len(after["ar"])
    rights = [after["ar"]] if other_class or old == new else [probe.tokens(old)["ar"], after["ar"]]
    compared = [(mode, i, after[mode][i], right[i]) for right in rights for mode in modes for i in range(prompts)]
    wrong = [(mode, i, *found) for mode, i, tokens, right in compared if (found := first_difference(tokens, right))]
    checks = {"agreement": Checks(len(compared), len(compared) - len(wrong))}
    digest = hashlib.sha256(json.dumps([[list(t) for t in after[m]] for m in sorted(after)]).encode()).hexdigest()
    count = sum(len(tokens) for _, _, tokens, _ in compared)
    if wrong:
        mode, prompt, index, found, right = wrong[0]
        return Agreement(checks, prompts, count, digest, {},
                         f"{mode}, prompt {prompt}: token {index} is {found}, AR emits {right}")
    times = probe.time_step(old, new, repeats) if old != new else {}
    ratios = {mode: paired(np.array([b / a for a, b in pairs])) for mode, pairs in times.items()}
    full = {mode: found for mode, found in ratios.items() if found}
    slower = [mode for mode, found in full.items() if not found.interval[1] <= 1]
    if full:
        checks["full_model"] = Checks(len(full), len(full) - len(slower))
    return Agreement(checks, prompts, count, digest, full,
                     f"{slower[0]}: the interval of the full model's time, new over old, doesn't exclude a slowdown: "
                     f"{full[slower[0]].interval[0]} to {full[slower[0]].interval[1]}" if slower else None)


def first_difference(tokens: Sequence[int], right: Sequence[int]) -> tuple[int, Any, Any] | None:
    """(index, token, right token) of the first that differs; None stands for one that isn't there."""
    for i in range(max(len(tokens), len(right))):
        a, b = (s[i] if i < len(s) else None for s in (tokens, right))
        if a != b:
            return i, a, b
    return None


def agreement_from_dict(table: Mapping[str, Any]) -> Agreement:
    """As `dataclasses.asdict` gave it. Raises KeyError or TypeError where it isn't one."""
    full = {mode: Paired(p["ratio"], tuple(p["interval"]), p["pairs"]) for mode, p in table["full_model"].items()}
    return Agreement({kind: Checks(**c) for kind, c in table["checks"].items()}, table["prompts"], table["tokens_compared"],
                     table["tokens_sha256"], full, table["failure"])
