"""Real kernels that misbehave on a GPU, one for each kind, for test_on_hardware: a worker imports this module by name."""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from tune_kernels.tuner.on_gpu.worker.case import RowsCase
from tune_kernels.tuner.on_gpu.worker.checks import run_checks
from tune_kernels.tuner.on_gpu.worker.process import at_work
from tune_kernels.tuner.on_gpu.worker.tasks import Answer, CheckTask

KINDS = ("good", "crash", "hang", "nothing", "wrong", "unsteady", "memory")
SIZE = 4096


@triton.jit
def kernel(x_ptr, out_ptr, flag_ptr, rows, SIZE: tl.constexpr, KIND: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, SIZE)
    x = tl.load(x_ptr + row * SIZE + offs)
    y = 2.0 * x
    if KIND == 1:
        tl.store(out_ptr + ((row.to(tl.int64) + 1) << 38) + offs, y)
    if KIND == 2:
        flag = tl.load(flag_ptr, volatile=True)
        while flag == 0:
            flag = tl.load(flag_ptr, volatile=True)
    if KIND == 4:
        y = x
    if KIND == 5:
        clock = tl.inline_asm_elementwise("mov.u32 $0, %clock;", "=r,r", [offs], dtype=tl.int32, is_pure=False, pack=1)
        y = y + (clock % 64).to(tl.float32) * 1e-6
    if KIND != 3:
        tl.store(out_ptr + row * SIZE + offs, y)


class Twice(RowsCase[Any]):
    """A case: out = 2 x."""

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.x = torch.arange(9 * SIZE, device="cuda", dtype=torch.float32).reshape(9, SIZE) + 1
        self.flag = torch.zeros(1, dtype=torch.int32, device="cuda")

    def limit(self, schedule: Any) -> float:
        return 1e-3

    def rows(self, schedule: Any) -> int:
        return len(self.x)

    def output(self, schedule: Any, first: int, rows: int) -> torch.Tensor:
        if KINDS[self.kind] == "memory":
            torch.empty(1 << 46, device="cuda")
        out = torch.empty((rows, SIZE), device="cuda")
        kernel[(rows,)](self.x[first:], out, self.flag, rows, SIZE, self.kind)
        return out

    def error(self, output: torch.Tensor) -> float:
        return float((output - 2 * self.x[:len(output)]).abs().max() / self.x.abs().max())

    def timed(self, schedule: Any, copy: int) -> None:
        self.output(schedule, 0, 1)

    def bits(self, schedule: Any) -> Iterator[torch.Tensor]:
        while True:
            yield self.output(schedule, 0, 5)


def check(task: CheckTask) -> Answer[Any]:
    """The real checks of the kind that num_stages numbers."""
    def work() -> Any:
        case = Twice(task.schedule.num_stages - 1)  # type: ignore[union-attr]
        return run_checks(case, case, task.schedule)

    return at_work(task.words, work, task.name)
