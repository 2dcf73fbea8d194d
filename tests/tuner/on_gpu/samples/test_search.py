"""The study of a large space: several workers share it, and measure nothing twice."""

import itertools
import json
import multiprocessing
import random
import sys
import time
from pathlib import Path

import pytest
from tune_kernels.schedules.schedule import LinearSchedule
from tune_kernels.tuner.errors import StorageError
from tune_kernels.tuner.on_gpu.samples.search import FIRST_ROUNDS, MORE_ROUNDS, Study, search
from tune_kernels.tuner.on_gpu.samples.timing import Batch, State

CANDIDATES = {f"v{i}": LinearSchedule(n, k, stages, warps)
              for i, (n, k, stages, warps) in enumerate(itertools.product([64, 128, 256], [64, 128], [2, 3, 4, 5], [4, 8]))}
BASE = "v0"


def work(storage: str, seed: int, out: Path, few: int) -> None:
    """One machine: deeper pipelines are slower."""
    noise = random.Random(seed)
    candidates = dict(list(CANDIDATES.items())[:few])
    study = Study(storage, "test", candidates, seed)
    claimed: list[str] = []

    def timed(phase: str, names: object, rounds: int) -> Batch:
        assert isinstance(names, list)
        claimed.extend(names[1:] if rounds == FIRST_ROUNDS else [])
        times = {n: [10 + CANDIDATES[n].num_stages + noise.random() / 10 for _ in range(rounds)] for n in names}
        return Batch(phase, 0, times, [State()] * rounds)

    search(study, BASE, lambda name: True, timed, lambda: False)
    out.write_text(json.dumps([claimed, study.best(4, lambda n: True)]))


@pytest.mark.parametrize(("kind", "few"), [("file", 48), ("sqlite", 20)])
def test_several_workers_share_a_study_and_measure_nothing_twice(tmp_path: Path, kind: str, few: int) -> None:
    storage = str(tmp_path / "study.journal") if kind == "file" else f"sqlite:///{tmp_path}/study.db"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(storage, i, tmp_path / f"{i}.json", few)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    found = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(3)]
    claimed = [name for names, _ in found for name in names]
    assert sorted([*claimed, BASE]) == sorted(list(CANDIDATES)[:few]), "each once, and all of them"
    assert all(CANDIDATES[n].num_stages == 2 for n in found[0][1])


def test_a_search_begins_with_what_is_known_to_be_good(tmp_path: Path) -> None:
    """TPE learns: the first half of its variants is faster than the second."""
    work(str(tmp_path / "study.journal"), 1, tmp_path / "out.json", len(CANDIDATES))
    claimed, _ = json.loads((tmp_path / "out.json").read_text())
    depth = [CANDIDATES[n].num_stages for n in claimed]
    after_startup = depth[20:]
    half = len(after_startup) // 2
    assert sum(after_startup[:half]) < sum(after_startup[half:])


def test_the_slow_are_pruned_and_the_dead_are_told(tmp_path: Path) -> None:
    study = Study(str(tmp_path / "study.journal"), "test", CANDIDATES, 0)
    rounds_of: dict[str, int] = {}

    def timed(phase: str, names: object, rounds: int) -> Batch:
        assert isinstance(names, list)
        alive = [n for n in names if n != "v7"]
        for n in alive:
            rounds_of[n] = rounds_of.get(n, 0) + rounds
        return Batch(phase, 0, {n: [10.0 + CANDIDATES[n].num_stages] * rounds for n in alive}, [State()] * rounds)

    search(study, BASE, lambda name: name != "v9", timed, lambda: False)
    assert "v9" not in rounds_of, "what fails its checks isn't timed"
    assert {FIRST_ROUNDS, FIRST_ROUNDS + MORE_ROUNDS} <= set(rounds_of.values())
    states = {t.user_attrs["variant"]: t.state.name for t in study.study.get_trials()}
    assert (states["v7"], states["v9"]) == ("FAIL", "FAIL")


def test_a_storage_that_cant_be_opened_is_named() -> None:
    with pytest.raises(StorageError, match="nosuchdb://"):
        Study("nosuchdb://host/db", "test", CANDIDATES, 0)


def test_a_missing_driver_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """F40: `postgresql://` failed after all retries, and nothing said what to install."""
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("tried again"))
    with pytest.raises(StorageError, match="pip install psycopg2-binary"):
        Study("postgresql://host/db", "test", CANDIDATES, 0)
