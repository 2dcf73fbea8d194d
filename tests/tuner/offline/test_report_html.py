"""The page that a sweep writes, in a browser: Debian's Chromium, driven from disk as a user would open it."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from pages import Opened, OpenPage
from tune_kernels.schedules.schedule import LinearSchedule
from tune_kernels.tuner.offline.report import Report, report_from
from tune_kernels.tuner.offline.report_html import render_report as render
from tune_kernels.tuner.page import TEMPLATES

TARGETS = ["sm_103", "sm_90"]
MMA = "@%p10 tcgen05.mma.cta_group::1.kind::f8f6f4 [ %r120 + 0 ], %rd28, %rd29, %r53, %p9;"
DOT = "%118 = tt.dot %116, %117, %arg12, inputPrecision = tf32 : tensor<64x128xf16> * tensor<128x8xf16>"
SPILL = "8 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads"
HOSTILE = ("</script><script>window.broken = 1</script><!--<script><img src=x onerror='window.broken = 2'>&lt;]]>"
           "\u2028\"'{{ 7*7 }}")


def variant(number: int, kernel: str = "qkv", target: str = "sm_103", reasons: tuple[dict[str, Any], ...] = (),
            **changes: Any) -> dict[str, Any]:
    """One variant as a sweep reports it. One rejected at ttgir has no facts of the artefact."""
    early = any(r["code"] == "wrong_instruction" for r in reasons)
    facts = {"registers": 32, "spill_store_bytes": 0, "spill_load_bytes": 0, "stack_bytes": 0, "shared_bytes": 30736,
             "tmem_columns": 32, "blocks_per_sm": 7, "cubin_sha256": f"{number:064x}", "instructions": ["UTCQMMA"],
             "artefact": f"{number:032x}"}
    schedule = asdict(LinearSchedule(64, 128, 3, 4))
    schedule |= changes.pop("schedule", {})
    return {"id": f"{number:012x}", "kernel": kernel, "kernel_digest": "a0608c64480ac2a8", "target": target,
            "shape": {"N": 4608, "K": 3584, "bias": True, "dtype": "e4m3", "terms": 2, "swiglu": False}, "schedule": schedule,
            "verdict": "rejected" if reasons else "accepted", "stage": "ttgir" if early else "sass",
            "reasons": list(reasons), "warnings": [], "lines": [DOT] if early else [MMA],
            "compile_ms": 200.0 + number, **(dict.fromkeys(facts) if early else facts), **changes}


def reason(code: str, detail: str = "", *lines: str) -> dict[str, Any]:
    return {"code": code, "detail": detail or code, "lines": list(lines)}


def report_of(variants: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    accepted = sum(v["verdict"] == "accepted" for v in variants)
    return {"schema": "tune-kernels/offline-report/1", "model": "qwen2.5-7b", "targets": TARGETS, "space": "default",
            "recipe": "fp8-v1", "max_spill_bytes": 0, "seconds": 1.25,
            "toolchain": {"triton": "3.7.1", "ptxas": {"sm_103": "13.1", "sm_90": "12.8"}, "nvdisasm": "13.1",
                          "flags": {"max_num_imprecise_acc": {"sm_103": 0, "sm_90": 1073741824},
                                    "enable_fp_fusion": False}},
            "counts": {"variants": len(variants), "accepted": accepted, "rejected": len(variants) - accepted,
                       "contract": 0, "cached": 0, "cubins": len(variants), "accepted_cubins": accepted},
            "audit": {"one_in": 16, "sampled": 2, "disagreed": []}, "variants": variants, **changes}


def small_report() -> dict[str, Any]:
    """Eight variants of two kernels on two targets, three of them rejected. Registers sort right only as numbers."""
    return report_of([
        variant(1, registers=100),
        variant(2, registers=9, schedule={"BLOCK_N": 640}),
        variant(3, reasons=(reason("wrong_instruction", "expected UTCQMMA, found HMMA", DOT),),
                schedule={"row_tile": 8}),
        variant(4, target="sm_90", registers=80, instructions=["QGMMA"]),
        variant(5, target="sm_90", registers=255, spill_store_bytes=8, spill_load_bytes=16, stack_bytes=8,
                reasons=(reason("register_spill", "8 B of spill stores, 16 B of loads", SPILL),
                         reason("resource_limit", "blocks_per_sm 3 asked for")),
                lines=[MMA, SPILL, "Used 255 registers"],
                warnings=["(C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized"]),
        variant(6, kernel="merge", instructions=[], registers=24),
        variant(7, kernel="merge", target="sm_90", instructions=[], registers=26),
        variant(8, kernel="merge", target="sm_90", reasons=(reason("resource_limit", "300,000 B of shared memory"),)),
    ])


class OpenedReport(Opened):
    """An offline report's page."""

    def ids(self) -> list[int]:
        """The numbers of the variants whose rows are on the page, in its order."""
        return [int(i, 16) for i in self.rows()]


