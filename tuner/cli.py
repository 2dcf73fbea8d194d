"""The command line. `--help` imports neither triton nor torch: each command does its imports when it runs."""

import importlib
import io
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..shapes.errors import UserError
from ..shapes.files import end_on_signals
from .on_gpu.classes_command import with_classes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress

    from .offline.sweep import Progress

SECONDS_PER_LINE = 5.0  # between progress lines when the output isn't a terminal
INTERRUPTED = 130  # the shell's exit code for Ctrl-C
DECODER_COMMANDS = "tune_kernels.decoder.cli"


class _Commands(click.Group):
    """The commands of this file, and the decoder's, imported on demand."""

    names = ("generate", "verify", "bench", "roofline", "train-drafter")

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self.names])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.names:
            return super().get_command(ctx, cmd_name)
        found: click.Command = getattr(importlib.import_module(DECODER_COMMANDS), cmd_name.replace("-", "_"))
        return with_classes(found) if cmd_name == "verify" else found


def _version(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        from .offline.doctor import versions

        click.echo(versions())
        context.exit()


@click.group(cls=_Commands, invoke_without_command=True,
             context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version,
              help="Print the version and the toolchain, and exit.")
@click.option("--offline", is_flag=True, help="Compile, inspect and report every schedule; needs no GPU.")
@click.option("--on-gpu", is_flag=True, help="Time an offline bundle's survivors on this GPU, prove their bits, promote.")
@click.option("--model", default="qwen2.5-7b", show_default=True, metavar="NAME|PATH",
              help="A shipped shape, or a Hugging Face config.json.")
@click.option("--target", "targets", multiple=True, metavar="sm_NN|GPU",
              help="GPU target, as sm_103, nvidia-b300 or b300; repeat for several.  [default: sm_103, sm_100, sm_90]")
@click.option("--kernel", "kernels", multiple=True, metavar="NAME|FILE.py[:NAME]|MODULE:NAME",
              help="Kernel of the decode step, or of your own; repeat for several.  [default: all of the step]")
@click.option("--shape", "shapes", multiple=True, metavar="NAME=N,...",
              help="Sizes in the place of the model's, or of your kernel's, as N=4608,K=3584; repeat for several.")
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True, help="GPUs that share the model.")
@click.option("--space", default="default", show_default=True, metavar="default|small|wide|findings|FILE",
              help="Schedules to try: a shipped space, or your own TOML file.")
@click.option("--recipe", default="fp8-v1", show_default=True, help="Precisions and numerics flags.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N",
              help="Worker processes.  [default: one per core, memory allowing]")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False),
              help="Folder of the report and its artefacts; a later run continues from it.  "
                   "[default: build/offline, build/on-gpu]")
@click.option("--fresh", is_flag=True, help="Ignore results of earlier runs in the folder: compile everything again.")
@click.option("--max-spill-bytes", type=click.IntRange(min=0), default=0, show_default=True,
              help="Spilled bytes per thread that are still accepted.")
@click.option("--timeout", type=click.FloatRange(min=1), default=60, show_default=True, metavar="SECONDS",
              help="Processor time of one variant.")
@click.option("--executor", metavar="MODULE:CALLABLE",
              help="Factory of a concurrent.futures.Executor; its workers must see --out.  [default: local processes]")
@click.option("--bundle", type=click.Path(path_type=Path, file_okay=False), default=Path("build/offline"), show_default=True,
              help="On a GPU: the folder that --offline wrote.")
@click.option("--weights", default="random:0", show_default=True, metavar="random:SEED|PATH",
              help="On a GPU: weights of the full model that winners are verified in.")
@click.option("--budget", type=click.FloatRange(min=1), default=600, show_default=True, metavar="SECONDS",
              help="On a GPU: stop after this time; a second run continues.")
@click.option("--storage", metavar="FILE|URL", help="On a GPU: storage of the search in a large space; machines can share a "
              "database URL.  [default: a file in --out]")
@click.option("--schedules", type=click.Path(path_type=Path, file_okay=False), envvar="TUNE_KERNELS_SCHEDULES",
              help="Folder of promoted schedules: read first and, on a GPU, promoted to.  [default: the user's data folder]")
@click.option("--promote", is_flag=True, help="On a GPU: write the schedules that passed the gate.")
@click.option("--dry-run", is_flag=True, help="On a GPU: show the rows that --promote would write.")
@click.option("--replay", type=click.Path(path_type=Path), metavar="RUN",
              help="Rank a recorded run again (its --out folder or recording.json); needs no GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line instead of tables.")
