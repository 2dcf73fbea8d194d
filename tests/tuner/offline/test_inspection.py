"""Verdicts from facts, with no compiler: reading lines, resources, occupancy, policy."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tune_kernels.kernels.operation import Instructions
from tune_kernels.schedules.schedule import LinearSchedule
from tune_kernels.shapes.target import load_arch
from tune_kernels.tuner.offline.inspection import blocks_per_sm, dots_of, log_lines, ptx_lines, verdict_on
from tune_kernels.tuner.offline.record import Facts, Reason, Record

H200, B300 = load_arch("sm_90"), load_arch("sm_103")
WANTED = Instructions(required=("UTCQMMA",), forbidden=("HMMA",))
FACTS = Facts(instructions={"UTCQMMA": 4}, registers=64, stack_bytes=0, spill_store_bytes=0, spill_load_bytes=0,
              shared_bytes=50_000, tmem_columns=32, cubin_sha256="0" * 64)
GOOD = Record("sass", facts=FACTS, num_warps=4)
PLAIN = LinearSchedule(64, 128, 3, 4)


def with_facts(**changes: Any) -> Record:
    return replace(GOOD, facts=replace(FACTS, **changes))


def test_a_good_record_is_accepted() -> None:
    assert verdict_on(GOOD, WANTED, PLAIN, B300).accepted


@pytest.mark.parametrize(("changes", "code"), [
    ({"instructions": {}}, "wrong_instruction"),
    ({"instructions": {"HMMA": 4}}, "wrong_instruction"),
    ({"instructions": {"UTCQMMA": 4, "HMMA": 1}}, "wrong_instruction"),
    ({"spill_store_bytes": 4}, "register_spill"),
    ({"spill_load_bytes": 4}, "register_spill"),
    ({"shared_bytes": 232_449}, "resource_limit"),
    ({"tmem_columns": 513}, "resource_limit"),
])
def test_each_fault_has_its_code(changes: dict[str, object], code: str) -> None:
    verdict = verdict_on(with_facts(**changes), WANTED, PLAIN, B300)
    assert [r.code for r in verdict.reasons] == [code]
    assert not verdict.accepted


def test_the_spill_limit_is_a_policy_and_the_figure_stays() -> None:
    spilling = with_facts(spill_store_bytes=8, spill_load_bytes=16, stack_bytes=16)
    assert not verdict_on(spilling, WANTED, PLAIN, B300, max_spill_bytes=15).accepted
    verdict = verdict_on(spilling, WANTED, PLAIN, B300, max_spill_bytes=16)
    assert verdict.accepted
    assert verdict.facts and verdict.facts.spill_load_bytes == 16


def test_an_fp8_conversion_is_the_fallback_even_with_the_right_opcode() -> None:
    converting = replace(GOOD, conversions=("cvt.rn.f16x2.e4m3x2 %r1, %rs1;",))
    assert [r.code for r in verdict_on(converting, WANTED, PLAIN, B300).reasons] == ["wrong_instruction"]


def test_what_is_touched_before_the_wait_is_a_fault() -> None:
    racing = replace(GOOD, early_accesses=("x_ptr read: ld.global.b32 %r1, [%rd1];",))
    verdict = verdict_on(racing, WANTED, PLAIN, B300)
    assert [(r.code, r.lines) for r in verdict.reasons] == [("early_access", racing.early_accesses)]


def test_more_blocks_an_sm_than_fit_are_a_resource_limit() -> None:
    verdict = verdict_on(with_facts(shared_bytes=100_000), WANTED, replace(PLAIN, blocks_per_sm=3), B300)
    assert [r.code for r in verdict.reasons] == ["resource_limit"]
    assert "shared memory allows 2" in verdict.reasons[0].detail


def test_a_record_that_stopped_early_has_no_facts_and_is_rejected() -> None:
    stopped = Record("ttgir", failures=(Reason("wrong_instruction", "d", ("l",)),))
    verdict = verdict_on(stopped, WANTED, PLAIN, B300)
    assert (verdict.accepted, verdict.stage, verdict.blocks_per_sm) == (False, "ttgir", None)


@pytest.mark.parametrize(("registers", "shared", "tmem", "warps", "blocks", "limit"), [
    (32, 0, 0, 1, 32, "blocks"), (255, 0, 0, 4, 2, "registers"), (64, 0, 0, 4, 8, "registers"),
    (32, 50_000, 0, 4, 4, "shared memory"), (32, 0, 256, 4, 2, "TMEM"), (32, 0, 0, 16, 4, "warps"),
    (40, 40_960, 0, 4, 5, "shared memory"), (168, 0, 0, 4, 3, "registers"),
])
def test_blocks_per_sm(registers: int, shared: int, tmem: int, warps: int, blocks: int, limit: str) -> None:
    assert blocks_per_sm(registers, shared, tmem, warps, B300) == (blocks, limit)


@given(st.integers(1, 255), st.integers(0, 232_448), st.sampled_from([1, 2, 4, 8, 16]))
def test_more_use_never_fits_more_blocks(registers: int, shared: int, warps: int) -> None:
    here = blocks_per_sm(registers, shared, 0, warps, H200)[0]
    assert here >= blocks_per_sm(min(255, registers + 8), min(232_448, shared + 4096), 0, warps, H200)[0]
    assert 0 <= here <= H200.max_blocks_per_sm


DOTS = """
  %a = ttng.warp_group_dot %w, %x, %c {isAsync = true} : !ttg.memdesc<64x128xf8E4M3FN, #s> * !ttg.memdesc<128x16xf8E4M3FN, #t>
  %b = ttng.warp_group_dot %w, %x, %c : tensor<64x128xbf16, #d> * !ttg.memdesc<128x64xbf16, #t> -> tensor<64x64xf32> loc(#loc1)
  ttng.tc_gen5_mma %w, %x, %acc, %t : !ttg.memdesc<64x128xf8E4M3FN, #s>, !ttg.memdesc<128x16xf8E4M3FN, #t>, !ttg.memdesc<64x16>
  ttng.tc_gen5_mma %w, %x, %acc, %t : !ttg.memdesc<64x128xf16, #s>, !ttg.memdesc<128x16xf16, #t>, !ttg.memdesc<64x16xf32>
  %e = tt.dot %w, %x, %c : tensor<64x128xf16, #d> * tensor<128x8xf16, #e> -> tensor<64x8xf32, #mma>
  %n = arith.addf %dot, %x : tensor<64x8xf32>
