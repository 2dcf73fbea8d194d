#!/usr/bin/env python
"""Simulates false wins on a throttling GPU: candidates as fast as the incumbent, in runs that lose a share of their rounds.

    python scripts/throttled_wins.py --runs 200 [--seed 0] [--out FILE.json]

Needs no GPU: random times with noise and drift go through the confirmations and the ranking of --on-gpu. Prints a row per share
of throttled rounds and per effect of a process on a candidate: number of decided runs, of runs called throttled, of runs in which
one of the equal candidates won, and of runs in which a candidate that is 5% faster won. Then one JSON line. Exit 1 if more than
5% of the runs have a false win, or a run without a decision isn't called throttled.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from common import parser, publish, run
from tune_kernels.schedules.promoted import Artefact, Toolchain
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import LinearSchedule
from tune_kernels.shapes.model import LinearShape
from tune_kernels.tuner.on_gpu.samples.gate import Checked
from tune_kernels.tuner.on_gpu.samples.machine import Machine
from tune_kernels.tuner.on_gpu.samples.race import CONFIRM_ROUNDS, FINALISTS
from tune_kernels.tuner.on_gpu.samples.ranking import rank_all
from tune_kernels.tuner.on_gpu.samples.recording import PROCESSES, Contest, Entrant, Recording
from tune_kernels.tuner.on_gpu.samples.timing import CONFIRM, Batch, State

SHARES = (0.0, 0.1, 0.25, 0.4, 0.45, 0.5, 0.55, 0.6, 0.75, 0.9, 0.98, 1.0)
BASE, GAIN = "base", 0.05
NOISE, DRIFT = 0.005, 0.05  # of a sample, of the clock over a batch
PLACES = (0.002, 0.01, 0.025)  # how much a candidate's own place in one process is worth: standard deviation
CASES = [*((share, PLACES[0]) for share in SHARES), *((share, place) for place in PLACES[1:] for share in (0.0, 0.25, 0.45))]
MOST_FALSE_WINS = 0.05  # of the runs
SLOWED = (1.2, 3.0)  # how many times as long a throttled sample takes
RECIPE = load_recipe("fp8-v1")
THROTTLED = 0x40


@dataclass(frozen=True)
class Row:
    """Runs with one share of throttled rounds and one effect of processes. decided and throttled: runs; false_wins and found: of
    all runs."""

    share: float
    place: float
    runs: int
    decided: int
    throttled: int
    false_wins: int
    found: int


def contest_of(names: list[str]) -> Contest:
    """A contest whose candidates are all right and of one class."""
    entrants = {n: Entrant(n, LinearSchedule(64, 128, i + 1, 4), Artefact((), 0, 0, 0, 0, 0, 0, 0, "ab" * 32))
                for i, n in enumerate(names)}
    checked = {n: Checked(numerics_class="cd" * 32) for n in names}
    return Contest("down", LinearShape(3584, 18944), "ef" * 8, entrants, BASE, "recipe default", checked=checked)


def batch_of(names: list[str], truth: Callable[[str], float], share: float, place: float, process: int,
             random: np.random.Generator) -> Batch:
    """One confirmation. A throttled round slows each of its samples by another factor."""
    rounds = CONFIRM_ROUNDS
    throttled = random.random(rounds) < share
    drift = 1 + DRIFT * np.sin(np.arange(rounds) / 7 + random.random())
    samples = {}
    for name in names:
        mine = random.normal(1, place)
        slowed = np.where(throttled, random.uniform(*SLOWED, rounds), 1.0)
        samples[name] = [float(t) for t in truth(name) * mine * drift * slowed * random.lognormal(0, NOISE, rounds)]
    states = [State(1980, 3201, 60, 500.0, THROTTLED if t else 0) for t in throttled]
    return Batch(CONFIRM, process, samples, states, str(process))


def winner_of(truth: Callable[[str], float], share: float, place: float, seed: list[int]) -> tuple[Contest, str | None]:
    """One run: as many processes confirm as --on-gpu starts at most. (contest, winner)."""
    random = np.random.default_rng(seed)
    names = [BASE, *(f"c{i}" for i in range(FINALISTS))]
    contest = contest_of(names)
    for process in range(PROCESSES + 1):
        if not contest.finished:
            contest.batches.append(batch_of(names, truth, share, place, process, random))
            contest.finished = len(contest.confirmations()) >= PROCESSES
    recording = Recording("simulated", "nvidia-h200", RECIPE.name, Toolchain("", "", {}), Machine("NVIDIA H200", ""), 0,
                          "random:0", contests={"down": contest})
    return contest, rank_all(recording, RECIPE)["down"].winner


def row_of(share: float, runs: int, place: float = PLACES[0], seed: int = 0) -> Row:
    """Runs of equals, and as many in which one candidate is faster."""
    equal = [winner_of(lambda name: 10.0, share, place, [seed, run, 0]) for run in range(runs)]
    gain = [winner_of(lambda name: 10.0 * (1 - GAIN * (name == "c0")), share, place, [seed, run, 1]) for run in range(runs)]
    return Row(share, place, runs, sum(c.finished for c, _ in equal), sum(c.throttled for c, _ in equal),
               sum(winner not in (BASE, None) for _, winner in equal), sum(winner == "c0" for _, winner in gain))


def held(row: Row) -> bool:
    """At most 5% false wins, and each run is decided or called throttled."""
    return row.false_wins <= MOST_FALSE_WINS * row.runs and row.decided + row.throttled == row.runs


def counts_of(row: Row) -> dict[str, int]:
    """As they are recorded: what counts, and of which row."""
    case = f"{row.share:.0%} throttled, process effect {row.place:.1%}"
    counts = {"runs": row.runs, "decided": row.decided, "called throttled": row.throttled, "false wins": row.false_wins,
              "gains found": row.found}
    return {f"{case}: {name}": n for name, n in counts.items()}


def false_wins(counts: Mapping[str, int]) -> list[str]:
    """The rows of a record, or of several added up, with too many false wins."""
    return [name for name, n in counts.items() if name.endswith(": false wins")
            and n > MOST_FALSE_WINS * counts[name.removesuffix("false wins") + "runs"]]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=200, help="per row")
    options.add_argument("--seed", type=int, default=0, help="of the noise")
    given = options.parse_args()
    names = ("throttled rounds", "process effect", "decided", "throttled", "false wins", f"a {GAIN:.0%} gain found")
    print("".join(f"{name:>18}" for name in names))
    rows, began = [], time.monotonic()
    for share, place in CASES:
        rows.append(row := row_of(share, given.runs, place, given.seed))
        counts = "".join(f"{n / row.runs:>18.0%}" for n in (row.decided, row.throttled, row.false_wins, row.found))
        print(f"{row.share:>18.0%}{row.place:>18.1%}{counts}")
    lost = [f"{r.share:.0%} throttled: a run is neither decided nor called throttled" for r in rows
            if r.decided + r.throttled != r.runs]
    publish({"seed": given.seed, "counts": {name: n for row in rows for name, n in counts_of(row).items()}, "faults": lost,
             "seconds": round(time.monotonic() - began, 1)}, given.out)
    return 0 if all(map(held, rows)) else 1


if __name__ == "__main__":
    run(main)
