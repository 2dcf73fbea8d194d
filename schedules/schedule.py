"""Schedules: the knobs of a kernel under the field's names. A schedule decides how a result is computed, never the result.

The kernel's contract (`kernels/`) decides whether a schedule fits a shape.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import get_args, get_type_hints

from ..shapes.errors import UserError
from ..shapes.fields import nearest, shown
from ..shapes.own import Frozen, Knob, own_knobs
from .errors import ScheduleError


@dataclass(frozen=True)
class LinearSchedule:
    """Schedule of a linear.

    BLOCK_N: output columns per block. BLOCK_K: depth of one accumulation step. split_k: blocks that share one output tile, each
    writing an fp32 partial. orientation: `weights_as_m` swaps the operands, and a small row tile reaches the FP8 tensor-core
    instruction. row_tile: rows that a launch is padded to. blocks_per_sm: persistent blocks per SM; 0 launches a block per tile.
    load: of weights, by pointer or TMA. pdl: programmatic dependent launch. preload: a block loads all its weights before its
    dependency wait. early: with pdl, the next kernel may start with this one, not only after its main loop. maxnreg: maximum of
    registers per thread.
    """

    BLOCK_N: int
    BLOCK_K: int
    num_stages: int
    num_warps: int
    split_k: int = 1
    orientation: str = "weights_as_m"
    row_tile: int = 16
    blocks_per_sm: int = 0
    load: str = "pointer"
    preload: bool = False
    pdl: bool = False
    early: bool = False
    maxnreg: int | None = None


@dataclass(frozen=True)
class HeadSchedule:
    """Schedule of the language-model head, whose reduction isn't split. Knobs as in LinearSchedule."""

    BLOCK_N: int
    BLOCK_K: int
    num_stages: int
    num_warps: int
    row_tile: int = 16
    pdl: bool = False
    maxnreg: int | None = None


@dataclass(frozen=True)
class ScreenSchedule:
    """Schedule of a certified head's screen, which reads an int8 copy of the head. product: of int8 digits, or in bf16."""

    BLOCK_N: int
    BLOCK_K: int
    num_stages: int
    num_warps: int
    product: str = "int8"
    pdl: bool = False
    maxnreg: int | None = None


@dataclass(frozen=True)
class AttentionSchedule:
    """Schedule of split-KV attention. chunk: keys per block, fixed by the recipe because it orders the sums. TILE: query rows
    times group per block. BLOCK_N: keys per step."""

    chunk: int
    TILE: int
    BLOCK_N: int
    num_stages: int
    num_warps: int
    pdl: bool = False
    maxnreg: int | None = None


@dataclass(frozen=True)
class MergeSchedule:
    """Schedule of the merge. BLOCK_D: head dimensions per block. splits: partials that are loaded at once."""

    BLOCK_D: int
    splits: int
    num_warps: int
    pdl: bool = False
    maxnreg: int | None = None


@dataclass(frozen=True)
class FixedSchedule:
    """Schedule of a kernel that isn't tuned."""

    num_warps: int
    pdl: bool = False


@dataclass(frozen=True, kw_only=True)
class PrefillSchedule(FixedSchedule):
    """Schedule of a tiled prefill kernel. BLOCK_M: rows per tile. BLOCK_N: columns per tile, or keys per step."""

    BLOCK_M: int
    BLOCK_N: int
    num_stages: int


@dataclass(frozen=True)
class OwnSchedule:
    """Schedule of a user's kernel: constants of the function and compiler options, by name."""

    knobs: Frozen[Knob] = field(default_factory=Frozen)

    @property
    def num_warps(self) -> int:
        """Triton's default is 4."""
        found = self.knobs.get("num_warps")
        return found if isinstance(found, int) else 4

    @property
    def pdl(self) -> bool:
        """Programmatic dependent launch."""
        return self.knobs.get("launch_pdl") is True


@dataclass(frozen=True)
class StepSchedules:
    """The schedule of each tunable kernel of a decode step. lm_head_certified: None where the plain head runs. fc: an EAGLE-3
    drafter's, None in other models."""

    qkv: LinearSchedule
    o: LinearSchedule
    gate_up: LinearSchedule
    down: LinearSchedule
    attention: AttentionSchedule
    merge: MergeSchedule
    lm_head: HeadSchedule
    lm_head_certified: ScreenSchedule | None = None
    fc: LinearSchedule | None = None

    @property
    def row_tile(self) -> int:
        """The smallest row tile of the step's matrix products."""
        return min(s.row_tile for s in (self.qkv, self.o, self.gate_up, self.down, self.lm_head, self.fc) if s)

    def linear(self, kernel: str) -> LinearSchedule:
        """The schedule of one of the linears."""
        found = {"qkv": self.qkv, "o": self.o, "gate_up": self.gate_up, "down": self.down, "fc": self.fc}[kernel]
        assert found is not None, f"{kernel} isn't a kernel of this step"
        return found


