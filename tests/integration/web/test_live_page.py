"""Tests the page in a real browser for a live run with simulated services and a real monitor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Browser, expect

from shared.rundir import RunDir
from tests.integration.monitor.played_run import monitored, play_steps
from tests.integration.web.chromium import PHONE, visit
from tests.integration.web.shown_run import HOSTILE, add_samples, page_of, sample

pytestmark = pytest.mark.slow

TABS = ("Curves", "Services", "Timeline", "Samples", "Log", "Warnings")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    """Yield a run of three steps, whose telemetry has reached the monitor before the page is opened."""

    with monitored(tmp_path) as run:
        play_steps(run, 3)
        yield run


def test_the_timeline_covers_the_time_before_the_page_and_says_which_process_waited_for_which(
    browser: Browser, run: RunDir
) -> None:
    with page_of(run.path) as url, visit(browser, url) as page:
        page.get_by_role("button", name="Timeline").click()
        expect(page.locator("#lane-names")).to_contain_text("reference/0 works")
        waits = page.locator("#waits tr", has_text="reference/0")
        expect(waits).to_contain_text("scheduler/0")
        expect(waits).to_contain_text(re.compile(r"lease\d\.\d s of 1 min"))
        expect(page.locator("#lanes")).to_have_attribute("aria-label", re.compile("and 3 steps"))


def test_services_show_gpu_memory_and_incarnation(browser: Browser, run: RunDir) -> None:
    with page_of(run.path) as url, visit(browser, url) as page:
        page.get_by_role("button", name="Services").click()
        row = page.locator('[data-process="rollout/1"]')
        expect(row).to_contain_text("2.5 GiB")
        heads = page.locator("#processes th").all_inner_texts()
        cells = dict(zip(heads, row.locator("td").all_inner_texts(), strict=True))
        assert (cells["state"], cells["GPU memory"], cells["incarnation"]) == ("READY", "2.5 GiB", "00000000")


def test_no_tab_is_wider_than_a_phone(browser: Browser, run: RunDir) -> None:
    add_samples(run.path, 3, sample("train/0/1", 0, step=3, reward=1.0, text=HOSTILE * 20 + "x" * 500))
    warning = {"at": 1e9, "step": 3, "kind": "mismatch", "text": "x" * 300, "remedy": f"lower {'y' * 300}"}
    run.warnings.write_bytes(msgspec.json.encode(warning) + b"\n")
    with page_of(run.path) as url, visit(browser, url, size=PHONE) as page:
        expect(page.locator(".chart canvas").first).to_be_visible()
        for tab in TABS:
            page.get_by_role("button", name=tab).click()
            expect(page.locator(f"#{tab.lower()}")).to_be_visible()
            expect(page.locator(f"#{tab.lower()} :visible").first).to_be_visible()
            if tab == "Samples":
                page.locator("#sample-list tbody tr").first.click()
                expect(page.locator("#sample .tokens")).to_be_visible()
            if tab == "Timeline":
                expect(page.locator("#waits table")).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], tab