@click.pass_context
def cli(context: click.Context, offline: bool, on_gpu: bool, as_json: bool, **options: Any) -> None:
    """Compile Triton FP8 schedules for LLM decode kernels offline, time them on a GPU, promote those that keep the bits.

    \b
    tune-kernels --offline                              all kernels of Qwen2.5-7B, for B300, B200 and H200
    tune-kernels --offline --target sm_90 --kernel down
    tune-kernels --offline --kernel my_norm.py          a Triton kernel of your own: docs/your-own-kernel.md
    tune-kernels --on-gpu --bundle build/offline --promote
    tune-kernels show ID                                a variant's verdict with its reasons and SASS
    tune-kernels diff main..HEAD                        the effect of a change of promoted schedules
    tune-kernels doctor                                 toolchain and GPU of this machine

    Exit codes: 0 done, 1 nothing survived or a check failed, 2 wrong usage.
    """
    asked = [name for name, given in (("--offline", offline), ("--on-gpu", on_gpu)) if given]
    if context.invoked_subcommand is not None:
        if asked:
            raise click.UsageError(f"{asked[0]} and {context.invoked_subcommand} don't go together")
        return
    if len(asked) != 1:
        if asked:
            raise click.UsageError("--offline and --on-gpu don't go together: run one after the other")
        click.echo(context.get_help())
        raise click.exceptions.Exit(2)
    names = OFFLINE if offline else ON_GPU
    for name in options:
        if name not in names and context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{asked[0]} takes no --{name.replace('_', '-').removesuffix('s')}")
    chosen = {name: options[name] for name in names}
    if offline:
        context.exit(_offline(as_json, {name: value for name, value in chosen.items() if value is not None}))
    from .on_gpu.command import run
    from .on_gpu.run import Request

    how = ("promote", "dry_run", "replay")
    chosen["out"] = chosen["out"] or Path("build/on-gpu")
    request = Request(**{n: v for n, v in chosen.items() if n not in how})
    given = [n for n in names if context.get_parameter_source(n) == click.core.ParameterSource.COMMANDLINE]
    context.exit(run(request, as_json=as_json, given=given, **{n: chosen[n] for n in how}))


OFFLINE = ("model", "targets", "kernels", "space", "recipe", "jobs", "out", "fresh", "max_spill_bytes", "executor", "schedules",
           "shapes", "tp", "timeout")
ON_GPU = ("model", "kernels", "recipe", "out", "bundle", "weights", "budget", "storage", "schedules", "promote", "dry_run",
          "replay")


def _offline(as_json: bool, options: dict[str, Any]) -> int:
    """Sweep and print the summary. options: the given fields of SweepRequest. Returns the exit code."""
    from rich.console import Console

    from ..kernels.fixed import FIXED
    from .offline.report import print_summary
    from .offline.sweep import SweepRequest, sweep

    console = Console(stderr=as_json)
    request = SweepRequest(**options)
    with _Watcher(console, quiet=as_json) as watch:
        report = sweep(request, watch)
    if as_json:
        click.echo(json.dumps({"report": str(request.out / "report.json"), "counts": vars(report.counts),
                               "audit": vars(report.audit), "toolchain": vars(report.toolchain), "seconds": report.seconds}))
    else:
        print_summary(report, console, request.out)
    survived = any(v.accepted and v.kernel not in FIXED for v in report.variants)
    if not survived:
        click.echo("nothing survived: every variant was rejected; see the reasons in the report", err=True)
    if report.audit.disagreed:
        click.echo(f"audit failed: early rejects without the predicted fault: {', '.join(report.audit.disagreed)}. "
                   "This is a bug of tune-kernels: please report it", err=True)
    return 0 if survived and not report.audit.disagreed else 1


class _Watcher:
    """Shows a sweep's progress: a bar on a terminal, plain lines in a pipe, nothing if quiet."""

    def __init__(self, console: "Console", quiet: bool) -> None:
        self.console, self.quiet = console, quiet
        self.bar: RichProgress | None = None
        self.began = self.last = time.monotonic()

    def __enter__(self) -> "_Watcher":
        return self

    def __call__(self, progress: "Progress") -> None:
        if self.quiet or not progress.total:
            return
        text = f"{progress.accepted} accepted, {progress.rejected} rejected"
        if not self.console.is_terminal:
            if time.monotonic() - self.last >= SECONDS_PER_LINE or progress.done == progress.total:
                self.last = time.monotonic()
                click.echo(f"compiled {progress.done} of {progress.total}: {text}{self._time_left(progress)}")
            return
        if self.bar is None:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self.bar = Bar(TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                           TextColumn("{task.description}", markup=False), console=self.console, transient=True)
            self.bar.start()
            self.bar.add_task(text, total=progress.total)
        self.bar.update(self.bar.task_ids[0], completed=progress.done, description=text)

    def _time_left(self, progress: "Progress") -> str:
        """Elapsed and estimated remaining seconds."""
        spent = time.monotonic() - self.began
        if not progress.done or progress.done == progress.total:
            return f"; {spent:.0f} s"
        return f"; {spent:.0f} s, about {spent * (progress.total - progress.done) / progress.done:.0f} s left"

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


