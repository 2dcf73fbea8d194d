"""The checks before a timing, on real kernels: what is right passes, and each kind of wrong is named. Here and not in
tests/tuner because they launch kernels."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tune_kernels.kernels import registry
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.schedule import AttentionSchedule, HeadSchedule, LinearSchedule, MergeSchedule, ScreenSchedule
from tune_kernels.shapes.model import AttentionShape, CertifiedHeadShape, HeadShape, LinearShape, MergeShape
from tune_kernels.tuner.on_gpu.samples.gate import Checked
from tune_kernels.tuner.on_gpu.worker import checks
from tune_kernels.tuner.on_gpu.worker.case import RowsCase
from tune_kernels.tuner.on_gpu.worker.cases import Beside, make_case
from tune_kernels.tuner.on_gpu.worker.checks import numerics_class as class_of
from tune_kernels.tuner.on_gpu.worker.operands import Operands, Sizes
from tune_kernels.tuner.on_gpu.worker.tasks import CheckTask, Problem

pytestmark = pytest.mark.interpreter
RECIPE = load_recipe("fp8-v1")
LINEAR = LinearSchedule(32, 64, 2, 4)
MERGE = MergeSchedule(BLOCK_D=16, splits=1, num_warps=1)
BESIDE = Beside(MERGE, HeadSchedule(32, 64, 2, 4))
ATTENTION = AttentionSchedule(chunk=256, TILE=32, BLOCK_N=64, num_stages=1, num_warps=4)
CASES = {
    "qkv": (LinearShape(48, 80, "e4m3", bias=True), LINEAR),
    "down": (LinearShape(48, 256, terms=2), replace(LINEAR, split_k=2)),
    "o": (LinearShape(48, 80, "bf16"), LINEAR),
    "gate_up": (LinearShape(64, 80, terms=2, swiglu=True), LINEAR),
    "lm_head": (HeadShape(80, 64), HeadSchedule(32, 64, 2, 4)),
    "lm_head_logits": (HeadShape(80, 64), HeadSchedule(32, 64, 2, 4)),
    "lm_head_logits of a drafter": (HeadShape(80, 64, "e4m3", 2), HeadSchedule(32, 64, 2, 4)),
    "lm_head_certified": (CertifiedHeadShape(80, 64), ScreenSchedule(32, 64, 2, 4)),
    "attention": (AttentionShape(4, 2, 16), ATTENTION),
    "merge": (MergeShape(4, 16), MERGE),
}


# The interpreter takes a millisecond a block.
SMALL = Sizes(rows=5, capacity=600, checked_length=510, occupancies=(100, 300), repeats=2, class_outputs=1000)


def run_checks(case: Any, wide: Any, schedule: Any) -> Checked:
    return checks.run_checks(case, wide, schedule, SMALL)


def numerics_class(wide: Any, schedule: Any, sizes: Sizes = SMALL) -> str:
    return class_of(wide, schedule, sizes)


def cases(kernel: str, device: str) -> tuple[Any, Any, Any]:
    shape, schedule = CASES[kernel]
    made = [make_case(kernel.split()[0], shape, RECIPE, Operands(device, wide, sizes=SMALL), BESIDE)
            for wide in (False, True)]
    return made[0], made[1], schedule


@pytest.mark.parametrize("kernel", CASES)
def test_every_kernel_passes_its_checks(kernel: str, device: str) -> None:
    case, wide, schedule = cases(kernel, device)
    checked = run_checks(case, wide, schedule)
    assert checked.failure is None
    assert set(checked.checks) == {"reference", "rows", "determinism"}
    assert checked.numerics_class == numerics_class(wide, schedule), "the same inputs, the same class"


def test_a_kernel_that_writes_nothing_is_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, wide, schedule = cases("qkv", device)
    monkeypatch.setattr("tune_kernels.kernels.operation.Launch.__call__", lambda *_, **__: None)
    checked = run_checks(case, wide, schedule)
    assert checked.failure and checked.failure.stage == "reference"
    assert "240 of 240 outputs were not written" in checked.failure.detail


@pytest.mark.parametrize("kernel", ["lm_head", "merge"])
def test_outputs_of_integers_and_of_merges_are_poisoned_too(kernel: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, wide, schedule = cases(kernel, device)
    monkeypatch.setattr("tune_kernels.kernels.operation.Launch.__call__", lambda *_, **__: None)
    checked = run_checks(case, wide, schedule)
    assert checked.failure and "were not written" in checked.failure.detail


class Wrong(RowsCase[Any]):
    """A case whose output is spoilt."""

    def __init__(self, case: Any, spoil: Any) -> None:
        self.case, self.spoil, self.count = case, spoil, 0
        self.limit, self.rows, self.error = case.limit, case.rows, case.error  # type: ignore[method-assign]

    def output(self, schedule: Any, first: int, rows: int) -> Any:
        self.count += 1
        return self.spoil(self.case.output(schedule, first, rows), first, rows, self.count)


@pytest.mark.parametrize(("stage", "spoil", "said"), [
    ("reference", lambda y, first, rows, count: y * 1.1, "relative RMS error 1.0"),
    ("reference", lambda y, first, rows, count: y.index_fill(1, y.new_tensor([0], dtype=int), float("nan")), "5 of 240"),
    ("rows", lambda y, first, rows, count: y.index_fill(1, y.new_tensor([0], dtype=int), rows), "bits differ: 1 rows of 5"),
    ("rows", lambda y, first, rows, count: y.index_fill(1, y.new_tensor([0], dtype=int), first), "bits differ: row 1 alone"),
    ("determinism", lambda y, first, rows, count: y.index_fill(1, y.new_tensor([0], dtype=int), max(count, 10)), "2 of 2 runs"),
])
def test_each_kind_of_wrong_is_named(device: str, stage: str, spoil: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spoilt column of small numbers passes the tolerance and no comparison of bytes."""
    case, wide, schedule = cases("qkv", device)
    if stage != "reference":
        case.limit = lambda schedule: 1e9
    checked = run_checks(Wrong(case, spoil), wide, schedule)
    assert checked.failure
    assert (checked.failure.stage, said in checked.failure.detail) == (stage, True), checked.failure


