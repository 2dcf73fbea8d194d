"""`verify --promote`: evidence of promoted rows upgraded from random weights to a real model's, and everything that forbids it.
A tiny model in Triton's interpreter or on a GPU, under promoted schedules whose numbers are made up."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from click.testing import CliRunner
from promoted_rows import built, row
from tune_kernels.decoder.checks import verify as verify_module
from tune_kernels.decoder.checks.check import Check, CheckResult
from tune_kernels.decoder.checks.evidence import Evidence
from tune_kernels.decoder.checks.upgrade import upgrade
from tune_kernels.decoder.cli import verify
from tune_kernels.decoder.errors import RequestError
from tune_kernels.decoder.selection import INTERPRETED, KERNELS
from tune_kernels.kernels import bundle
from tune_kernels.kernels.registry import default_schedule, store_key
from tune_kernels.schedules import store
from tune_kernels.schedules.errors import ScheduleError
from tune_kernels.schedules.promoted import Checks, PromotedSchedule
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.schedules.store import PromotedFile
from tune_kernels.shapes.model import load_model_shape
from tune_kernels.shapes.target import load_sku, sku_of

pytestmark = pytest.mark.interpreter
RECIPE = load_recipe("fp8-v1")
MODEL = "named-otherwise"  # of the promoted file: look-up doesn't go by it, and the rows stay where they stood


@pytest.fixture(autouse=True)
def digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels have no source to digest in the interpreter."""
    if triton.knobs.runtime.interpret:
        monkeypatch.setattr(bundle, "kernel_digest", lambda kernel: "0" * 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, make_model: Any) -> Path:
    """A model's files."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "llama", num_hidden_layers=1)


@pytest.fixture
def promoted(folder: Path, device: str, tmp_path: Path) -> Path:
    """A folder of schedules with a row for each kernel of the model."""
    target = load_sku(INTERPRETED) if device == "cpu" else sku_of(torch.cuda.get_device_name())
    shapes, made = load_model_shape(str(folder)).kernel_shapes(RECIPE.linear_dtype, RECIPE.terms), []
    for kernel in KERNELS:
        schedule = default_schedule(RECIPE, kernel, target.arch, shapes[kernel])
        key = store_key(kernel, shapes[kernel], target, RECIPE)
        made.append(built(kernel, key.shape, schedule, 10.8, target=target.name, model=MODEL, kernel_digest=key.kernel_digest,
                          toolchain=key.toolchain).sealed())
    store.promote(tmp_path / "promoted", PromotedFile(target.name, MODEL, RECIPE.name, tuple(made)))
    return tmp_path / "promoted"


def rows(schedules: Path) -> dict[str, PromotedSchedule]:
    [path] = schedules.glob("*/*.json")
    assert path.name == f"{MODEL}.fp8-v1.json"
    return {r.kernel: r for r in store.read(path).rows}


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The checks take minutes in the interpreter: stand-ins that fail as often as a test says, by kind."""
    failing = {"agreement": 0, "reference": 0}

    class Agreement:
        def __init__(self, decoder: Any, prompt: list[int]) -> None:
            self.prompts, self.tokens_compared, self.emitted = {tuple(prompt)}, 321, [1, 2, 3]

        def checks(self) -> Iterator[Check]:
            for i in range(4):
                yield Check(f"agreement {i}", lambda i=i: "wrong" if i < failing["agreement"] else "")  # type: ignore[misc]

    monkeypatch.setattr(verify_module, "Agreement", Agreement)
    monkeypatch.setattr(verify_module, "reference_model", lambda checkpoint, linear: None)
    monkeypatch.setattr(verify_module, "compare_with_reference", lambda *_: (
        CheckResult("reference", f"reference {i}", i >= failing["reference"]) for i in range(2)))
    return failing


def invoke(folder: Path | str, tmp_path: Path, *more: str, backend: str = "triton") -> Any:
    return CliRunner().invoke(verify, ["--weights", str(folder), "--recipe", "fp8-v1", "--backend", backend, "--capacity", "48",
                                       "--promote", "--out", str(tmp_path / "evidence.json"), *more])


def test_evidence_becomes_that_of_the_model(folder: Path, promoted: Path, checks: dict[str, int], tmp_path: Path) -> None:
    """And nothing else changes; a second time it is refreshed."""
    before = rows(promoted)
    for _ in range(2):
        done = invoke(folder, tmp_path, "--schedules", str(promoted), "--json")
        assert done.exit_code == 0, done.output
        assert len(json.loads(done.stdout)["promoted"]) == 1
        for kernel, new in rows(promoted).items():
            old, evidence = before[kernel], new.evidence
            assert (evidence.weights, evidence.random_weights) == ("path:tiny", False)
            assert evidence.weights_fingerprint == json.loads((tmp_path / "evidence.json").read_text())["fingerprint"]
            assert evidence.checks == {"rows": Checks(9, 9), "determinism": Checks(5, 5), "agreement": Checks(4, 4),
                                       "reference": Checks(2, 2)}
            assert (evidence.prompts, evidence.tokens_compared) == (1, 321)
            assert evidence.tokens_sha256 != old.evidence.tokens_sha256
            assert new.problems() == []
            assert replace(new, evidence=old.evidence, date=old.date, row_digest=old.row_digest) == old
    assert str(tmp_path) not in next(promoted.glob("*/*.json")).read_text()