def render_report(report: dict[str, Any]) -> str:
    """The page of a report, from the value of its file."""
    return render(read(report))


def read(report: dict[str, Any]) -> Report:
    return report_from(json.loads(json.dumps(report)), "report.json")


Open = Callable[..., OpenedReport]


@pytest.fixture
def open_report(open_page: OpenPage) -> Open:
    def opened(report: dict[str, Any], fragment: str = "", **options: Any) -> OpenedReport:
        return OpenedReport(**vars(open_page(render_report(report), fragment, **options)))

    return opened


def test_opens_from_disk_without_errors_or_network(open_report: Open) -> None:
    opened = open_report(small_report())
    assert opened.ids() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert opened.count() == "8 of 8 variants"
    assert opened.said == []
    assert {url.split(":")[0] for url in opened.asked} <= {"file", "data"}
    assert sum(url.startswith("file:") for url in opened.asked) == 1


def test_header_has_toolchain_counts_and_audit(open_report: Open) -> None:
    page = open_report(small_report()).page
    toolchain = page.locator(".toolchain").inner_text()
    assert re.search(r"Triton\s+3\.7\.1", toolchain)
    assert re.search(r"ptxas\s+13\.1\s+12\.8", toolchain)
    assert re.search(r"max_num_imprecise_acc\s+0\s+1073741824", toolchain)
    assert "all have the predicted fault" in page.locator(".audit").inner_text()
    assert re.sub(r"\s+", " ", page.locator(".counts").inner_text()).startswith("variants 8 accepted 5 rejected 3")


def test_audit_names_the_variants_it_disagrees_on(open_report: Open) -> None:
    opened = open_report(report_of([variant(n) for n in range(1, 251)],
                                   audit={"one_in": 16, "sampled": 2, "disagreed": [f"{222:012x}"]}))
    opened.page.locator(".audit a").click()
    opened.page.locator("tr.opened").wait_for()
    assert 222 in opened.ids()
    assert opened.page.locator("tr.opened").get_attribute("data-id") == f"{222:012x}"


def test_sorts_numbers_as_numbers_with_unknown_last(open_report: Open) -> None:
    opened = open_report(small_report())
    opened.sort("registers")
    assert opened.column("registers") == ["9", "24", "26", "32", "80", "100", "255", ""]
    assert opened.head("registers").get_attribute("aria-sort") == "ascending"
    opened.sort("registers")
    assert opened.column("registers") == ["255", "100", "80", "32", "26", "24", "9", ""]
    assert opened.head("registers").get_attribute("aria-sort") == "descending"
    opened.sort("registers")
    assert opened.ids() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert opened.head("registers").get_attribute("aria-sort") == "none"
    opened.sort("spill_bytes")
    opened.sort("spill_bytes")
    assert opened.column("spill_bytes")[0] == "24"


def test_sorts_text_and_keeps_the_order_of_equals(open_report: Open) -> None:
    opened = open_report(small_report())
    opened.sort("kernel")
    assert opened.ids() == [6, 7, 8, 1, 2, 3, 4, 5]
    opened.sort("reason")
    assert [r for r in opened.column("reason") if r] == ["register_spill +1", "resource_limit", "wrong_instruction"]
    assert opened.column("reason")[-1] == ""
    assert opened.page.locator("th[aria-sort=ascending]").count() == 1


