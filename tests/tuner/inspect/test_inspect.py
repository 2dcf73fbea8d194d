"""`tune-kernels inspect` on kernels that plain Triton compiled, not through the sweep."""

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tune_kernels.kernels.toolchain import disassemble
from tune_kernels.shapes.errors import UserError
from tune_kernels.tuner.cli import cli
from tune_kernels.tuner.inspect.command import inspected
from tune_kernels.tuner.inspect.judge import Demands, Inspected
from tune_kernels.tuner.offline.cubin import read_cubin

triton = pytest.importorskip("triton")
tl = triton.language
gdc_wait = tl.extra.cuda.gdc_wait

pytestmark = pytest.mark.compiles
MMA = re.compile(r"\b(\w*MMA)\b")
TYPES = {"fp16": "float32", "bf16": "float32", "fp8e4nv": "float32", "i8": "int32"}


@triton.jit
def product(x_ptr, w_ptr, y_ptr, ACC: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(x_ptr + m[:, None] * K + k[None, :])
    w = tl.load(w_ptr + k[:, None] * N + n[None, :])
    tl.store(y_ptr + m[:, None] * N + n[None, :], tl.dot(x, w, out_dtype=ACC))


@triton.jit
def waits_in_its_loop(x_ptr, w_ptr, y_ptr, K, BLOCK: tl.constexpr):
    m = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        gdc_wait()
        x = tl.load(x_ptr + m[:, None] * K + k + m[None, :])
        w = tl.load(w_ptr + (k + m[:, None]) * BLOCK + m[None, :])
        acc = tl.dot(x, w, acc)
    tl.store(y_ptr + m[:, None] * BLOCK + m[None, :], acc)


@triton.jit
def waits_first(x_ptr, y_ptr, BLOCK: tl.constexpr):
    gdc_wait()
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at) + 1)


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, **options: Any) -> Any:
    """As a program's launch would leave it in the cache."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    divisible = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in types}
    return triton.compile(ASTSource(kernel, signature, constants, divisible), target=GPUTarget("cuda", capability, 32),
                          options={"num_warps": 4, "enable_fp_fusion": True, **options})


def matrix_product(dtype: str, capability: int, rows: int = 64) -> Any:
    acc = getattr(tl, TYPES[dtype])
    out = "*i32" if dtype == "i8" else "*fp32"
    return compiled(product, {"x_ptr": f"*{dtype}", "w_ptr": f"*{dtype}", "y_ptr": out},
                    {"ACC": acc, "M": rows, "N": 64, "K": 64}, capability)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's cache folder."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    return folder


def one(path: Path, **demands: Any) -> Inspected:
    kernels = inspected([path], Demands(**demands)).kernels
    assert len(kernels) == 1
    return kernels[0]


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 103, 120])
@pytest.mark.parametrize("dtype", TYPES)
def test_families_equal_nvdisasm(dtype: str, capability: int) -> None:
    if dtype == "fp8e4nv" and capability < 89:
        with pytest.raises(Exception, match=r"not supported|CompilationError|fp8e4nv"):
            matrix_product(dtype, capability)
        return
    cubin = matrix_product(dtype, capability).asm["cubin"]
    facts = read_cubin(cubin)
    assert facts.arch == capability
    assert facts.instructions == dict(Counter(MMA.findall(disassemble(cubin))))


def test_a_cache_folder_and_its_demands(cache: Path) -> None:
    matrix_product("bf16", 90)
    found = one(cache)
    assert (found.name, found.arch, found.verdict) == ("product", "sm_90", "accepted")
    assert set(found.instructions or {}) == {"HGMMA"} and found.blocks_per_sm
    assert [r.code for r in one(cache, required=("QGMMA",)).reasons] == ["wrong_instruction"]
    assert [r.code for r in one(cache, forbidden=("HGMMA",)).reasons] == ["wrong_instruction"]


def test_a_silent_conversion_is_named(cache: Path) -> None:
    """FP8 with few rows falls back to the FP16 instruction."""
    matrix_product("fp8e4nv", 90, rows=16)
    found = one(cache)
    assert found.conversions and set(found.instructions or {}) == {"HMMA"}
    assert [r.code for r in found.reasons] == ["wrong_instruction"] and "converted to f16" in found.reasons[0].detail


def test_a_pipelined_loop_with_a_wait_in_it_is_a_race(cache: Path) -> None:
    """Triton's pipeliner lifts the loads over the wait (triton issue 11905)."""
    types = {"x_ptr": "*bf16", "w_ptr": "*bf16", "y_ptr": "*fp32", "K": "i32"}
    compiled(waits_in_its_loop, types, {"BLOCK": 64}, 90, num_stages=3, launch_pdl=True)
    found = one(cache)
    assert [r.code for r in found.reasons] == ["early_access"]
    touched = {line.split(":")[0] for line in found.reasons[0].lines}
    assert {"x_ptr read", "w_ptr read"} <= touched
    declared = one(cache, reads_early=("w_ptr",)).reasons[0].lines
    assert not any(line.startswith("w_ptr") for line in declared) and any(line.startswith("x_ptr read") for line in declared)


