"""Accesses before the wait, read from PTX: written by hand here, and by the compiler at the end."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tune_kernels.kernels import registry
from tune_kernels.kernels.bundle import artefact_key
from tune_kernels.kernels.fixed import FIXED
from tune_kernels.kernels.layout import LONGEST, ROWS
from tune_kernels.kernels.operation import Instructions, Launch
from tune_kernels.schedules.recipe import load_recipe
from tune_kernels.shapes.model import AcceptShape, LookupShape, NormShape, load_model_shape
from tune_kernels.shapes.target import load_arch
from tune_kernels.tuner.offline.compile import _Compilation, compile_task, launch_of, make_task, wanted_instructions
from tune_kernels.tuner.offline.cubin import Unreadable
from tune_kernels.tuner.offline.early_access import before_wait
from tune_kernels.tuner.offline.inspection import verdict_on

POINTERS = ["x_ptr", "w_ptr", "out_ptr"]
HEAD = """.visible .entry k(
	.param .u64 .ptr .global .align 1 k_param_0,
	.param .u64 .ptr .global .align 1 k_param_1,
	.param .u64 .ptr .global .align 1 k_param_2,
	.param .u32 k_param_3,
	.param .u64 .ptr .global .align 1 k_param_4
)
.reqntid 128
{
	.reg .b32 	%r<9>;
	ld.param.b64 	%rd1, [k_param_0];
	ld.param.b64 	%rd2, [k_param_1];
	ld.param.b64 	%rd3, [k_param_2];
	ld.param.b64 	%rd4, [k_param_4];
	ld.param.b32 	%r1, [k_param_3];
"""
WAIT = "griddepcontrol.wait; // dummy %r3"


def touched(body: str) -> list[tuple[str | None, bool]]:
    """(argument, whether it is written) of each access before the wait."""
    found = before_wait(HEAD + body + "\nret;\n}\n.func peek() {\nst.global.b32 [%rd1], %r1;\n}", POINTERS)
    assert found is not None
    return [(access.name, access.writes) for access in found]


READ, WEIGHTS, WRITTEN, ANYWHERE = ("x_ptr", False), ("w_ptr", False), ("out_ptr", True), (None, True)


@pytest.mark.parametrize(("instruction", "expected"), [
    ("ld.global.b32 %r2, [%rd2];", [WEIGHTS]),
    ("@%p1 ld.global.v4.b32 { %r5, %r6, %r7, %r8 }, [ %rd1 + 16 ];", [READ]),
    ("ld.v4.b32 {%r5, %r6, %r7, %r8}, [%rd1];", [READ]),
    ("ld.relaxed.gpu.global.b32 %r2, [%rd1];", [READ]),
    ("ldu.global.b32 %r2, [%rd1];", [READ]),
    ("ld.global.b32 %r2, [%rd4];", [(None, False)]),
    ("ld.global.b32 %r2, [table+4];", [(None, False)]),
    ("ld.global.b32 %r2,\n  [%rd1];", [READ]),
    ("ld.global.b32 %r2, [%rd2]; ld.global.b32 %r2, [%rd1];", [WEIGHTS, READ]),
    ("{ .reg .b64 a; add.s64 a, %rd1, 16; ld.global.b32 %r2, [a]; }", [READ]),
    ("st.global.b32 [%rd3], %r1;", [WRITTEN]),
    ("atom.global.add.u32 %r2, [%rd3], 1;", [WRITTEN]),
    ("red.global.add.u32 [%rd3], 1;", [WRITTEN]),
    ("multimem.red.global.add.u32 [%rd3], 1;", [WRITTEN]),
    ("discard.global.L2 [%rd3], 128;", [WRITTEN]),
    ("cp.async.cg.shared.global [ %r2 + 0 ], [ %rd1 + 0 ], 0x10, %r1;", [READ]),
    ("cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd2, {%r2, %r1}], [%r2];", [WEIGHTS]),
    ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd3, {%r2, %r1}], [%r2];", [WRITTEN]),
    ("cp.async.bulk.prefetch.L2.global [%rd1], 64;", [READ]),
    ("prefetch.global.L2 [%rd1];", [READ]),
    ("call.uni (%r2), peek, (%rd2);", [ANYWHERE]),
    ("@%p1 brx.idx %r1, places;", [ANYWHERE]),
    ("ld.shared.b32 %r2, [%r1]; st.shared.v4.b32 [%r1], {%r1, %r1, %r1, %r1}; ld.volatile.shared.b32 %r2, [%r1];", []),
    ("atom.shared.add.u32 %r2, [%r1], 1; st.async.shared::cluster.b32 [%r1], %r2, [%r2]; cp.async.commit_group;", []),
    ("@%p1 tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {%r2};\ntcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r1];", []),
    ("mbarrier.init.shared::cta.b64 [%r1], 1; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r1];", []),
    ("// ld.global.b32 %r2, [%rd1]; bra nowhere\n/* st.global.b32 [%rd3], %r1; */", []),
])
def test_what_counts(instruction: str, expected: list[tuple[str | None, bool]]) -> None:
    """Before the wait; after it nothing does. Other functions don't count."""
    assert touched(f"{instruction}\n{WAIT}") == expected
    assert touched(f"{WAIT}\n{instruction}") == []


@pytest.mark.parametrize("address", [
    "mul.wide.s32 %rd8, %r1, 4;\nadd.s64 %rd9, %rd1, %rd8;",
    "mov.b64 %rd7, %rd1;\ncvta.to.global.u64 %rd9, %rd7;",
    "mov.b64 {%r5, %r6}, %rd1;\nadd.s32 %r7, %r6, 1;\nmov.b64 %rd9, {%r5, %r7};",
    "selp.b64 %rd9, %rd1, 0, %p1;",
], ids=["offset", "moved", "in halves", "selected"])
def test_an_address_belongs_to_what_it_is_computed_from(address: str) -> None:
    assert touched(f"{address}\nld.global.b32 %r2, [%rd9];\n{WAIT}") == [("x_ptr", False)]


def test_an_index_from_memory_is_no_address() -> None:
    """A row of w by an index that was read from x's neighbour: w alone."""
    body = f"{WAIT}\nld.global.b32 %r2, [%rd1];\n"
    assert touched("ld.global.b32 %r4, [%rd2];\nmul.wide.s32 %rd8, %r4, 4;\nadd.s64 %rd9, %rd2, %rd8;\n"
                   "ld.global.b32 %r2, [%rd9];\n" + body) == [("w_ptr", False)]


LOAD = "ld.global.b32 %r2, [%rd1];"


@pytest.mark.parametrize(("body", "expected"), [
    (f"bra.uni $L1;\n$L3:\n{LOAD}\n@%p1 bra $L1;\nbra.uni $L4;\n$L1:\n{WAIT}\nbra.uni $L3;\n$L4:", []),
    (f"@%p1 bra $L2;\n{WAIT}\n$L2:\n{LOAD}", [READ]),
    (f"@%p1 bra $L2;\n{WAIT}\nbra.uni $L3;\n$L2:\n{WAIT}\n$L3:\n{LOAD}", []),
    (f"setp.eq.s32 %p1, %r1, 0; @%p1 bra $L2;\n{LOAD}\n$L2:\n{WAIT}", [READ]),
    (f"$L1: @%p1 bra $L1;\n{LOAD}\n{WAIT}", [READ]),
    (f"@%p1 griddepcontrol.wait;\n{LOAD}\n{WAIT}", [READ]),
    (f"mov.b32 %r2, 1; // griddepcontrol.wait comes later\n{LOAD}\n{WAIT}", [READ]),
    (f"@%p1 ret;\n{LOAD}\n{WAIT}", [READ]),
    (f"bra.uni $L1;\n{LOAD}\n$L1:\n{WAIT}", []),
], ids=["a loop laid out with its end first", "a branch past the wait", "a wait on either path", "two statements a line",
        "a label before a branch", "a wait for some threads", "a wait in a comment", "an early return", "never reached"])
def test_control_flow_counts_and_not_the_order_of_lines(body: str, expected: list[tuple[str | None, bool]]) -> None:
    assert touched(body) == expected


def test_names_that_inline_assembly_uses_again() -> None:
    """Each in a block of its own, back and forth."""
    spin = "{\nwaitLoop:\nmbarrier.try_wait.shared.b64 complete, [%r1], %r2;\n@!complete bra.uni waitLoop;\n}\n"
    skip = "{\n@!%p1 bra.uni skipWait;\nmov.b32 %r2, 1;\nskipWait:\n}\n"
    assert touched(f"{spin}{skip}{WAIT}\n{LOAD}\n{spin}{skip}ld.global.b32 %r2, [%rd3];") == []
    assert touched(f"{spin}{skip}ld.global.b32 %r2, [%rd2];\n{spin}{skip}{WAIT}") == [WEIGHTS]


def test_a_kernel_that_never_waits() -> None:
    """Neither does a comment that speaks of it, nor a function beside the entry."""
    for beside in ("", f"// {WAIT}", f".func wait() {{ {WAIT} ret; }}"):
        assert before_wait(f"{HEAD}{LOAD}\nret;\n}}\n{beside}", POINTERS) is None


def test_parameters_are_told_apart() -> None:
    """A descriptor is one that comes by value; fewer pointers than the kernel has mean that something isn't understood."""
    by_value = HEAD.replace(".param .u64 .ptr .global .align 1 k_param_1,", ".param .align 64 .b8 k_param_1[128],")
    by_value = by_value.replace("ld.param.b64 \t%rd2, [k_param_1];", "mov.b64 %rd5, k_param_1;\ncvta.param.u64 %rd2, %rd5;")
    copy = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd2, {%r2, %r1}], [%r2];"
    found = before_wait(f"{by_value}{copy}\n{WAIT}\nret;\n}}", POINTERS)
    assert found is not None
    assert [access.name for access in found] == ["w_ptr"]
    with pytest.raises(Unreadable, match="3 pointers among its parameters; the kernel has 4"):
        before_wait(HEAD.replace(".ptr .global .align 1 k_param_1", "k_param_1") + f"{WAIT}\n}}", [*POINTERS, "bias_ptr"])