Schedule = (LinearSchedule | HeadSchedule | ScreenSchedule | AttentionSchedule | MergeSchedule | FixedSchedule
            | OwnSchedule)

# Schedule types with fixed knobs: all but OwnSchedule.
KINDS: tuple[type[Schedule], ...] = (LinearSchedule, HeadSchedule, ScreenSchedule, AttentionSchedule, MergeSchedule,
                                     FixedSchedule, PrefillSchedule)
CHOICES = {"orientation": ("weights_as_m", "activations_as_m"), "load": ("pointer", "tma"), "product": ("int8", "bf16")}
MAY_BE_ZERO = ("blocks_per_sm",)


def knobs(kind: type[Schedule]) -> list[str]:
    """The knobs of a schedule type."""
    return [f.name for f in dataclasses.fields(kind)]


def check_knob(kind: type[Schedule], name: str, value: object) -> str | None:
    """The reason why `value` is illegal for this knob, or None. Doesn't check combinations of knobs."""
    if name not in knobs(kind):
        return f"unknown knob {shown(name)}{nearest(name, knobs(kind))}; expected one of {', '.join(knobs(kind))}"
    if name in CHOICES:
        return None if value in CHOICES[name] else f"{name} is {shown(value)}; expected one of {', '.join(CHOICES[name])}"
    hint = _types(kind)[name]  # type: ignore[arg-type]  # mypy holds a dataclass's type for unhashable
    if value is None and type(None) in get_args(hint):
        return None
    want = bool if hint is bool else int
    if type(value) is not want:
        return f"{name} is {shown(value)}; expected {'true or false' if want is bool else 'a whole number'}"
    least = 0 if name in MAY_BE_ZERO else 1
    if type(value) is int and not least <= value <= 2**20:
        return f"{name} is {shown(value)}; expected a positive number" + (" or 0" if name in MAY_BE_ZERO else "")
    return None


@cache
def _types(kind: type) -> dict[str, object]:
    """Type by knob. Cached: resolving them for each knob took more than half the time of reading a row."""
    return get_type_hints(kind)


def schedule_from_dict(kind: type[Schedule], table: Mapping[str, object], where: str,
                       error: type[UserError] = ScheduleError) -> Schedule:
    """A schedule from its knobs. Raises `error` for a knob that is unknown, missing or of the wrong type."""
    for name, value in table.items():
        if problem := check_knob(kind, name, value):
            raise error(f"{where}: {problem}")
    needed = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
    for name in needed:
        if name not in table:
            raise error(f"{where}: knob {name} is missing", expected=f"each of {', '.join(needed)}")
    return kind(**table)  # type: ignore[arg-type]  # each knob was checked above


def schedule_of(table: Mapping[str, object], where: str, error: type[UserError] = ScheduleError) -> Schedule:
    """A schedule of the type that has exactly these knobs. Raises `error` if there is none."""
    if set(table) == {"knobs"}:
        if not isinstance(table["knobs"], Mapping):
            raise error(f"{where}: knobs is {shown(table['knobs'])}", expected="a table of knobs")
        return OwnSchedule(own_knobs(table["knobs"], where, error))
    for kind in KINDS:
        if set(table) == set(knobs(kind)):
            return schedule_from_dict(kind, table, where, error)
    nearest_kind = max(KINDS, key=lambda kind: len(set(knobs(kind)) & set(table)))
    raise error(f"{where}: knobs {shown(sorted(map(str, table)))}",
                expected=f"exactly the knobs of one type, such as {', '.join(sorted(knobs(nearest_kind)))}")


def step_schedules(by_kernel: Mapping[str, Schedule]) -> StepSchedules:
    """The schedules of one step. by_kernel: by kernel name. Raises ScheduleError for a kernel without a schedule of its type."""
    for part in dataclasses.fields(StepSchedules):
        kind, *other = get_args(_types(StepSchedules)[part.name]) or (_types(StepSchedules)[part.name],)
        found = by_kernel.get(part.name)
        if not isinstance(found, kind) and not (found is None and other):
            raise ScheduleError(f"{part.name} has {'no schedule' if found is None else f'a {type(found).__name__}'}",
                                expected=f"a {kind.__name__}")
    return StepSchedules(**by_kernel)  # type: ignore[arg-type]  # each was checked above


def schedule_to_dict(schedule: Schedule) -> dict[str, object]:
    """As in files: the knobs by name; those of a user's kernel in a table `knobs`."""
    return {"knobs": dict(schedule.knobs)} if isinstance(schedule, OwnSchedule) else dataclasses.asdict(schedule)


def knobs_of(schedule: Schedule) -> Mapping[str, object]:
    """The knobs by name, of any schedule type."""
    return schedule.knobs if isinstance(schedule, OwnSchedule) else vars(schedule)


def schedule_id(schedule: Schedule) -> str:
    """A digest of the knobs: 12 hexadecimal digits. It links timings and evidence to their schedule."""
    text = json.dumps([type(schedule).__name__, schedule_to_dict(schedule)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