def test_a_kernel_that_waits_first_passes(cache: Path) -> None:
    compiled(waits_first, {"x_ptr": "*fp32", "y_ptr": "*fp32"}, {"BLOCK": 128}, 90, launch_pdl=True)
    assert one(cache).verdict == "accepted"


def test_cubin_and_ptx_alone(tmp_path: Path) -> None:
    kernel = matrix_product("bf16", 90)
    (tmp_path / "a.cubin").write_bytes(kernel.asm["cubin"])
    (tmp_path / "b.ptx").write_text(kernel.asm["ptx"])
    cubin, ptx = one(tmp_path / "a.cubin"), one(tmp_path / "b.ptx")
    assert cubin.instructions == ptx.instructions and cubin.registers == ptx.registers
    assert len(inspected([tmp_path], Demands()).kernels) == 2


@pytest.mark.parametrize(("name", "data"), [
    ("a.cubin", b""), ("a.cubin", b"\x7fELF"), ("a.ptx", b".version 8.0"), ("a.txt", b"hello"),
    ("a.ptx", b".version 8.0\n.target sm_90a\n.entry k() { nonsense; }")])
def test_what_cannot_be_read_is_said(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    assert [r.code for r in one(tmp_path / name).reasons] == ["not_inspectable"]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc to make a fat binary")
def test_a_fat_binary(tmp_path: Path) -> None:
    """Every architecture and kernel in it; a linker's empty sections are no kernels."""
    (tmp_path / "a.cu").write_text("__global__ void one(float* a) { a[threadIdx.x] += 1; }\n"
                                   "__global__ void two(float* a) { a[threadIdx.x] *= 2; }\n")
    codes = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in (80, 90)]
    subprocess.run(["nvcc", *codes, "-shared", "-Xcompiler", "-fPIC", "a.cu", "-o", "a.so"], cwd=tmp_path, check=True)
    found = inspected([tmp_path / "a.so"], Demands()).kernels
    assert sorted((k.name, k.arch, k.verdict) for k in found) == [
        (name, arch, "accepted") for name in ("_Z3onePf", "_Z3twoPf") for arch in ("sm_80", "sm_90")]


def test_metadata_of_the_wrong_kind_is_said(cache: Path) -> None:
    matrix_product("bf16", 90)
    path = next(p for p in cache.rglob("product.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "shared": "[/b]"}))
    found = one(cache)
    assert [r.code for r in found.reasons] == ["not_inspectable"] and "shared" in found.reasons[0].detail


def test_baseline_names_what_got_worse(cache: Path, tmp_path: Path) -> None:
    run, baseline = CliRunner(), tmp_path / "baseline.json"
    matrix_product("fp8e4nv", 90)
    done = run.invoke(cli, ["inspect", str(cache), "--format", "json", "--out", str(baseline)])
    assert done.exit_code == 0, done.output
    same = run.invoke(cli, ["inspect", str(cache), "--baseline", str(baseline)])
    assert same.exit_code == 0 and "nothing worse" in same.output
    matrix_product("fp8e4nv", 90, rows=16)
    worse = run.invoke(cli, ["inspect", str(cache), "--baseline", str(baseline)])
    assert worse.exit_code == 1
    assert "worse: product sm_90: wrong_instruction" in worse.output and "worse: product sm_90: QGMMA lost" in worse.output


def test_a_known_fault_is_not_worse(cache: Path, tmp_path: Path) -> None:
    matrix_product("fp8e4nv", 90, rows=16)
    run, baseline = CliRunner(), tmp_path / "baseline.json"
    assert run.invoke(cli, ["inspect", str(cache), "--format", "json", "--out", str(baseline)]).exit_code == 1
    assert run.invoke(cli, ["inspect", str(cache), "--baseline", str(baseline)]).exit_code == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "other"}',
                                  '{"schema": "tune-kernels/inspect/1", "worst": [{"name": 1}]}'])
def test_a_baseline_that_is_none(text: str, cache: Path, tmp_path: Path) -> None:
    matrix_product("bf16", 90)
    (tmp_path / "baseline.json").write_text(text)
    with pytest.raises(UserError, match=r"baseline\.json"):
        inspected([cache], Demands(), tmp_path / "baseline.json")


def test_formats_and_markup(cache: Path, tmp_path: Path) -> None:
    """Names from artefacts are never markup."""
    kernel = matrix_product("bf16", 90)
    (tmp_path / "[b]<script>.cubin").write_bytes(kernel.asm["cubin"][:100])
    (tmp_path / "whole.cubin").write_bytes(kernel.asm["cubin"])
    run = CliRunner()
    for form, name in (("text", "[b]<script>"), ("markdown", "`[b]<script>`"), ("html", "[b]&lt;script&gt;"),
                       ("json", "[b]<script>")):
        done = run.invoke(cli, ["inspect", str(tmp_path), "--format", form])
        assert done.exit_code == 1 and name in done.output
    line = run.invoke(cli, ["inspect", str(tmp_path), "--json"]).output
    assert line.count("\n") == 1 and len(json.loads(line)["kernels"]) == 2


def test_nothing_to_inspect(tmp_path: Path) -> None:
    run = CliRunner()
    for path in (tmp_path, tmp_path / "missing"):
        done = run.invoke(cli, ["inspect", str(path)])
        assert isinstance(done.exception, UserError) and done.exception.exit_code == 2
