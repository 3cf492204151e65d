"""Tests in a real browser what a run that has ended says about its processes: states, restarts, timeline."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from proto.messages import ProcessRow
from services.web.saved import WINDOWS_S, page
from shared.rundir import RunDir
from shared.runfiles.files import RunFiles
from shared.runfiles.last import as_lines
from shared.view.look import WorkKind
from shared.view.services import process_rows
from tests.integration.monitor.played_run import play_steps, start_monitor
from tests.integration.tiny.harness import SERVICES, launched, wait_for
from tests.integration.web.chromium import visit
from tests.integration.web.shown_run import HOSTILE, ended_run, page_of, rgb

pytestmark = pytest.mark.slow

ENDED_AT = 1_700_000_000.0
MARK = "(each) => getComputedStyle(each).backgroundColor"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that has ended: its monitor was stopped, and its supervisor has added the final states."""
    folder = tmp_path_factory.mktemp("ended")
    made = RunDir.create(folder / "run", shm_root=folder / "shm")
    monitor = start_monitor(made)

    try:
        play_steps(made, 3)
        monitor.terminate()
        assert monitor.wait(60) == 0
    finally:
        monitor.kill()
        monitor.wait()
        made.remove_volatile()
    states = [ProcessRow("rollout", 0, "STOPPED", 0, 5, 2), ProcessRow("rollout", 1, "FAILED", 0, 6, 1, HOSTILE)]
    with made.last.open("ab") as file:
        file.write(as_lines(process_rows(states, ENDED_AT)))
    made.outcome.write_text('{"outcome": "failed", "cause": "rollout/1: exit status 1"}')
    return made.path


def check_last_states(shown: Page) -> None:
    expect(shown.locator("#contact")).to_have_text("failed: rollout/1: exit status 1")
    shown.get_by_role("button", name="Services").click()
    expect(shown.locator("#reported")).to_contain_text("The last states, reported at ")
    rows = {name: shown.locator(f'[data-process="{name}"]') for name in ("rollout/0", "rollout/1", "reference/0")}
    heads = shown.locator("#processes th").all_inner_texts()
    cells = {name: dict(zip(heads, line.locator("td").all_inner_texts(), strict=True)) for name, line in rows.items()}
    assert (cells["rollout/0"]["state"], cells["rollout/0"]["restarts"]) == ("STOPPED", "2")
    assert (cells["rollout/1"]["state"], cells["rollout/1"]["restarts"]) == ("FAILED", "1")
    assert "<img src=x" in cells["rollout/1"]["cause"]
    assert (cells["rollout/1"]["host"], cells["rollout/1"]["memory"]) == ("node-1", "–")
    expect(shown.locator("#pipeline")).to_contain_text("batch-store/0")
    assert rows["rollout/0"].locator(".mark").evaluate(MARK) == rgb(WorkKind.GENERATE)
    assert rows["reference/0"].locator(".mark").evaluate(MARK) == rgb(WorkKind.REFERENCE)

    shown.get_by_role("button", name="Timeline").click()
    expect(shown.locator("#lane-names")).to_contain_text("reference/0 works")
    expect(shown.locator("#lane-names")).to_contain_text("The last span ended at ")
    expect(shown.locator("#waits tr", has_text="reference/0")).to_contain_text("scheduler/0")
    expect(shown.locator("#lanes")).to_have_attribute("aria-label", re.compile("and 3 steps"))
    legend = {
        entry.inner_text().strip(): entry.locator(".mark").evaluate(MARK)
        for entry in shown.locator("#lane-names .facts.soft span").all()
    }
    assert legend == {
        "step: step": rgb(WorkKind.STEP),
        "waiting: batch, lease": rgb(WorkKind.IDLE),
        "forward and backward: ForwardBackward": rgb(WorkKind.TRAIN),
        "reference: score": rgb(WorkKind.REFERENCE),
        "generate: generate": rgb(WorkKind.GENERATE),
    }
    shown.locator("#seconds").select_option("300")
    expect(shown.locator("#waits tr", has_text="reference/0")).to_contain_text("of 5 min")
    assert shown.evaluate("document.body.dataset.broken") is None


def test_an_ended_run_shows_its_services_restarts_and_timeline(browser: Browser, run: Path) -> None:
    with page_of(run) as url, visit(browser, url) as shown:
        check_last_states(shown)


def test_the_report_of_an_ended_run_shows_them_too(browser: Browser, run: Path, tmp_path: Path) -> None:
    saved = tmp_path / "report.html"
    saved.write_text(page([run]), encoding="utf-8")
    with visit(browser, saved.as_uri()) as shown:
        check_last_states(shown)
        offered = shown.locator("#seconds option").evaluate_all("(all) => all.map((each) => Number(each.value))")
    assert tuple(offered) == WINDOWS_S


def test_a_run_whose_processes_were_all_killed_says_why_nothing_is_known_about_them(
    browser: Browser, tmp_path: Path
) -> None:
    killed = ended_run(tmp_path / "killed")
    with page_of(killed) as url, visit(browser, url) as shown:
        for tab, where in (("Services", "#reported"), ("Timeline", "#lane-names")):
            shown.get_by_role("button", name=tab).click()
            expect(shown.locator(where)).to_be_visible()
            expect(shown.locator(where)).to_contain_text("last.jsonl is missing")
            expect(shown.locator(where)).to_contain_text("all its processes were killed at the same moment")


def test_a_run_records_its_last_states_and_their_restarts(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as here:
        here.wait_ready(SERVICES)

        def rollout() -> dict[str, Any]:
            rows = here.status().get("services", [])
            return next((row for row in rows if row["service"] == "rollout" and row["state"] == "READY"), {})

        os.kill(rollout()["pid"], signal.SIGKILL)
        wait_for("another life", lambda: rollout().get("restarts") == 1)
        here.process.send_signal(signal.SIGINT)
        assert here.process.wait(120) == 1
        run = here.run.path
    files = RunFiles(run)
    files.read_last()
    last = {view.name: view for view in files.view.services(files.view.newest_at)}
    assert len(last) == SERVICES
    assert {view.state for view in last.values()} == {"STOPPED"}
    assert {name: view.restarts for name, view in last.items() if view.restarts} == {"rollout/0": 1}
    assert files.view.pipeline().tasks
