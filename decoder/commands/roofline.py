"""`tune-kernels roofline`: the floor of a step, and the rates of AR, SD and SSD."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from .screen import reported, table

if TYPE_CHECKING:
    from ..bench.roofline import Prediction


class Values(TypedDict):
    """The command's values."""

    model: str
    drafter_model: str
    sku: str
    recipe: str
    bandwidth: float | None
    context: int
    draft_lengths: tuple[int, ...]
    acceptance: float
    tau: float | None
    hit_rate: float
    t_v: float | None
    t_d: float | None
    t_o: float
    t_sync: float
    measured: Path | None
    as_json: bool


@click.command()
@click.option("--model", default="qwen2.5-7b", show_default=True, help="A shipped shape or a config.json.")
@click.option("--drafter-model", default="qwen2.5-7b-eagle3", show_default=True, help="The drafter's shape, for t_d.")
@click.option("--target", "sku", default="nvidia-b300", show_default=True, help="The GPU: a SKU, its "
              "short name (b300) or an architecture (sm_103).")
@click.option("--recipe", default="fp8-v1", show_default=True)
@click.option("--bandwidth", type=float, default=None, help="TB/s.  [default: the SKU's peak]")
@click.option("--context", default=0, show_default=True, help="Tokens in the KV cache.")
@click.option("--draft-length", "draft_lengths", multiple=True, type=click.IntRange(1, 15), default=tuple(range(1, 9)),
              show_default=True)
@click.option("--acceptance", type=click.FloatRange(0, 1), default=0.6, show_default=True, help="Probability per drafted token.")
@click.option("--tau", type=click.FloatRange(1, 16), default=None, help="Measured tokens per round, in place of "
              "--acceptance; for one draft length.")
@click.option("--hit-rate", default=1.0, show_default=True, help="Hit rate of SSD's branches, 0 to 1.")
@click.option("--t-v", type=float, default=None, help="Measured ms of a verification.  [default: the floor]")
@click.option("--t-d", type=float, default=None, help="Measured ms of a drafted token.  [default: the floor]")
@click.option("--t-o", default=0.0, show_default=True, help="Measured ms of the rest of a round.")
@click.option("--t-sync", default=0.0, show_default=True, help="Measured ms that SSD waits on a hit.")
@click.option("--measured", type=click.Path(path_type=Path), default=None, help="A file of `bench --out`: gives tau, times and "
              "hit rate of each K.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@reported
def roofline(**values: Unpack[Values]) -> None:
    """Compute the floor of a decode step, and the rates of AR, SD and SSD. Needs no GPU."""
    from ...schedules.recipe import load_recipe
    from ...shapes.model import load_model_shape
    from ...shapes.target import sku_named
    from ..bench import roofline as physics
    from ..errors import RequestError

    tau, lengths = values["tau"], values["draft_lengths"]
    if tau is not None and len(lengths) != 1:
        raise RequestError("--tau was measured at one draft length", expected="exactly one --draft-length beside it")
    target = sku_named(values["sku"])
    speed = target.peak_tb_s if values["bandwidth"] is None else values["bandwidth"]
    if speed <= 0:
        raise RequestError(f"--bandwidth {speed}", expected="TB/s above 0")
    precision = load_recipe(values["recipe"]).precision
    read = physics.step_bytes(load_model_shape(values["model"]), precision, values["context"])
    floor = physics.floor_ms(read, speed)
    drafting = physics.floor_ms(physics.step_bytes(load_model_shape(values["drafter_model"]), precision), speed)
    times = physics.Times(drafting if values["t_d"] is None else values["t_d"], floor if values["t_v"] is None else values["t_v"],
                          values["t_o"], values["t_sync"])
    rows = physics.from_bench(values["measured"]) if values["measured"] else [
        physics.predict(times, k, tau or physics.tokens_per_round(values["acceptance"], k), values["hit_rate"]) for k in lengths]
    best = {mode: physics.best(rows, mode).draft_length for mode in ("sd", "ssd")}
    if values["as_json"]:
        click.echo(json.dumps({
            "schema": "tune-kernels/roofline/1", "model": values["model"], "target": target.name, "recipe": values["recipe"],
            "bandwidth_tb_s": speed, "context": values["context"], "bytes": read, "floor_ms": floor,
            "floor_tokens_per_s": 1e3 / floor, "t_v_ms": times.t_v, "t_d_ms": times.t_d,
            "rows": [asdict(row) for row in rows], "best_sd": best["sd"], "best_ssd": best["ssd"]}, sort_keys=True))
        return
    click.echo(f"{values['model']}, {values['recipe']}, {values['context']} tokens of context: {sum(read.values()) / 1e9:.2f} GB "
               "per step (" + ", ".join(f"{name} {n / 1e9:.2f}" for name, n in read.items()) + ")")
    click.echo(f"floor on {target.name} at {speed:g} TB/s: {floor:.2f} ms, {1e3 / floor:.0f} tokens/s")
    show(f"measured: {values['measured']}" if values["measured"] else f"t_v {times.t_v:.3f} ms, t_d {times.t_d:.3f} ms, t_o "
         f"{times.t_o:g} ms, t_sync {times.t_sync:g} ms, hit rate {values['hit_rate']:g}", rows)
    click.echo(f"best draft length: {best['sd']} for SD, {best['ssd']} for SSD")


def show(title: str, rows: "list[Prediction]") -> None:
    """One row per draft length."""
    table(title, ("K", "tau", "AR tokens/s", "SD", "SSD", "SD / AR", "SSD / SD", "SSD / SD at best"),
          [(str(r.draft_length), f"{r.tau:.2f}", f"{r.ar:.0f}", f"{r.sd:.0f}", f"{r.ssd:.0f}", f"{r.sd_over_ar:.2f}",
            f"{r.ssd_over_sd:.2f}", f"{r.ssd_ceiling_over_sd:.2f}") for r in rows])
