#!/usr/bin/env python
"""Draws the pictures of docs/images/ from the committed records, each in a light and a dark version.

    python scripts/pictures.py

rates: tokens/s of each mode beside the floor of the memory and measured peers. round: one round of SD and one of SSD, to
scale, from the measured parts. life: a schedule's way from a candidate to a promoted row, with the value on each arrow.
"""

import argparse
import json
import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
BENCHMARKS = ROOT / "docs" / "benchmarks"


@dataclass(frozen=True)
class Palette:
    """Colours of one version: CSS values."""

    paper: str
    ink: str
    faint: str
    target: str
    drafter: str
    peer: str
    bad: str


PALETTES = {"light": Palette("#ffffff", "#1f2328", "#8c959f", "#0969da", "#bf8700", "#afb8c1", "#cf222e"),
            "dark": Palette("#0d1117", "#e6edf3", "#7d8590", "#4493f8", "#d29922", "#484f58", "#f85149")}


@dataclass
class Drawing:
    """An SVG under construction; x to the right and y down, in pixels."""

    width: int
    height: int
    palette: Palette
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, anchor: str = "start", size: int = 13, colour: str = "",
             weight: str = "normal") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
                          f'fill="{colour or self.palette.ink}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, colour: str, outline: bool = False) -> None:
        paint = f'fill="none" stroke="{colour}" stroke-width="1.5"' if outline else f'fill="{colour}"'
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height:.1f}" rx="4" {paint}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "", arrow: bool = False) -> None:
        head = ' marker-end="url(#arrow)"' if arrow else ""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
                          f'stroke-width="1.5"{dashes}{head}/>')

    def svg(self, title: str) -> str:
        arrow = (f'<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
                 f'<path d="M0 0 L8 4 L0 8 z" fill="{self.palette.faint}"/></marker></defs>')
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
                f'height="{self.height}" role="img" font-family="system-ui, -apple-system, Segoe UI, Arial, sans-serif">'
                f'<title>{escape(title)}</title>{arrow}<rect width="100%" height="100%" fill="{self.palette.paper}"/>'
                + "".join(self.parts) + "</svg>\n")


