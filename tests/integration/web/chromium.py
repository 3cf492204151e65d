"""A headless Chromium for tests: Debian's package, driven by Playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

PHONE = {"width": 390, "height": 800}
DESKTOP = {"width": 1280, "height": 900}
LIMIT_MS = 30_000
expect.set_options(timeout=LIMIT_MS)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Yield a browser. Skips the test if Chromium is not installed."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed (apt package chromium)")
    with sync_playwright() as playwright:
        # Chromium's sandbox needs more privileges than a container has; the pages are ours.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def visit(browser: Browser, url: str, *, size: dict[str, int] | None = None, dark: bool = False) -> Iterator[Page]:
    """Yield a page at `url` in a separate profile.

    A script error or a violation of the page's content security policy fails the test.
    """
    context = browser.new_context(
        viewport=size or DESKTOP,
        color_scheme="dark" if dark else "light",
        has_touch=size == PHONE,
        is_mobile=size == PHONE,
    )
    page = context.new_page()
    page.set_default_timeout(LIMIT_MS)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda line: faults.append(line.text) if "Content Security Policy" in line.text else None)
    page.on("dialog", lambda dialog: (faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    try:
        page.goto(url)
        yield page
        assert not faults, faults
    finally:
        context.close()
