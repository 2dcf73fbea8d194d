"""The drawings of report.html: the knobs that decide verdicts, and each artefact's registers against its occupancy. Values are in
a drawing's own units; the template makes the SVG."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from ...schedules.schedule import knobs_of
from .report import Variant

MOST_KNOBS = 4  # per kernel
SHADES = 4
WIDTH, HEIGHT = 560, 240  # of the drawing of registers and occupancy
LEFT, RIGHT, TOP, BOTTOM = 34, 8, 8, 34  # its margins
REGISTER_TICKS, BLOCK_TICKS = (32, 64, 96, 128, 160, 192, 224, 255), (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Cell:
    """A count in a summary table. query: the filter that a click sets, as the page's URL hash."""

    count: int
    total: int
    query: str

    @property
    def shade(self) -> int:
        """0 for a count of 0, else 1 to SHADES by the share."""
        return 1 + min(SHADES - 1, SHADES * self.count // self.total) if self.count else 0

    @property
    def percent(self) -> int:
        return round(100 * self.count / self.total) if self.total else 0


@dataclass(frozen=True)
class Knob:
    """One knob of one kernel. values: (value, accepted of all). spread: percentage points between best and worst value."""

    kernel: str
    name: str
    values: tuple[tuple[str, Cell], ...]
    spread: int


@dataclass(frozen=True)
class Dot:
    """The artefacts of one kernel and verdict with equal registers and occupancy. x, y, radius: in the drawing's units."""

    x: float
    y: float
    radius: float
    verdict: str
    text: str


@dataclass(frozen=True)
class Scatter:
    """Registers per thread (linear) against blocks per SM (powers of two). ticks: (position, label)."""

    dots: tuple[Dot, ...]
    x_ticks: tuple[tuple[float, int], ...]
    y_ticks: tuple[tuple[float, int], ...]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    bottom: int = HEIGHT - BOTTOM


def query_of(**filters: str) -> str:
    """The URL hash that filters the table."""
    return urlencode({name: value for name, value in filters.items() if value})


def deciding_knobs(variants: Sequence[Variant]) -> list[Knob]:
    """The knobs whose values differ in their share of accepted variants: per kernel the MOST_KNOBS with the largest spread."""
    found: list[Knob] = []
    for kernel in dict.fromkeys(v.kernel for v in variants):
        mine = [v for v in variants if v.kernel == kernel]
        knobs = [_knob(kernel, name, mine) for name in dict.fromkeys(n for v in mine for n in knobs_of(v.schedule))]
        found += sorted((k for k in knobs if k.spread), key=lambda k: -k.spread)[:MOST_KNOBS]
    return found


def _knob(kernel: str, name: str, variants: Sequence[Variant]) -> Knob:
    values = {_word(value): value for v in variants for value in [knobs_of(v.schedule).get(name)]}  # 1 and True are two
    total = Counter(_word(knobs_of(v.schedule).get(name)) for v in variants)
    accepted = Counter(_word(knobs_of(v.schedule).get(name)) for v in variants if v.accepted)
    words = sorted(values, key=lambda word: (isinstance(values[word], str), values[word] is not None, values[word] or 0)
                   if not isinstance(values[word], str) else (True, True, word))
    cells = [(word, Cell(accepted[word], total[word], query_of(kernel=kernel, q=f"{name}={word}"))) for word in words]
    shares = [cell.percent for _, cell in cells]
    return Knob(kernel, name, tuple(cells), max(shares) - min(shares))


def _word(value: object) -> str:
    """A knob's value as the page's script writes it: the search box must find it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def occupancy(variants: Sequence[Variant]) -> Scatter:
    """Every artefact's registers and blocks per SM."""
    counted = Counter((v.kernel, v.facts.registers, v.facts.blocks_per_sm, v.verdict) for v in variants if v.facts)
    most = max(counted.values(), default=1)
    dots = [Dot(_x(registers), _y(blocks), round(2.5 + 5 * math.sqrt(n / most), 1), verdict,
                f"{kernel}: {registers} registers, {blocks} blocks per SM, {n} {verdict}")
            for (kernel, registers, blocks, verdict), n in counted.most_common()]
    return Scatter(tuple(dots), tuple((_x(n), n) for n in REGISTER_TICKS), tuple((_y(n), n) for n in BLOCK_TICKS))


def _x(registers: int) -> float:
    return round(LEFT + registers / 256 * (WIDTH - LEFT - RIGHT), 1)


def _y(blocks: int) -> float:
    """Height of a number of blocks per SM, in powers of two; 0 is one step below 1."""
    height = (math.log2(blocks) + 1) / 6 if blocks else 0.0
    return round(HEIGHT - BOTTOM - height * (HEIGHT - TOP - BOTTOM), 1)
