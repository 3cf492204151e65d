"""Tests the page in a real browser for runs that have ended: curves, comparison, samples, and hostile text."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from playwright.sync_api import Browser, FloatRect, Page, expect

from services.web.samples import MAX_RECORDS
from services.web.saved import page
from shared.samples.record import plain
from tests.integration.tiny.harness import ROOT, environment
from tests.integration.web.chromium import PHONE, visit
from tests.integration.web.shown_run import HOSTILE, add_samples, ended_run, page_of, row, sample

pytestmark = pytest.mark.slow

CHARTS = "(all) => all.map((each) => [each.querySelector('h2').textContent, each.dataset.points])"
"""Returns the title of each chart, and the numbers of its points."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return ended_run(tmp_path / "shown")


def test_curves_are_drawn_in_light_and_dark_mode_and_fit_on_a_phone(browser: Browser, run: Path) -> None:
    with page_of(run) as url:
        with visit(browser, url) as page:
            expect(page.locator(".chart canvas").first).to_be_visible()
            expect(page.locator("#contact")).to_have_text("ended")
            expect(page.locator("#progress")).to_contain_text("step 120")
            titles = page.locator(".chart h2").all_inner_texts()
            light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert titles[:2] == ["reward", "KL"]
        with visit(browser, url, size=PHONE, dark=True) as page:
            expect(page.locator(".chart canvas").first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
            page.locator("#theme").click()
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == light


def test_curves_change_when_rows_are_added_or_rolled_back(browser: Browser, run: Path) -> None:
    with page_of(run) as url, visit(browser, url) as page:
        last = page.locator(".chart").first.locator(".u-legend")
        expect(page.locator("#progress")).to_contain_text("step 120")
        expect(last).to_be_visible()
        rows = [row(step) for step in range(1, 61)]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
        expect(page.locator("#progress")).to_contain_text("step 60")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(f"{json.dumps(row(61) | {'reward/mean': 77.0})}\n")
        expect(page.locator("#progress")).to_contain_text("step 61")
        expect(page.locator("#progress")).to_contain_text("reward 77")


def test_zooming_into_one_chart_zooms_all_charts(browser: Browser, run: Path) -> None:
    ranges = "[...document.querySelectorAll('.uplot')].map((each) => each.dataset.steps)"
    with page_of(run) as url, visit(browser, url) as page:
        expect(page.locator(".chart canvas").nth(2)).to_be_visible()
        before = page.evaluate(ranges)
        assert len(before) >= 5
        assert set(before) == {"1 120"}
        box = page.locator(".u-over").first.bounding_box()
        assert box is not None
        drag(page, box)
        expect(page.locator("#reset")).to_be_visible()
        [zoomed] = set(page.evaluate(ranges))
        low, high = map(float, zoomed.split())
        assert 20 < low < 40
        assert 50 < high < 70
        page.locator("#reset").click()
        expect(page.locator("#reset")).to_be_hidden()
        assert set(page.evaluate(ranges)) == {"1 120"}
        drag(page, box)
        expect(page.locator("#reset")).to_be_visible()
        page.locator(".u-over").nth(1).dblclick()
        expect(page.locator("#reset")).to_be_hidden()
        assert set(page.evaluate(ranges)) == {"1 120"}


def drag(page: Page, box: FloatRect) -> None:
    """Select the second quarter of a chart."""
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60, steps=4)
    page.mouse.up()


def test_two_runs_are_drawn_in_the_same_charts(browser: Browser, run: Path) -> None:
    ended_run(run.parent / HOSTILE.replace("/", "_").replace("\x00", ""), steps=80, offset=0.3)
    ended_run(run.parent / "other", steps=80, offset=0.3)
    with page_of(run) as url, visit(browser, url) as page:
        expect(page.locator(".chart canvas").first).to_be_visible()
        page.locator("#compare summary").click()
        page.locator("#runs label", has_text="other").locator("input").check()
        legend = page.locator(".chart").first.locator(".u-legend")
        expect(legend).to_contain_text("other reward/mean")
        expect(legend).to_contain_text("shown reward/mean")
        expect(page.locator(".chart").first).to_have_attribute("data-points", "120 80")
        assert page.evaluate("document.body.dataset.broken") is None


