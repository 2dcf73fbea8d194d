"""A whole --on-gpu run on an imagined GPU: the winner, the promoted rows, the failures, and that a later run goes on."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import triton
from fake_gpu import B300, H200, H200_RUN, RECIPE, SPLIT, FakeMeasurer, FakeProbe, candidates, write_bundle
from tune_kernels.kernels import registry
from tune_kernels.schedules import store
from tune_kernels.schedules.errors import NotPromoted
from tune_kernels.schedules.schedule import LinearSchedule, Schedule, schedule_id
from tune_kernels.shapes.errors import UserError
from tune_kernels.shapes.model import load_model_shape
from tune_kernels.shapes.target import load_sku
from tune_kernels.tuner.errors import GpuError, RecordingError, SpaceError
from tune_kernels.tuner.on_gpu import run as on_gpu
from tune_kernels.tuner.on_gpu.report import make_report
from tune_kernels.tuner.on_gpu.report_html import render_gpu_report
from tune_kernels.tuner.on_gpu.run import Outcome, Request
from tune_kernels.tuner.on_gpu.samples import recording
from tune_kernels.tuner.on_gpu.samples.gate import Failure
from tune_kernels.tuner.on_gpu.samples.machine import Machine, sku_of
from tune_kernels.tuner.on_gpu.samples.search import FIRST_ROUNDS

pytestmark = [pytest.mark.compiles, pytest.mark.skipif(triton.knobs.runtime.interpret, reason="interpreting")]
SHAPES = load_model_shape("qwen2.5-7b").kernel_shapes(RECIPE.linear_dtype, RECIPE.terms)
DEFAULT = registry.default_schedule(RECIPE, "down", "sm_90")
BEST = LinearSchedule(128, 256, 4, 4, split_k=SPLIT, pdl=True)
OTHER_SPLIT = LinearSchedule(64, 256, 3, 4, split_k=2, pdl=True)


def time_us(schedule: Schedule) -> float:
    """BEST is 5% faster than the default; a schedule of another split-K is 20% faster."""
    if schedule == BEST:
        return 19.0
    if schedule == OTHER_SPLIT:
        return 16.0
    return 20.0 if schedule == DEFAULT else 21.0 + int(schedule_id(schedule), 16) % 97 / 50


def step_us(schedule: Any) -> float:
    """In the full model another split-K is slower: somebody has to read its partials."""
    return 30.0 if schedule.split_k != SPLIT else time_us(schedule)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Outcome]:
    """Tunes `down` from a bundle of candidates; keywords change the request, or name measurer and probe."""
    made = write_bundle(tmp_path / "bundle", {"down": candidates()})

    def tune(measurer: FakeMeasurer | None = None, probe: FakeProbe | None = None, machine: Machine = H200,
             promote: bool = False, **changes: Any) -> Outcome:
        request = replace(Request(bundle=made, schedules=tmp_path / "schedules", out=tmp_path / "out"), **changes)
        outcome = on_gpu.tune(request, machine, measurer or FakeMeasurer(time_us), lambda _: probe or FakeProbe(step_us),
                              lambda line: None)
        if promote:
            on_gpu.promote(outcome, request.schedules)
        return outcome

    return tune


def winner(outcome: Outcome) -> Schedule:
    ranking = outcome.rankings["down"]
    assert ranking.winner
    return ranking.place(ranking.winner).schedule


def test_the_fastest_of_the_recipes_class_is_promoted_and_found(run: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = run(promote=True)
    assert winner(outcome) == BEST
    assert (tmp_path / "schedules" / "nvidia-h200" / "qwen2.5-7b.fp8-v1.json").exists()
    key = registry.store_key("down", SHAPES["down"], load_sku("nvidia-h200"), RECIPE)
    row = store.lookup(key, [tmp_path / "schedules"])
    assert row.schedule == BEST
    assert row.timing.previous and row.timing.previous.schedule == DEFAULT
    assert row.timing.previous.paired.interval[1] < 1
    assert row.evidence.random_weights
    assert set(row.evidence.checks) == {"reference", "rows", "determinism", "agreement", "full_model"}
    assert row.timing.clocks["sm_mhz"] == 1980


def test_another_class_never_enters_by_speed(run: Callable[..., Outcome]) -> None:
    """The report shows its gain and the token that it would change."""
    probe = FakeProbe(step_us, lambda s: [1, 2, 3 if getattr(s["down"], "split_k", 0) == SPLIT else 4])
    outcome = run(probe=probe)
    place = outcome.rankings["down"].place(schedule_id(OTHER_SPLIT))
    assert (place.status, place.confirmed) == ("another class", True)
    assert "its bits differ" in place.why
    assert place.versus and place.versus.ratio == pytest.approx(0.8, abs=0.02)
    assert "token 2 would be 4 instead of 3" in outcome.gate.would_differ["down"]
    assert winner(outcome) == BEST


def by_width(schedule: Any) -> str:
    """Bits follow BLOCK_N: DEFAULT and BEST are of two classes."""
    return f"{schedule.BLOCK_N:064x}"


def test_the_first_promotion_founds_the_class_by_the_full_models_speed(run: Callable[..., Outcome]) -> None:
    """DEFAULT's class is not BEST's."""
    outcome = run(FakeMeasurer(step_us, class_of=by_width), promote=True)
    assert outcome.rankings["down"].place(schedule_id(BEST)).status == "another class"
    assert outcome.gate.accepted == {"down": schedule_id(BEST)}
    [row] = outcome.promoted.rows
    assert row.numerics_class == by_width(BEST)
    again = run(FakeMeasurer(lambda s: 10.0 if s == DEFAULT else step_us(s), class_of=by_width), promote=True)
    assert again.recording.contests["down"].founded == by_width(BEST)
    assert winner(again) == BEST, "the class is founded: a faster schedule of another one is only reported"
    assert not again.promoted.rows


def test_another_class_is_not_taken_without_a_time(run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the decoder runs neither: the head's logits variant."""
    monkeypatch.setattr(FakeProbe, "time_step", lambda *_: {})
    outcome = run(FakeMeasurer(step_us, class_of=by_width))
    assert outcome.gate.accepted == {"down": schedule_id(DEFAULT)}
    assert "down" in outcome.gate.would_differ