def test_every_column_sorts(open_report: Open) -> None:
    opened = open_report(small_report())
    heads = opened.page.locator("#head th")
    for i in range(heads.count()):
        heads.nth(i).locator("button").click()
        assert heads.nth(i).get_attribute("aria-sort") == "ascending"
        assert sorted(opened.ids()) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert opened.said == []


def test_filters_combine_and_clear(open_report: Open) -> None:
    opened = open_report(small_report())
    opened.page.select_option("#target", "sm_90")
    assert opened.ids() == [4, 5, 7, 8]
    opened.page.select_option("#verdict", "rejected")
    assert opened.ids() == [5, 8]
    opened.page.select_option("#kernel", "merge")
    assert opened.ids() == [8]
    assert opened.count() == "1 of 8 variants"
    opened.page.select_option("#reason", "register_spill")
    assert opened.ids() == []
    assert "No variant matches" in opened.page.locator("#body").inner_text()
    opened.page.locator("#clear").click()
    assert opened.count() == "8 of 8 variants"
    assert opened.hash() in ("", "#")


@pytest.mark.parametrize(("query", "ids"), [
    ("000000000004", [4]), ("hmma", [3]), ("block_n=64", [1, 3, 4, 5, 6, 7, 8]), ("BLOCK_N=640 qkv", [2]),
    ("row_tile=8", [3]), ("shared memory", [8]), ("c7512", [5]), ("nothing has this", []),
])
def test_searches_ids_knobs_and_reasons(open_report: Open, query: str, ids: list[int]) -> None:
    opened = open_report(small_report())
    opened.page.fill("#q", query)
    assert opened.ids() == ids


def test_summary_cells_filter(open_report: Open) -> None:
    opened = open_report(small_report())
    cell = opened.page.locator(".matrix a[href='#kernel=merge&target=sm_90']")
    assert re.sub(r"\s", "", cell.inner_text()) == "1/2"
    cell.click()
    opened.page.locator("#count", has_text="2 of 8").wait_for()
    assert opened.ids() == [7, 8]
    assert cell.get_attribute("aria-current") == "true"
    opened.page.locator(".reasons a[href='#reason=register_spill']").click()
    opened.page.locator("#count", has_text="1 of 8").wait_for()
    assert opened.ids() == [5]
    opened.page.go_back()
    opened.page.locator("#count", has_text="2 of 8").wait_for()
    assert opened.page.input_value("#kernel") == "merge"


def test_opened_row_shows_the_lines_that_decided(open_report: Open) -> None:
    opened = open_report(small_report())
    row = opened.page.locator("tr.variant").nth(4)
    row.click()
    detail = opened.page.locator("tr.detail")
    shown = detail.inner_text()
    for text in (SPILL, MMA, "Used 255 registers", "register_spill", "resource_limit", "blocks_per_sm 3 asked for",
                 "C7512", "weights_as_m", "3584", "a0608c64480ac2a8", f"{5:064x}", f"tune-kernels show {5:012x}"):
        assert text in shown
    assert shown.count(SPILL) == 1
    assert detail.locator("pre").first.evaluate("e => getComputedStyle(e).fontFamily").endswith("monospace")
    assert row.locator("button").get_attribute("aria-expanded") == "true"
    row.locator("button").click()
    assert opened.page.locator("tr.detail").count() == 0
    opened.page.locator("tr.variant").nth(2).click()
    assert DOT in opened.page.locator("tr.detail").inner_text()


def test_works_from_the_keyboard(open_report: Open) -> None:
    opened = open_report(small_report())
    keyboard = opened.page.keyboard
    focused = "document.activeElement.closest('tr')?.dataset.id"
    keyboard.press("/")
    keyboard.type("qkv")
    assert opened.ids() == [1, 2, 3, 4, 5]
    opened.head("registers").locator("button").focus()
    keyboard.press("Enter")
    assert opened.ids() == [2, 4, 1, 5, 3]
    for _ in range(20):
        keyboard.press("Tab")
        if opened.page.evaluate(focused):
            break
    assert opened.page.evaluate(focused) == f"{2:012x}"
    keyboard.press("ArrowDown")
    keyboard.press("Enter")
    assert opened.page.locator("tr.opened").get_attribute("data-id") == f"{4:012x}"
    keyboard.press("ArrowDown")
    assert opened.page.evaluate(focused) == f"{1:012x}"
    keyboard.press("End")
    assert opened.page.evaluate(focused) == f"{3:012x}"
    keyboard.press("Space")
    assert opened.page.locator("tr.opened").count() == 2