def test_a_sample_opens_with_its_tokens_coloured_by_log_prob_and_by_mismatch(browser: Browser, run: Path) -> None:
    add_samples(
        run, 7, sample("train/0/1", 0, step=7, reward=1.0), sample("train/0/1", 1, step=7, reward=0.0, text="13x")
    )
    with page_of(run) as url, visit(browser, url) as page:
        page.get_by_role("button", name="Samples").click()
        page.locator("#order").select_option("worst")
        first = page.locator("#sample-list tbody tr").first
        expect(first).to_contain_text("13x")
        first.click()
        expect(page.locator("#sample")).to_contain_text("5+7=")
        tokens = page.locator("#sample .tokens span")
        assert tokens.all_inner_texts() == ["1", "3", "x"]
        color = "(each) => getComputedStyle(each).backgroundColor"
        assert tokens.first.evaluate(color) != tokens.last.evaluate(color)
        before = tokens.last.evaluate(color)
        page.locator("#sample select").select_option("mismatch")
        assert page.locator("#sample .tokens span").last.evaluate(color) != before
        page.locator("#sample .tokens span").last.click()
        expect(page.locator("#sample")).to_contain_text("difference 0.05")


def test_the_worst_sample_of_a_large_step_is_shown_first_and_a_task_is_found(browser: Browser, run: Path) -> None:
    add_samples(run, 6, sample("train/0/9999", 0, step=6, reward=1.0))
    add_samples(run, 7, *(sample(f"train/0/{at}", 0, step=7, reward=-float(at)) for at in range(MAX_RECORDS + 20)))
    with page_of(run) as url, visit(browser, url) as page:
        page.get_by_role("button", name="Samples").click()
        rows = page.locator("#sample-list tbody tr")
        expect(rows).to_have_count(MAX_RECORDS)
        expect(page.locator("#sample-list")).to_contain_text("The first 500 of 520 samples; 20 are not shown.")
        page.locator("#order").select_option("worst")
        expect(rows.first).to_contain_text("train/0/519")
        page.locator("#task").fill("train/0/9999")
        page.locator("#task").press("Enter")
        expect(rows).to_have_count(1)
        rows.first.click()
        expect(page.locator("#sample")).to_contain_text("train/0/9999")
        page.locator("#step").select_option("7")
        expect(rows).to_have_count(MAX_RECORDS)


def test_hostile_metric_names_samples_and_log_lines_are_shown_as_text_and_do_no_harm(
    browser: Browser, run: Path
) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f"{json.dumps({'step': 121, HOSTILE: 1.0, 'reward/mean': 1.0})}\n")
    add_samples(
        run,
        7,
        sample(HOSTILE, 0, step=7, reward=0.0, text=HOSTILE),
        sample("train/0/2", 0, step=7, reward=1.0, text="<b>" + "ab" * 5_000_000),
    )
    line = {"timestamp": "2026-01-01T00:00:00", "level": "info", "service": HOSTILE, "event": HOSTILE}
    (run / "logs" / "rollout-0.jsonl").write_text(f"{json.dumps(line)}\n")
    with page_of(run) as url, visit(browser, url) as page:
        page.locator("#filter").fill("onerror")
        expect(page.locator(".chart h2", has_text="<img src=x onerror=")).to_be_visible()
        page.get_by_role("button", name="Samples").click()
        page.locator("#sample-list tbody tr").first.click()
        expect(page.locator("#sample")).to_contain_text("␛[31mred")
        expect(page.locator("#sample")).to_contain_text("⟨202e⟩")
        page.locator("#sample-list tbody tr").last.click()
        expect(page.locator("#sample")).to_contain_text("characters and tokens are not shown")
        page.get_by_role("button", name="Log").click()
        expect(page.locator("#lines")).to_contain_text("<script>document.body.dataset.broken")
        assert page.evaluate("document.body.dataset.broken") is None
        assert page.locator("main img, main script").count() == 0


def test_the_page_hides_the_same_characters_as_the_terminal(browser: Browser, run: Path) -> None:
    known = [code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) != "Cn"]
    hidden = [code for code in known if plain(chr(code)) != chr(code)]
    assert {0x061C, 0x200B, 0x2060, 0xFEFF, 0xE0001} <= set(hidden)
    script = """async (codes) => {
        const { clean } = await import("/dom.js");
        return codes.filter((code) => clean(String.fromCodePoint(code)) !== String.fromCodePoint(code));
    }"""
    with page_of(run) as url, visit(browser, url) as page:
        assert page.evaluate(script, known) == hidden