def test_a_founding_class_whose_modes_disagree_is_refused(run: Callable[..., Outcome]) -> None:
    outcome = run(FakeMeasurer(step_us, class_of=by_width), FakeProbe(step_us, modes_differ=True))
    assert not outcome.promoted.rows
    assert "ssd, prompt 0: token 0 is 9" in outcome.gate.rejected["down"]


@pytest.mark.parametrize(("probe", "said"), [
    (FakeProbe(step_us, lambda s: [1, 2] if s["down"] == BEST else [1, 3]), "token 1 is 2, AR emits 3"),
    (FakeProbe(lambda s: 500.0 if s == BEST else 20.0), "proves a slowdown"),
])
def test_what_the_full_model_refuses_is_not_promoted_but_its_incumbent_is(run: Callable[..., Outcome], probe: FakeProbe,
                                                                          said: str) -> None:
    """The winner in isolation may lose in the full model."""
    outcome = run(probe=probe, promote=True)
    assert winner(outcome) == BEST
    assert said in outcome.gate.rejected["down"]
    [row] = outcome.promoted.rows
    assert (row.schedule, row.timing.previous) == (DEFAULT, None)
    assert row.evidence.checks["agreement"].passed == row.evidence.checks["agreement"].run > 0
    assert not row.evidence.full_model, "nothing changed, so nothing was timed against anything"
    assert outcome.complete
    again = run(probe=probe, promote=True)
    assert said in again.gate.rejected["down"]
    assert not again.promoted.rows, "what is promoted already stays as it is"


def test_a_tie_keeps_the_incumbent(run: Callable[..., Outcome]) -> None:
    outcome = run(FakeMeasurer(lambda s: 20.0))
    assert winner(outcome) == DEFAULT
    assert outcome.rankings["down"].places[0].status == "incumbent"
    [row] = outcome.promoted.rows
    assert row.schedule == DEFAULT, "a first promotion promotes the recipe's default where nothing is faster"
    assert row.timing.previous is None


WRONG = {
    BEST: Failure("reference", "18944 of 32256 outputs were not written, or are NaN"),
    OTHER_SPLIT: Failure("reference", "relative RMS error 1.0e+00"),
    candidates()[2]: Failure("determinism", "3 of 8 runs gave other bits"),
    candidates()[3]: Failure("rows", "bits differ: row 3 alone"),
    candidates()[4]: Failure("hang", "did not end within its wall time"),
    candidates()[5]: Failure("crash", "AcceleratorError: an illegal memory access"),
}


