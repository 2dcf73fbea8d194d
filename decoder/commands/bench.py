"""`tune-kernels bench`: decode rates of the three modes on the committed prompts."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from ...shapes.files import replace_text
from ..draft_length import AUTO, MOST
from ..stats import MODES
from .options import DATA, LENGTH, Loading, load_decoder, model_options
from .screen import Progress, reported, table

if TYPE_CHECKING:
    from ..backend import PassProfile
    from ..bench.bench import Row, Window


class Values(Loading):
    """The command's values."""

    modes: tuple[str, ...]
    draft_lengths: tuple[int | str, ...]
    branches: int
    scripted_tau: float | None
    prompts: Path
    which: str
    repeats: int | None
    max_new_tokens: int
    naive: bool
    profile: bool
    long: int | None
    out: Path | None
    as_json: bool


@click.command()
@model_options
@click.option("--mode", "modes", multiple=True, type=click.Choice(MODES), default=MODES, show_default=True)
@click.option("--draft-length", "draft_lengths", multiple=True, type=LENGTH, default=(4,), show_default=True,
              help="K, or auto; may be repeated.")
@click.option("--branches", default=4, show_default=True)
@click.option("--scripted-tau", type=float, default=None, help="Replay the AR run at this many tokens per round; the drafter "
              "works, and the script overwrites its proposals.")
@click.option("--prompts", type=click.Path(path_type=Path), default=DATA / "prompts.toml")
@click.option("--set", "which", type=click.Choice(("evaluation", "tuning")), default="evaluation", show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=None, help="[default: from the prompts file]")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--naive", is_flag=True, help="Also run Hugging Face's model with its growing cache, for comparison.")
@click.option("--profile", is_flag=True, help="Time each kind of kernel of a pass on its own, and the pass without it "
              "(triton backend).")
@click.option("--long", type=click.IntRange(min=1), default=None, help="Also time one AR request of this many tokens, ends "
              "ignored: ms per token in windows of 1,024.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Also write the JSON to this file.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@reported
def bench(**values: Unpack[Values]) -> None:
    """Time AR, SD and SSD on the committed prompts. Exit code 1 if any output differs from AR's."""
    from ..bench import bench as benchmark
    from ..errors import RequestError, writing

    tau, longest = values["scripted_tau"], max(MOST if k == AUTO else int(k) for k in values["draft_lengths"])
    shortest = min(MOST if k == AUTO else int(k) for k in values["draft_lengths"])
    if tau is not None and not 1 <= tau <= shortest + 1:
        raise RequestError(f"--scripted-tau {tau}", expected=f"1 to {shortest + 1}: a round of K drafted tokens emits at "
                           "most K + 1")
    prompts, repeats = benchmark.load_prompts(values["prompts"], values["which"])
    decoder = load_decoder(values)
    profile = decoder.model.pass_profile(decoder.cache, (1, longest + 1)) if values["profile"] else None
    if values["profile"] and profile is None:
        raise RequestError("--profile without the triton backend", expected="a GPU, whose kernels it times")
    is_auto = values["drafter"] == AUTO
    drafter = decoder.drafter.name if is_auto and decoder.drafter else values["drafter"]
    naive = benchmark.naive_baseline(decoder, values["weights"], values["model"], "ngram" if is_auto else drafter,
                                     values["device"]) if values["naive"] else None  # the naive decoders have no EAGLE-3
    plan = benchmark.BenchPlan(prompts, values["repeats"] or repeats, benchmark.configs(values["modes"], values["draft_lengths"]),
                               values["max_new_tokens"], tau, values["branches"])
    progress = Progress()
    try:
        runs = list(benchmark.run_all(decoder, plan, progress, naive))
    finally:
        progress.done()
    rows = [row for kind in (None, *dict.fromkeys(run.prompt.kind for run in runs)) for row in benchmark.summary(runs, kind)]
    different = benchmark.differing(runs)
    windows = benchmark.long_run(decoder, prompts[0].text, values["long"]) if values["long"] else None
    text = json.dumps({
        "schema": "tune-kernels/decoder-bench/1", "weights": decoder.source, "recipe": values["recipe"], "set": values["which"],
        "drafter": "scripted" if tau else drafter, "backend": decoder.model.notes.name,
        "device": decoder.model.notes.device, "max_new_tokens": values["max_new_tokens"], "rows": rows,
        "naive_dtype": naive.dtype_name if naive else None, "different": different, "same": not different,
        **({"long": windows} if windows else {}), **({"profile": asdict(profile)} if profile else {})}, sort_keys=True)
    if not values["as_json"]:
        show(rows, values["which"], different, windows or [], profile)
    click.echo(text)
    if values["out"]:
        with writing(values["out"]):
            replace_text(values["out"], text + "\n")
    if different:
        sys.exit(1)


def show(rows: "list[Row]", which: str, different: list[str], windows: "list[Window]", profile: "PassProfile | None") -> None:
    """Prints the figures as tables."""
    table(f"{which} prompts, medians of per-request figures",
          ("prompts", "config", "tokens/s", "with prompt", "over AR", "tau", "acceptance", "hit rate", "t_v ms", "t_d ms",
           "same"),
          [(r["kind"], r["config"], f"{r['tokens_per_s']:.1f}", f"{r['tokens_per_s_with_prefill']:.1f}",
            f"{r['over_ar']:.2f}", f"{r['tokens_per_round']:.2f}", f"{r['acceptance']:.2f}", f"{r['hit_rate']:.2f}",
            f"{r['t_v_ms']:.2f}", f"{r['t_d_ms']:.2f}", f"{r['same_as_ar']} of {r['requests']}") for r in rows])
    for run in different:
        click.echo(f"other tokens than AR's: {run}")
    for window in windows:
        click.echo(f"tokens {window['first']} to {window['last']}: {window['ms_a_token']:.3f} ms per token")
    for count, kinds in profile.rows.items() if profile else ():
        table(f"one pass, rows: {count}; read ceiling {profile.read_ceiling_tb_s:.2f} TB/s" if profile else "",
              ("kernel", "launches", "us", "us each", "us added", "share of pass", "TB/s", "share of ceiling"),
              [(r.kind, str(r.launches), f"{r.time_us:.1f}", f"{r.time_us / r.launches:.2f}", f"{r.adds_us:.1f}",
                f"{r.share:.3f}", f"{r.bandwidth_tb_s:.2f}", f"{r.ceiling_share:.2f}") for r in kinds])
