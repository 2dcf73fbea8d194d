"""GPU targets: the limits of architectures and SKUs."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from .errors import ShapeError
from .fields import Count, Name, Positive, PositiveInt, Rule, nearest, read_fields

SHIPPED = Path(__file__).parent / "targets"
ARCHES = ("sm_103", "sm_100", "sm_90")


@dataclass(frozen=True)
class Target:
    """One SKU. gpus: its exact names in the driver. arch: the compiler's target. The fields from registers_per_sm to tmem_columns
    are equal for all SKUs of one arch. peak_tb_s, measured_tb_s: memory bandwidth in TB/s."""

    name: Name
    gpus: Annotated[tuple[str, ...], Rule("the exact names that the driver gives this GPU", lambda names: names and all(names))]
    arch: str
    sms: PositiveInt
    registers_per_sm: PositiveInt
    max_registers_per_thread: PositiveInt
    max_warps_per_sm: PositiveInt
    max_blocks_per_sm: PositiveInt
    shared_bytes_per_sm: PositiveInt
    shared_bytes_per_block: PositiveInt
    shared_bytes_reserved_per_block: PositiveInt
    tmem_columns: Count
    l2_bytes: PositiveInt
    peak_tb_s: Positive
    measured_tb_s: Positive | None
    source: str

    @property
    def capability(self) -> int:
        """103 for sm_103."""
        return int(self.arch.removeprefix("sm_"))


def _load(path: Path) -> Target:
    fields = read_fields(path, ShapeError)
    target = fields.read(Target)
    if target.arch not in ARCHES:
        raise fields.fail("arch", f"is {target.arch!r}", expected=f"one of {', '.join(ARCHES)}")
    return target


@cache
def load_targets() -> tuple[Target, ...]:
    """Every shipped SKU, by name."""
    return tuple(_load(p) for p in sorted(SHIPPED.glob("*.toml")))


def load_sku(name: str) -> Target:
    """A SKU by name, such as nvidia-h200. Raises ShapeError for an unlisted one."""
    for target in load_targets():
        if target.name == name:
            return target
    names = [t.name for t in load_targets()]
    raise ShapeError(f"unknown GPU {name!r}{nearest(name, names)}", expected=f"one of {', '.join(names)}",
                     action="add shapes/targets/SKU.toml with its limits and their source")


def sku_of(gpu: str) -> Target:
    """The SKU of a GPU by its exact name in the driver. Raises ShapeError for an unlisted one: GPUs with similar names and other
    memory or clocks (H200 NVL, H100 PCIe) are other SKUs."""
    for target in load_targets():
        if gpu in target.gpus:
            return target
    names = [name for target in load_targets() for name in target.gpus]
    raise ShapeError(f"GPU {gpu!r} is not listed{nearest(gpu, names)}", expected=f"exactly one of {', '.join(names)}",
                     action="add shapes/targets/SKU.toml for it: gpus with this exact name, its limits, their source; or, if it "
                            "is a listed SKU under another name, add the name to that file's gpus")


def load_arch(arch: str) -> Target:
    """The first SKU of an architecture, for the architecture's limits. Raises ShapeError for an unknown one."""
    for target in load_targets():
        if target.arch == arch:
            return target
    raise ShapeError(f"unknown target {arch!r}", expected=f"one of {', '.join(ARCHES)}")


def targets_named(word: str) -> tuple[Target, ...]:
    """The SKUs that a user names: as `nvidia-b300`, `b300`, `sm_103`, `sm_103a`, `sm103` or `103`. Raises ShapeError for an
    unknown name."""
    name = word.lower()
    found = tuple(t for t in load_targets() if name in (t.name, t.name.removeprefix("nvidia-"), t.arch, f"{t.arch}a",
                                                        t.arch.replace("_", ""), str(t.capability)))
    if not found:
        known = [*ARCHES, *(t.name for t in load_targets()), *(t.name.removeprefix("nvidia-") for t in load_targets())]
        raise ShapeError(f"unknown target {word!r}{nearest(name, known)}", expected=f"one of {', '.join(known)}")
    return found


def sku_named(word: str) -> Target:
    """As `targets_named`, for exactly one SKU. Raises ShapeError for an architecture of several SKUs."""
    found = targets_named(word)
    if len(found) > 1:
        raise ShapeError(f"{word} is several GPUs", expected=f"one of {', '.join(t.name for t in found)}")
    return found[0]
