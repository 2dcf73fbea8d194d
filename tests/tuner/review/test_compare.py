"""What a change of promoted schedules comes to: pairs, times, bits, evidence, and what `--check` refuses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import synthetic
from synthetic import B300, H200, in_recipe, promoted, scaled, with_row
from tune_kernels.schedules.promoted import Checks, Paired, PromotedSchedule
from tune_kernels.schedules.store import PromotedFile
from tune_kernels.shapes.model import LinearShape
from tune_kernels.tuner.review.check import CODES, checked
from tune_kernels.tuner.review.compare import PROMOTED, Collection, Diff, RowDiff, compare, promoted_entries
from tune_kernels.tuner.review.summary import summarise
from tune_kernels.tuner.review.times import verdict_of

OTHER = "ab" * 32


def collection(name: str, *files: PromotedFile) -> Collection:
    return Collection(name, PROMOTED, promoted_entries(files))


def diff_of(old: PromotedFile, new: PromotedFile) -> Diff:
    return checked(compare(collection("old", old), collection("new", new)))


def changed(kernel: str, change: Callable[[PromotedSchedule], PromotedSchedule]) -> Diff:
    old = synthetic.file()
    return diff_of(old, with_row(old, kernel, change))


def row_of(diff: Diff, kernel: str) -> RowDiff:
    return next(row for row in diff.rows if row.entry.kernel == kernel)


def test_the_same_store_twice_has_no_change() -> None:
    diff = diff_of(synthetic.file(), synthetic.file())
    assert (diff.count("unchanged"), len(diff.rows), diff.findings) == (7, 7, ())
    assert {row.time.verdict for row in diff.rows if row.time} == {"same"}
    assert summarise(diff).steps == ()


def test_a_changed_row_says_what_changed() -> None:
    diff = changed("down", lambda row: promoted(row, 0.91, BLOCK_N=128, num_stages=4))
    row = row_of(diff, "down")
    assert (row.status, diff.count("changed"), diff.count("unchanged")) == ("changed", 1, 6)
    assert [(c.name, c.old, c.new) for c in row.knobs] == [("BLOCK_N", 64, 128), ("num_stages", 6, 4)]
    assert row.time and (row.time.verdict, row.time.basis, row.time.ratio) == ("faster", "paired", 0.91)
    assert row.bits and row.bits.verdict == "same class"
    assert row.evidence and (row.evidence.state, row.evidence.random) == ("present", True)
    assert diff.rows[0] is row, "what differs comes first"


def test_rows_on_one_side() -> None:
    whole = synthetic.file()
    fewer = replace(whole, rows=tuple(r for r in whole.rows if r.kernel != "merge"))
    added, removed = row_of(diff_of(fewer, whole), "merge"), row_of(diff_of(whole, fewer), "merge")
    assert (added.status, removed.status) == ("added", "removed")
    assert added.time and (added.time.verdict, added.time.basis) == ("faster", "against the schedule before it")
    assert removed.evidence is None and not removed.findings


def test_a_shape_is_a_row_of_its_own() -> None:
    old = synthetic.file()
    diff = diff_of(old, replace(old, rows=(*old.rows, replace(old.rows[1], shape=LinearShape(16, 32)))))
    assert (diff.count("added"), diff.count("unchanged")) == (1, 7)


def test_two_skus_compare_but_for_times_and_bits() -> None:
    diff = diff_of(synthetic.file(H200), synthetic.file(B300))
    assert diff.count("changed") == 7
    assert next((c.name, c.old, c.new) for c in diff.everywhere) == ("target", H200, B300)
    for row in diff.rows:
        assert row.time and (row.time.verdict, row.time.why) == ("not comparable", "other SKU")
        assert row.bits and row.bits.verdict == "not comparable"
    assert ("instructions", ("QGMMA",), ("UTCQMMA",)) in [(c.name, c.old, c.new) for c in row_of(diff, "down").facts]
    assert diff.findings == ()


def test_two_recipes_compare_and_another_class_is_right() -> None:
    old = synthetic.file()
    new = in_recipe(with_row(old, "down", lambda row: replace(promoted(row, 0.8, split_k=2), numerics_class=OTHER)), "fp8-v2")
    diff = diff_of(old, new)
    row = row_of(diff, "down")
    assert (diff.count("changed"), diff.count("unchanged"), diff.findings) == (1, 6, ())
    assert row.bits and (row.bits.verdict, row.bits.new_recipe) == ("another class", True)
    assert summarise(diff).bits == {"another class and another recipe": 1, "same class": 6}


def test_a_folder_of_two_recipes_pairs_each_with_its_own() -> None:
    old = synthetic.file()
    second = in_recipe(with_row(old, "down", lambda row: promoted(row, 0.8, split_k=2)), "fp8-v2")
    diff = checked(compare(collection("old", old), collection("new", old, second)))
    assert (diff.count("unchanged"), diff.count("added")) == (7, 7)


# ---- times ----

@pytest.mark.parametrize(("interval", "verdict"), [((0.9, 0.99), "faster"), ((1.01, 1.2), "slower"), ((0.99, 1.01), "tie"),
                                                   ((0.9, 1.0), "tie"), ((1.0, 1.1), "tie")])
def test_a_difference_is_claimed_only_where_the_interval_excludes_one(interval: tuple[float, float], verdict: str) -> None:
    assert verdict_of(interval) == verdict


def measured_again(row: PromotedSchedule, by: float = 1.0, **changes: Any) -> PromotedSchedule:
    return replace(row, timing=replace(row.timing, times=scaled(row.timing.times, by), **changes))


@pytest.mark.parametrize(("by", "verdict"), [(0.9, "faster"), (1.003, "tie"), (1.1, "slower")])
def test_separate_runs_compare_where_their_intervals_part(by: float, verdict: str) -> None:
    time = row_of(changed("o", lambda row: measured_again(row, by)), "o").time
    assert time and (time.verdict, time.basis) == (verdict, "separate runs")


@pytest.mark.parametrize(("changes", "why"), [
    ({"driver": "580.2"}, "other driver: synthetic, 580.2"),
    ({"clocks": {"sm_mhz": 1500.0, "memory_mhz": 3201.0}}, "other clocks: sm_mhz 1980, 1500"),
    ({"clocks": {"sm_mhz": 1980.0}}, "other clocks: memory_mhz 3201, not recorded"),
])
def test_what_ran_elsewhere_is_not_comparable(changes: dict[str, Any], why: str) -> None:
    diff = changed("o", lambda row: measured_again(row, 1.5, **changes))
    time = row_of(diff, "o").time
    assert time and (time.verdict, time.why, time.ratio) == ("not comparable", why, None)
    assert diff.findings == ()


def test_temperature_and_a_clock_within_its_noise_are_no_reason() -> None:
    clocks = {"sm_mhz": 1975.0, "memory_mhz": 3201.0, "temperature_c": 71.0}
    time = row_of(changed("o", lambda row: measured_again(row, 1.1, clocks=clocks)), "o").time
    assert time and time.verdict == "slower"


def test_the_paired_comparison_of_another_schedule_does_not_count() -> None:
    """The new row was timed against something, but not against what OLD holds."""
    old = synthetic.file()
    elsewhere = with_row(old, "down", lambda row: promoted(row, 1.0, num_warps=8))
    new = with_row(elsewhere, "down", lambda row: promoted(row, 0.5, num_warps=4, num_stages=3))
    time = row_of(diff_of(old, new), "down").time
    assert time and time.basis == "separate runs"


def test_the_whole_step() -> None:
    """Layer kernels count once a layer, the head once: 28 * 18.9 of 28 * (6.7+5.5+34.9+18.9+8.3+2.1) + 262 µs become 10% less."""
    step, = summarise(changed("down", lambda row: promoted(row, 0.9, num_stages=4))).steps
    whole = 28 * (6.7 + 5.5 + 34.9 + 18.9 + 8.3 + 2.1) + 262
    assert (step.layers, len(step.counted), step.left_out) == (28, 7, ())
    assert step.old_us == pytest.approx(whole)
    assert step.ratio == pytest.approx(1 - 0.1 * 28 * 18.9 / whole)
    assert step.interval == pytest.approx((1 - 0.106 * 28 * 18.9 / whole, 1 - 0.094 * 28 * 18.9 / whole))


def test_the_step_says_what_it_leaves_out() -> None:
    old = synthetic.file()
    fewer = replace(old, rows=tuple(r for r in old.rows if r.kernel != "attention"))
    step, = summarise(diff_of(fewer, with_row(fewer, "down", lambda row: promoted(row, 0.9, num_stages=4)))).steps
    assert step.left_out == ("attention",)


def test_the_full_model_is_said_of_the_kernels_that_went_in() -> None:
    diff = changed("down", lambda row: promoted(row, 0.9, num_stages=4))
    full, = summarise(diff).full_model
    assert (full.mode, full.kernels) == ("ar", ("down",))


# ---- what --check refuses ----

def with_evidence(row: PromotedSchedule, **changes: Any) -> PromotedSchedule:
    return replace(row, evidence=replace(row.evidence, **changes))


def with_artefact(row: PromotedSchedule, **changes: Any) -> PromotedSchedule:
    return replace(row, artefact=replace(row.artefact, **changes))


REFUSED: list[tuple[str, Callable[[PromotedSchedule], PromotedSchedule], str]] = [
    ("edited", lambda row: replace(row, schedule=replace(row.schedule, num_stages=2)), "schedule_id is "),
    ("edited", lambda row: replace(row, timing=replace(row.timing, schedule_id="0" * 12)), "timing.schedule_id is 0000"),
    ("no_evidence", lambda row: with_evidence(row, checks={}), "no check was run"),
    ("no_evidence", lambda row: with_evidence(row, checks={"rows": Checks(0, 0)}), "no check was run"),
    ("check_failed", lambda row: with_evidence(row, checks={"rows": Checks(9, 8)}), "rows: 1 of 9 failed"),
    ("stale", lambda row: replace(row, kernel_digest="0" * 16), "changed since it was measured"),
    ("stale", lambda row: replace(row, kernel="downwards"), "there is no kernel downwards"),
    ("other_bits", lambda row: replace(row, numerics_class=OTHER), "in recipe fp8-v1: another class needs another recipe"),
    ("slower", lambda row: promoted(row, 1.03, num_stages=4), "+3.0% [+2.4, +3.6] (paired)"),
    ("slower", lambda row: measured_again(row, 1.1), "separate runs"),
    ("slower", lambda row: with_evidence(row, full_model={"sd": Paired(1.02, (1.01, 1.03), 5)}), "sd step's time +2.0%"),
    ("spills", lambda row: with_artefact(row, spill_store_bytes=8), "8 B of spill stores, 0 B of loads"),
    ("falls_back", lambda row: with_artefact(row, instructions=("HMMA",)), "expected QGMMA, found HMMA"),
    ("falls_back", lambda row: with_artefact(row, instructions=()), "expected QGMMA, found no tensor-core instruction"),
]


@pytest.mark.parametrize(("code", "change", "said"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_check_refuses_with_reason_and_row(code: str, change: Any, said: str) -> None:
    diff = changed("down", change)
    assert {f.code for f in diff.findings} == {code}
    assert any(said in f.detail for f in diff.findings)
    for finding in diff.findings:
        assert finding.what.startswith("down") and "N 3584, K 18944" in finding.what and "nvidia-h200" in finding.what
    assert diff.rows[0].findings == diff.findings, "the row comes first"


def test_every_code_of_a_promoted_row_is_tested() -> None:
    assert {code for code, _, _ in REFUSED} == CODES.keys() - {"unknown_sku", "rejected", "misplaced", "not_judged"}


def test_an_unknown_gpu_is_refused() -> None:
    old = synthetic.file()
    new = replace(old, target="nvidia-x1", rows=tuple(replace(row, target="nvidia-x1").sealed() for row in old.rows))
    assert {f.code for f in diff_of(old, new).findings} == {"unknown_sku"}


def test_a_hand_edit_names_each_field_that_no_longer_matches() -> None:
    diff = changed("down", lambda row: replace(row, schedule=replace(row.schedule, num_stages=2)))
    assert [f.detail.split()[0] for f in diff.findings] == ["schedule_id", "timing.schedule_id", "evidence.schedule_id"]


def test_unchanged_rows_are_checked_for_all_but_speed() -> None:
    """A kernel's source may change under rows that nobody touched."""
    old = with_row(synthetic.file(), "o", lambda row: replace(row, kernel_digest="0" * 16))
    assert {f.code for f in diff_of(old, old).findings} == {"stale"}
    slow = with_row(synthetic.file(), "o", lambda row: promoted(row, 1.2, num_stages=3))
    assert diff_of(slow, slow).findings == ()


def test_a_slower_row_that_is_new_is_refused() -> None:
    slow = with_row(synthetic.file(), "o", lambda row: promoted(row, 1.2, num_stages=3))
    none = replace(slow, rows=tuple(r for r in slow.rows if r.kernel != "o"))
    assert [f.code for f in diff_of(none, slow).findings] == ["slower"]


def test_several_faults_are_all_named() -> None:
    diff = changed("down", lambda row: with_artefact(replace(row, numerics_class=OTHER), spill_store_bytes=8))
    assert [f.code for f in diff.findings] == ["spills", "other_bits"]
