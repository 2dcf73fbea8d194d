"""The sweep: its report, its memory, and that neither a kill nor a second run loses anything."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tune_kernels.kernels import bundle
from tune_kernels.tuner import pool
from tune_kernels.tuner.errors import OutputError
from tune_kernels.tuner.offline import compile as compilation
from tune_kernels.tuner.offline import report as offline_report
from tune_kernels.tuner.offline import sweep as offline
from tune_kernels.tuner.offline.record import SCHEMA, record_path
from tune_kernels.tuner.offline.report import FACT_FIELDS
from tune_kernels.tuner.offline.sweep import Progress, SweepRequest

pytestmark = pytest.mark.compiles

# Small: twenty variants that are accepted, fall back, spill, need too much shared memory or can't be; and the kernels that serve
# them.
SPACE = """
name = "small"
[[grid]]
kernels = ["qkv", "o"]
BLOCK_N = [64, 100]
BLOCK_K = 128
num_stages = [3, 4]
num_warps = 4
orientation = ["activations_as_m", "weights_as_m"]
[[grid]]
kernels = "gate_up"
BLOCK_N = 256
BLOCK_K = 512
num_stages = 4
num_warps = 4
[[grid]]
kernels = "merge"
BLOCK_D = [32, 64, 128]
splits = 1
num_warps = 4
[[grid]]
kernels = "qkv"
BLOCK_N = 128
BLOCK_K = 128
num_stages = 4
num_warps = 4
maxnreg = [48, 128]
"""
FIELDS = {"id", "kernel", "kernel_digest", "target", "shape", "schedule", "verdict", "stage", "reasons", "warnings", "lines",
          "compile_ms", "artefact", *FACT_FIELDS}
MERGES = 7  # variants of a sweep of merge alone: three of the space, for each the quantisation after it, and the fold


def sweep(*arguments: Any) -> dict[str, Any]:
    """The report as its file has it."""
    return offline.sweep(*arguments).to_dict()


def read_report(folder: Path) -> dict[str, Any]:
    return offline_report.read_report(folder).to_dict()


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("space") / "small.toml"
    path.write_text(SPACE)
    return str(path)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, space: str) -> Path:
    out = tmp_path_factory.mktemp("swept")
    sweep(request(out, space))
    return out


def request(out: Path, space: str, **changes: Any) -> SweepRequest:
    return SweepRequest(**{"targets": ("sm_90",), "space": space, "out": out, "jobs": 2, **changes})


def essence(report: dict[str, Any]) -> dict[str, Any]:
    """The part on which two runs must agree: all but times and the number of cached variants."""
    variants = [{k: v for k, v in one.items() if k != "compile_ms"} for one in report["variants"]]
    counts = {k: v for k, v in report["counts"].items() if k != "cached"}
    return {**{k: v for k, v in report.items() if k not in ("seconds", "variants", "counts")}, "counts": counts,
            "variants": variants}


def test_the_report_is_as_designed(swept: Path) -> None:
    report = read_report(swept)
    counts = report["counts"]
    assert counts["variants"] == len(report["variants"]) == counts["accepted"] + counts["rejected"] + counts["contract"]
    assert counts["contract"] == 8
    assert len({v["id"] for v in report["variants"]}) == counts["variants"]
    for variant in report["variants"]:
        assert set(variant) == FIELDS
        assert (variant["verdict"] == "accepted") == (not variant["reasons"])
        known = [variant[name] is not None for name in FACT_FIELDS]
        assert all(known) if variant["stage"] == "sass" else not any(known)
    assert "</html>" in (swept / "report.html").read_text()


def test_accepted_variants_have_their_artefacts(swept: Path) -> None:
    for variant in read_report(swept)["variants"]:
        if variant["verdict"] == "accepted":
            files = bundle.read(swept / "artefacts" / variant["artefact"])
            cubin = next(data for name, data in files.items() if name.endswith(".cubin"))
            assert bundle.sha256(cubin) == variant["cubin_sha256"]


def test_a_second_run_compiles_nothing(swept: Path, space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_report(swept)

    def never(*_: object) -> None:
        raise AssertionError("compiled what was known")

    monkeypatch.setattr(compilation, "compile_task", never)
    after = sweep(request(swept, space))
    assert after["counts"]["cached"] == after["counts"]["variants"]
    assert essence(after) == essence(before)


def test_another_spill_limit_needs_no_compiling(swept: Path, space: str, tmp_path: Path) -> None:
    out = tmp_path / "copy"
    shutil.copytree(swept, out)
    lenient = sweep(request(out, space, max_spill_bytes=10**6))
    assert lenient["counts"]["cached"] == lenient["counts"]["variants"]
    assert lenient["counts"]["accepted"] == read_report(swept)["counts"]["accepted"] + 1
    spilled = [v for v in lenient["variants"] if v["verdict"] == "accepted" and v["spill_store_bytes"]]
    assert len(spilled) == 1


def test_what_is_damaged_is_compiled_again_and_nothing_else(swept: Path, space: str, tmp_path: Path) -> None:
    """Truncated artefact, torn record, record of another schema, artefact gone."""
    out = tmp_path / "copy"
    shutil.copytree(swept, out)
    with_artefact = [p for p in sorted((out / "records").iterdir()) if json.loads(p.read_text())["artefact"]]
    artefacts = [out / "artefacts" / json.loads(p.read_text())["artefact"] for p in with_artefact]
    cubin = next(artefacts[0].glob("*.cubin"))
    os.unlink(cubin)
    cubin.write_bytes(b"\x7fELF")
    with_artefact[1].write_text(with_artefact[1].read_text()[:50])
    with_artefact[2].write_text(with_artefact[2].read_text().replace(SCHEMA, "another/schema"))
    shutil.rmtree(artefacts[3])
    again = sweep(request(out, space))
    assert again["counts"]["variants"] - again["counts"]["cached"] == 4
    assert essence(again) == essence(read_report(swept))
    for place in artefacts[:4]:
        bundle.read(place)


def test_a_cubin_that_is_not_the_records_is_replaced(swept: Path, space: str, tmp_path: Path) -> None:
    """A whole artefact of the same size and name, from another compiler's switches: neither a run nor --fresh may keep it."""
    for number, fresh in enumerate((False, True)):
        out = tmp_path / str(number)
        shutil.copytree(swept, out)
        one = next(v for v in read_report(out)["variants"] if v["verdict"] == "accepted")
        place = out / "artefacts" / one["artefact"]
        cubin = next(place.glob("*.cubin"))
        data = bytearray(cubin.read_bytes())
        data[-1] ^= 1
        cubin.write_bytes(data)
        digests = json.loads((place / "sha256.json").read_text())
        (place / "sha256.json").write_text(json.dumps({**digests, cubin.name: bundle.sha256(bytes(data))}))
        bundle.read(place)
        again = sweep(request(out, space, fresh=fresh))
        assert essence(again) == essence(read_report(swept))
        for variant in again["variants"]:
            if variant["verdict"] == "accepted":
                files = bundle.read(out / "artefacts" / variant["artefact"])
                assert bundle.sha256(next(d for n, d in files.items() if n.endswith(".cubin"))) == variant["cubin_sha256"]


