"""A browser for the pages that the tuner writes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import ARGS, CHROMIUM, Opened, OpenPage


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium or chromium-browser on PATH to open the page with (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[OpenPage]:
    """Opens the text of a page from a file; options are those of a browser context."""
    contexts = []

    def opened(text: str, fragment: str = "", **options: Any) -> Opened:
        path = tmp_path / "report.html"
        path.write_text(text, encoding="utf-8")
        contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options}))
        result = Opened(contexts[-1].new_page())
        result.page.on("console", lambda message: result.said.append(message.text))
        result.page.on("pageerror", lambda error: result.said.append(str(error)))
        result.page.on("request", lambda request: result.asked.append(request.url))
        result.page.goto(path.as_uri() + fragment)
        return result

    yield opened
    for context in contexts:
        context.close()
