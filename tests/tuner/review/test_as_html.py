"""The page of a difference in a browser: Debian's Chromium, driven from disk as a user would open it."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic
from pages import Opened, OpenPage
from synthetic import promoted, with_row
from tune_kernels.schedules.promoted import Artefact
from tune_kernels.schedules.schedule import LinearSchedule
from tune_kernels.schedules.store import PromotedFile
from tune_kernels.shapes.model import LinearShape
from tune_kernels.tuner.offline.report import Audit, Counts, Report, Toolchains, Variant
from tune_kernels.tuner.review.as_html import render_html
from tune_kernels.tuner.review.check import checked
from tune_kernels.tuner.review.compare import PROMOTED, REPORT, Collection, Diff, compare, promoted_entries, report_entries

HOSTILE = ("</script><script>window.broken = 1</script><!--<script><img src=x onerror='window.broken = 2'>&lt;]]>"
           "\u2028\"'{{ 7*7 }}")


def diff_of(old: PromotedFile, new: PromotedFile) -> Diff:
    sides = (Collection(name, PROMOTED, promoted_entries([file])) for name, file in (("old", old), ("new", new)))
    return checked(compare(*sides))


def promotion() -> Diff:
    """`down` faster, `gate_up` slower, `merge` new, `o` gone; attention, lm_head and qkv as they were."""
    whole = synthetic.file()
    old = replace(whole, rows=tuple(r for r in whole.rows if r.kernel != "merge"))
    new = with_row(whole, "down", lambda row: promoted(row, 0.91, BLOCK_N=128, num_stages=4))
    new = with_row(new, "gate_up", lambda row: promoted(row, 1.03, num_stages=4))
    return diff_of(old, replace(new, rows=tuple(r for r in new.rows if r.kernel != "o")))


def report(count: int, registers: Callable[[int], int]) -> Collection:
    variants = tuple(
        Variant(id=f"{n:012x}", kernel=("down", "o")[n % 2], kernel_digest="d" * 16, target="sm_103",
                shape=LinearShape(16 * n, 64), schedule=LinearSchedule(64, 128, 3, 4),
                verdict="accepted", stage="sass", reasons=(), compile_ms=1.0,
                artefact="a" * 32, facts=Artefact(("UTCQMMA",), registers(n), 0, 0, 0, 0, 0, 1, "b" * 64))
        for n in range(count))
    whole = Report(model="qwen2.5-7b", targets=("sm_103",), space="default", recipe="fp8-v1", max_spill_bytes=0, seconds=1.0,
                   toolchain=Toolchains("3.7.1", {"sm_103": "13.1"}, "13.1", {}), counts=Counts(count, 0, count, 0, 0, 1, 1),
                   audit=Audit(16, 0, ()), variants=variants)
    return Collection("report", REPORT, report_entries(whole))


@pytest.fixture
def opened(open_page: OpenPage) -> Opened:
    return open_page(render_html(promotion()))


def kernels(opened: Opened) -> list[str]:
    return opened.page.eval_on_selector_all("tr.variant > th button", "buttons => buttons.map(b => b.textContent)")


def test_opens_from_disk_without_errors_or_network(opened: Opened) -> None:
    assert kernels(opened) == ["gate_up", "down", "merge", "o", "attention", "lm_head", "qkv"]
    assert opened.count() == "7 of 7 rows"
    assert opened.column("knobs")[:2] == ["num_stages 3 → 4", "BLOCK_N 64 → 128num_stages 6 → 4"]
    assert opened.column("knobs")[-1] == "BLOCK_N 64, BLOCK_K 128, num_stages 4, num_warps 4, split_k 4"
    assert opened.said == []
    assert {url.split(":")[0] for url in opened.asked} <= {"file", "data"}
    assert sum(url.startswith("file:") for url in opened.asked) == 1


def test_the_summary_comes_first(opened: Opened) -> None:
    said = re.sub(r"\s+", " ", opened.page.locator(".summary").inner_text())
    assert "kernels of one step, 28 layers" in said
    assert "1 RANDOM WEIGHTS" not in said and "6 RANDOM WEIGHTS (random:0)" in said
    assert "slower gate_up N 37888, K 3584, e4m3" in said
    assert re.sub(r"\s+", " ", opened.page.locator(".counts").inner_text()) == (
        "changed 2 added 1 removed 1 unchanged 3 refused by --check 1")


def test_sorts(opened: Opened) -> None:
    opened.sort("ratio")
    assert kernels(opened)[:3] == ["down", "merge", "gate_up"]
    opened.sort("ratio")
    assert kernels(opened)[:3] == ["gate_up", "merge", "down"]
    assert opened.head("ratio").get_attribute("aria-sort") == "descending"
    opened.sort("ratio")
    assert kernels(opened)[0] == "gate_up" and kernels(opened)[-1] == "qkv"
    opened.sort("drawn")
    assert kernels(opened)[0] == "merge", "by the new median"
    for column in ("kernel", "shape", "status", "knobs", "artefact", "time", "bits_words", "evidence", "refused"):
        opened.sort(column)
        assert opened.head(column).get_attribute("aria-sort") == "ascending"
        assert len(kernels(opened)) == 7
    assert opened.said == []


def test_filters_combine_and_clear(opened: Opened) -> None:
    opened.page.select_option("#status", "changed")
    assert kernels(opened) == ["gate_up", "down"]
    opened.page.select_option("#time", "faster")
    assert kernels(opened) == ["down"]
    assert opened.count() == "1 of 7 rows"
    opened.page.locator("#clear").click()
    assert opened.count() == "7 of 7 rows"
    opened.page.select_option("#refused", "refused")
    assert kernels(opened) == ["gate_up"]
    opened.page.locator("#clear").click()
    opened.page.locator(".counts a[href='#status=added']").click()
    opened.page.locator("#count", has_text="1 of 7").wait_for()
    assert kernels(opened) == ["merge"]


@pytest.mark.parametrize(("query", "found"), [
    ("BLOCK_N", ["down", "gate_up", "attention", "lm_head", "o", "qkv"]),
    ("block_n=128 num_stages=4", ["down", "gate_up", "lm_head"]),
    ("slower", ["gate_up"]), ("152064", ["lm_head"]), ("nothing has this", [])])
def test_searches(opened: Opened, query: str, found: list[str]) -> None:
    opened.page.fill("#q", query)
    assert sorted(kernels(opened)) == sorted(found)


def test_an_opened_row_shows_all_of_it(opened: Opened) -> None:
    opened.page.locator("tr.variant", has_text="down").click()
    shown = re.sub(r"\s+", " ", opened.page.locator("tr.detail").inner_text())
    for text in ("Times, paired", "18.90 [18.82, 18.98] µs, 160 samples", "faster −9.0% [−9.6, −8.4]", "BLOCK_N 64 128",
                 "instructions QGMMA QGMMA", "registers 90 90", "RANDOM WEIGHTS (random:0)", "rows 9/9", "tokens compared 2,304",
                 "whole ar step, in the full model", "Triton 3.6.0 3.6.0", "numerics class", "sm_mhz 1980"):
        assert text in shown, text
    assert opened.page.locator("tr.detail .sides tr.differs th").all_inner_texts() == ["BLOCK_N", "num_stages", "identity"]
    opened.page.locator("tr.variant", has_text="gate_up").locator("button").click()
    assert "Refused by --check because" in opened.page.locator("tr.detail").first.inner_text()


def test_distributions_are_drawn_old_above_new_on_one_scale(opened: Opened) -> None:
    drawn = opened.page.locator("tr.variant", has_text="down").locator("svg.strip")
    assert "old 18.90" in drawn.get_attribute("aria-label") and "new 17.20" in drawn.get_attribute("aria-label")
    box = {side: drawn.locator(f"g.{side} rect.median").bounding_box() for side in ("old", "new")}
    assert box["old"]["x"] > box["new"]["x"], "faster lies to the left"
    assert box["old"]["y"] < box["new"]["y"]
    assert drawn.locator("g.old rect:not([class])").count() == 10, "a gap between eleven quantiles each"
    inside = drawn.evaluate("e => [...e.querySelectorAll('rect')].every(r => +r.getAttribute('x') >= -1 && "
                            "+r.getAttribute('x') + +r.getAttribute('width') <= e.viewBox.baseVal.width + 1)")
    assert inside
    removed = opened.page.locator("tr.variant.status-removed, tr.variant:has(td.status-removed)")
    assert removed.locator("g.old").count() == 1 and removed.locator("g.new").count() == 0


def test_forest_plots_put_each_interval_on_one_axis(opened: Opened) -> None:
    """Without a script: a kernel whose interval excludes 0 is on its side of the line, in its colour."""
    kernels, step = opened.page.locator("figure svg").all()
    labels = kernels.locator("text[text-anchor=end]").all_text_contents()[1:]
    changed = {row.entry.kernel: row.time for row in promotion().rows if row.new and row.time and row.time.ratio}
    assert labels == sorted(changed, key=lambda name: -abs(changed[name].ratio - 1))
    zero = float(kernels.locator("line.zero").get_attribute("x1"))
    for name, line in zip(labels, kernels.locator("line.interval").all()):
        low, high = (float(line.get_attribute(end)) for end in ("x1", "x2"))
        side = {"faster": high < zero, "slower": low > zero, "tie": low <= zero <= high}
        assert side[changed[name].verdict], name
    assert "full model ar" in step.locator("text").all_text_contents()


def test_random_weights_are_marked_in_each_row(opened: Opened) -> None:
    assert opened.page.locator("td.evidence .random").count() == 6
    mark = opened.page.locator("td.evidence .random").first
    assert mark.inner_text() == "random weights"
    assert mark.evaluate("e => getComputedStyle(e).backgroundColor") != "rgba(0, 0, 0, 0)"


def test_works_from_the_keyboard(opened: Opened) -> None:
    keyboard = opened.page.keyboard
    keyboard.press("/")
    keyboard.type("num_stages")
    opened.head("kernel").locator("button").focus()
    keyboard.press("Enter")
    first = kernels(opened)[0]
    for _ in range(30):
        keyboard.press("Tab")
        if opened.page.evaluate("document.activeElement.closest('tr.variant') !== null"):
            break
    assert opened.page.evaluate("document.activeElement.textContent") == first
    keyboard.press("ArrowDown")
    keyboard.press("Enter")
    assert opened.page.locator("tr.opened button").first.inner_text() == kernels(opened)[1]
    keyboard.press("End")
    keyboard.press("Space")
    assert opened.page.locator("tr.opened").count() == 2


def test_a_finding_leads_to_its_row_and_a_link_restores_the_view(opened: Opened, open_page: OpenPage) -> None:
    opened.page.locator(".findings a").click()
    opened.page.locator("tr.opened").wait_for()
    assert opened.page.locator("tr.opened button").inner_text() == "gate_up"
    opened.page.select_option("#status", "changed")
    again = open_page(render_html(promotion()), opened.hash())
    assert kernels(again) == ["gate_up", "down"]
    assert again.page.locator("tr.opened button").inner_text() == "gate_up"


@pytest.mark.parametrize("width", [390, 768, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_never_scrolls_sideways(open_page: OpenPage, width: int, scheme: str) -> None:
    opened = open_page(render_html(promotion()), viewport={"width": width, "height": 844}, color_scheme=scheme)
    opened.page.locator("tr.variant button").first.click()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    detail = opened.page.locator(".detail-body").bounding_box()
    assert detail["x"] >= 0 and detail["x"] + detail["width"] <= width
    dark = opened.page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")


def test_prints_all_its_rows(opened: Opened) -> None:
    opened.page.locator("tr.variant button").first.click()
    opened.page.emulate_media(media="print")
    assert not opened.page.locator("#filters").is_visible()
    assert opened.page.evaluate("(e => e.scrollHeight <= e.clientHeight + 1)(document.getElementById('rows'))")
    assert opened.page.pdf(landscape=True)[:4] == b"%PDF"


def test_without_scripts_the_summary_is_there(open_page: OpenPage) -> None:
    page = open_page(render_html(promotion()), java_script_enabled=False).page
    assert "kernels of one step" in page.locator(".summary").inner_text()
    assert page.locator("noscript").is_visible()
    assert not page.locator("#variants").is_visible()


def test_hostile_text_stays_text(open_page: OpenPage) -> None:
    old = synthetic.file()
    new = with_row(old, "down", lambda row: replace(row, kernel=HOSTILE, date=HOSTILE, numerics_class=HOSTILE,
                                                    evidence=replace(row.evidence, weights="path:" + HOSTILE)))
    opened = open_page(render_html(replace(diff_of(old, new), old=HOSTILE)))
    opened.page.locator("tr.variant", has_text="window.broken").first.click()
    assert opened.page.evaluate("window.broken") is None
    assert opened.page.locator("img, [onerror]").count() == 0
    assert opened.page.locator("script").count() == 2
    assert HOSTILE in opened.page.locator("h1").text_content()
    assert opened.said == []


def test_10_000_variants_of_two_reports(open_page: OpenPage) -> None:
    diff = checked(compare(report(10_000, lambda n: 40), report(10_000, lambda n: 41 if n % 100 == 0 else 40)))
    opened = open_page(render_html(diff))
    assert opened.count() == "10,000 of 10,000 rows"
    opened.page.select_option("#status", "changed")
    assert opened.count() == "100 of 10,000 rows"
    assert len(opened.rows()) == 100
    assert opened.said == []


def test_a_difference_without_rows_opens(open_page: OpenPage) -> None:
    opened = open_page(render_html(compare(Collection("a", "", ()), Collection("b", "", ()))))
    assert "no promoted schedules on either side" in opened.page.locator(".summary").inner_text()
    assert opened.said == []


def test_same_values_same_bytes(tmp_path: Path) -> None:
    values: Any = promotion()
    assert render_html(values) == render_html(promotion())
