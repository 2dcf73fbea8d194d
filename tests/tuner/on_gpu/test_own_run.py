"""A kernel of one's own from its bundle to a promoted row, on a GPU that isn't there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faulty_kernels
import pytest
import triton
from click.testing import CliRunner
from fake_gpu import H200, FakeMeasurer, write_own_bundle
from tune_kernels import Kernel, KernelError
from tune_kernels.kernels.loading import source_of
from tune_kernels.schedules import store
from tune_kernels.schedules.schedule import OwnSchedule, Schedule
from tune_kernels.shapes.own import OwnShape
from tune_kernels.tuner.cli import cli
from tune_kernels.tuner.errors import SpaceError
from tune_kernels.tuner.on_gpu import run as on_gpu
from tune_kernels.tuner.on_gpu.report import make_report, report_to_dict
from tune_kernels.tuner.on_gpu.report_html import render_gpu_report
from tune_kernels.tuner.on_gpu.run import Outcome, Request
from tune_kernels.tuner.on_gpu.samples.gate import Failure
from tune_kernels.tuner.review.command import difference

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(triton.knobs.runtime.interpret, reason="interpreting")]
FILE = faulty_kernels.__file__
KERNEL = faulty_kernels.few
FASTEST = 3  # of the schedules
SCHEDULES = KERNEL.schedules


def time_us(schedule: Schedule) -> float:
    return 10.0 if schedule == SCHEDULES[FASTEST] else 12.0


def by_block(schedule: Schedule) -> str:
    """Bits follow the block."""
    assert isinstance(schedule, OwnSchedule)
    return f"{schedule.knobs['BLOCK']:064x}"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Outcome]:
    def of(measurer: FakeMeasurer | None = None, kernel: Kernel = KERNEL, promote: bool = False, **changes: Any) -> Outcome:
        made = write_own_bundle(tmp_path / "bundle", kernel)
        machine = changes.pop("machine", H200)
        request = Request(**{"bundle": made, "kernels": (FILE,), "sources": (source_of(f"{FILE}:few"),),
                             "schedules": tmp_path / "schedules", "out": tmp_path / "out", **changes})
        outcome = on_gpu.tune(request, machine, measurer or FakeMeasurer(time_us, class_of=by_block), None, lambda line: None)
        if promote:
            on_gpu.promote(outcome, request.schedules)
        return outcome
    return of


def test_each_shape_has_its_winner_in_the_kernels_own_file(run: Callable[..., Outcome], tmp_path: Path) -> None:
    """At its first promotion a kernel may take a faster class: no bits are promised yet. No decoder is asked: the row says it."""
    outcome = run(promote=True)
    assert outcome.complete
    file = store.read(tmp_path / "schedules" / "nvidia-h200" / "few.json")
    assert (file.model, file.recipe) == ("few", "own")
    assert {row.shape for row in file.rows} == set(KERNEL.own_shapes)
    for row in file.rows:
        assert (row.schedule, row.evidence.weights, row.evidence.tokens_compared) == (SCHEDULES[FASTEST], "none", 0)
        assert not row.evidence.random_weights and not row.problems()
        assert row.timing.previous and row.timing.previous.schedule == SCHEDULES[0], "compared with the first one"
        assert row.numerics_class == by_block(SCHEDULES[FASTEST]) != by_block(SCHEDULES[0])
    decisions = make_report(outcome).decisions
    assert {d.kernel for d in decisions} == {f"few[H=96,rows={n}]" for n in (5, 2)}
    assert {(d.outcome, d.why, d.origin) for d in decisions} == {("gain", "faster; no decoder was asked", "first accepted")}


def test_a_promoted_kernel_keeps_its_bits(run: Callable[..., Outcome], tmp_path: Path) -> None:
    run(promote=True)
    other = next(s for s in SCHEDULES if by_block(s) != by_block(SCHEDULES[FASTEST]))
    outcome = run(FakeMeasurer(lambda s: 5.0 if s == other else time_us(s), class_of=by_block), out=tmp_path / "again")
    assert {outcome.recording.contests[k].entrants[r.winner or ""].schedule for k, r in outcome.rankings.items()} == {
        SCHEDULES[FASTEST]}
    assert all("its bits differ" in p.why for r in outcome.rankings.values() for p in r.places if p.schedule == other)
    assert not outcome.promoted.rows


@pytest.mark.parametrize(("stage", "detail"), [
    ("reference", "y_ptr: relative RMS error 1.00e-01"), ("rows", "bits differ: row 0 among others"),
    ("determinism", "7 of 32 runs gave other bits"), ("launch", "wrote outside y_ptr"), ("crash", "an illegal memory access")])
def test_the_fastest_is_refused_where_it_is_wrong(run: Callable[..., Outcome], stage: str, detail: str) -> None:
    failure = Failure(stage, detail)
    outcome = run(FakeMeasurer(time_us, does=lambda s: failure if s == SCHEDULES[FASTEST] else None, class_of=by_block))
    report = make_report(outcome)
    for kernel in report.kernels:
        [place] = [p for p in kernel.places if p.schedule == SCHEDULES[FASTEST]]
        assert (place.status, place.why) == ("failed", f"{stage}: {detail}")
    assert all(row.schedule == SCHEDULES[0] for row in outcome.promoted.rows), "nothing else is faster"


def test_a_recording_replays_and_its_report_shows_sizes_and_knobs(run: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = run()
    again = on_gpu.replay(tmp_path / "out")
    assert again.rankings == outcome.rankings
    assert {row.shape for row in again.promoted.rows} == set(KERNEL.own_shapes)
    report = make_report(again)
    assert report.title == "own kernels on nvidia-h200"
    assert {effect.knob for effect in report.kernels[0].knobs} == {"FAULT", "BLOCK"}
    page = render_gpu_report(report)
    assert "H 96, rows 5" in page and "no decoder asked" in page
    json.dumps(report_to_dict(report))


def test_a_second_run_measures_nothing_again(run: Callable[..., Outcome]) -> None:
    run()
    second = FakeMeasurer(time_us, class_of=by_block)
    run(second)
    assert (second.checks, second.timed) == (0, [])


def test_another_bundle_and_a_changed_source_are_named(run: Callable[..., Outcome], tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    from tune_kernels.tuner.on_gpu import survivors

    with pytest.raises(SpaceError, match=r"kernel 'few'.*is not in") as caught:
        run(kernel=faulty_kernels.make("none", name="other"))
    assert f"--kernel {FILE}" in str(caught.value)
    monkeypatch.setattr("tune_kernels.tuner.offline.own.digest_of", lambda name, jitted: "feed" * 4)
    made: list[Any] = []
    monkeypatch.setattr(survivors, "sweep", lambda request: made.append(request) or survivors.read_report(tmp_path / "bundle"))
    run(out=tmp_path / "changed")
    assert made[0].kernels == (FILE,)


def test_a_kernel_without_reference_is_refused(tmp_path: Path) -> None:
    """Before anything is timed: by the worker that imports it."""
    from tune_kernels.tuner.on_gpu.worker.cases import DescribeTask, describe

    file = tmp_path / "bare.py"
    file.write_text(Path(FILE).read_text() + "\nkernel = make('none', reference=None)\n")
    with pytest.raises(KernelError, match="double has no reference"):
        describe(DescribeTask(source_of(str(file)), str(tmp_path / "words")))


@pytest.mark.parametrize(("arguments", "said"), [
    (("--kernel", FILE, "--kernel", "down"), "don't go together"),
    (("--kernel", FILE, "--weights", "random:1"), "--weights means nothing to a kernel of your own"),
    (("--kernel", "nowhere.py"), "nowhere.py"),
])
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(cli, ["--on-gpu", *arguments])
    assert done.exit_code != 0
    assert said in done.output + str(done.exception)


def test_a_diff_shows_an_own_row_and_checks_it(run: Callable[..., Outcome], tmp_path: Path) -> None:
    run(promote=True)
    folder = tmp_path / "schedules"
    path = folder / "nvidia-h200" / "few.json"
    before = tmp_path / "before" / "nvidia-h200" / "few.json"
    before.parent.mkdir(parents=True)
    before.write_text(path.read_text())
    other = next(s for s in SCHEDULES if by_block(s) == by_block(SCHEDULES[FASTEST]) and s != SCHEDULES[FASTEST])
    run(FakeMeasurer(lambda s: 5.0 if s == other else time_us(s), class_of=by_block), out=tmp_path / "again", promote=True)
    found = difference(str(before.parents[1]), str(folder))
    assert not found.findings
    assert {row.status for row in found.rows} == {"changed"}
    assert {c.name for row in found.rows for c in row.knobs} <= {"FAULT", "BLOCK"}
    from tune_kernels.tuner.review.as_text import render_text

    said = render_text(found)
    assert "H 96, rows 5" in said and "no decoder asked" in said and "FAULT" in said
    table = json.loads(path.read_text())
    table["rows"][0]["schedule"]["knobs"]["BLOCK"] = 512
    path.write_text(json.dumps(table))
    assert {f.code for f in difference(str(before.parents[1]), str(folder)).findings} >= {"edited"}


def test_one_name_for_a_model_and_a_kernel_is_refused(run: Callable[..., Outcome], tmp_path: Path) -> None:
    """`x.fp8-v1` is the file of a model x and of a kernel x.fp8-v1."""
    from dataclasses import replace

    from promoted_rows import row
    from tune_kernels.schedules.errors import ScheduleError
    from tune_kernels.schedules.store import PromotedFile

    folder = tmp_path / "schedules"
    store.promote(folder, PromotedFile("nvidia-h200", "m", "fp8-v1", (row(),)))
    mine = replace(run().promoted.rows[0], model="m.fp8-v1", kernel="m.fp8-v1").sealed()
    with pytest.raises(ScheduleError, match="holds rows of m, fp8-v1"):
        store.promote(folder, PromotedFile("nvidia-h200", "m.fp8-v1", "own", (mine,)))


def test_the_sizes_are_part_of_the_name() -> None:
    from tune_kernels.tuner.on_gpu.samples.recording import contest_name

    assert contest_name("few", OwnShape(KERNEL.own_shapes[0].dims)) == "few[H=96,rows=5]"
