"""Host time of a launch through `tune_kernels.tuned` against Triton's `function[grid](...)`, in turns in one process on a GPU.

    python scripts/tuned_overhead.py FILE.py[:NAME] --bundle build/own --schedules DIR [--out FILE.json]

Both launch the same artefact on the same tensors. A sample is the mean over LAUNCHES calls, without waiting for the GPU; medians
over ROUNDS rounds, of which the first warms up. Prints the two in us, their difference and ratio.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
from tune_kernels import Kernel, tuned
from tune_kernels.kernels import bundle
from tune_kernels.kernels.loading import kernels_in, source_of
from tune_kernels.schedules.recipe import OWN
from tune_kernels.tuner.on_gpu.worker.operands import Operands
from tune_kernels.tuner.on_gpu.worker.own import OwnCase

LAUNCHES, ROUNDS = 100, 31


def overhead(kernel: Kernel, folder: Path, schedules: Path) -> dict[str, Any]:
    """The record of one kernel's first shape."""
    import torch

    launcher = tuned(kernel, bundle=folder, schedules=schedules)
    case, shape = OwnCase(kernel, kernel.own_shapes[0], Operands("cuda")), kernel.own_shapes[0]
    bound = kernel.bind(shape, kernel.schedules[0], lambda name, described, values: case._keep(name, described, values, 0).tensor)
    tensors = [bound[name] for name in launcher.names if not isinstance(bound[name], (int, float))]
    schedule, row = launcher.schedule(*tensors)
    assert row is not None
    bundle.install(kernel.jitted, folder)
    bound = kernel.bind(shape, schedule, lambda name, described, values: case._keep(name, described, values, 0).tensor)
    grid = kernel.blocks(shape, schedule, bound)
    order = [bound.pop(name) for name in kernel.jitted.arg_names if name in kernel.arguments]
    constants = {name: value for name, value in bound.items() if name not in kernel.arguments} | kernel.options(schedule)
    function = kernel.jitted

    def plain() -> None:
        function[grid](*order, **constants)

    def through() -> None:
        launcher(*tensors)

    samples: dict[str, list[float]] = {"plain": [], "tuned": []}
    for round_ in range(ROUNDS):
        for name, launch in (("plain", plain), ("tuned", through)):
            found = _sample(launch)
            if round_:
                samples[name].append(found)
        torch.cuda.synchronize()
    us = {name: statistics.median(found) for name, found in samples.items()}
    return {"kernel": kernel.name, "shape": dict(shape.dims), "schedule": dict(schedule.knobs), "recipe": OWN.name,
            "plain_us": round(us["plain"], 3), "tuned_us": round(us["tuned"], 3),
            "over_us": round(us["tuned"] - us["plain"], 3), "ratio": round(us["tuned"] / us["plain"], 4),
            "launches": LAUNCHES, "rounds": ROUNDS - 1, "gpu": torch.cuda.get_device_name()}


def _sample(launch: Callable[[], None]) -> float:
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(LAUNCHES):
        launch()
    return (time.perf_counter() - began) / LAUNCHES * 1e6


def main() -> int:
    made = common.parser(__doc__)
    made.add_argument("kernels", nargs="+", metavar="FILE.py[:NAME]")
    made.add_argument("--bundle", type=Path, default=Path("build/own"))
    made.add_argument("--schedules", type=Path, required=True)
    given = made.parse_args()
    kernels = [kernel for word in given.kernels for kernel in kernels_in(source_of(word)).values()]
    found = [overhead(kernel, given.bundle, given.schedules) for kernel in kernels]
    for one in found:
        print(f"{one['kernel']:<16} {one['plain_us']:8.2f} us plain {one['tuned_us']:8.2f} us tuned {one['over_us']:+8.2f} us")
    common.publish({"tuned_overhead": found}, given.out)
    return 0


if __name__ == "__main__":
    common.run(main)