@cli.command()
@click.argument("variant_id", metavar="ID")
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/offline"), show_default=True,
              help="Folder of the report.")
@click.option("--sass/--no-sass", default=True, show_default=True, help="Print the whole SASS, not only the deciding lines.")
@click.option("--ptx", is_flag=True, help="Print the whole PTX too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
def show(variant_id: str, out: Path, sass: bool, ptx: bool, as_json: bool) -> None:
    """Show one variant: schedule, verdict, deciding lines, SASS.

    ID is an id of report.json or report.html, or its first characters. A variant that was rejected before it had code is
    compiled for this command.
    """
    from .offline.report import find_variant, read_report
    from .offline.show import code_of, describe

    report = read_report(out)
    variant = find_variant(report, variant_id)
    problem, code = "", None
    try:
        code = code_of(report, variant, out if out.is_dir() else out.parent)
    except UserError as e:
        problem = str(e)
    if as_json:
        click.echo(json.dumps({**variant.to_dict(), "sass": code and code.sass, "ptx": code and code.ptx, "no_code": problem}))
        return
    for line in describe(variant, code, problem):
        click.echo(line)
    if code and ptx:
        click.echo(code.ptx)
    if code and sass:
        click.echo(code.sass)


@cli.command()
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="[NEW]", required=False)
@click.option("--format", "form", type=click.Choice(["text", "markdown", "html", "json"]), default="text", show_default=True,
              help="For a terminal, a pull request, a browser, a program.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write there instead of printing.")