def test_candidates_that_misbehave_are_named_and_the_rest_goes_on(run: Callable[..., Outcome]) -> None:
    """Even if they would be the fastest."""
    outcome = run(FakeMeasurer(lambda s: 5.0 if s in WRONG else time_us(s), does=WRONG.get))
    ranking = outcome.rankings["down"]
    for schedule, failure in WRONG.items():
        place = ranking.place(schedule_id(schedule))
        assert (place.status, place.why) == ("failed", f"{failure.stage}: {failure.detail}")
        assert place.times is None, "what is wrong isn't timed"
    assert winner(outcome) == DEFAULT
    assert {p.status for p in ranking.places if p.schedule not in WRONG} <= {"incumbent", "slower", "tie", "another class"}


def test_a_candidate_that_dies_while_it_is_timed_costs_itself_alone(run: Callable[..., Outcome]) -> None:
    outcome = run(FakeMeasurer(time_us, kills=lambda s: s == OTHER_SPLIT))
    assert outcome.rankings["down"].place(schedule_id(OTHER_SPLIT)).why.startswith("crash: AcceleratorError")
    assert winner(outcome) == BEST


@pytest.mark.parametrize("wrong", ["check", "timing"])
def test_a_wrong_incumbent_doesnt_judge_the_others(run: Callable[..., Outcome], wrong: str) -> None:
    measurer = FakeMeasurer(time_us, kills=lambda s: wrong == "timing" and s == DEFAULT,
                            does=lambda s: Failure("reference", "wrong") if wrong == "check" and s == DEFAULT else None)
    outcome = run(measurer)
    assert outcome.rankings["down"].place(schedule_id(DEFAULT)).status == "failed"
    assert winner(outcome) == BEST
    assert outcome.promoted.rows[0].timing.previous is None


def test_a_second_run_goes_on(run: Callable[..., Outcome], tmp_path: Path) -> None:
    first = FakeMeasurer(time_us)
    run(first, budget=1e-9)
    assert first.checks == 0 or not first.timed
    second, third = FakeMeasurer(time_us), FakeMeasurer(time_us)
    assert winner(run(second)) == BEST
    assert winner(run(third)) == BEST
    assert (third.checks, third.timed) == (0, []), "what was measured is kept"


def test_a_run_that_is_stopped_keeps_what_it_measured(run: Callable[..., Outcome], tmp_path: Path) -> None:
    class Stopped(FakeMeasurer):
        def time(self, *arguments: Any) -> Any:
            if arguments[2] == "confirm":
                raise KeyboardInterrupt
            return super().time(*arguments)

    with pytest.raises(KeyboardInterrupt):
        run(Stopped(time_us))
    kept = recording.load(tmp_path / "out").contests["down"]
    assert kept.batches and not kept.finished
    second = FakeMeasurer(time_us)
    assert winner(run(second)) == BEST
    assert [phase for phase, _, _ in second.timed] == ["confirm", "confirm"], "one in each process"
    assert second.checks == 0


def test_a_recording_of_other_conditions_is_refused(run: Callable[..., Outcome]) -> None:
    run()
    with pytest.raises(RecordingError, match=r"recorded with weights random:0"):
        run(weights="random:1")


def test_a_replay_ranks_the_same_without_measuring(run: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = run()
    again = on_gpu.replay(tmp_path / "out")
    assert again.rankings == outcome.rankings
    assert [r.schedule_id for r in again.promoted.rows] == [r.schedule_id for r in outcome.promoted.rows]
    before, after = make_report(outcome), make_report(again)
    assert before == after
    assert render_gpu_report(before) == render_gpu_report(after)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": "tune-kernels/recording/9"}'])
def test_a_damaged_recording_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "recording.json").write_text(text)
    with pytest.raises(RecordingError, match=r"recording\.json"):
        on_gpu.replay(tmp_path)


def test_throttled_rounds_are_dropped(run: Callable[..., Outcome]) -> None:
    outcome = run(FakeMeasurer(time_us, throttled=lambda i: i % 5 == 0))
    report = make_report(outcome)
    assert report.kernels[0].dropped_rounds > 0
    times = outcome.rankings["down"].places[0].times
    assert times and times.quantiles_us[-1] < 25, "a throttled sample took ten times as long"


