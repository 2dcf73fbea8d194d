"""A page in a browser, as a user would open it: Debian's Chromium, driven from disk."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync"]


@dataclass
class Opened:
    """A page in the browser, with its errors and requests."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def rows(self) -> list[str]:
        """The ids of the rows on the page, in its order."""
        return self.page.eval_on_selector_all("tr.variant", "rows => rows.map(r => r.dataset.id)")

    def column(self, name: str) -> list[str]:
        return self.page.eval_on_selector_all(f"tr.variant td.{name}", "cells => cells.map(c => c.textContent)")

    def head(self, name: str) -> Any:
        return self.page.locator(f"th.{name}[aria-sort]")

    def sort(self, name: str) -> None:
        self.head(name).locator("button").click()

    def count(self) -> str:
        return self.page.locator("#count").inner_text()

    def hash(self) -> str:
        return self.page.evaluate("location.hash")


OpenPage = Callable[..., Opened]