@click.option("--check", is_flag=True, help="Exit 1 if a row must not be merged, with the reasons.")
@click.option("--bundle", "bundles", multiple=True, type=click.Path(path_type=Path, exists=True), metavar="DIR",
              help="Offline report with the artefacts of promoted rows: adds the changed SASS lines; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
@click.pass_context
def diff(context: click.Context, old: str, new: str | None, form: str, out: Path | None, check: bool,
         bundles: tuple[Path, ...], as_json: bool) -> None:
    """Show the effect of a change of schedules: knobs, instruction, registers, spills, time, bits, evidence.

    OLD and NEW are each a file or folder of promoted schedules, an offline report or its folder, a git revision (its
    schedules/), or REVISION:PATH. A..B names both. A single revision is compared with the files on disk.

    \b
    tune-kernels diff main..HEAD --check
    tune-kernels diff v1 schedules --format html --out diff.html
    tune-kernels diff build/triton-3.7 build/triton-3.9
    """
    from .review import command as diff_command

    context.exit(diff_command.run(old, new, form="line" if as_json else form, out=out, check=check, bundles=bundles))


@cli.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH...")
@click.option("--require", "required", multiple=True, metavar="FAMILY",
              help="Instruction family that each kernel must have; repeatable.")
@click.option("--forbid", "forbidden", multiple=True, metavar="FAMILY",
              help="Instruction family that no kernel may have; repeatable.")
@click.option("--max-spill-bytes", type=click.IntRange(min=0), default=0, show_default=True,
              help="Spilled bytes per thread that are still accepted.")
@click.option("--reads-early", multiple=True, metavar="ARGUMENT",
              help="Argument that no predecessor writes: it may be read before the dependency wait; repeatable.")
@click.option("--baseline", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="JSON of an earlier run: exit 1 only if a kernel got worse since.")
@click.option("--format", "form", type=click.Choice(["text", "markdown", "html", "json"]), default="text", show_default=True,
              help="For a terminal, a pull request, a browser, a program.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write there instead of printing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
@click.pass_context
def inspect(context: click.Context, paths: tuple[Path, ...], required: tuple[str, ...], forbidden: tuple[str, ...],
            max_spill_bytes: int, reads_early: tuple[str, ...], baseline: Path | None, form: str, out: Path | None,
            as_json: bool) -> None:
    """Judge compiled kernels: Triton caches, bundles, cubins, PTX, fat binaries. Needs no GPU.

    Shows tensor-core instructions, spills, registers, shared memory and occupancy. Rejects FP8 that silently runs as FP16,
    spills, and memory accesses before the dependency wait. Architectures sm_80 to sm_120.

    \b
    tune-kernels inspect ~/.triton/cache
    tune-kernels inspect kernel.cubin --require QGMMA --forbid HMMA
    tune-kernels inspect build/cache --format json --out baseline.json
    tune-kernels inspect build/cache --baseline baseline.json      # in CI: exit 1 if one got worse
    """
    from .inspect.command import run
    from .inspect.judge import Demands

    demands = Demands(required, forbidden, reads_early, max_spill_bytes)
    context.exit(run(list(paths), demands, baseline=baseline, form="line" if as_json else form, out=out))


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- PROGRAM [ARGUMENT]...")
@click.option("--target", metavar="sm_NN|GPU", help="The GPU to play; nothing is executed.  [default: the GPU that is here]")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("build/record"), show_default=True,
              help="Folder of the launches, the judgement and the compiled code.")
@click.option("--max-configs", type=click.IntRange(min=1), default=100, show_default=True,
              help="Configs of an autotuned kernel that are compiled, per tuning.")
@click.option("--max-spill-bytes", type=click.IntRange(min=0), default=0, show_default=True,
              help="Spilled bytes per thread that are still accepted.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line; the program's output goes to stderr.")
@click.pass_context
def record(context: click.Context, command: tuple[str, ...], target: str | None, out: Path, max_configs: int,
           max_spill_bytes: int, as_json: bool) -> None:
    """Run a program and judge every Triton kernel that it launches, for a GPU that isn't there.

    The program sees the GPU of --target: torch.cuda answers, tensors on "cuda" lie on the CPU, each kernel is compiled for that
    GPU, and nothing is executed: outputs stay as they are. Without --target its launches on the real GPU are recorded.

    \b
    tune-kernels record --target sm_103 -- python script.py
    tune-kernels record --target b200 --out build/train -- python -m my_package.train --steps 1
    tune-kernels inspect build/record/cache --baseline baseline.json

    Exit codes: 0 done, 1 a kernel is rejected, isn't compiled or isn't launched, or the program failed, 2 wrong usage.
    """
    from .inspect.judge import Demands
    from .record.command import run

    context.exit(run(command, target, out, max_configs, Demands(max_spill_bytes=max_spill_bytes), as_json_line=as_json))


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Check toolchain, targets and GPU of this machine. Exit 1 if it can't compile for a target."""
    from .offline import doctor as doctor_module

    findings = doctor_module.examine()
    if as_json:
        click.echo(json.dumps(doctor_module.as_json(findings)))
    else:
        for f in findings:
            mark = {True: "ok", False: "NO", None: "--"}[f.ok]
            click.echo(f"{mark}  {f.what:<18} {f.found.replace(chr(10), chr(10) + ' ' * 23)}")
    context.exit(1 if any(f.ok is False for f in findings) else 0)


@cli.command()
@click.argument("kernel", metavar="KERNEL")
@click.option("--format", "form", type=click.Choice(["triton", "json"]), default="triton", show_default=True,
              help="Python source with triton.Config by SKU and sizes, or one JSON line.")
@click.option("--schedules", type=click.Path(path_type=Path, file_okay=False), envvar="TUNE_KERNELS_SCHEDULES",
              help="Folder of promoted schedules, read first.  [default: the user's data folder]")
@click.option("--json", "as_json", is_flag=True, help="As --format json.")
def export(kernel: str, form: str, schedules: Path | None, as_json: bool) -> None:
    """Print the promoted schedules of KERNEL, built-in or your own, for use in @triton.autotune. Exit 1 where there is none.

    \b
    tune-kernels export my_norm.norm > my_norm_configs.py
    """
    from ..schedules import store
    from . import export as exporting

    found = exporting.exported(kernel, store.search_path(schedules))
    click.echo(exporting.as_json(kernel, found) if as_json or form == "json" else exporting.as_triton(kernel, found).rstrip())


def main() -> None:
    """Entry point. A user's mistake ends in a message and an exit code, never in a traceback."""
    end_on_signals()
    for stream in (sys.stdout, sys.stderr):  # a character that the terminal can't show is escaped
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as e:
        e.show()
        sys.exit(e.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted: finished work is kept; the same command continues it", err=True)
        sys.exit(INTERRUPTED)
    except UserError as e:
        click.echo(f"error: {e}", err=True)
        sys.exit(e.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader is gone: Python would print an error when it flushes
        sys.exit(0)
