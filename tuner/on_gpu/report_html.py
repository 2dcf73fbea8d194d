"""report.html of an --on-gpu run: one file that works from disk, with the distributions drawn. No script: it is plain HTML."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..offline.report import describe_schedule
from ..page import render_page
from .report import closing_lines, describe_times

WIDTH, HEIGHT, MARGIN = 170, 18, 3  # of a drawing, in its own units


@dataclass(frozen=True)
class Drawing:
    """A distribution: whiskers from least to greatest, a box over the middle half, a mark at the median. x in WIDTH units."""

    low: float
    box: tuple[float, float]
    median: float
    high: float


def render_gpu_report(report: Mapping[str, Any]) -> str:
    """The page, as the text of one HTML file; the same report gives the same bytes."""
    kernels = [{**kernel, "rows": _rows(kernel)} for kernel in report["kernels"]]
    return render_page("on_gpu.html", None, ["on_gpu.css"], [], report=report, kernels=kernels,
                       lines=closing_lines(report), width=WIDTH, height=HEIGHT)


def _rows(kernel: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each place with what is shown of it; all of a kernel are drawn on one scale."""
    times = [p["times"]["quantiles_us"] for p in kernel["places"] if p["times"]]
    least = min((q[0] for q in times), default=0.0)
    # The slowest of a large space would press all others to the edge: the scale ends at thrice the fastest's median.
    most = min(max((q[-1] for q in times), default=1.0), 3 * min((q[len(q) // 2] for q in times), default=1.0))
    rows = []
    for place in kernel["places"]:
        took, change = describe_times(place)
        drawing = _drawing(place["times"]["quantiles_us"], least, most) if place["times"] else None
        rows.append({**place, "took": took, "change": change, "drawing": drawing, "text": describe_schedule(place["schedule"])})
    return rows


def _drawing(quantiles: list[float], least: float, most: float) -> Drawing:
    def x(value: float) -> float:
        share = (min(value, most) - least) / (most - least) if most > least else 0.5
        return round(MARGIN + share * (WIDTH - 2 * MARGIN), 1)

    last = len(quantiles) - 1
    return Drawing(x(quantiles[0]), (x(quantiles[last // 4]), x(quantiles[-1 - last // 4])), x(quantiles[last // 2]),
                   x(quantiles[-1]))