def test_the_first_folder_is_written_to(folder: Path, promoted: Path, checks: dict[str, int], tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the rows are shipped and the user names none: theirs; what is shipped stays as it is."""
    monkeypatch.setattr(store, "SHIPPED", promoted)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    before = rows(promoted)
    done = invoke(folder, tmp_path)
    assert done.exit_code == 0, done.output
    assert rows(promoted) == before
    mine = tmp_path / "data" / "tune-kernels" / "schedules"
    assert {r.evidence.weights for r in rows(mine).values()} == {"path:tiny"}
    assert f"promoted: {mine}" in done.stdout
    assert "evidence of path:tiny; before: random:0" in done.stdout


@pytest.mark.parametrize("kind", ["agreement", "reference"])
def test_after_a_failed_check_nothing_is_written(kind: str, folder: Path, promoted: Path, checks: dict[str, int],
                                                 tmp_path: Path) -> None:
    before = rows(promoted)
    checks[kind] = 1
    done = invoke(folder, tmp_path, "--schedules", str(promoted))
    assert done.exit_code == 1
    assert "not promoted: a check failed" in done.stdout
    assert rows(promoted) == before


@pytest.mark.parametrize(("more", "said"), [
    (["--weights", "random:0", "--model", "smollm2-135m"], "they prove no more than"),
    (["--kind", "agreement"], "--promote without the reference check"),
    (["--kind", "quality"], "--promote without the agreement and the reference check"),
    (["--backend", "torch"], "--promote on the torch backend: no promoted schedules are in use"),
])
def test_what_proves_nothing_is_refused(more: list[str], said: str, folder: Path, promoted: Path, checks: dict[str, int],
                                        tmp_path: Path) -> None:
    """Before any check runs."""
    before = rows(promoted)
    done = invoke(folder, tmp_path, "--schedules", str(promoted), *more)
    assert (done.exit_code, said in done.output) == (2, True), done.output
    assert not (tmp_path / "evidence.json").exists()
    assert rows(promoted) == before


def test_schedules_that_are_not_promoted_are_refused(folder: Path, promoted: Path, checks: dict[str, int],
                                                     tmp_path: Path) -> None:
    [path] = promoted.glob("*/*.json")
    file = store.read(path)
    path.write_text(store.text_of(replace(file, rows=tuple(r for r in file.rows if r.kernel not in ("o", "merge")))))
    refused = invoke(folder, tmp_path, "--schedules", str(promoted))
    assert (refused.exit_code, "no promoted schedule of o" in refused.output) == (1, True), refused.output
    done = invoke(folder, tmp_path, "--schedules", str(promoted), "--allow-untuned")
    assert (done.exit_code, "aren't promoted: o, merge" in done.output) == (2, True), done.output


def proven(**changes: Any) -> Evidence:
    results = [CheckResult(kind, "one", True) for kind in ("agreement", "reference")]
    return replace(Evidence("path:m", "f", "fp8-v1", "triton", results, 1, 2, "ab" * 32, in_use=(row(),)), **changes)


def test_a_row_that_was_replaced_meanwhile_stays(tmp_path: Path) -> None:
    """Between a model's loading and the end of its checks another promotion may go in: its schedule was not verified."""
    store.promote(tmp_path, PromotedFile("nvidia-h200", "m", "fp8-v1", (row(BLOCK_N=128),)))
    with pytest.raises(ScheduleError, match=r"gate_up: the row has changed to"):
        upgrade(proven(), tmp_path)
    [path] = tmp_path.glob("*/*.json")
    assert store.read(path).rows == (row(BLOCK_N=128),)


def test_kinds_that_were_not_run_again_stay_with_the_same_weights_alone(tmp_path: Path) -> None:
    quality = [*proven().results, CheckResult("quality", "two", True)]
    upgrade(proven(results=quality), tmp_path)

    def again(**changes: Any) -> set[str]:
        [path] = tmp_path.glob("*/*.json")
        upgrade(proven(in_use=(store.read(path).rows[0],), **changes), tmp_path)
        return set(store.read(path).rows[0].evidence.checks)

    assert again() == {"rows", "determinism", "agreement", "reference", "quality"}
    assert again(fingerprint="other") == {"rows", "determinism", "agreement", "reference"}


def test_checks_that_failed_or_were_not_run_are_no_evidence(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="without reference"):
        upgrade(proven(results=[CheckResult("agreement", "one", True)]), tmp_path)
    with pytest.raises(RequestError, match="after 1 failed checks"):
        upgrade(proven(results=[*proven().results, CheckResult("quality", "two", False)]), tmp_path)
    assert not list(tmp_path.iterdir())
