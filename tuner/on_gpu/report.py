"""The report of an --on-gpu run, as a value and as JSON. It depends on the recording alone."""

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from ...schedules.promoted import Distribution, Paired, Toolchain
from ...schedules.recipe import OWN
from ...schedules.schedule import Schedule, knobs_of
from ...shapes.fields import Table
from ...shapes.model import KernelShape, MergeShape
from ...shapes.own import OwnShape
from ...shapes.target import load_sku
from .classes import ClassSize, Knob, changes_bits, classes_of, sizes
from .run import Outcome
from .samples.bytes import read_bytes
from .samples.decisions import GAIN, REFUSED, UNCHANGED, Decision, decide
from .samples.gate import GateResult
from .samples.machine import Machine
from .samples.ranking import FASTEST, Place, Ranking
from .samples.recording import Contest, contest_name
from .samples.timing import describe_dropped
from .samples.usage import Calls

SCHEMA = "tune-kernels/on-gpu-report/2"


@dataclass(frozen=True)
class PlaceReport:
    """A candidate. status: as in ranking.STATUSES, or `winner` or `refused` after the full model's decision on the fastest. why:
    the reason. share_of_ceiling: bytes over time, as a share of the SKU's bandwidth."""

    name: str
    schedule: Schedule
    status: str
    why: str
    times: Distribution | None
    versus: Paired | None
    numerics_class: str | None
    confirmed: bool
    share_of_ceiling: float | None


@dataclass(frozen=True)
class KnobEffect:
    """A knob's effect on the time. values: (value, number of candidates, minimum and median of their ratios to the incumbent).
    spread: the largest of these minima over the smallest. changes_bits: yes, no, or not varied alone."""

    knob: str
    values: tuple[tuple[Knob, int, float, float], ...]
    spread: float
    changes_bits: str


@dataclass(frozen=True)
class Trace:
    """One process's confirmation, round by round. incumbent_us and fastest_us: [rounds]; sm_mhz: [rounds], None if not
    recorded; throttled: [rounds]."""

    process: str
    incumbent_us: tuple[float, ...]
    fastest_us: tuple[float, ...]
    sm_mhz: tuple[int | None, ...]
    throttled: tuple[bool, ...]


@dataclass(frozen=True)
class KernelReport:
    """One kernel's contest. resolution: the smallest relative difference that the run resolves."""

    kernel: str
    shape: KernelShape
    finished: bool
    origin: str
    incumbent: str
    fastest: str | None
    tied: tuple[str, ...]
    numerics_class: str | None
    classes: tuple[ClassSize, ...]
    knobs: tuple[KnobEffect, ...]
    rounds: int
    dropped_rounds: int
    throttling: str
    resolution: float | None
    places: tuple[PlaceReport, ...]
    traces: tuple[Trace, ...]


@dataclass(frozen=True)
class Report:
    """A run. decisions: one per kernel."""

    model: str
    target: str
    recipe: str
    weights: str
    machine: Machine
    toolchain: Toolchain
    seed: int
    calls: Calls
    seconds_to_first_sample: float | None
    gpu_seconds: float
    skipped: Mapping[str, str]
    notes: tuple[str, ...]
    decisions: tuple[Decision, ...]
    gate: GateResult
    kernels: tuple[KernelReport, ...]

    @property
    def title(self) -> str:
        """`qwen2.5-7b on nvidia-h200, recipe fp8-v1`."""
        own = self.recipe == OWN.name
        return f"own kernels on {self.target}" if own else f"{self.model} on {self.target}, recipe {self.recipe}"

    def kernels_with(self, outcome: str) -> tuple[str, ...]:
        """The kernels with this decision."""
        return tuple(d.kernel for d in self.decisions if d.outcome == outcome)


def make_report(outcome: Outcome) -> Report:
    now = outcome.recording
    promotable = frozenset(contest_name(row.kernel, row.shape) for row in outcome.promoted.rows)
    decisions = decide(now, outcome.rankings, promotable, outcome.skipped)
    outcomes = {d.kernel: d.outcome for d in decisions}
    return Report(
        now.model, now.target, now.recipe, now.weights, now.machine, now.toolchain, now.seed, now.calls,
        now.seconds_to_first_sample, now.gpu_seconds, outcome.skipped, tuple(outcome.notes), decisions, outcome.gate,
        tuple(_kernel(now.contests[k], r, now.target, outcomes[k], outcome.gate.accepted.get(k))
              for k, r in outcome.rankings.items()))


def report_to_dict(report: Report) -> Table:
    """As in report.json. promotable: the gains; unchanged: kernels whose schedule in place stays, with evidence."""
    return {"schema": SCHEMA, **dataclasses.asdict(report), "promotable": list(report.kernels_with(GAIN)),
            "unchanged": list(report.kernels_with(UNCHANGED))}


def _kernel(contest: Contest, ranking: Ranking, target: str, outcome: str, accepted: str | None) -> KernelReport:
    classes = classes_of(contest)
    bits = {knob: effect.says for knob, effect in changes_bits(classes).items()}
    return KernelReport(
        contest.name, contest.shape, contest.finished, contest.origin, contest.incumbent, ranking.winner, ranking.tied,
        ranking.home_class, sizes(classes), _knobs(ranking.places, bits), sum(len(b.states) for b in contest.batches),
        sum(b.dropped for b in contest.batches), describe_dropped(contest.batches), ranking.rule.resolution,
        tuple(_place(p, contest.shape, target, outcome, accepted) for p in ranking.places), _traces(contest, ranking))