def test_a_large_space_is_searched_and_no_variant_timed_twice(tmp_path: Path) -> None:
    many = [LinearSchedule(n, k, stages, warps, split_k=4) for n in (16, 32, 64, 128, 256) for k in (32, 64, 128, 256)
            for stages in (2, 3, 4, 5, 6) for warps in (1, 2, 4)]
    made = write_bundle(tmp_path / "bundle", {"down": list(dict.fromkeys([DEFAULT, *many]))})
    measurer = FakeMeasurer(lambda s: 20.0 if s == DEFAULT else 18 + 3 * s.num_stages + s.num_warps)  # type: ignore[union-attr]
    request = Request(bundle=made, schedules=tmp_path / "schedules", out=tmp_path / "out")
    outcome = on_gpu.tune(request, H200, measurer, lambda _: FakeProbe(lambda s: 1.0), lambda line: None)
    contest = outcome.recording.contests["down"]
    batches = [b for b in contest.batches if b.phase == "race" and len(b.states) == FIRST_ROUNDS]
    first = [n for b in batches for n in b.samples_us if n != contest.incumbent]
    assert len(first) == len(set(first)) == len(contest.entrants) - 1
    assert contest.finished


def test_kernels_without_an_incumbent_in_the_bundle_are_skipped_by_name(tmp_path: Path) -> None:
    made = write_bundle(tmp_path / "bundle", {"down": candidates(), "qkv": [LinearSchedule(64, 64, 3, 4, split_k=4)]})
    request = Request(bundle=made, schedules=tmp_path / "schedules", out=tmp_path / "out")
    outcome = on_gpu.tune(request, H200, FakeMeasurer(time_us), lambda _: FakeProbe(time_us), lambda line: None)
    assert "recipe default" in outcome.skipped["qkv"]
    assert not outcome.complete


@pytest.mark.parametrize(("changes", "said"), [
    ({"kernels": ("dwon",)}, "did you mean 'down'"), ({"model": "llama-3.1-8b"}, "is of qwen2.5-7b"),
])
def test_a_bundle_that_doesnt_fit_is_named(run: Callable[..., Outcome], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpaceError) as caught:
        run(**changes)
    assert said in str(caught.value)


def test_another_toolchain_is_named_and_compiled_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tune_kernels.tuner.offline.report import read_report
    from tune_kernels.tuner.on_gpu import survivors

    good = write_bundle(tmp_path / "good", {"down": candidates()})
    table = json.loads((good / "report.json").read_text())
    table["toolchain"]["triton"] = "3.5.0"
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "report.json").write_text(json.dumps(table))
    monkeypatch.setattr(survivors, "sweep", lambda request: read_report(good))
    lines: list[str] = []
    request = Request(bundle=tmp_path / "old", schedules=tmp_path / "schedules", out=tmp_path / "out")
    on_gpu.tune(request, H200, FakeMeasurer(time_us), lambda _: FakeProbe(time_us), lines.append)
    assert "made with Triton 3.5.0" in lines[0]


def test_an_unlisted_gpu_is_refused(run: Callable[..., Outcome]) -> None:
    with pytest.raises(UserError, match="RTX 4090"):
        run(machine=Machine("NVIDIA GeForce RTX 4090", "580.0"))
    assert sku_of(B300).name == "nvidia-b300"


def test_two_runs_promote_into_one_file(run: Callable[..., Outcome], tmp_path: Path) -> None:
    run(promote=True)
    made = write_bundle(tmp_path / "other", {"o": candidates("o")})
    run(bundle=made, out=tmp_path / "out-o", promote=True)
    path = tmp_path / "schedules" / "nvidia-h200" / "qwen2.5-7b.fp8-v1.json"
    assert {row.kernel for row in store.read(path).rows} == {"down", "o"}


def test_a_drafters_kernels_need_no_decoder(tmp_path: Path) -> None:
    made = write_bundle(tmp_path / "bundle", {"fc": candidates("fc")}, model="qwen2.5-7b-eagle3")
    request = Request(model="qwen2.5-7b-eagle3", bundle=made, schedules=tmp_path / "schedules", out=tmp_path / "out")
    outcome = on_gpu.tune(request, H200, FakeMeasurer(lambda s: 20.0), None, lambda line: None)
    assert [row.kernel for row in outcome.promoted.rows] == ["fc"]


