"""`tune-kernels record`: run a program, judge every kernel that it launched, write its launches down."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from ...shapes.target import targets_named
from ..errors import RecordError
from ..inspect.judge import Demands
from ..inspect.show import Inspection, as_json, as_text, ordered, print_text
from ..offline.record import write_text
from ..on_gpu.worker.gpu_state import cuda_device
from .judge import judged
from .kernel_file import KernelFiles, kernel_files
from .program import CACHE, EVENTS, Plan, run_program
from .recording import SCHEMA, Recording, read_events, summary_of

RECORDING, INSPECTION, KERNELS = "recording.json", "inspection.json", "kernels"  # in the folder of a recording


@dataclass(frozen=True)
class Recorded:
    """A recording, its judgement, kernel by kernel in the order of the table, and the files that `--offline --kernel` takes."""

    recording: Recording
    inspection: Inspection
    files: KernelFiles

    @property
    def code(self) -> int:
        """The command's exit code."""
        recording = self.recording
        return 1 if recording.code != 0 or recording.failures or self.inspection.failed else 0

    @property
    def lines(self) -> list[str]:
        """What the table doesn't say."""
        recording = self.recording
        launches = [launch for launch in recording.launches if not launch.trial]
        functions = {kernel.source for kernel in recording.kernels}
        total = sum(one.count for one in launches)
        lines = [f"{len(recording.kernels)} kernels of {len(functions)} functions; {total:,} launches, "
                 f"{len(launches):,} distinct"]
        lines += [f"not compiled: {one.module}:{one.function}: {one.error}: {summary_of(one.message)}"
                  for one in recording.failures]
        lines += [f"autotuned: {one.module}:{one.function}: {one.kept} of {one.total} configs compiled"
                  + ("" if one.kept == one.total else "; --max-configs compiles more") for one in recording.tunings]
        names = {kernel.hash: kernel.source for kernel in recording.kernels}
        after: dict[str, list[str]] = {}
        for kernel, places in recording.launched_after_reads().items():
            after.setdefault(names[kernel], places)
        lines += [f"may depend on data: {name} is launched after a kernel's output was read back at {', '.join(places)}"
                  for name, places in after.items()]
        lines += [f"in no kernel file: {name}: {reason}" for name, reason in self.files.left_out.items()]
        if recording.code != 0:
            lines.append(f"the program ended with exit code {recording.code}; its launches until then are recorded")
        return lines


def record(plan: Plan, demands: Demands, quiet: bool = False) -> Recorded:
    """Runs the program, judges, and writes recording.json, inspection.json and the kernel files into the folder.

    Raises:
        RecordError: no such program, it launched nothing, or it made no Python process that the recorder could enter.
        OutputError: the folder can't be written.
    """
    code = run_program(plan, quiet)
    recording = read_events(plan.out / EVENTS, plan.command, plan.target.arch if plan.target else None, code)
    if not recording.kernels and not recording.failures:
        raise _nothing(recording)
    recording, judgements = judged(recording, plan.out / CACHE, demands)
    inspection = Inspection(ordered(list(judgements.values())))
    write_text(plan.out / RECORDING, as_text_file(recording))
    write_text(plan.out / INSPECTION, as_json(inspection))
    files = kernel_files(recording)
    for name, text in files.texts.items():
        write_text(plan.out / KERNELS / name, text)
    return Recorded(recording, inspection, files)


def as_text_file(recording: Recording) -> str:
    """recording.json. after_reads: by kernel, the places at which outputs were read back before its first launch."""
    return json.dumps({"schema": SCHEMA, **dataclasses.asdict(recording), "after_reads": recording.launched_after_reads()},
                      indent=1) + "\n"


def _nothing(recording: Recording) -> RecordError:
    """The error of a program that launched no kernel."""
    ended = "" if recording.code == 0 else f" and ended with exit code {recording.code}"
    if not recording.processes:
        error = RecordError(f"the program started no Python that could be recorded{ended}",
                            expected="Python with its site module, without -I, -E or -S",
                            action="tune-kernels record --target sm_103 -- python script.py")
    elif not any(process.triton for process in recording.processes):
        error = RecordError(f"the program never imported triton{ended}", expected="a program that launches Triton kernels",
                            action=f"its Python is {recording.processes[0].executable}: name the one that has Triton")
    else:
        error = RecordError(f"the program launched no Triton kernel{ended}", expected="at least one launch",
                            action="call the functions that launch kernels")
    error.exit_code = 1
    return error


def run(command: tuple[str, ...], target: str | None, out: Path, max_configs: int, demands: Demands, *,
        as_json_line: bool) -> int:
    """The command; returns its exit code. Raises UserError."""
    if target is None and cuda_device() is None:
        raise RecordError("no GPU on this machine", expected="--target with the GPU to play", action="--target sm_103")
    plan = Plan(command, out, targets_named(target)[0] if target else None, max_configs)
    recorded = record(plan, demands, quiet=as_json_line)
    if as_json_line:
        click.echo(json.dumps({"recording": str(out / RECORDING), "inspection": str(out / INSPECTION), "cache": str(out / CACHE),
                               "kernel_files": [str(out / KERNELS / name) for name in recorded.files.texts],
                               "program_exit_code": recorded.recording.code, "kernels": len(recorded.recording.kernels),
                               "rejected": [one.name for one in recorded.inspection.kernels if one.reasons],
                               "failed": [f"{one.module}:{one.function}" for one in recorded.recording.failures],
                               "notes": recorded.lines}))
        return recorded.code
    console = Console()
    if console.is_terminal:
        print_text(recorded.inspection, console)
    else:
        click.echo(as_text(recorded.inspection), nl=False)
    for line in recorded.lines:
        click.echo(line)
    click.echo(f"wrote {out / RECORDING} and {out / INSPECTION}; the compiled code is in {out / CACHE}")
    for name in recorded.files.texts:
        click.echo(f"sweep it: tune-kernels --offline --kernel {out / KERNELS / name}{f' --target {target}' if target else ''}")
    return recorded.code


