"""Every kernel that the decoder launches, by name. A kernel that is registered here, or among FIXED, is compiled, inspected and
bundled by the tuner, and tested to compile without a spill for every target."""

from dataclasses import replace

from ..schedules.recipe import Recipe
from ..schedules.schedule import LinearSchedule, Schedule, schedule_from_dict
from ..schedules.store import Key
from ..shapes.model import KernelShape, LinearShape
from ..shapes.target import Target
from . import attention, bundle, linear, lm_head, merge, toolchain
from .findings import FINDINGS
from .fixed import FIXED
from .linear import PRELOADED
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
}

IN_SPACES: dict[str, AnyOperation] = TUNABLE | {name: finding.operation for name, finding in FINDINGS.items()}

# lm_head_logits has no default of its own: it must have lm_head's bits, so it has lm_head's schedule.
DEFAULT_OF = {"lm_head_logits": "lm_head"}


def known(kernel: str) -> bool:
    """Whether there is a kernel of this name."""
    return kernel in IN_SPACES or kernel in FIXED


def operation(kernel: str) -> AnyOperation:
    """The operation of a kernel of this name. Raises KeyError."""
    return IN_SPACES[kernel] if kernel in IN_SPACES else FIXED[kernel].operation


def jitted() -> list[Jitted]:
    """The jitted function of every kernel, each once."""
    return list({id(k): k for k in (operation(name).kernel for name in (*TUNABLE, *FIXED))}.values())


def default_schedule(recipe: Recipe, kernel: str, arch: str, shape: KernelShape | None = None) -> Schedule:
    """The recipe's default for one kernel and target, fitted to a shape where one is given: defaults are a 7B model's. Raises
    ScheduleError where its knobs are wrong."""
    if kernel in FIXED:
        return FIXED[kernel].schedule
    name = DEFAULT_OF.get(kernel, kernel)
    schedule = schedule_from_dict(TUNABLE[kernel].schedule_type, recipe.defaults[arch][name],
                                  f"{recipe.name}: defaults.{arch}.{name}")
    if isinstance(schedule, LinearSchedule) and isinstance(shape, LinearShape):
        schedule = _fitted(schedule, shape, TUNABLE[kernel])
    return schedule


def store_key(kernel: str, shape: KernelShape, target: Target, recipe: Recipe) -> Key:
    """The key under which this kernel's schedule is promoted and looked up, with the toolchain that is here."""
    return Key(target.name, recipe.name, kernel, shape, toolchain.installed(target, recipe.numerics),
               bundle.kernel_digest(operation(kernel).kernel))


def _fitted(schedule: LinearSchedule, shape: LinearShape, linear: AnyOperation) -> LinearSchedule:
    """Splits as deep as in the default where weights are preloaded and K allows it; else as many splits as there are steps at
    most, and nothing preloaded."""
    if linear.contract(shape, schedule) is None:
        return schedule
    steps, depth = -(-shape.K // schedule.BLOCK_K), PRELOADED // (schedule.BLOCK_N * schedule.BLOCK_K)
    deep = replace(schedule, split_k=max(1, steps // max(1, depth)))
    if schedule.preload and linear.contract(shape, deep) is None:
        return deep
    return replace(schedule, split_k=min(schedule.split_k, steps), preload=False)