def test_the_newest_warnings_are_shown_above_every_tab_and_all_of_them_in_their_own(
    browser: Browser, run: Path
) -> None:
    warnings = [
        {"at": 1e9 + step, "step": step, "kind": "truncation", "text": f"{HOSTILE} at {step}", "remedy": "raise it"}
        for step in range(1, 9)
    ]
    (run / "warnings.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in warnings))
    with page_of(run) as url, visit(browser, url) as page:
        notices, listed = page.locator("#notices .notice.warn"), page.locator("#warnings .notice.warn")
        expect(notices).to_have_count(5)
        expect(notices.first).to_contain_text("step 8: <img src=x")
        expect(notices.first).to_contain_text("at 8 → raise it (truncation)")
        expect(page.locator("#notices")).to_contain_text("3 earlier warnings are listed under Warnings.")
        page.get_by_role("button", name="Warnings (8)").click()
        expect(listed).to_have_count(8)
        expect(listed.first).to_be_visible()
        expect(listed.last).to_contain_text("step 1: ")
        assert page.evaluate("document.body.dataset.broken") is None


def test_a_saved_page_shows_charts_samples_and_logs_without_a_server_or_a_request(browser: Browser, run: Path) -> None:
    add_samples(
        run, 7, sample("train/0/1", 0, step=7, reward=1.0, text=HOSTILE), sample("train/0/1", 1, step=7, reward=0.0)
    )
    ended_run(run.parent / "other", steps=80, offset=0.3)
    (run / "logs" / "rollout-0.jsonl").write_text(f"{json.dumps({'level': 'info', 'event': HOSTILE})}\n")
    (run / "outcome.json").write_text('{"outcome": "failed", "cause": "rollout/0: exit status 1"}')
    saved, compared = run.parent / "saved.html", run.parent / "compared.html"
    saved.write_text(page([run]), encoding="utf-8")
    compared.write_text(page([run, run.parent / "other"]), encoding="utf-8")
    requests: list[str] = []
    with page_of(run) as url, visit(browser, url) as live:
        expect(live.locator(".chart canvas").first).to_be_visible()
        charts = live.locator(".chart").evaluate_all(CHARTS)
    with visit(browser, saved.as_uri()) as offline:
        offline.on("request", lambda request: requests.append(request.url))
        expect(offline.locator(".chart canvas").first).to_be_visible()
        assert offline.locator(".chart").evaluate_all(CHARTS) == charts
        expect(offline.locator("#contact")).to_have_text("failed: rollout/0: exit status 1")
        expect(offline.locator("#progress")).to_contain_text("step 120")
        offline.get_by_role("button", name="Samples").click()
        offline.locator("#order").select_option("worst")
        offline.locator("#sample-list tbody tr").first.click()
        assert offline.locator("#sample .tokens span").all_inner_texts() == ["1", "2"]
        offline.locator("#sample-list tbody tr").last.click()
        expect(offline.locator("#sample")).to_contain_text("␛[31mred")
        offline.get_by_role("button", name="Log").click()
        expect(offline.locator("#lines")).to_contain_text("<script>document.body.dataset.broken")
        offline.get_by_role("button", name="Timeline").click()
        offline.get_by_role("button", name="Warnings").click()
        assert offline.evaluate("document.body.dataset.broken") is None
    with visit(browser, compared.as_uri()) as offline:
        expect(offline.locator(".chart").first.locator(".u-legend")).to_contain_text("other reward/mean")
        expect(offline.locator(".chart").first).to_have_attribute("data-points", "120 80")
    assert not [address for address in requests if not address.startswith("data:")]


def test_serving_by_hand_refuses_other_machines_and_addresses_in_use_in_one_line(run: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = f"127.0.0.1:{taken.getsockname()[1]}"
        refusals = {
            "0.0.0.0:8080": "others can reach this address; use a loopback address, or monitor.web with a token",
            "localhost": "'localhost' is not an address with a port; write one such as 127.0.0.1:8080",
            used: f"--listen {used}: cannot be used (Address already in use); choose another port",
        }
        for address, expected in refusals.items():
            command = [sys.executable, "-m", "launch.monitor", "--web", "--run", str(run), "--listen", address]
            done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60)
            assert done.returncode == 2
            [line] = done.stderr.splitlines()
            assert line.endswith(expected)