def test_a_link_restores_the_view(open_report: Open) -> None:
    first = open_report(small_report())
    first.page.select_option("#kernel", "qkv")
    first.page.fill("#q", "block_n=64")
    first.sort("registers")
    first.sort("registers")
    first.page.locator("tr.variant").nth(1).click()
    again = open_report(small_report(), first.hash())
    assert again.ids() == first.ids() == [5, 1, 4, 3]
    assert again.page.input_value("#q") == "block_n=64"
    assert again.head("registers").get_attribute("aria-sort") == "descending"
    assert again.page.locator("tr.opened").get_attribute("data-id") == f"{1:012x}"
    assert again.said == []


@pytest.mark.parametrize("fragment", ["#kernel=none&sort=x&page=-3&open=zz", "#page=99", "#%%%", "#open=,,&dir=desc"])
def test_a_link_that_makes_no_sense_shows_everything(open_report: Open, fragment: str) -> None:
    opened = open_report(small_report(), fragment)
    assert opened.count() == "8 of 8 variants"
    assert opened.said == []


def test_hostile_text_stays_text(open_page: OpenPage) -> None:
    """Of names too, which the reader would refuse."""
    bad = variant(1, reasons=(reason("register_spill", HOSTILE, HOSTILE),), warnings=[HOSTILE],
                  lines=[HOSTILE, "</SCRIPT ><svg onload=window.broken=3>"])
    whole = read(report_of([bad, variant(2)], model=HOSTILE, space=HOSTILE))
    first = replace(whole.variants[0], kernel=HOSTILE, schedule=LinearSchedule(64, 128, 3, 4, load=HOSTILE))
    opened = OpenedReport(**vars(open_page(render(replace(whole, variants=(first, whole.variants[1]))))))
    opened.page.locator("tr.variant").first.click()
    assert opened.page.evaluate("window.broken") is None
    assert opened.page.locator("img, body svg:not(.bar, .scatter svg), [onerror]").count() == 0
    assert opened.page.locator("script").count() == 2
    assert opened.page.locator("h1").text_content() == HOSTILE
    assert opened.page.locator("tr.detail pre span").first.text_content() == HOSTILE
    opened.page.select_option("#kernel", HOSTILE)
    assert opened.ids() == [1]
    assert opened.said == []


def test_the_policy_stops_other_scripts(open_report: Open) -> None:
    opened = open_report(small_report())
    opened.page.evaluate("""() => { const s = document.createElement('script'); s.textContent = 'window.broken = 1';
                                    document.body.append(s); }""")
    assert opened.page.evaluate("window.broken") is None


def test_25_000_variants(open_report: Open) -> None:
    kernels = ("qkv", "o", "gate_up", "down")
    fallback = (reason("wrong_instruction", "expected UTCQMMA, found HMMA", DOT),)
    many = [variant(n, kernel=kernels[n % 4], target=TARGETS[n % 2],
                    **({"registers": (n * 7919) % 25_000} if n % 5 else {"reasons": fallback})) for n in range(25_000)]
    opened = open_report(report_of(many))
    assert opened.count() == "25,000 of 25,000 variants"
    assert len(opened.ids()) == 100
    opened.page.locator("#next").click()
    assert opened.ids()[0] == 100
    opened.page.fill("#q", "found hmma")
    assert opened.count() == "5,000 of 25,000 variants"
    opened.page.select_option("#kernel", "down")
    assert opened.count() == "1,250 of 25,000 variants"
    opened.page.locator("#clear").click()
    opened.page.select_option("#verdict", "accepted")
    opened.sort("registers")
    opened.sort("registers")
    expected = sorted((v["registers"] for v in many if v["verdict"] == "accepted"), reverse=True)[:100]
    assert opened.column("registers") == [f"{n:,}" for n in expected]
    assert opened.page.locator("#page").inner_text() == "page 1 of 200"
    assert opened.said == []


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_the_page_never_scrolls_sideways(open_report: Open, width: int) -> None:
    opened = open_report(small_report(), viewport={"width": width, "height": 844})
    opened.page.locator("tr.variant button").nth(2).click()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    detail = opened.page.locator(".detail-body").bounding_box()
    assert detail["x"] >= 0
    assert detail["x"] + detail["width"] <= width
    if width == 390:
        assert opened.page.evaluate("(e => e.scrollWidth > e.clientWidth)(document.getElementById('rows'))")


