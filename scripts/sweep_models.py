#!/usr/bin/env python
"""Sweeps models of several families offline, from their `config.json`, for all three architectures.

    python scripts/sweep_models.py [--space small] [--out FILE.json]

For each model and target: variants, accepted ones and contract rejects per kernel. Prints a table, then one JSON line. Exit 1
where a kernel has no accepted variant.
"""

import platform
import sys
import tempfile
from collections import Counter
from pathlib import Path

from common import ROOT, parser, publish, run
from tune_kernels.tuner.offline.report import Report
from tune_kernels.tuner.offline.sweep import SweepRequest, sweep

CONFIGS = ROOT / "tests" / "data" / "configs"
Row = dict[str, int]  # variants, accepted, contract


def counts(report: Report) -> dict[str, dict[str, Row]]:
    """Target, then kernel: its counts."""
    found: dict[str, dict[str, Row]] = {}
    for variant in report.variants:
        row = found.setdefault(variant.target, {}).setdefault(variant.kernel, {"variants": 0, "accepted": 0, "contract": 0})
        row["variants"] += 1
        row["accepted"] += variant.accepted
        row["contract"] += variant.stage == "contract"
    return found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--space", default="small", help="a shipped space, or a file")
    options.add_argument("--jobs", type=int, default=None, help="worker processes; one per core where not given")
    given = options.parse_args()
    models: dict[str, dict[str, dict[str, Row]]] = {}
    seconds: dict[str, float] = {}
    for folder in sorted(CONFIGS.iterdir()):
        with tempfile.TemporaryDirectory() as out:
            report = sweep(SweepRequest(model=str(folder), space=given.space, jobs=given.jobs, out=Path(out)))
        models[folder.name], seconds[folder.name] = counts(report), report.seconds
        for target, kernels in models[folder.name].items():
            total: Counter[str] = Counter()
            for row in kernels.values():
                total.update(row)
            print(f"{folder.name:16} {target:7} {len(kernels):3} kernels {total['variants']:4} variants "
                  f"{total['accepted']:4} accepted {total['contract']:4} against a contract", file=sys.stderr, flush=True)
    publish({"space": given.space, "triton": report.toolchain.triton, "ptxas": dict(report.toolchain.ptxas),
             "machine": platform.machine(), "seconds": seconds, "models": models}, given.out)
    rows = [row for targets in models.values() for kernels in targets.values() for row in kernels.values()]
    return int(any(row["accepted"] == 0 for row in rows))


if __name__ == "__main__":
    run(main)