def test_a_killed_assembler_is_no_verdict(tmp_path: Path, space: str) -> None:
    """It dies once, for want of memory say; the next run must try again."""
    from tune_kernels.kernels.toolchain import ptxas_path

    wrapper, died = tmp_path / "ptxas", tmp_path / "died"
    real = ptxas_path(90)
    wrapper.write_text(f'#!/bin/sh\ncase " $* " in *" -v "*) [ -e {died} ] || {{ touch {died}; kill -KILL $$; }};; esac\n'
                       f'exec {real} "$@"\n')
    wrapper.chmod(0o755)
    run = command(tmp_path / "out", space, "--kernel", "merge", "--json")
    environment = {**os.environ, "TRITON_PTXAS_PATH": str(wrapper), "TRITON_PTXAS_BLACKWELL_PATH": str(wrapper)}
    first = json.loads(subprocess.run(run, capture_output=True, text=True, env=environment).stdout)
    report = read_report(tmp_path / "out")
    second = json.loads(subprocess.run(run, capture_output=True, text=True, env=environment).stdout)
    assert died.exists()
    deaths = [r["detail"] for v in report["variants"] for r in v["reasons"]].count("the assembler died: SIGKILL")
    assert deaths in (1, 2), "two workers may ask before one of them has died"
    assert second["counts"]["variants"] - second["counts"]["cached"] == deaths
    assert second["counts"]["accepted"] == MERGES >= first["counts"]["accepted"]


