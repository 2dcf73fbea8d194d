#!/usr/bin/env python
"""Makes screenshots of the three HTML pages for the documentation: docs/images/PAGE-light.png and PAGE-dark.png.

    python scripts/screenshots.py --chromium /usr/bin/chromium

report: a small offline sweep. diff: two revisions of the synthetic store. on-gpu: a replay of a recorded run.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
WIDTH, HEIGHT, PHONE = 1280, 860, 390


def command(*arguments: str) -> None:
    """Runs one of the project's commands. Exit code 1 (a failed check) isn't an error."""
    run = [sys.executable, "-m", "tune_kernels.tuner", *arguments]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")


def pages(folder: Path) -> dict[str, Path]:
    """The pages, made below `folder`."""
    data = Path("tests") / "data"  # relative to the checkout, because the pages show the names
    sweep, replay, diff = folder / "sweep", folder / "replay", folder / "diff.html"
    command("--offline", "--target", "sm_103", "--kernel", "down", "--kernel", "merge", "--out", str(sweep))
    command("--on-gpu", "--replay", str(data / "recordings" / "h200-qwen2.5-7b.json"), "--out", str(replay), "--dry-run")
    command("diff", str(data / "synthetic" / "nvidia-h200"), str(data / "synthetic" / "nvidia-b300"), "--format", "html",
            "--out", str(diff))
    return {"report": sweep / "report.html", "on-gpu": replay / "report.html", "diff": diff}


def photograph(found: dict[str, Path], out: Path, chromium: str, width: int) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
            for name, path in found.items():
                page.goto(path.as_uri())
                page.screenshot(path=out / f"{name}-{scheme}.png")
        browser.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("chromium-browser"))
    parser.add_argument("--out", type=Path, default=IMAGES)
    parser.add_argument("--phone", action="store_true", help=f"{PHONE} pixels wide, for a check; not committed")
    options = parser.parse_args()
    if not options.chromium:
        raise SystemExit("error: no chromium on PATH: install it (Debian: apt-get install chromium), or name it with --chromium")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        photograph(pages(Path(folder)), options.out, options.chromium, PHONE if options.phone else WIDTH)
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
