"""What is touched before the wait, read from PTX: written by hand here, and by the compiler at the end."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tune_kernels.kernels.bundle import artefact_key
from tune_kernels.kernels.operation import Instructions, Launch
from tune_kernels.shapes.target import load_arch
from tune_kernels.tuner.compile import _Compilation
from tune_kernels.tuner.early_access import before_wait
from tune_kernels.tuner.inspection import judge

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
    found = before_wait(HEAD + body + "\nret;\n}", POINTERS)
    assert found is not None
    return [(access.name, access.writes) for access in found]


@pytest.mark.parametrize(("body", "expected"), [
    (f"{WAIT}\nld.global.b32 %r2, [%rd1];", []),
    (f"ld.global.b32 %r2, [%rd2];\n{WAIT}\nld.global.b32 %r2, [%rd1];", [("w_ptr", False)]),
    (f"@%p1 ld.global.v4.b32 {{ %r5, %r6, %r7, %r8 }}, [ %rd1 + 16 ];\n{WAIT}", [("x_ptr", False)]),
    (f"ld.global.b32 %r2, [%rd4];\n{WAIT}", [(None, False)]),
    (f"st.global.b32 [%rd3], %r1;\n{WAIT}", [("out_ptr", True)]),
    (f"atom.global.add.u32 %r2, [%rd3], 1;\n{WAIT}", [("out_ptr", True)]),
    (f"red.global.add.u32 [%rd3], 1;\n{WAIT}", [("out_ptr", True)]),
    (f"cp.async.cg.shared.global [ %r2 + 0 ], [ %rd1 + 0 ], 0x10, %r1;\n{WAIT}", [("x_ptr", False)]),
    (f"cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd2, {{%r2, %r1}}], [%r2];\n{WAIT}",
     [("w_ptr", False)]),
    (f"cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd3, {{%r2, %r1}}], [%r2];\n{WAIT}", [("out_ptr", True)]),
    (f"prefetch.global.L2 [%rd1];\n{WAIT}", [("x_ptr", False)]),
    (f"ld.shared.b32 %r2, [%r1];\nst.shared.v4.b32 [%r1], {{%r1, %r1, %r1, %r1}};\ncp.async.commit_group;\n{WAIT}", []),
], ids=["after", "weights before", "guarded and vectorised", "scratch", "store", "atomic", "reduction", "copy", "tensor load",
        "tensor store", "prefetch", "shared memory"])
def test_what_counts(body: str, expected: list[tuple[str | None, bool]]) -> None:
    assert touched(body) == expected


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


def test_control_flow_counts_and_not_the_order_of_lines() -> None:
    """A loop that the compiler laid out with its end first, and a branch past the wait."""
    turned = f"bra.uni $L1;\n$L3:\nld.global.b32 %r2, [%rd1];\n@%p1 bra $L1;\nbra.uni $L4;\n$L1:\n{WAIT}\nbra.uni $L3;\n$L4:"
    assert touched(turned) == []
    past = f"@%p1 bra $L2;\n{WAIT}\n$L2:\nld.global.b32 %r2, [%rd1];"
    assert touched(past) == [("x_ptr", False)]
    both = f"@%p1 bra $L2;\n{WAIT}\nbra.uni $L3;\n$L2:\n{WAIT}\n$L3:\nld.global.b32 %r2, [%rd1];"
    assert touched(both) == []


def test_names_that_inline_assembly_uses_again() -> None:
    spin = "waitLoop:\nmbarrier.try_wait.shared.b64 complete, [%r1], %r2;\n@!complete bra.uni waitLoop;\n"
    assert touched(f"{spin}{WAIT}\nld.global.b32 %r2, [%rd1];\n{spin}ld.global.b32 %r2, [%rd3];") == []
    assert touched(f"{spin}ld.global.b32 %r2, [%rd2];\n{spin}{WAIT}") == [("w_ptr", False)]


def test_a_kernel_that_never_waits() -> None:
    assert before_wait(HEAD + "ld.global.b32 %r2, [%rd1];\nret;\n}", POINTERS) is None


@pytest.mark.compiles
@pytest.mark.parametrize(("where", "line"), [
    ("in the loop", "x_ptr read"), ("nowhere", "no griddepcontrol.wait"), ("in front", None)])
def test_a_load_that_the_pipeliner_lifts_over_the_wait_is_rejected(where: str, line: str | None, tmp_path: Path) -> None:
    """In the loop the wait stands before the load of x in the source; Triton's pipeliner issues the first loads of a loop before
    it (on sm_90; on sm_100 it refuses such a loop until 3.9)."""
    launch = Launch(kernel_with_a_wait(tmp_path), {"x_ptr": "*fp8e4nv", "w_ptr": "*fp8e4nv", "out_ptr": "*fp32"},
                    {"IN_LOOP": where == "in the loop", "IN_FRONT": where == "in front"},
                    {"num_warps": 4, "num_stages": 4, "launch_pdl": True, "enable_fp_fusion": False})
    wanted, target = Instructions(ahead=("w_ptr",)), load_arch("sm_90")
    record = _Compilation(launch, target, wanted, artefact_key(launch, 90), tmp_path / "out").run()
    verdict = judge(record, wanted, SimpleNamespace(), target)
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