def test_fresh_compiles_anew(swept: Path, space: str, tmp_path: Path) -> None:
    out = tmp_path / "copy"
    shutil.copytree(swept, out)
    again = sweep(request(out, space, fresh=True))
    answered_by_rule = [v for v in again["variants"] if v["stage"] == "contract"]
    assert again["counts"]["cached"] == len(answered_by_rule)
    assert essence(again) == essence(read_report(swept))


def test_progress_counts_to_the_end(tmp_path: Path, space: str) -> None:
    seen: list[tuple[int, int]] = []
    sweep(request(tmp_path, space, kernels=("merge",)), lambda p: seen.append((p.done, p.total)))
    assert seen[0] == (0, MERGES)
    assert seen[-1] == (MERGES, MERGES)
    assert isinstance(Progress().total, int)


def test_a_worker_that_dies_is_reported_and_tried_again_next_time(tmp_path: Path, space: str,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    original = pool.run

    def one_dies(executor: Any, function: Any, tasks: Any, *, in_flight: int) -> Any:
        for i, (task, result) in enumerate(original(executor, function, tasks, in_flight=in_flight)):
            if i == 0:
                record_path(tmp_path, task.record_key).unlink()
                result = pool.Died(True, "exceeded its 60 s of processor time")
            yield task, result

    monkeypatch.setattr(pool, "run", one_dies)
    first = sweep(request(tmp_path, space, kernels=("merge",)))
    assert [r["code"] for v in first["variants"] for r in v["reasons"]].count("timeout") == 1
    monkeypatch.setattr(pool, "run", original)
    second = sweep(request(tmp_path, space, kernels=("merge",)))
    assert second["counts"]["variants"] - second["counts"]["cached"] == 1
    assert second["counts"]["accepted"] == MERGES


def command(out: Path, space: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "tune_kernels.tuner", "--offline", "--target", "sm_90", "--space", space, "--out", str(out),
            "--jobs", "2", *more]


KILLS = int(os.environ.get("TUNE_KERNELS_KILLS", "6"))


def test_kill_at_random_moments_loses_nothing_finished(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory,
                                                       space: str, swept: Path) -> None:
    """kill -9 of the whole run, over and over. TUNE_KERNELS_KILLS=50 does it 50 times, on a space that outlasts them."""
    moments = random.Random(0)
    known = 0
    if KILLS >= 50:
        space, swept = "wide", tmp_path_factory.mktemp("undisturbed")
        sweep(request(swept, space, kernels=("lm_head",)))
    kernels = ("--kernel", "lm_head") if KILLS >= 50 else ()
    for _ in range(KILLS):
        run = subprocess.Popen(command(tmp_path, space, *kernels), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=True)
        time.sleep(moments.uniform(0.1, 1.5))
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        records = list((tmp_path / "records").glob("*.json")) if (tmp_path / "records").is_dir() else []
        assert len(records) >= known, "a record was lost"
        known = len(records)
        for record in records:
            json.loads(record.read_text())
    final = sweep(request(tmp_path, space, kernels=kernels[1:]))
    assert essence(final) == essence(read_report(swept))
    assert not list((tmp_path / "tmp").iterdir()), "what killed runs left behind is cleared away"


def test_a_run_with_nothing_to_compile_clears_what_a_killed_one_left(tmp_path: Path, space: str, swept: Path) -> None:
    """One killed after its last record, before it removed its folder."""
    out = tmp_path / "out"
    shutil.copytree(swept, out)
    left = out / "tmp" / "run-killed"
    left.mkdir(parents=True)
    (left / "held").touch()
    assert sweep(request(out, space))["counts"]["cached"] == read_report(swept)["counts"]["variants"]
    assert not left.exists()


def test_two_sweeps_into_one_folder_lose_nothing(tmp_path: Path, space: str, swept: Path) -> None:
    both = [subprocess.Popen(command(tmp_path, space, *kernels), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            for kernels in ((), ("--kernel", "o", "--kernel", "merge"))]
    for run in both:
        _, said = run.communicate(timeout=120)
        assert run.returncode == 0, said
    final = sweep(request(tmp_path, space))
    assert final["counts"]["cached"] == final["counts"]["variants"]
    assert essence(final) == essence(read_report(swept))


def test_ctrl_c_keeps_what_was_finished(tmp_path: Path, space: str, swept: Path) -> None:
    run = subprocess.Popen(command(tmp_path, "wide", "--kernel", "qkv"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                           text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "records").glob("*.json"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: the whole group
    _, said = run.communicate(timeout=30)
    assert run.returncode == 130
    assert "finished work is kept" in said
    assert "Traceback" not in said
    records = [json.loads(p.read_text()) for p in (tmp_path / "records").glob("*.json")]
    assert len(records) >= 4
    assert not any(f["code"] in ("assembler_error", "compile_error") for r in records for f in r["failures"]), \
        "Ctrl-C must not look like a fault of a candidate"


def test_workers_die_with_a_killed_parent(tmp_path: Path) -> None:
    run = subprocess.Popen(command(tmp_path, "wide", "--kernel", "qkv"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           start_new_session=True)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "records").glob("*.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _alive(run.pid) > 1
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    deadline = time.monotonic() + 20
    while _alive(run.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert _alive(run.pid) == 0


def _alive(session: int) -> int:
    """Processes of a session, zombies not counted."""
    count = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        count += fields[3] == str(session) and fields[0] != "Z"
    return count


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, space: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="--out"):
        sweep(request(tmp_path / "file" / "out", space))


def test_a_disk_that_fills_up_is_said_and_nothing_finished_is_lost(tmp_path: Path, space: str, swept: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, one task at a time, with a disk that is full after the second artefact."""
    original, saved = bundle.save, []

    def full(*arguments: Any) -> None:
        if len(saved) == 2:
            raise OSError(28, "No space left on device")
        saved.append(arguments)
        original(*arguments)

    monkeypatch.setattr(bundle, "save", full)
    monkeypatch.setattr(pool, "BoundedExecutor", lambda inner, *_: inner)  # in this process, where `save` is replaced
    one_by_one = "concurrent.futures:ThreadPoolExecutor"
    with pytest.raises(OutputError, match="No space left on device"):
        sweep(request(tmp_path, space, executor=one_by_one, jobs=1))
    monkeypatch.setattr(bundle, "save", original)
    again = sweep(request(tmp_path, space))
    assert again["counts"]["cached"] > again["counts"]["contract"], "what was finished is kept"
    assert essence(again) == essence(read_report(swept))


def test_works_without_home_driver_or_network(tmp_path: Path, space: str) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "CUDA_VISIBLE_DEVICES": "", "http_proxy": "http://0.0.0.0:1",
                   "https_proxy": "http://0.0.0.0:1"}
    run = command(tmp_path, space, "--kernel", "merge", "--json")
    done = subprocess.run(run, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["counts"]["accepted"] == MERGES


def test_an_audit_that_disagrees_fails(tmp_path: Path, space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every early reject audited; then one whose foresight is made wrong."""
    from tune_kernels.tuner.offline import inspection

    monkeypatch.setattr(compilation, "AUDIT_ONE_IN", 1)
    monkeypatch.setattr(pool, "BoundedExecutor", lambda inner, scratch, limits: inner)  # in this process, where it is replaced
    one_by_one = "concurrent.futures:ThreadPoolExecutor"
    honest = sweep(request(tmp_path / "a", space, executor=one_by_one, jobs=1))
    early = [v for v in honest["variants"] if {r["code"] for r in v["reasons"]} & {"wrong_instruction", "resource_limit"}]
    assert honest["audit"] == {"one_in": 1, "sampled": len(early), "disagreed": ()}
    assert len(early) == 5
    monkeypatch.setattr(inspection, "resource_reasons", lambda *_: [])
    wrong = sweep(request(tmp_path / "b", space, executor=one_by_one, jobs=1))
    assert len(wrong["audit"]["disagreed"]) == 1
