#!/usr/bin/env python
"""Writes docs/figures.md from the committed records, so that no figure is typed by hand.

    python scripts/figures.py            # write the page
    python scripts/figures.py --check    # exit 1 if the page differs from the records
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jinja2

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "figures.md"

Record = dict[str, Any]


def read(path: Path) -> Record:
    """A record: the JSON object that a script wrote."""
    record: Record = json.loads(path.read_text())
    return record


def modes(record: Record) -> list[tuple[str, Record]]:
    """(name, figures) of each mode of bench_decode.py's record, one GPU first."""
    k = record["draft_length"]
    found = [("AR", record["decode"]["ar"]), (f"SD, K = {k}", record["decode"]["sd"])]
    for where, runs in (("the same GPU", record["decode"]), ("a second GPU", record.get("two_gpus") or {})):
        found += [(f"SSD, K = {k}, drafter on {where}, {100 * runs[mode]['hit_rate']:.0f}% of branches hit", runs[mode])
                  for mode in ("ssd", "ssd_misses") if mode in runs]
    return found


def recordings() -> list[Record]:
    """The recorded --on-gpu runs, each with its number of candidates checked and right."""
    found = []
    for path in sorted((ROOT / "tests" / "data" / "recordings").glob("h200-*.json")):
        record = read(path)
        checked = [c for contest in record["contests"].values() for c in contest["checked"].values()]
        found.append({**record, "checked": len(checked), "right": sum(c["failure"] is None for c in checked)})
    return found


def checks() -> list[tuple[str, str, Record]]:
    """(backend, recipe, checks by kind) of each recorded `verify` on SmolLM2."""
    files = [(where, recipe, ROOT / "docs" / "evidence" / f"{prefix}-{recipe}.json")
             for where, prefix in (("torch, CPU", "decoder-smollm2"), ("triton, H200", "h200-decoder-smollm2"))
             for recipe in ("fp32", "bf16", "fp8-v1")]
    return [(where, recipe, read(path)["checks"]) for where, recipe, path in files if path.exists()]


def page() -> str:
    """The whole page."""
    docs = ROOT / "docs"
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    decode = read(docs / "benchmarks" / "h200-qwen2.5-7b-decode.json")
    certified = read(docs / "benchmarks" / "h200-qwen2.5-7b-certified-head.json")
    return environment.get_template("figures.md.j2").render(
        decode=decode, runs=modes(decode), certified=certified, certified_runs=modes(certified),
        real=read(docs / "benchmarks" / "h200-smollm2-drafters.json"), peers=read(docs / "benchmarks" / "h200-peers.json"),
        cpu=[read(docs / "evidence" / f"bench-cpu-smollm2-{name}.json") for name in ("1-thread", "2-threads")],
        drafter=read(docs / "evidence" / "bench-smollm2-drafter-cpu.json"), recordings=recordings(), checks=checks(),
        accumulation=read(docs / "evidence" / "h200-accumulation-error.json"),
        offline=read(docs / "evidence" / "bench-offline-sm_103.json"), bundle=read(docs / "evidence" / "h200-bundle-check.json"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    options = parser.parse_args()
    text, name = page(), PAGE.relative_to(ROOT)
    if options.check:
        if PAGE.read_text() != text:
            print(f"{name} is not what the records give: run python scripts/figures.py")
            return 1
        return 0
    PAGE.write_text(text)
    print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