def _place(place: Place, shape: KernelShape, target: str, outcome: str, accepted: str | None) -> PlaceReport:
    status, why = place.status, place.why
    if outcome == GAIN and place.name == accepted:
        status, why = "winner", ""
    elif status == FASTEST and outcome == REFUSED:
        status, why = "refused", "fastest alone, but the full model refused it"
    elif status == FASTEST:
        why = "fastest alone"
    return PlaceReport(place.name, place.schedule, status, why, place.times, place.versus, place.numerics_class, place.confirmed,
                       share_of_ceiling(shape, place.times, target))


def share_of_ceiling(shape: KernelShape, times: Distribution | None, target: str) -> float | None:
    """Bytes over time, as a share of the SKU's measured bandwidth; None for a kernel that isn't bound by bandwidth."""
    if times is None or isinstance(shape, MergeShape | OwnShape):
        return None
    sku = load_sku(target)
    return round(read_bytes(shape, 0) / times.median_us / 1e6 / (sku.measured_tb_s or sku.peak_tb_s), 3)


def _knobs(places: tuple[Place, ...], bits: Mapping[str, str]) -> tuple[KnobEffect, ...]:
    """The knobs that vary among the timed candidates, largest spread first."""
    timed = [(knobs_of(p.schedule), p.versus.ratio if p.versus else 1.0) for p in places if p.times]
    found = []
    for knob in timed[0][0] if timed else ():
        groups: dict[Knob, list[float]] = {}
        for schedule, ratio in timed:
            groups.setdefault(schedule[knob], []).append(ratio)
        if len(groups) > 1:
            values = tuple((value, len(mine), round(min(mine), 5), round(statistics.median(mine), 5))
                           for value, mine in sorted(groups.items(), key=lambda item: str(item[0]).rjust(12)))
            best = [v[2] for v in values]
            found.append(KnobEffect(knob, values, round(max(best) / min(best), 5), bits.get(knob, "")))
    return tuple(sorted(found, key=lambda effect: -effect.spread))


def _traces(contest: Contest, ranking: Ranking) -> tuple[Trace, ...]:
    """The confirmations of the incumbent, and of the fastest if that is another one."""
    base, fastest = ranking.base, ranking.winner
    return tuple(
        Trace(process, tuple(batch.samples_us[base]), tuple(batch.samples_us.get(fastest or "", ())) if fastest != base else (),
              tuple(s.sm_mhz for s in batch.states), tuple(s.throttled for s in batch.states))
        for process, listed in contest.confirmations().items() for batch in listed if base is not None)


def describe_times(times: Distribution | None) -> str:
    """`6.7 us [6.6, 6.8]`, or an empty string."""
    return f"{times.median_us:.4g} us [{times.interval_us[0]:.4g}, {times.interval_us[1]:.4g}]" if times else ""


def describe_change(versus: Paired | None) -> str:
    """`-3.2% [-3.9, -2.5]`, or an empty string."""
    if versus is None:
        return ""
    low, high = versus.interval
    return f"{100 * (versus.ratio - 1):+.1f}% [{100 * (low - 1):+.1f}, {100 * (high - 1):+.1f}]"


def closing_lines(report: Report) -> list[str]:
    """Lines after the decisions: other classes, the full model's times and tokens, the run's cost."""
    gate, where = report.gate, f"full model {report.model}, weights {report.weights}"
    lines = [f"{kernel}: a faster schedule of another class: {why}" for kernel, why in gate.would_differ.items()]
    for mode, found in gate.agreement.full_model.items():
        low, high = found.interval
        lines.append(f"{where}, {mode}: {100 * (found.ratio - 1):+.2f}% time per token [{100 * (low - 1):+.2f}, "
                     f"{100 * (high - 1):+.2f}], {found.pairs} pairs, with all gains in place")
    if gate.agreement.tokens_compared:
        lines.append(f"{where}: {gate.agreement.tokens_compared} tokens compared over {gate.agreement.prompts} prompts: "
                     f"{gate.agreement.failure or 'all equal'}")
    if report.seconds_to_first_sample is not None:
        lines.append(f"{report.gpu_seconds:.1f} s on the GPU, {report.seconds_to_first_sample:.1f} s to the first sample; "
                     f"kernels compiled there {report.calls.compiler}, assembled {report.calls.ptxas}, launchers built "
                     f"{report.calls.c_compiler}")
    resolved = next((k.resolution for k in report.kernels if k.resolution), None)
    if resolved:
        lines.append(f"resolution of this run: {100 * resolved:.2f}%; a smaller difference is a tie")
    return [*lines, *report.notes]


def headline(report: Report) -> str:
    """`1 gain (down), 5 unchanged, 2 refused (o, qkv)`."""
    parts = []
    for outcome in dict.fromkeys(d.outcome for d in report.decisions):
        kernels = report.kernels_with(outcome)
        named = "" if outcome == UNCHANGED else f" ({', '.join(kernels)})"
        parts.append(f"{len(kernels)} {outcome}{'s' if outcome == GAIN and len(kernels) != 1 else ''}{named}")
    return ", ".join(parts if report.kernels_with(GAIN) else ["0 gains", *parts])