def test_the_recipes_limits_judge(device: str) -> None:
    """What would pass as a rounding to bf16 is too much for fp32 partials: accumulation alone is in them."""
    case, wide, schedule = cases("down", device)
    whole = replace(schedule, split_k=1)
    limits = RECIPE.max_rms_error
    assert (case.limit(schedule), case.limit(whole)) == (limits.partials, limits.output)
    assert cases("gate_up", device)[0].limit(LINEAR) == limits.swiglu
    spoil = Wrong(case, lambda y, first, rows, count: y * (1 + 1.5 * limits.partials))
    checked = run_checks(spoil, wide, schedule)
    assert checked.failure and f"at most {limits.partials:.0e} in this recipe" in checked.failure.detail
    assert run_checks(spoil, wide, whole).failure is None


def test_classes_differ_where_the_order_of_a_sum_does(device: str) -> None:
    shape = LinearShape(64, 512)
    wide = make_case("down", shape, RECIPE, Operands(device, wide=True, sizes=SMALL), BESIDE)
    by_split = {numerics_class(wide, replace(LINEAR, split_k=n)) for n in (1, 2, 4)}
    assert len(by_split) == 3


@pytest.fixture
def from_bundle(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The worker's tasks find every artefact, and make their operands here."""
    monkeypatch.setattr(checks, "require_artefact", lambda problem, schedule: None)
    monkeypatch.setattr("tune_kernels.tuner.on_gpu.worker.cases.install", lambda folder: None)
    monkeypatch.setattr(checks, "case_of", lambda problem, operands: make_case(
        problem.kernel, problem.shape, RECIPE, replace(operands, device=device, sizes=SMALL), BESIDE))
    monkeypatch.setattr(checks, "numerics_class", numerics_class)
    checks.wide_case.cache_clear()
    yield
    checks.wide_case.cache_clear()


@pytest.mark.parametrize("kernel", ["down", "merge"])
def test_a_class_is_the_same_without_the_checks(kernel: str, device: str, from_bundle: None, tmp_path: Path) -> None:
    """What `verify --classes` asks the worker, against what `--on-gpu` does; schedules that can't be launched are named."""
    case, wide, schedule = cases(kernel, device)
    problem = Problem(kernel, CASES[kernel][0], "nvidia-h200", "fp8-v1", "bundle", (100, 300))
    found = checks.classify(CheckTask(problem, "one", schedule, str(tmp_path / "words"))).value
    assert found.failure is None and not found.checks
    assert found.numerics_class == run_checks(case, wide, schedule).numerics_class
    illegal = replace(schedule, num_warps=3)
    wrong = checks.classify(CheckTask(problem, "two", illegal, str(tmp_path / "words"))).value
    assert wrong.failure and wrong.failure.stage == "launch" and "num_warps" in wrong.failure.detail


@pytest.mark.parametrize("kernel", CASES)
def test_a_timed_launch_takes_any_copy(kernel: str, device: str) -> None:
    shape, schedule = CASES[kernel]
    case = make_case(kernel, shape, RECIPE, Operands(device, copies=2, sizes=SMALL), BESIDE)
    for copy in (0, 1):
        case.timed(schedule, copy)


def test_every_tunable_kernel_of_a_model_has_a_case(device: str) -> None:
    assert {name.split()[0] for name in CASES} | {"fc"} == set(registry.TUNABLE)