"""


def test_families_in_ttgir() -> None:
    assert [family for family, _ in dots_of(DOTS)] == ["QGMMA", "HGMMA", "UTCQMMA", "UTCHMMA", "HMMA"]
    assert not any("loc(" in line for _, line in dots_of(DOTS))


def test_ptx_lines_show_each_kind_once_and_every_conversion() -> None:
    ptx = "\n".join(["@%p wgmma.mma_async.a.e4m3 {1};", "wgmma.mma_async.a.e4m3 {2};", "mma.sync.b {3};",
                     "cvt.rn.f16x2.e4m3x2 %r, %s;"])
    shown, wrong = ptx_lines(ptx, ("cvt.rn.f16x2.e4m3x2",))
    assert len(shown) == 2
    assert wrong == ("cvt.rn.f16x2.e4m3x2 %r, %s;",)


@pytest.mark.parametrize("code", ["C7510", "C7511", "C7515"])
def test_warnings_of_the_assembler_are_kept(code: str) -> None:
    used, warnings, spills = log_lines(
        f"ptxas info    : ({code}) Potential Performance Loss: wgmma serialized\n"
        "    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\nptxas info : Used 40 registers, used 1 barriers\n")
    assert code in warnings[0]
    assert spills == (8, 12)
    assert any("Used 40 registers" in line for line in used)
