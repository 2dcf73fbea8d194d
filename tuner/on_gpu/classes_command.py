"""`tune-kernels verify --classes`: the decoder's command with one more check, that of kernels, which the decoder can't make."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from .classes import Classified, Request

COMMANDLINE = click.core.ParameterSource.COMMANDLINE
OUT = Path("build/classes.json")
ADDED = [
    click.Option(["--classes"], is_flag=True, help="Check kernels instead of a model: the numerics class of every variant of a "
                 "bundle on this GPU, and which knobs change the bits. Exit code 1 where a promoted class isn't met."),
    click.Option(["--bundle"], type=click.Path(path_type=Path, file_okay=False), default=Path("build/offline"),
                 show_default=True, help="With --classes: the folder that --offline wrote; its model and recipe."),
    click.Option(["--kernel", "kernels"], multiple=True, metavar="NAME", help="With --classes; repeat for several.  "
                 "[default: all]"),
    click.Option(["--replay"], type=click.Path(path_type=Path), metavar="RUN", help="With --classes: those of a recorded run of "
                 "--on-gpu; needs no GPU."),
]
MEANT = ("weights", "model", "recipe", "schedules", "out", "as_json")  # of verify's own options, with --classes
MEANT_IN_REPLAY = ("schedules", "out", "as_json")


def with_classes(command: click.Command) -> click.Command:
    """`verify` as the decoder has it, and `--classes` with what belongs to it."""
    own = command.callback
    assert own

    @click.pass_context
    def verify(context: click.Context, /, classes: bool, bundle: Path, kernels: tuple[str, ...], replay: Path | None,
               **options: Any) -> None:
        if not classes:
            _refuse(context, {"bundle", "kernels", "replay"}, "without --classes")
            own(**options)
            return
        meant = MEANT_IN_REPLAY if replay else MEANT
        _refuse(context, {*options, *({"bundle"} if replay else ())} - {*meant}, "with --replay" if replay else "with --classes")
        given = {name: value for name, value in options.items() if context.get_parameter_source(name) == COMMANDLINE}
        model = given.get("model") or given.get("weights")
        context.exit(run(given.get("out", OUT), options["as_json"], replay, bundle=bundle, model=model,
                         recipe=given.get("recipe"), kernels=kernels,
                         schedules=Path(options["schedules"]) if options["schedules"] else None))

    return click.Command(command.name, params=[*command.params, *ADDED], callback=verify, help=command.help)


def _refuse(context: click.Context, names: set[str], when: str) -> None:
    """Raises UsageError for an option that was given and means nothing here."""
    for parameter in context.command.params:
        if parameter.name in names and context.get_parameter_source(parameter.name) == COMMANDLINE:
            raise click.UsageError(f"{parameter.opts[0]} means nothing {when}")


def run(out: Path, as_json: bool, replay: Path | None, **request: Any) -> int:
    """Returns the exit code: 1 where a promoted class isn't met, or a kernel couldn't be classified."""
    from rich.console import Console

    from ...schedules import store
    from ..offline.record import write_json
    from .classes import Request, make_report, of_recording

    console = Console(stderr=as_json)
    asked = Request(**request, out=out.parent)
    found = of_recording(replay, asked.kernels) if replay else _on_gpu(asked, console, quiet=as_json)
    report = make_report(found, store.search_path(asked.schedules))
    write_json(out, report)
    if as_json:
        click.echo(json.dumps(report, sort_keys=True))
    else:
        print_report(report, console)
        console.print(f"report: {out}", highlight=False, markup=False, soft_wrap=True)
    return 0 if report["passed"] else 1


def _on_gpu(request: "Request", console: "Console", quiet: bool) -> "Classified":
    """On this machine's GPU, in a worker that may die."""
    from .. import pool
    from .classes import classify
    from .worker import gpu_state, measure
    from .worker.measurer import GpuMeasurer, gpu_executor

    def watch(line: str) -> None:
        if not quiet:
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    machine = gpu_state.this_machine()
    with pool.scratch_folder(request.out.absolute()) as scratch:
        executor = gpu_executor(scratch)
        try:
            return classify(request, machine, GpuMeasurer(executor, scratch / "words", check=measure.classify), watch)
        finally:
            executor.shutdown(cancel_futures=True)


def print_report(report: dict[str, Any], console: "Console") -> None:
    """A table a kernel, then what became of the promoted classes."""
    from rich.table import Table

    from ..offline.report import describe_schedule

    for kernel in report["kernels"]:
        shape = ", ".join(f"{k} {v}" for k, v in kernel["shape"].items())
        table = Table(title=f"{kernel['kernel']} on {report['target']}, recipe {report['recipe']}: {shape}\n"
                      f"{len(kernel['classes'])} classes of {kernel['variants']} variants; {kernel['origin']}: "
                      f"{describe_schedule(kernel['schedule'])}: class {(kernel['class'] or 'NOT COMPUTED')[:12]}",
                      title_justify="left")
        for name in ("knob", "changes bits", "for example"):
            table.add_column(name, no_wrap=name != "for example")
        for knob, found in kernel["knobs"].items():
            table.add_row(knob, found["changes_bits"], _example(knob, found["pair"]))
        console.print(table)
    for line in closing_lines(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _example(knob: str, pair: list[dict[str, Any]]) -> str:
    """`4 and 7 give 1a2b3c4d and 5e6f7a8b: BLOCK_N 64, ...`, or an empty string."""
    from ..offline.report import describe_schedule

    if not pair:
        return ""
    a, b = pair
    rest = describe_schedule({k: v for k, v in a["schedule"].items() if k != knob})
    given = f"both give {a['class'][:8]}" if a["class"] == b["class"] else f"give {a['class'][:8]} and {b['class'][:8]}"
    return f"{a['schedule'][knob]} and {b['schedule'][knob]} {given}: {rest}"


def closing_lines(report: dict[str, Any]) -> list[str]:
    """What the tables don't say."""
    lines = [f"{kernel}: skipped: {why}" for kernel, why in report["skipped"].items()]
    for kernel in report["kernels"]:
        lines += [f"{kernel['kernel']}: {name} has no class: {why}" for name, why in kernel["without_class"].items()]
        for row in kernel["promoted"]:
            found = f", here {row['found'][:12]}" if row["verdict"] == "another class" else ""
            lines.append(f"{kernel['kernel']}: promoted {row['schedule_id']} ({row['date']}, Triton {row['triton']}): class "
                         f"{row['class'][:12]}{found}: {row['verdict']}")
    compared = [row for kernel in report["kernels"] for row in kernel["promoted"]]
    met = sum(row["verdict"] == "same class" for row in compared)
    lines.append(f"promoted classes: {met} of {len(compared)} met here" if compared else
                 "no promoted row of these kernels: nothing to compare with")
    if report["seconds"] is not None:
        lines.append(f"{report['seconds']:.1f} s; calls of the compiler {report['calls'].get('compiler', 0)}, of ptxas "
                     f"{report['calls'].get('ptxas', 0)}")
    return lines
