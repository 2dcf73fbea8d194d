#!/usr/bin/env python
"""The long counts, shared out over processes with disjoint seeds: mutated files, fuzzed requests, sweeps at once, false wins.

    python scripts/long_counts.py --jobs 12 --minutes 8 --first-seed 1000 --parts PARTS.jsonl
    python scripts/long_counts.py --merge PARTS.jsonl --merge MORE.jsonl --out docs/evidence/long-counts.json

A part is one run of a script with one seed. PARTS gets a line as each ends; none is started that would not end in time. Prints
one JSON line per script: counts, faults, and by machine the seeds and the seconds of all processes. Exit 1 where a script met a
fault or ended without a record, and where equal candidates won in more than 5% of the runs of a row of throttled_wins.py.
"""

import json
import os
import platform
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from common import cpu_model, parser, publish, run
from throttled_wins import false_wins
from tune_kernels.shapes.errors import UserError
from tune_kernels.shapes.fields import parse_fields

SCRIPTS = Path(__file__).parent


@dataclass(frozen=True)
class Work:
    """The parts of one script. arguments: of one part; parts: that make the whole; seconds: of one part on one core, a guess that
    the first parts replace."""

    script: str
    arguments: tuple[str, ...]
    parts: int
    seconds: float


ALL = (Work("throttled_wins", ("--runs", "25"), 24, 60), Work("fuzz_files", ("--count", "300"), 31, 90),
       Work("fuzz_decoder", ("--requests", "500"), 20, 40), Work("sweeps_at_once", ("--times", "10"), 20, 60))


@dataclass(frozen=True)
class Machine:
    """The machine's kind, and the versions that ran on it."""

    cpu: str
    cores: int
    python: str
    torch: str
    triton: str
    numba: str
    numpy: str


@dataclass(frozen=True)
class Found:
    """The record that each of the scripts prints. counts: add up over parts."""

    seed: int
    counts: Mapping[str, int]
    faults: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Part:
    """One run of a script."""

    script: str
    machine: Machine
    found: Found


def this_machine() -> Machine:
    return Machine(cpu_model(), len(os.sched_getaffinity(0)), platform.python_version(),
                   *(version(name) for name in ("torch", "triton", "numba", "numpy")))


def found_by(work: Work, seed: int) -> Found:
    """One run of the script. A run that ends without its record is a fault."""
    command = [sys.executable, str(SCRIPTS / f"{work.script}.py"), *work.arguments, "--seed", str(seed)]
    began = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if ended.returncode in (0, 1) and ended.stdout.rstrip().endswith("}"):
        return parse_fields(ended.stdout.splitlines()[-1].encode(), "JSON", work.script, UserError).read(Found)
    return Found(seed, {}, (f"seed {seed}: exit {ended.returncode}: {(ended.stderr or ended.stdout)[-600:]}",),
                 round(time.monotonic() - began, 1))


def shared_out(works: Sequence[Work], jobs: int, first_seed: int, seconds: float, parts: Path) -> None:
    """Runs parts in `jobs` processes until all are done or the time is up. The scripts take turns by their share of the whole, so
    that a run cut short has some of each."""
    until, machine, lock = time.monotonic() + seconds, this_machine(), threading.Lock()
    longest = {work.script: 0.0 for work in works}
    waiting: queue.SimpleQueue[tuple[Work, int]] = queue.SimpleQueue()
    for number, work in sorted(((i, w) for w in works for i in range(w.parts)), key=lambda part: (part[0] + 0.5) / part[1].parts):
        waiting.put((work, first_seed + number))

    def run_parts() -> None:
        while not waiting.empty():
            try:
                work, seed = waiting.get_nowait()
            except queue.Empty:
                return
            if time.monotonic() + (longest[work.script] or work.seconds) > until:
                continue
            found = found_by(work, seed)
            with lock, parts.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(Part(work.script, machine, found))) + "\n")
                longest[work.script] = max(longest[work.script], found.seconds)

    workers = [threading.Thread(target=run_parts) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def read_parts(paths: Iterable[Path]) -> list[Part]:
    """Raises UserError where a seed stands twice."""
    parts = [parse_fields(line, "JSON", str(path), UserError).read(Part)
             for path in paths if path.exists() for line in path.read_bytes().splitlines()]
    twice = [key for key, n in Counter((p.script, p.found.seed) for p in parts).items() if n > 1]
    if twice:
        raise UserError(f"{twice[0][0]}: seed {twice[0][1]} stands twice", expected="each seed once")
    return parts


def totals(script: str, parts: Sequence[Part]) -> dict[str, object]:
    """The sums of one script's parts, and the machines that they ran on."""
    mine = [p for p in parts if p.script == script]
    counts: Counter[str] = Counter()
    for part in mine:
        counts.update(part.found.counts)
    machines = [{**asdict(machine), "seeds": sorted(p.found.seed for p in mine if p.machine == machine),
                 "seconds": round(sum(p.found.seconds for p in mine if p.machine == machine))}
                for machine in sorted({p.machine for p in mine}, key=str)]
    return {"script": script, "counts": dict(counts), "faults": [f for p in mine for f in p.found.faults], "machines": machines}


def held(script: str, record: Mapping[str, object]) -> bool:
    """No fault, and few enough false wins in each row."""
    counts = record["counts"]
    assert isinstance(counts, dict)
    return not record["faults"] and not false_wins(counts)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--jobs", type=int, default=1, help="processes")
    options.add_argument("--minutes", type=float, default=8, help="at most")
    options.add_argument("--first-seed", type=int, default=1, help="of each script")
    options.add_argument("--only", action="append", choices=[w.script for w in ALL], help="this script alone (repeatable)")
    options.add_argument("--parts", type=Path, help="run, and write the parts there")
    options.add_argument("--merge", action="append", type=Path, help="a file of parts to add up (repeatable)")
    given = options.parse_args()
    chosen = [w for w in ALL if not given.only or w.script in given.only]
    if given.parts:
        shared_out(chosen, given.jobs, given.first_seed, 60 * given.minutes, given.parts)
    parts = read_parts([*([given.parts] if given.parts else []), *(given.merge or [])])
    if not parts:
        raise UserError("no part has ended", action="give it more --minutes")
    records = {w.script: totals(w.script, parts) for w in chosen if any(p.script == w.script for p in parts)}
    for record in records.values():
        print(json.dumps(record, sort_keys=True))
    if given.out:
        publish(records, given.out)
    return 0 if all(held(script, record) for script, record in records.items()) else 1


if __name__ == "__main__":
    run(main)