@pytest.mark.parametrize(("ptx", "said"), [
    ("nothing", "without an entry"),
    (f"{HEAD}{WAIT}\n", "ends within"),
    (f"{HEAD}{WAIT}\nst.global.b32 [%rd3], %r1\n}}", "ends within"),
    (f"{HEAD}bra.uni $L9;\n{WAIT}\n}}", "branch to nowhere: bra.uni"),
    (f"{HEAD}{{\nhidden:\n}}\n@%p1 bra hidden;\n{WAIT}\n}}", "nowhere: @%p1 bra hidden"),
], ids=["no entry", "no end", "no semicolon", "no label", "a label of another block"])
def test_what_cannot_be_read_is_told(ptx: str, said: str) -> None:
    with pytest.raises(Unreadable, match=said):
        before_wait(ptx, POINTERS)


@pytest.mark.compiles
@pytest.mark.parametrize("kernel", ["norm", "attention", "down"])
def test_what_a_kernel_declares_is_what_it_may_read(kernel: str, tmp_path: Path) -> None:
    """As shipped it is accepted, and rejected where nothing is declared."""
    recipe, model = load_recipe("fp8-v1"), load_model_shape("qwen2.5-7b")
    shape = NormShape(3584, 7, quantised=True) if kernel == "norm" else model.kernel_shapes(recipe.linear_dtype, 2)[kernel]
    schedule = registry.default_schedule(recipe, kernel, "sm_90")
    launch = launch_of(kernel, shape, schedule, recipe.numerics)
    wanted = wanted_instructions(kernel, shape, "sm_90")
    codes = []
    for allowed in (wanted, replace(wanted, early_reads=())):
        record = _Compilation(launch, load_arch("sm_90"), allowed, artefact_key(launch, 90), tmp_path / str(len(codes))).run()
        codes.append([r.code for r in verdict_on(record, allowed, schedule, load_arch("sm_90")).reasons])
    assert codes == [[], ["early_access"]]


