"""`tune-kernels verify --classes`: adds a check of kernels, which the decoder can't make, to the decoder's command."""

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
                 "bundle on this GPU, and the knobs that change the bits. Exit code 1 if a promoted class isn't met."),
    click.Option(["--bundle"], type=click.Path(path_type=Path, file_okay=False), default=Path("build/offline"),
                 show_default=True, help="With --classes: the folder that --offline wrote, which gives model and recipe."),
    click.Option(["--kernel", "kernels"], multiple=True, metavar="NAME", help="With --classes: kernel to classify; repeat for "
                 "several.  [default: all]"),
    click.Option(["--replay"], type=click.Path(path_type=Path), metavar="RUN", help="With --classes: show the classes of a "
                 "recorded run of --on-gpu; needs no GPU."),
]
USED = ("weights", "model", "recipe", "schedules", "out", "as_json")  # verify's options that --classes takes
USED_IN_REPLAY = ("schedules", "out", "as_json")


def with_classes(command: click.Command) -> click.Command:
    """The decoder's `verify` with the option `--classes` added."""
    own = command.callback
    assert own

    @click.pass_context
    def verify(context: click.Context, /, classes: bool, bundle: Path, kernels: tuple[str, ...], replay: Path | None,
               **options: Any) -> None:
        if not classes:
            _refuse(context, {"bundle", "kernels", "replay"}, "without --classes")
            own(**options)
            return
        used = USED_IN_REPLAY if replay else USED
        _refuse(context, {*options, *({"bundle"} if replay else ())} - {*used}, "with --replay" if replay else "with --classes")
        given = {name: value for name, value in options.items() if context.get_parameter_source(name) == COMMANDLINE}
        context.exit(_run(options["as_json"], replay, given, bundle, kernels, options["schedules"]))

    return click.Command(command.name, params=[*command.params, *ADDED], callback=verify, help=command.help)


def _refuse(context: click.Context, names: set[str], when: str) -> None:
    """Raises UsageError for a given option that has no effect here."""
    for parameter in context.command.params:
        if parameter.name in names and context.get_parameter_source(parameter.name) == COMMANDLINE:
            raise click.UsageError(f"{parameter.opts[0]} has no effect {when}")


def _run(as_json: bool, replay: Path | None, given: dict[str, Any], bundle: Path, kernels: tuple[str, ...],
         schedules: str | None) -> int:
    """Returns the exit code: 1 if a promoted class isn't met, or a kernel couldn't be classified. given: verify's options that
    the user gave."""
    from rich.console import Console

    from ...schedules import store
    from ..offline.record import write_json
    from .classes import Request, make_report, of_recording
    from .classes_report import print_report, report_to_dict

    console, out = Console(stderr=as_json), Path(given.get("out", OUT))
    request = Request(bundle, given.get("model") or given.get("weights"), given.get("recipe"), kernels,
                      Path(schedules) if schedules else None, out.parent)
    found = of_recording(replay, kernels) if replay else _on_gpu(request, console, quiet=as_json)
    report = make_report(found, store.search_path(request.schedules))
    table = report_to_dict(report)
    write_json(out, table)
    if as_json:
        click.echo(json.dumps(table, sort_keys=True))
    else:
        print_report(report, console)
        console.print(f"report: {out}", highlight=False, markup=False, soft_wrap=True)
    return 0 if report.passed else 1


def _on_gpu(request: "Request", console: "Console", quiet: bool) -> "Classified":
    """Classify on this machine's GPU."""
    from .. import pool
    from .classes import classify
    from .worker import checks, gpu_state
    from .worker.measurer import GpuMeasurer, gpu_executor

    def watch(line: str) -> None:
        if not quiet:
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    machine = gpu_state.this_machine()
    with pool.scratch_folder(request.out.absolute()) as scratch:
        measurer = GpuMeasurer(lambda: gpu_executor(scratch), scratch / "words", check=checks.classify)
        try:
            return classify(request, machine, measurer, watch)
        finally:
            measurer.close()
