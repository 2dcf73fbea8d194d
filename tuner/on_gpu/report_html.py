"""report.html of an --on-gpu run: one file that works from disk, without scripts. Decisions first, then each kernel's
drawings."""

from dataclasses import dataclass

from ...shapes.model import dims_of
from ..drawing import Drawing
from ..page import render_page
from . import drawing
from .report import KernelReport, PlaceReport, Report, closing_lines, describe_change, describe_times, headline
from .report_text import describe

KINDS = {"gain": "good", "refused": "bad", "throttled": "bad"}


@dataclass(frozen=True)
class Row:
    """A decision in the page's first table."""

    kernel: str
    now: str
    times_now: str
    proposed: str
    times: str
    alone: str
    full_model: str
    outcome: str
    why: str
    kind: str


@dataclass(frozen=True)
class Candidate:
    """A candidate in a kernel's table."""

    number: int
    place: PlaceReport
    schedule: str
    times: str
    change: str


@dataclass(frozen=True)
class Section:
    """One kernel: its shape, its drawings, its candidates."""

    kernel: KernelReport
    shape: str
    drawings: tuple[tuple[str, Drawing], ...]
    candidates: tuple[Candidate, ...]


def render_gpu_report(report: Report) -> str:
    """The HTML page. Equal reports give equal bytes."""
    return render_page("on_gpu.html", None, ["drawing.css", "on_gpu.css"], [], report=report, rows=_rows(report),
                       headline=headline(report), sections=[_section(k) for k in report.kernels], lines=closing_lines(report))


def _rows(report: Report) -> list[Row]:
    return [Row(d.kernel, describe(d.now), describe_times(d.times_now), describe(d.proposed), describe_times(d.times),
                describe_change(d.alone), d.describe_full_model(), d.outcome, d.why, KINDS.get(d.outcome, ""))
            for d in report.decisions]


def _section(kernel: KernelReport) -> Section:
    named = (("Against the schedule in place", drawing.forest(kernel)), ("Times", drawing.times(kernel)),
             ("Which knob matters", drawing.knobs(kernel)), ("Samples over time", drawing.rounds(kernel)))
    candidates = tuple(Candidate(i, p, describe(p.schedule), describe_times(p.times), describe_change(p.versus))
                       for i, p in enumerate(kernel.places, 1))
    return Section(kernel, ", ".join(f"{k} {v}" for k, v in dims_of(kernel.shape).items()),
                   tuple((title, found) for title, found in named if found), candidates)