@pytest.mark.compiles
@pytest.mark.parametrize(("where", "line"), [
    ("in the loop", "x_ptr read"), ("nowhere", "no griddepcontrol.wait"), ("in front", None)])
def test_a_load_that_the_pipeliner_lifts_over_the_wait_is_rejected(where: str, line: str | None, tmp_path: Path) -> None:
    """In the loop the wait stands before the load of x in the source; Triton's pipeliner issues the first loads of a loop before
    it (on sm_90; on sm_100 it refuses such a loop until 3.9)."""
    launch = Launch(kernel_with_a_wait(tmp_path), {"x_ptr": "*fp8e4nv", "w_ptr": "*fp8e4nv", "out_ptr": "*fp32"},
                    {"IN_LOOP": where == "in the loop", "IN_FRONT": where == "in front"},
                    {"num_warps": 4, "num_stages": 4, "launch_pdl": True, "enable_fp_fusion": False})
    wanted, target = Instructions(early_reads=("w_ptr",)), load_arch("sm_90")
    record = _Compilation(launch, target, wanted, artefact_key(launch, 90), tmp_path / "out").run()
    verdict = verdict_on(record, wanted, SimpleNamespace(), target)
    if line is None:
        assert verdict.accepted, verdict.reasons
    else:
        assert [r.code for r in verdict.reasons] == ["early_access"]
        assert any(said.startswith(line) for said in verdict.reasons[0].lines)


