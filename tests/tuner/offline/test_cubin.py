"""The cubin reader against nvdisasm and ptxas, and against files that aren't cubins."""

import contextlib
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tune_kernels.kernels import bundle, registry
from tune_kernels.kernels.toolchain import disassemble
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.shapes.model import load_model_shape
from tune_kernels.shapes.target import ARCHES
from tune_kernels.tuner.offline.compile import compile_task, make_task
from tune_kernels.tuner.offline.cubin import Unreadable, read_cubin
from tune_kernels.tuner.offline.record import Record

pytestmark = pytest.mark.compiles
RECIPE = load_recipe("fp8-v1")
SHAPES = load_model_shape("qwen2.5-7b").kernel_shapes()
NAMES = re.compile(r"\b(HMMA|HGMMA|QGMMA|UTCHMMA|UTCQMMA)\b")
LOCAL = re.compile(r"\b(STL|LDL)((?:\.\w+)*)")  # LDL.LU.64: the width is one of the suffixes
BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}

# One of each family, and one that spills.
KINDS = {
    "fp8": ("down", {}),
    "fp16 fallback": ("down", {"orientation": "activations_as_m"}),
    "bf16 wide": ("lm_head_logits", {}),
    "bf16 narrow": ("attention", {"TILE": 16}),
    "attention": ("attention", {}),
    "none": ("merge", {}),
    "spills": ("attention", {"maxnreg": 96}),
    "spills a little": ("attention", {"TILE": 128}),
}


def width(suffixes: str) -> int:
    """Bytes of a local load or store by its suffixes; 4 where none says."""
    return next((BYTES[s] for s in suffixes.split(".") if s in BYTES), 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cubins")


def compiled(folder: Path, kind: str, arch: str) -> tuple[bytes, Record]:
    kernel, change = KINDS[kind]
    schedule = replace(registry.default_schedule(RECIPE, kernel, arch), **change)
    task = make_task(kernel, arch, SHAPES[kernel], schedule, RECIPE.numerics, folder)
    record = compile_task(task, to_the_end=True)
    files = bundle.read(folder / "artefacts" / task.key)
    return next(data for name, data in files.items() if name.endswith(".cubin")), record


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_counts_equal_nvdisasm_and_ptxas(kind: str, arch: str, folder: Path) -> None:
    cubin, record = compiled(folder, kind, arch)
    facts = read_cubin(cubin)
    sass = disassemble(cubin)
    assert facts.instructions == dict(Counter(NAMES.findall(sass)))
    assert facts.arch == int(arch[3:])
    for name, found in (("STL", facts.spill_store_bytes), ("LDL", facts.spill_load_bytes)):
        assert found == sum(width(suffixes) for op, suffixes in LOCAL.findall(sass) if op == name), name
    log = " ".join(record.log)
    assert f"{facts.spill_store_bytes} bytes spill stores, {facts.spill_load_bytes} bytes spill loads" in log
    assert f"Used {facts.registers} registers" in log
    assert f"{facts.stack_bytes} bytes stack frame" in log
    assert (facts.spill_store_bytes > 0) == kind.startswith("spills"), "the kinds show both"


@pytest.fixture(scope="module")
def cubin(folder: Path) -> bytes:
    return compiled(folder, "fp8", "sm_103")[0]


def test_every_truncation_is_unreadable_or_whole(cubin: bytes) -> None:
    """A truncated file never reads as 'no spills, no fallback'."""
    whole = read_cubin(cubin)
    for length in [0, 1, 15, 16, 64, *range(100, len(cubin), 997)]:
        try:
            assert read_cubin(cubin[:length]) == whole
        except Unreadable:
            continue


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_noise_is_unreadable_never_a_crash(cubin: bytes, data: st.DataObject) -> None:
    changed = bytearray(cubin)
    for _ in range(data.draw(st.integers(1, 8))):
        changed[data.draw(st.integers(0, 700))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(Unreadable):
        read_cubin(bytes(changed))


@given(st.binary(max_size=400))
def test_bytes_that_are_no_cubin(data: bytes) -> None:
    with pytest.raises(Unreadable):
        read_cubin(data)


def test_an_unknown_tensor_kind_is_unreadable(cubin: bytes) -> None:
    """A tcgen05.mma of a kind that the table doesn't have must not pass as FP8 or as nothing."""
    at = next(i for i in range(0, len(cubin) - 16, 8) if int.from_bytes(cubin[i:i + 2], "little") & 0x1FF == 0x1EA
              and (cubin[i + 9] & 3) == 3)
    changed = bytearray(cubin)
    changed[at + 9] = (changed[at + 9] & ~3) | 1
    with pytest.raises(Unreadable, match="unknown kind"):
        read_cubin(bytes(changed))
