"""Every kernel that the decoder launches, by name. The tuner compiles, inspects and bundles each kernel of TUNABLE and FIXED. The
tests compile each for every target, without a spill."""

from dataclasses import replace

from ..schedules.recipe import Recipe
from ..schedules.schedule import LinearSchedule, Schedule, schedule_from_dict
from ..schedules.store import Key
from ..shapes.model import KernelShape, LinearShape
from ..shapes.target import Target
from . import attention, bundle, linear, lm_head, merge, screen, toolchain
from .findings import FINDINGS
from .fixed import FIXED
from .linear import PRELOADED
from .loading import Source, load
from .operation import AnyOperation, Jitted

TUNABLE: dict[str, AnyOperation] = {
    "qkv": linear.OPERATION,
    "o": linear.OPERATION,
    "gate_up": linear.OPERATION,
    "down": linear.OPERATION,
    "fc": linear.OPERATION,
    "attention": attention.OPERATION,
    "merge": merge.OPERATION,
    "lm_head": lm_head.ARGMAX,
    "lm_head_logits": lm_head.LOGITS,
    "lm_head_certified": screen.SCREEN,
}

IN_SPACES: dict[str, AnyOperation] = TUNABLE | {name: finding.operation for name, finding in FINDINGS.items()}

# lm_head_logits must have lm_head's bits, so it runs under lm_head's default.
DEFAULT_OF = {"lm_head_logits": "lm_head"}


def known(kernel: str) -> bool:
    return kernel in IN_SPACES or kernel in FIXED


def operation(kernel: str, source: Source | None = None) -> AnyOperation:
    """The operation of a kernel. source: of a user's, whose file is imported here: in a worker. Raises KeyError for an unknown
    name, KernelError for a file that isn't what it was."""
    if source is not None:
        return load(source).operation
    return IN_SPACES[kernel] if kernel in IN_SPACES else FIXED[kernel].operation


def jitted() -> list[Jitted]:
    """The jitted function of every kernel, each once."""
    return list({id(k): k for k in (operation(name).kernel for name in (*TUNABLE, *FIXED))}.values())


def default_schedule(recipe: Recipe, kernel: str, arch: str, shape: KernelShape | None = None) -> Schedule:
    """The recipe's default for one kernel and target. shape: fits the default, which is a 7B model's, to this shape.

    Raises:
        ScheduleError: the recipe's knobs are wrong.
    """
    if kernel in FIXED:
        return FIXED[kernel].schedule
    name = DEFAULT_OF.get(kernel, kernel)
    schedule = schedule_from_dict(TUNABLE[kernel].schedule_type, recipe.defaults[arch][name],
                                  f"{recipe.name}: defaults.{arch}.{name}")
    if isinstance(schedule, LinearSchedule) and isinstance(shape, LinearShape):
        schedule = _fitted(schedule, shape, TUNABLE[kernel])
    return schedule


def store_key(kernel: str, shape: KernelShape, target: Target, recipe: Recipe) -> Key:
    """The key under which this kernel's schedule is promoted and looked up, with the installed toolchain."""
    return Key(target.name, recipe.name, kernel, shape, toolchain.installed(target, recipe.numerics),
               bundle.kernel_digest(operation(kernel).kernel))


def _fitted(schedule: LinearSchedule, shape: LinearShape, linear: AnyOperation) -> LinearSchedule:
    """The schedule if it is legal. Else splits as deep as the default's, with preloaded weights, if K allows that; else at most
    one split per K step, nothing preloaded."""
    if linear.contract(shape, schedule) is None:
        return schedule
    steps, depth = -(-shape.K // schedule.BLOCK_K), PRELOADED // (schedule.BLOCK_N * schedule.BLOCK_K)
    deep = replace(schedule, split_k=max(1, steps // max(1, depth)))
    if schedule.preload and linear.contract(shape, deep) is None:
        return deep
    return replace(schedule, split_k=min(schedule.split_k, steps), preload=False)