def kernel_with_a_wait(folder: Path) -> Any:
    """A product of x [16, 1024] and w [64, 1024] in a pipelined loop."""
    import importlib.util

    path = folder / "lifted.py"
    path.write_text("""
import triton
import triton.language as tl

@triton.jit
def wait():
    tl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)

@triton.jit
def lifted(x_ptr, w_ptr, out_ptr, IN_LOOP: tl.constexpr, IN_FRONT: tl.constexpr):
    n = tl.arange(0, 64)
    m = tl.arange(0, 16)
    k = tl.arange(0, 128)
    acc = tl.zeros((64, 16), tl.float32)
    if IN_FRONT:
        wait()
    for step in tl.range(0, 8):
        w = tl.load(w_ptr + step * 128 + n[:, None] * 1024 + k[None, :])
        if IN_LOOP:
            wait()
        x = tl.load(x_ptr + step * 128 + m[None, :] * 1024 + k[:, None])
        acc = tl.dot(w, x, acc)
    tl.store(out_ptr + n[:, None] * 16 + m[None, :], acc)
""", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("lifted", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.lifted


@pytest.mark.compiles
@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_103"])
@pytest.mark.parametrize(("kernel", "shape"), [("ngram", LookupShape(LONGEST)), ("accept", AcceptShape(ROWS))])
def test_kernels_of_a_round_wait_first_and_spill_nothing(kernel: str, shape: Any, arch: str, tmp_path: Path) -> None:
    task = make_task(kernel, arch, shape, FIXED[kernel].schedule, load_recipe("fp8-v1").numerics, tmp_path)
    record = compile_task(task, to_the_end=True)
    verdict = verdict_on(record, wanted_instructions(kernel, shape, arch), FIXED[kernel].schedule, load_arch(arch))
    assert verdict.accepted, verdict.reasons
    assert record.facts is not None and record.facts.stack_bytes == 0
