"""Kernels of one's own on an H200, replayed: gains over the first schedule, and faulty candidates refused there."""

from pathlib import Path

import faulty_kernels
import pytest
from tune_kernels.schedules.schedule import OwnSchedule
from tune_kernels.tuner.on_gpu import run as on_gpu
from tune_kernels.tuner.on_gpu.report import make_report
from tune_kernels.tuner.on_gpu.samples import recording

FOLDER = Path(__file__).parents[2] / "data" / "own"
# The check that refused each fault of faulty_kernels on the GPU. A race and a ticket that depends on the order of the blocks
# already show in rows, which are computed by launches of their own.
REFUSED_BY = {"wrong": "reference", "one element": "reference", "nothing": "reference", "unmasked": "reference",
              "neighbour": "rows", "race": "rows", "ticket": "rows", "past the end": "launch"}


def test_the_norm_the_softmax_and_the_product_gain() -> None:
    """By the recorded samples, beyond noise, in two processes; nothing was compiled there; no decoder was asked."""
    outcome = on_gpu.replay(FOLDER / "h200-tunable.json")
    report = make_report(outcome)
    assert {d.kernel.split("[")[0] for d in report.decisions if d.outcome == "gain"} == {"rms_norm", "softmax", "matmul"}
    assert all(d.alone and d.alone.interval[1] < 1 and d.origin == "first accepted" for d in report.decisions)
    assert len(outcome.promoted.rows) == 4
    for row in outcome.promoted.rows:
        assert not row.problems() and row.evidence.weights == "none"
        assert {kind for kind, c in row.evidence.checks.items() if c.run == c.passed} == {"reference", "rows", "determinism"}
    assert (outcome.recording.calls.compiler, outcome.recording.calls.ptxas) == (0, 0)


def test_one_wrong_schedule_of_each_kind_was_refused() -> None:
    recorded = recording.load(FOLDER / "h200-faulty.json")
    for contest in recorded.contests.values():
        for name, entrant in contest.entrants.items():
            assert isinstance(entrant.schedule, OwnSchedule)
            fault, failure = str(entrant.schedule.knobs["FAULT"]), contest.failure(name)
            assert (failure.stage if failure else None) == REFUSED_BY.get(fault), (contest.name, fault, failure)
    assert set(REFUSED_BY) | {"none"} == set(faulty_kernels.FAULTS)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_recording_reads_back_as_it_was(path: Path) -> None:
    recorded = recording.load(path)
    assert recording.to_dict(recorded)["contests"].keys() == recorded.contests.keys()  # type: ignore[attr-defined]
    assert all(contest.name == key for key, contest in recorded.contests.items())