def test_a_drafter_leaves_the_rows_of_a_model_alone(run: Callable[..., Outcome], tmp_path: Path) -> None:
    """Its `down` has the model's shape, and look-up goes by shape: what is fastest alone made the model's step 5% slower on an
    H200."""
    run(promote=True)
    made = write_bundle(tmp_path / "drafter", {"down": candidates(), "fc": candidates("fc")}, model="qwen2.5-7b-eagle3")
    request = Request(model="qwen2.5-7b-eagle3", bundle=made, schedules=tmp_path / "schedules", out=tmp_path / "out-drafter")
    measurer = FakeMeasurer(lambda s: 10.0 if s == DEFAULT else 20.0)
    outcome = on_gpu.tune(request, H200, measurer, None, lambda line: None)
    assert (winner(outcome), outcome.gate.accepted["down"]) == (DEFAULT, schedule_id(BEST))
    assert "tune it with that model" in outcome.gate.rejected["down"]
    assert [row.kernel for row in outcome.promoted.rows] == ["fc"]
    assert outcome.complete


def test_what_a_contest_leaves_of_its_time_goes_to_those_that_had_too_little(run: Callable[..., Outcome], tmp_path: Path,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one pays for the worker's start."""
    clock = iter([*[0.0] * 3, *[50.0] * 10_000])  # the budget begins, and the first contest: it is over at once
    monkeypatch.setattr(on_gpu, "Budget", partial(on_gpu.Budget, clock=lambda: next(clock)))
    made = write_bundle(tmp_path / "two", {"down": candidates(), "o": candidates("o")})
    outcome = run(bundle=made, budget=150.0)
    assert all(contest.finished for contest in outcome.recording.contests.values())


def test_a_rehearsal_for_b300(tmp_path: Path) -> None:
    """The whole way for a SKU that is not at hand, up to the launch: its own defaults, its own folder."""
    default = registry.default_schedule(RECIPE, "down", "sm_103")
    made = write_bundle(tmp_path / "bundle", {"down": candidates("down", "nvidia-b300")}, "nvidia-b300")
    request = Request(bundle=made, schedules=tmp_path / "schedules", out=tmp_path / "out")
    measurer = FakeMeasurer(lambda s: 10.0 if s == default else 11.0)
    outcome = on_gpu.tune(request, B300, measurer, lambda _: FakeProbe(lambda s: 10.0), lambda line: None)
    [written] = on_gpu.promote(outcome, request.schedules)
    assert written.parent.name == "nvidia-b300"
    key = registry.store_key("down", SHAPES["down"], load_sku("nvidia-h200"), RECIPE)
    with pytest.raises(NotPromoted, match="target nvidia-b300"):
        store.lookup(key, [tmp_path / "schedules"])


def test_the_report_says_which_knobs_change_bits(run: Callable[..., Outcome]) -> None:
    report = make_report(run())
    said = {effect.knob: effect.changes_bits for effect in report.kernels[0].knobs}
    assert (said["split_k"], said["BLOCK_K"], said["num_stages"]) == ("yes", "no", "no")
    assert "row_tile" not in said, "a knob that doesn't vary can't matter"
    page = render_gpu_report(report)
    assert page.count("<svg") == 4
    assert "<script" not in page


def test_where_all_of_the_first_die_it_is_not_the_candidates(run: Callable[..., Outcome], tmp_path: Path) -> None:
    """A broken driver would cost every candidate, and the whole budget."""
    with pytest.raises(GpuError, match="the first 4 candidates all died, the last with: no driver"):
        run(FakeMeasurer(time_us, does=lambda s: Failure("crash", "no driver")))


def test_a_recording_made_on_an_h200_ranks_as_it_did_there() -> None:
    """A real one: winners, the class that would have changed a token, and winners that the full model refused, whose incumbents
    stay. Nothing was compiled."""
    outcome = on_gpu.replay(H200_RUN)
    assert set(outcome.rankings) == {row.kernel for row in outcome.promoted.rows} == set(registry.TUNABLE) - {
        "fc", "lm_head_certified"}
    assert set(outcome.gate.rejected) == {"o", "qkv"}
    assert all("proves a slowdown" in why for why in outcome.gate.rejected.values())
    for kernel in outcome.gate.rejected:
        assert outcome.gate.accepted[kernel] == outcome.recording.contests[kernel].incumbent != outcome.rankings[kernel].winner
    assert "token 2 would be 133980 instead of 33775" in outcome.gate.would_differ["o"]
    assert all(row.evidence.random_weights and not row.problems() for row in outcome.promoted.rows)
    assert (outcome.recording.calls.compiler, outcome.recording.calls.ptxas) == (0, 0)


@pytest.mark.parametrize("run", sorted(H200_RUN.parent.rglob("*.json")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_an_h200_measured_is_within_the_recipes_limits(run: Path) -> None:
    """Each candidate's error against fp64, and room below: a limit that the next machine would break is none."""
    recorded = recording.load(run)
    limits = RECIPE.max_rms_error
    for contest in recorded.contests.values():
        for name, checked in contest.checked.items():
            split = getattr(contest.entrants[name].schedule, "split_k", 1) > 1
            most = limits.partials if split else limits.swiglu if getattr(contest.shape, "swiglu", False) else limits.output
            assert checked.error is not None and checked.error <= 0.85 * most, (contest.kernel, name)


def test_a_recorded_drafter_left_its_models_rows_alone() -> None:
    outcome = on_gpu.replay(H200_RUN.with_name("h200-qwen2.5-7b-eagle3.json"))
    assert set(outcome.gate.rejected) == {"o"}
    assert {row.kernel for row in outcome.promoted.rows} == {"qkv", "fc", "attention", "lm_head", "lm_head_logits"}


def machine_of(uuid: str) -> Machine:
    return replace(H200, clocks="at most 700 W", uuid=uuid)


def test_samples_of_another_gpu_are_left_alone(run: Callable[..., Outcome], tmp_path: Path) -> None:
    """F10: an H200's samples became an H200 NVL's winner, with nothing timed. Back on the first GPU, they count again."""
    first, second, third = (FakeMeasurer(time_us) for _ in range(3))
    run(first, machine=machine_of("GPU-a"))
    other = run(second, machine=machine_of("GPU-b"))
    assert second.timed and second.checks, "timed anew"
    assert winner(other) == BEST
    aside = tmp_path / "out" / f"recording-{machine_of('GPU-a').digest}.json"
    assert recording.load(aside).machine.uuid == "GPU-a"
    run(third, machine=machine_of("GPU-a"))
    assert (third.checks, third.timed) == (0, [])


@pytest.mark.parametrize("change", [{"driver": "590.0"}, {"clocks": "at most 500 W"}, {"uuid": "GPU-b"}])
def test_another_driver_or_clocks_policy_is_timed_anew(run: Callable[..., Outcome], change: dict[str, str]) -> None:
    """F10."""
    run(machine=machine_of("GPU-a"))
    again = FakeMeasurer(time_us)
    run(again, machine=replace(machine_of("GPU-a"), **change))
    assert again.timed


def test_a_run_that_throttles_says_so_and_is_timed_again(run: Callable[..., Outcome]) -> None:
    """F11: exit code 0, `finished`, and never timed again."""
    hot = run(FakeMeasurer(time_us, throttled=lambda i: True))
    [decision] = make_report(hot).decisions
    assert (decision.outcome, decision.proposed) == ("throttled", None)
    assert not hot.promoted.rows
    assert not hot.complete, "exit code 1"
    cool = FakeMeasurer(time_us)
    assert winner(run(cool)) == BEST
    assert cool.timed and cool.checks == 0


def test_a_large_space_that_throttles_gives_its_variants_back(tmp_path: Path) -> None:
    """F11: what throttling spoilt is claimed anew, not held for dead."""
    many = [LinearSchedule(n, k, stages, warps, split_k=SPLIT) for n in (64, 128) for k in (64, 128) for stages in (2, 3)
            for warps in (4, 8)]
    made = write_bundle(tmp_path / "bundle", {"down": list(dict.fromkeys([DEFAULT, *many]))})
    request = Request(bundle=made, schedules=tmp_path / "schedules", out=tmp_path / "out", storage=str(tmp_path / "study"))
    measurer = FakeMeasurer(lambda s: 20.0 if s == DEFAULT else 18.0, throttled=lambda i: True)
    on_gpu.tune(request, H200, measurer, lambda _: FakeProbe(lambda s: 1.0), lambda line: None)
    measurer.throttled = lambda i: False
    outcome = on_gpu.tune(request, H200, measurer, lambda _: FakeProbe(lambda s: 1.0), lambda line: None)
    timed = {n for b in outcome.recording.contests["down"].batches for n in b.samples_us if b.enough}
    assert timed == set(outcome.recording.contests["down"].entrants)


def test_a_confirmation_spans_processes(run: Callable[..., Outcome]) -> None:
    """F11: the same artefact differs by up to 5% from one process to another."""
    contest = run().recording.contests["down"]
    assert len(contest.confirmations()) == 2
    assert all(schedule_id(BEST) in b.samples_us for listed in contest.confirmations().values() for b in listed)


def test_a_gain_below_the_resolution_is_a_tie(run: Callable[..., Outcome]) -> None:
    """F11: -0.1% was promoted where 0.85% are resolved."""
    outcome = run(FakeMeasurer(lambda s: 19.98 if s == BEST else 20.0, noise=0.002))
    assert winner(outcome) == DEFAULT
    rule = outcome.rankings["down"].rule
    assert rule.resolution and rule.resolution > 0.001


def test_time_left_is_shown(tmp_path: Path) -> None:
    """F35."""
    made = write_bundle(tmp_path / "bundle", {"down": candidates(), "o": candidates("o")})
    request = Request(bundle=made, schedules=tmp_path / "schedules", out=tmp_path / "out", budget=100)
    lines: list[str] = []
    on_gpu.tune(request, H200, FakeMeasurer(time_us), lambda _: FakeProbe(step_us), lines.append)
    assert "process 1, 1 of 2: down: " in lines[0]
    assert "of 100 s left" in lines[0]


def test_a_bundle_of_another_model_with_the_same_name_is_refused(tmp_path: Path) -> None:
    """F34: a model is its shapes, its name a label."""
    made = write_bundle(tmp_path / "bundle", {"down": candidates()}, model="llama-3.1-8b")
    table = json.loads((made / "report.json").read_text())
    (made / "report.json").write_text(json.dumps({**table, "model": "qwen2.5-7b"}))
    request = Request(bundle=made, schedules=tmp_path / "schedules", out=tmp_path / "out")
    with pytest.raises(SpaceError, match="down is LinearShape"):
        on_gpu.tune(request, H200, FakeMeasurer(time_us), None, lambda line: None)
    (made / "report.json").write_text(json.dumps({**table, "model": "a-copy-of-llama"}))
    outcome = on_gpu.tune(replace(request, model="llama-3.1-8b"), H200, FakeMeasurer(time_us), None, lambda line: None)
    assert outcome.recording.model == "llama-3.1-8b"


def test_a_refused_schedule_is_never_called_the_winner() -> None:
    """F30: from the recording of Qwen2.5-7B `o` was a green winner, refused 16,000 pixels below; 7 unchanged schedules were
    promotable."""
    report = make_report(on_gpu.replay(H200_RUN))
    decisions = {d.kernel: d for d in report.decisions}
    assert [d.kernel for d in report.decisions][:3] == ["lm_head_logits", "o", "qkv"], "gains and refusals come first"
    assert (decisions["o"].outcome, decisions["o"].describe_full_model()) == ("refused", "ar +5.3% to +5.4%: proves a slowdown")
    assert report.kernels_with("gain") == ("lm_head_logits",)
    assert len(report.kernels_with("unchanged")) == 5
    assert decisions["o"].alone and decisions["o"].alone.ratio == pytest.approx(0.577, abs=0.001)
    o = next(k for k in report.kernels if k.kernel == "o")
    assert {p.status for p in o.places if p.name == o.fastest} == {"refused"}
    page = render_gpu_report(report)
    assert page.index("slower in the full model") < page.index("<svg")
    assert page.index('id="o"') > page.index("slower in the full model")
    section = page[page.index('aria-labelledby="o"'):page.index('aria-labelledby="qkv"')]
    assert "winner" not in section and 'class="good"' not in section
    half = make_report(on_gpu.replay(H200_RUN.with_name("h200-qwen2.5-0.5b.json")))
    said = {d.kernel: d.describe_full_model() for d in half.decisions}
    assert "proves a slowdown" in said["o"] and "doesn't exclude a slowdown" in said["qkv"]
