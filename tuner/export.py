"""`tune-kernels export`: promoted schedules of a kernel as `triton.Config`s by key, for use elsewhere, or as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..kernels import registry
from ..schedules import store
from ..schedules.promoted import PromotedSchedule
from ..schedules.recipe import load_recipe
from ..schedules.schedule import OwnSchedule, knobs_of
from ..shapes.errors import UserError
from ..shapes.fields import nearest
from ..shapes.model import dims_of

SCHEMA = "tune-kernels/export/1"
OF_CONFIG = ("num_warps", "num_stages", "num_ctas", "maxnreg")  # arguments of triton.Config beside its constants


class ExportError(UserError):
    """Nothing promoted to export."""

    exit_code = 1


@dataclass(frozen=True)
class Exported:
    """A promoted row as Triton takes it. key: the sizes by name. constants: compiled in, and other launch options. options: the
    arguments of triton.Config beside them."""

    row: PromotedSchedule
    key: Mapping[str, object]
    constants: Mapping[str, object]
    options: Mapping[str, object]

    def config(self) -> str:
        """`triton.Config({'BLOCK': 1024}, num_warps=4)`."""
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"triton.Config({dict(self.constants)!r}{options})"


def exported(kernel: str, folders: Sequence[Path]) -> list[Exported]:
    """The rows of a kernel, one for each SKU, sizes, recipe and toolchain: that of the first folder.

    Raises:
        ExportError: there is none, or a row can't be relied on. ScheduleError: a damaged file.
    """
    found: dict[object, PromotedSchedule] = {}
    rows = store.rows_like(folders, lambda row: True)
    for row in (r for r in rows if r.kernel == kernel):
        if problems := row.problems():
            raise ExportError(f"{kernel} on {row.target}: {problems[0].text}", expected="a row as it was measured")
        found.setdefault(str(store.key_of(row).parts()), row)
    if not found:
        known = sorted({row.kernel for row in rows})
        raise ExportError(f"no promoted schedule of {kernel!r}{nearest(kernel, known)}",
                          expected=f"one of {', '.join(known) or 'none here'}",
                          action="tune-kernels --on-gpu --promote, or name the folder with --schedules")
    return [_exported(row) for row in sorted(found.values(), key=lambda r: (r.target, r.recipe, str(dims_of(r.shape))))]


def _exported(row: PromotedSchedule) -> Exported:
    """A built-in kernel's constants and options are its launch's; those of one's own are the knobs themselves."""
    if isinstance(row.schedule, OwnSchedule):
        values = dict(knobs_of(row.schedule))
    else:
        launch = registry.operation(row.kernel).launch(row.shape, row.schedule, load_recipe(row.recipe).numerics)
        values = {**launch.constants, **launch.options}
    return Exported(row, dict(dims_of(row.shape)), {n: v for n, v in values.items() if n not in OF_CONFIG},
                    {n: values[n] for n in OF_CONFIG if n in values})


def as_triton(kernel: str, found: Sequence[Exported]) -> str:
    """Python source: `CONFIGS[SKU][sizes]`, the sizes in the order that KEY says. Of several toolchains: the last."""
    lines = [f'"""Promoted schedules of {kernel}, written by tune-kernels export."""', "", "import triton", ""]
    lines += [f"KEY = {tuple(found[0].key)!r}", "CONFIGS = {"]
    for sku in dict.fromkeys(one.row.target for one in found):
        lines.append(f"    {sku!r}: {{")
        mine = sorted((e for e in found if e.row.target == sku), key=lambda e: e.row.date)
        for one in {tuple(e.key.values()): e for e in mine}.values():
            tools = one.row.toolchain
            lines.append(f"        {tuple(one.key.values())!r}: {one.config()},  # {one.row.timing.times.median_us:.4g} us, "
                         f"{one.row.recipe}, Triton {tools.triton}, ptxas {tools.ptxas}, {one.row.date}")
        lines.append("    },")
    return "\n".join([*lines, "}", ""])


def as_json(kernel: str, found: Sequence[Exported]) -> str:
    """One line."""
    rows = [{"target": e.row.target, "recipe": e.row.recipe, "key": dict(e.key), "constants": dict(e.constants),
             "options": dict(e.options), "schedule_id": e.row.schedule_id, "triton": e.row.toolchain.triton,
             "ptxas": e.row.toolchain.ptxas, "median_us": e.row.timing.times.median_us, "numerics_class": e.row.numerics_class,
             "date": e.row.date} for e in found]
    return json.dumps({"schema": SCHEMA, "kernel": kernel, "rows": rows}, sort_keys=True)
