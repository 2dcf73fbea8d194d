"""The report of an --on-gpu run: one JSON value, and what a terminal shows of it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...schedules.promoted import Distribution, Paired
from ...schedules.schedule import schedule_to_dict
from ...shapes.model import KernelShape, MergeShape, shape_to_dict
from ...shapes.target import load_sku
from ..offline.report import describe_schedule
from .classes import changes_bits, classes_of, sizes
from .samples.ranking import Place, Ranking
from .samples.recording import Contest
from .worker.operands import read_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from .run import Outcome

SCHEMA = "tune-kernels/on-gpu-report/1"
SHOWN = 6  # places of each kernel on a terminal


def make_report(outcome: "Outcome") -> dict[str, Any]:
    """Everything a reader may want to know; the same for the same recording."""
    now = outcome.recording
    return {
        "schema": SCHEMA, "model": now.model, "target": now.target, "recipe": now.recipe, "weights": now.weights,
        "machine": {"gpu": now.machine.gpu, "driver": now.machine.driver, "cuda": now.machine.cuda},
        "toolchain": {"triton": now.toolchain.triton, "ptxas": now.toolchain.ptxas, "flags": dict(now.toolchain.flags)},
        "seed": now.seed, "calls": dict(now.calls), "seconds_to_first_sample": now.seconds_to_first_sample,
        "gpu_seconds": now.gpu_seconds, "skipped": dict(outcome.skipped), "notes": list(outcome.notes),
        "promotable": [row.kernel for row in outcome.promoted.rows], "written": outcome.written and outcome.written.name,
        "gate": outcome.said.as_dict(),
        "kernels": [_kernel(now.contests[k], r, now.target) for k, r in outcome.rankings.items()],
    }


def _kernel(contest: Contest, ranking: Ranking, target: str) -> dict[str, Any]:
    found = classes_of(contest)
    return {
        "kernel": contest.kernel, "shape": shape_to_dict(contest.shape), "finished": contest.finished,
        "origin": contest.origin, "incumbent": contest.incumbent, "winner": ranking.winner, "tied": list(ranking.tied),
        "class": ranking.home_class, "classes": sizes(found),
        "changes_bits": {knob: effect.says for knob, effect in changes_bits(found).items()},
        "rounds": sum(len(b.states) for b in contest.batches), "dropped_rounds": sum(b.dropped for b in contest.batches),
        "places": [_place(p, contest.shape, target) for p in ranking.places],
    }


def _place(place: Place, shape: KernelShape, target: str) -> dict[str, Any]:
    return {
        "id": place.name, "schedule": schedule_to_dict(place.schedule), "status": place.status, "why": place.why,
        "times": _times(place.times), "versus_incumbent": _paired(place.versus), "class": place.numerics_class,
        "confirmed": place.confirmed, "share_of_ceiling": share_of_ceiling(shape, place.times, target),
    }


def _times(times: Distribution | None) -> dict[str, Any] | None:
    if times is None:
        return None
    return {"median_us": times.median_us, "interval_us": list(times.interval_us), "samples": times.samples,
                      "quantiles_us": list(times.quantiles_us)}


def _paired(found: Paired | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"ratio": found.ratio, "interval": list(found.interval), "pairs": found.pairs}


def share_of_ceiling(shape: KernelShape, times: Distribution | None, target: str) -> float | None:
    """Bytes over time as a share of what the SKU was measured to read; None where bytes aren't what bounds it."""
    if times is None or isinstance(shape, MergeShape):
        return None
    sku = load_sku(target)
    return round(read_bytes(shape, 0) / times.median_us / 1e6 / (sku.measured_tb_s or sku.peak_tb_s), 3)


def describe_times(place: Mapping[str, Any]) -> tuple[str, str]:
    """(`6.7 us [6.6, 6.8]`, `-3.2% [-3.9, -2.5]`), as far as they are known."""
    times, versus = place["times"], place["versus_incumbent"]
    took = f"{times['median_us']:.4g} us [{times['interval_us'][0]:.4g}, {times['interval_us'][1]:.4g}]" if times else ""
    change = (f"{100 * (versus['ratio'] - 1):+.1f}% [{100 * (versus['interval'][0] - 1):+.1f}, "
              f"{100 * (versus['interval'][1] - 1):+.1f}]") if versus else ""
    return took, change


def print_report(report: Mapping[str, Any], console: "Console") -> None:
    """A table a kernel, then what the full model said and what is promoted."""
    from rich.table import Table

    for kernel in report["kernels"]:
        table = Table(title=f"{kernel['kernel']} on {report['target']}, recipe {report['recipe']}", title_justify="left")
        for name in ("schedule", "time", "against incumbent", "ceiling", "class", "what"):
            table.add_column(name, no_wrap=name == "class")
        for place in shown(kernel["places"]):
            took, change = describe_times(place)
            share = place["share_of_ceiling"]
            table.add_row(describe_schedule(place["schedule"]), took, change, f"{share:.2f}" if share else "",
                          (place["class"] or "")[:8], place["status"] + (f": {place['why']}" if place["why"] else ""))
        console.print(table)
    for line in closing_lines(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def shown(places: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first few, the incumbent, and the best of each status that isn't among them."""
    chosen = list(places[:SHOWN])
    statuses = {p["status"] for p in chosen}
    for place in places[SHOWN:]:
        if place["status"] not in statuses or place["status"] == "incumbent":
            chosen.append(place)
            statuses.add(place["status"])
    return chosen


def closing_lines(report: Mapping[str, Any]) -> list[str]:
    """What the tables don't say."""
    gate, calls = report["gate"], report["calls"]
    lines = [f"{kernel}: skipped: {why}" for kernel, why in report["skipped"].items()]
    lines += [f"{kernel}: the winner was refused: {why}"
              + ("; the incumbent stays" if kernel in gate["accepted"] else "") for kernel, why in gate["rejected"].items()]
    lines += [f"{kernel}: another class: {why}" for kernel, why in gate["would_differ"].items()]
    for mode, found in gate["agreement"]["full_model"].items():
        low, high = found["interval"]
        lines.append(f"full model, {mode}: {100 * (found['ratio'] - 1):+.2f}% time a token [{100 * (low - 1):+.2f}, "
                     f"{100 * (high - 1):+.2f}], {found['pairs']} pairs")
    if gate["agreement"]["tokens_compared"]:
        lines.append(f"tokens: {gate['agreement']['tokens_compared']} compared over {gate['agreement']['prompts']} prompts, "
                     f"weights {report['weights']}: {gate['agreement']['failure'] or 'all equal'}")
    if report["seconds_to_first_sample"] is not None:
        lines.append(f"{report['gpu_seconds']:.1f} s on the GPU, {report['seconds_to_first_sample']:.1f} s to the first sample; "
                     f"calls of the compiler {calls.get('compiler', 0)}, of ptxas {calls.get('ptxas', 0)}, of a C compiler "
                     f"{calls.get('c_compiler', 0)}")
    lines += report["notes"]
    lines.append(f"promotable: {', '.join(report['promotable']) or 'nothing'}")
    return lines
