"""`make screenshots`: trains the quickstart twice and takes the pictures for docs/web.md. It needs chromium.

docs/web-curves.png     two overlaid runs, zoomed charts, light
docs/web-services.png   processes and pipeline of a live run, dark
docs/web-timeline.png   the timeline of a live run
docs/web-sample.png     a sample with its tokens
docs/web-phone.png      curves on a phone, dark
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from tests.integration.tiny.harness import QUICKSTART, ROOT, environment, wait_for
from tests.integration.web.chromium import PHONE, chromium, visit

DOCS = ROOT / "docs"
LIMIT_BYTES = 200_000
STEPS = 30
LIVE_STEP = 10
START_S, RUN_S = 600, 3600


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        assert train(Path(folder) / "lr-1e-4", "optimizer.lr=1.0e-4").wait(RUN_S) == 0
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        process = train(Path(folder) / "lr-3e-4", f"monitor.web.listen={address}")
        try:
            metrics = Path(folder) / "lr-3e-4" / "metrics.jsonl"
            wait_for(
                f"step {LIVE_STEP}",
                lambda: metrics.exists() and len(metrics.read_text().splitlines()) > LIVE_STEP,
                START_S + RUN_S,
            )
            take(browser, f"http://{address}/")
        finally:
            process.terminate()
            process.wait(RUN_S)


def train(path: Path, *settings: str) -> subprocess.Popen[bytes]:
    overrides = [part for each in (f"run.steps={STEPS}", *settings) for part in ("--set", each)]
    command = [sys.executable, "-m", "launch.cluster", str(QUICKSTART), "--run-dir", str(path), *overrides]
    return subprocess.Popen(command, cwd=ROOT, env=environment())


def take(browser: Browser, url: str) -> None:
    with visit(browser, url) as page:
        expect(page.locator(".chart canvas").first).to_be_visible()
        page.locator("#compare summary").click()
        page.locator("#runs input").first.check()
        expect(page.locator(".chart").first).to_have_attribute("data-points", re.compile(rf"\b{STEPS}\b"))
        save(page, "curves")
        page.get_by_role("button", name="Timeline").click()
        expect(page.locator("#lane-names")).to_contain_text("works")
        save(page, "timeline")
    with visit(browser, url, dark=True) as page:
        page.get_by_role("button", name="Services").click()
        expect(page.locator("#pipeline")).to_contain_text("batch-store/0")
        save(page, "services")
    with visit(browser, url, size=PHONE, dark=True) as page:
        expect(page.locator(".chart canvas").nth(2)).to_be_visible()
        save(page, "phone")
    with visit(browser, url) as page:
        page.get_by_role("button", name="Samples").click()
        page.locator("#order").select_option("worst")
        page.locator("#sample-list tbody tr").first.click()
        expect(page.locator("#sample .tokens")).to_be_visible()
        save(page, "sample")


def save(page: Page, name: str) -> None:
    file = DOCS / f"web-{name}.png"
    page.screenshot(path=file)
    nbytes = file.stat().st_size
    assert nbytes <= LIMIT_BYTES, f"{file}: {nbytes} bytes, limit {LIMIT_BYTES}; show less on it"
    print(f"{file}: {nbytes} bytes")


if __name__ == "__main__":
    main()