def test_without_scripts_the_summary_is_there(open_report: Open) -> None:
    page = open_report(small_report(), java_script_enabled=False).page
    assert page.locator(".matrix tbody tr").count() == 3
    assert page.locator("noscript").is_visible()
    assert "tune-kernels show ID" in page.locator("body").inner_text()
    assert not page.locator("#variants").is_visible()


def test_a_report_without_variants_opens(open_report: Open) -> None:
    opened = open_report(report_of([]))
    assert "This report has no variants" in opened.page.locator("#body").inner_text()
    assert opened.said == []


def test_same_report_same_bytes() -> None:
    report = small_report()
    page = render_report(report)
    assert page == render_report(report)
    assert page == render_report(json.loads(json.dumps(report, sort_keys=True)))


def test_embedded_json_cannot_end_its_element() -> None:
    report = report_of([variant(1, lines=[HOSTILE])])
    page = render_report(report)
    start = page.index('<script type="application/json"')
    embedded = page[page.index(">", start) + 1:page.index("</script>", start)]
    assert not set("<>&\u2028") & set(embedded)
    assert HOSTILE in json.loads(embedded)["shared"]


def test_sources_that_stand_in_the_page_do_not_end_their_element() -> None:
    sources = [path for path in TEMPLATES.iterdir() if path.suffix in (".js", ".css")]
    assert len(sources) >= 3
    for path in sources:
        assert "</" not in path.read_text(encoding="utf-8"), path.name


def test_the_knob_that_decides_leads_to_its_variants(open_report: Open) -> None:
    """By value: accepted of all. row_tile decides; BLOCK_N, whose values fare alike, isn't shown."""
    wrong = reason("wrong_instruction", "expected UTCQMMA, found HMMA", DOT)
    opened = open_report(report_of([
        variant(n, schedule={"row_tile": tile, "BLOCK_N": width}, reasons=(wrong,) if tile == 8 else ())
        for n, (tile, width) in enumerate([(8, 64), (8, 128), (16, 64), (16, 128)], 1)]))
    rows = opened.page.locator(".knobs tbody tr")
    assert [" ".join(text.split()) for text in rows.all_inner_texts()] == ["qkv row_tile 8 0% 16 100% 100"]
    rows.locator("a", has_text="8 0%").click()
    assert opened.ids() == [1, 2]


def test_registers_are_drawn_against_occupancy(open_report: Open) -> None:
    """One dot for equal artefacts of a kernel; more registers to the right, more blocks further up."""
    opened = open_report(report_of([variant(1, registers=32, blocks_per_sm=8), variant(2, registers=32, blocks_per_sm=8),
                                    variant(3, registers=255, blocks_per_sm=1, reasons=(reason("register_spill"),))]))
    dots = opened.page.eval_on_selector_all(".scatter circle", "dots => dots.map(d => [+d.getAttribute('cx'), "
                                            "+d.getAttribute('cy'), d.getAttribute('class'), d.textContent])")
    (x, y, verdict, text), (x_spilled, y_spilled, spilled, _) = dots
    assert (verdict, spilled) == ("accepted", "rejected")
    assert text == "qkv: 32 registers, 8 blocks per SM, 2 accepted"
    assert x < x_spilled and y < y_spilled


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_but_the_table_is_wider_than_the_window(open_report: Open, width: int) -> None:
    opened = open_report(small_report())
    opened.page.set_viewport_size({"width": width, "height": 900})
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