def read(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((BENCHMARKS / name).read_text())
    return record


def rates(palette: Palette) -> str:
    """Horizontal bars of tokens/s, the floor as a line."""
    record = read("h200-qwen2.5-7b-decode.json")
    one, two = record["decode"], record["two_gpus"]
    bars = [("SSD, two GPUs", two["ssd"]["tokens_per_s"], palette.target), ("SD", one["sd"]["tokens_per_s"], palette.target),
            ("SSD, one GPU", one["ssd"]["tokens_per_s"], palette.target), ("AR", one["ar"]["tokens_per_s"], palette.target)]
    peers = BENCHMARKS / "h200-peers.json"
    if peers.exists():
        found = read(peers.name)["rates"]
        bars += [(name, rate["tokens_per_s"], palette.peer) for name, rate in found.items() if "tune-kernels" not in name]
    left, scale, floor = 300, 0.42, 1e6 / record["floor_us"]
    picture = Drawing(800, 96 + 34 * len(bars), palette)
    picture.text(20, 28, "Qwen2.5-7B's shape on an H200, one request: tokens/s", size=16, weight="600")
    for i, (name, rate, colour) in enumerate(bars):
        y = 62 + 34 * i
        picture.text(left - 10, y + 17, name, "end")
        picture.box(left, y, rate * scale, 24, colour)
        picture.text(left + rate * scale + 8, y + 17, f"{rate:.0f}", weight="600")
    bottom = 62 + 34 * len(bars)
    picture.line(left + floor * scale, 46, left + floor * scale, bottom, palette.bad, "5 4")
    picture.text(left + floor * scale + 6, 54, f"a step's bytes at memory speed: {floor:.0f}", size=11,
                 colour=palette.bad)
    words = (f"Random weights; SD and SSD with K = {record['draft_length']} and scripted acceptance, "
             f"{one['sd']['tokens_per_round']:.2f} tokens a round. scripts/bench_decode.py, scripts/bench_peers.py")
    picture.text(20, bottom + 20, words, size=11, colour=palette.faint)
    return picture.svg("tokens per second of AR, SD and SSD beside the memory's limit")


def rounds(palette: Palette) -> str:
    """One round of SD on one GPU and one of SSD on two, from their measured parts."""
    record = read("h200-qwen2.5-7b-decode.json")
    parts, k = record["ssd_parts_us"], record["draft_length"]

    def part(name: str) -> float:
        return min(us for key, us in parts.items() if key.startswith(name))

    draft, verify, prepare, finish = (part(name) for name in ("draft ", "verify ", "prepare ", "finish "))
    prepare = max(us for key, us in parts.items() if key.startswith("prepare "))
    left, scale = 130, 0.215
    picture = Drawing(800, 300, palette)
    picture.text(20, 28, f"One round, K = {k}, in microseconds", size=16, weight="600")

    def bar(x: float, y: float, us: float, words: str, colour: str) -> None:
        picture.box(left + x * scale, y, us * scale, 30, colour)
        if us * scale > 40:
            picture.text(left + (x + us / 2) * scale, y + 20, words, "middle", colour=palette.paper, weight="600")

    picture.text(20, 76, "SD", weight="600")
    picture.text(40, 76, ", one GPU")
    bar(0, 56, draft, f"draft {draft:.0f}", palette.drafter)
    bar(draft, 56, verify, f"verify {k + 1} rows {verify:.0f}", palette.target)
    picture.line(left + (draft + verify) * scale, 50, left + (draft + verify) * scale, 224, palette.faint, "4 4")
    picture.text(20, 142, "SSD", weight="600")
    picture.text(50, 142, ", target")
    picture.text(50, 182, "  drafter")
    bar(0, 122, verify, f"verify {k + 1} rows {verify:.0f}", palette.target)
    bar(0, 162, prepare, f"prepare branches {prepare:.0f}", palette.drafter)
    bar(verify, 122, finish, "", palette.ink)
    hit = verify + finish
    picture.line(left + hit * scale, 116, left + hit * scale, 224, palette.faint, "4 4")
    picture.text(left + hit * scale - 4, 214, f"select the branch {finish:.0f}: a hit has its next draft", "end", size=12)
    picture.text(left, 246, f"A hit hides the draft behind the verification: {draft + verify:.0f} → {hit:.0f} us a round.")
    picture.text(left, 266, "A miss drafts then, as SD does. The tokens are the same either way.")
    words = f"{record['gpu']}, parts timed as graphs by scripts/bench_decode.py; copies between GPUs and the host come on top."
    picture.text(20, 290, words, size=11, colour=palette.faint)
    return picture.svg("one round of SD and one of SSD")


STEPS = [("space", "knobs × contract", "Schedule"), ("compile", "no GPU needed", "Variant"),
         ("inspect", "SASS, spills, PTX", "Verdict"), ("time", "on the GPU", "Timing"), ("gate", "bits, full model", "Evidence"),
         ("promote", "schedules/SKU/", "PromotedSchedule")]
REJECTED = {"space": "contract", "compile": "compile_error", "inspect": "wrong_instruction, register_spill, early_access …",
            "time": "a tie keeps the incumbent", "gate": "other bits, or slower in the model"}


def life(palette: Palette) -> str:
    """A schedule's way through the tool."""
    picture = Drawing(1000, 210, palette)
    width, gap, top = 104, 62, 56
    picture.text(20, 28, "A schedule's life", size=16, weight="600")
    for i, (step, what, value) in enumerate(STEPS):
        x = 20 + i * (width + gap)
        picture.box(x, top, width, 58, palette.target, outline=True)
        picture.text(x + width / 2, top + 25, step, "middle", weight="600")
        picture.text(x + width / 2, top + 44, what, "middle", size=11, colour=palette.faint)
        if i + 1 < len(STEPS):
            picture.line(x + width + 2, top + 29, x + width + gap - 3, top + 29, palette.faint, arrow=True)
            picture.text(x + width + gap / 2, top + 20, value, "middle", size=12)
        if step in REJECTED:
            down = top + 58 + (24 if i % 2 == 0 else 54)
            picture.line(x + width / 2, top + 60, x + width / 2, down - 2, palette.bad, arrow=True)
            picture.text(max(x + width / 2, 60), down + 14, REJECTED[step], "middle", size=11, colour=palette.bad)
    picture.text(20 + 5 * (width + gap) + width / 2, top + 80, "PromotedSchedule", "middle", size=12)
    picture.text(20 + 5 * (width + gap) + width / 2, top + 98, "→ the decoder, exact", "middle", size=11, colour=palette.faint)
    return picture.svg("a schedule's life: space, compile, inspect, time, gate, promote")


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    IMAGES.mkdir(exist_ok=True)
    for name, draw in (("rates", rates), ("round", rounds), ("life", life)):
        for version, palette in PALETTES.items():
            (IMAGES / f"{name}-{version}.svg").write_text(draw(palette))
    print(f"wrote {IMAGES.relative_to(ROOT)}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
