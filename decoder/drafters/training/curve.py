"""The curve of a training run as SVG: the loss above, tau per kind of held-out prompt below."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 640, 190, 52, 96, 28, 44
COLOURS = ("#222222", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b")
TICKS = 4


@dataclass(frozen=True)
class Line:
    """One line of a panel. points: (step, value), steps ascending."""

    name: str
    points: Sequence[tuple[int, float]]


def curve_svg(title: str, loss: Line, taus: Sequence[Line]) -> str:
    """The picture, with one panel per unit over a common axis of steps."""
    last = max((step for line in (loss, *taus) for step, _ in line.points), default=1) or 1
    height = TOP + 2 * PANEL + 2 * GAP
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
             f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
             f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>']
    parts += _panel(TOP, "training loss", [loss], last)
    parts += _panel(TOP + PANEL + GAP, "tau, held-out prompts", taus, last)
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{height - 8}" text-anchor="middle">training step</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(top: int, label: str, lines: Sequence[Line], last: int) -> list[str]:
    values = [value for line in lines for _, value in line.points] or [0.0]
    low, high = min(values), max(values)
    span = (high - low) or 1.0

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last

    def y(value: float) -> float:
        return top + PANEL - (PANEL - 20) * (value - low) / span

    parts = [f'<text x="{LEFT}" y="{top + 8}" fill="#555555">{escape(label)}</text>']
    for tick in range(TICKS + 1):
        value, step = low + span * tick / TICKS, last * tick / TICKS
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        parts.append(f'<text x="{x(step):.1f}" y="{top + PANEL + 16}" text-anchor="middle">{step:.0f}</text>')
    ends = sorted((y(line.points[-1][1]), place) for place, line in enumerate(lines) if line.points)
    shown: dict[int, float] = {}
    for place_y, place in ends:  # a label that would overlap moves down
        shown[place] = max(place_y, max(shown.values(), default=-1e9) + 13)
    for place, line in enumerate(lines):
        if line.points:
            colour = COLOURS[place % len(COLOURS)]
            path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in line.points)
            parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{path}"/>')
            parts.append(f'<text x="{WIDTH - RIGHT + 6}" y="{shown[place] + 4:.1f}" fill="{colour}">{escape(line.name)} '
                         f'{line.points[-1][1]:.2f}</text>')
    return parts
