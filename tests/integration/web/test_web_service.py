"""Tests the web service of a live run: tokens, killed services, operator commands, and real training."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, Page, expect

from services.web.live_parts import MAX_STREAMS
from tests.integration.tiny.harness import (
    QUICKSTART,
    ROOT,
    SERVICES,
    Launched,
    environment,
    launched,
    processes_of,
    wait_for,
)
from tests.integration.web.chromium import visit

pytestmark = pytest.mark.slow

TOKEN, OPERATOR = "visitors-token-of-a-test", "operators-token-of-a-test"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
COLOR = "(each) => getComputedStyle(each).color"


@dataclass
class Shown:
    """A live run whose processes do no work, and the address of its page."""

    here: Launched
    address: str

    @property
    def url(self) -> str:
        return f"http://{self.address}/#token={TOKEN}"

    def pid(self, name: str) -> int:
        rows = {f"{row['service']}/{row['instance']}": row for row in self.here.status().get("services", [])}
        return int(rows[name]["pid"]) if name in rows and rows[name]["state"] == "READY" else 0

    def ask(self, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> tuple[int, str]:
        """Return the status and the text of the response. `headers` replace the headers that a browser would send."""
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=30)) as connection:
            connection.putrequest(method, path, skip_host=True)
            for name, value in {"Host": self.address, "Content-Length": str(len(body)), **headers}.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()


def page_settings(folder: Path) -> tuple[str, list[str]]:
    """Return a free address, and the settings for a page at that address with both tokens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    web = {"listen": address}
    for key, token in (("token", TOKEN), ("operator_token", OPERATOR)):
        file = folder / key
        file.write_text(token)
        file.chmod(0o600)
        web[key] = str(file)
    return address, ["--set", f"monitor.web={json.dumps(web)}"]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    folder = tmp_path_factory.mktemp("web")
    address, arguments = page_settings(folder)
    with launched(folder / "run", *arguments) as here:
        here.wait_ready(SERVICES + 1)
        yield Shown(here, address)


def enter(page: Page, token: str) -> None:
    expect(page.locator("#ask")).to_be_visible()
    page.locator("#ask-token").fill(token)
    page.locator("#ask button", has_text="OK").click()


def test_page_of_a_live_run_needs_the_token(browser: Browser, shown: Shown) -> None:
    with visit(browser, f"http://{shown.address}/") as page:
        enter(page, "not the token")
        expect(page.locator("#ask-token")).to_have_value("")
        enter(page, TOKEN)
        expect(page.locator("#contact")).to_have_text("live")
    with visit(browser, shown.url) as page:
        expect(page.locator("#contact")).to_have_text("live")
        assert TOKEN not in page.url


def rollouts(path: Path) -> set[int]:
    """Return the processes of a run that are a rollout, not one of its ranks or a fork that will become one."""
    found: set[int] = set()
    for pid in processes_of(path):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "tests.integration.tiny.rollout" in psutil.Process(pid).cmdline():
                found.add(pid)
    return found


def test_a_killed_service_is_red_until_it_is_back(browser: Browser, shown: Shown) -> None:
    with visit(browser, shown.url) as page:
        page.get_by_role("button", name="Services").click()
        chip = page.locator('[data-process="rollout/0"] .chip')
        expect(chip).to_have_text("READY")
        good = wait_for("a color", lambda: chip.evaluate(COLOR))  # an element that is being replaced has none
        before = rollouts(shown.here.path)
        os.kill(shown.pid("rollout/0"), signal.SIGKILL)
        [reborn] = wait_for("another life", lambda: rollouts(shown.here.path) - before)
        os.kill(reborn, signal.SIGSTOP)
        try:
            expect(chip).to_have_class(re.compile("wrong"))
            assert chip.evaluate(COLOR) != good
            expect(page.locator('[data-process="rollout/0"]')).to_contain_text("killed by SIGKILL")
        finally:
            os.kill(reborn, signal.SIGCONT)
        expect(chip).to_have_text("READY")
        expect(chip).to_have_class(re.compile("well"))
        wait_for("the first color", lambda: chip.evaluate(COLOR) == good)


def test_the_page_continues_once_its_killed_server_is_back(browser: Browser, shown: Shown) -> None:
    with visit(browser, shown.url) as page:
        expect(page.locator("#contact")).to_have_text("live")
        page.evaluate("document.body.dataset.same = 'page'")
        before = set(processes_of(shown.here.path))
        os.kill(shown.pid("web/0"), signal.SIGKILL)
        [reborn] = wait_for("another life", lambda: set(processes_of(shown.here.path)) - before)
        os.kill(reborn, signal.SIGSTOP)
        try:
            expect(page.locator("#contact")).to_have_text("no contact with the page's server")
        finally:
            os.kill(reborn, signal.SIGCONT)
        expect(page.locator("#contact")).to_have_text("live")
        assert page.evaluate("document.body.dataset.same") == "page"


def test_an_operator_restarts_a_service_from_the_page(browser: Browser, shown: Shown) -> None:
    before = wait_for("rollout/0", lambda: shown.pid("rollout/0"))
    with visit(browser, shown.url) as page:
        page.get_by_role("button", name="Services").click()
        restart = page.locator('[data-process="rollout/0"]').get_by_role("button", name="restart")
        restart.click()
        enter(page, TOKEN)
        expect(page.locator("#answer")).to_have_text("the operator token is missing or wrong")
        assert shown.pid("rollout/0") == before
        restart.click()
        enter(page, OPERATOR)
        expect(page.locator("#answer")).to_have_text("restart rollout/0: ordered")
        wait_for("another life", lambda: shown.pid("rollout/0") not in (0, before))


def test_requests_from_other_sites_or_without_a_token_are_refused(shown: Shown) -> None:
    order, operator = b'{"action": "drain", "name": "rollout/0"}', {**BEARER, "X-Operator-Token": OPERATOR}
    assert shown.ask("GET", "/api/metrics", {})[0] == 401
    assert shown.ask("GET", "/api/metrics", {"Authorization": f"Bearer {TOKEN[:-1]}"})[0] == 401
    assert shown.ask("GET", "/api/metrics", BEARER)[0] == 200
    status, text = shown.ask("GET", "/api/metrics", {**BEARER, "Host": "evil.example"})
    assert (status, text.startswith("'evil.example' is not a name of this server")) == (421, True)
    assert shown.ask("GET", "/", {"Host": "evil.example:8080"})[0] == 421
    assert shown.ask("POST", "/api/operate", {**operator, "Origin": "http://evil.example"}, order)[0] == 403
    assert shown.ask("POST", "/api/operate", BEARER, order)[0] == 403
    assert shown.ask("POST", "/api/operate", {**operator, "X-Operator-Token": TOKEN}, order)[0] == 403
    assert shown.ask("GET", "/api/operate", operator)[0] == 405
    assert shown.ask("POST", "/api/operate", operator, b"x" * 2000)[0] == 413
    assert shown.ask("POST", "/api/operate", operator, b'{"action": "stop", "name": "rollout"}')[0] == 409
    status, text = shown.ask("POST", "/api/operate", operator, b'{"action": "restart", "name": "rolout"}')
    assert status == 409
    assert "no service rolout" in text
    for path in ("/../topology.yaml", "/%2e%2e/topology.yaml", "/api/../../etc/passwd"):
        assert shown.ask("GET", path, BEARER)[0] == 404
    assert shown.pid("rollout/0")


def test_browsers_beyond_the_limit_are_refused_and_browsers_that_do_not_read_do_not_delay_others(shown: Shown) -> None:
    head = f"GET /api/stream HTTP/1.1\r\nHost: {shown.address}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    host, port = shown.address.split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_STREAMS):
            client = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            client.sendall(head)
            assert client.recv(12) == b"HTTP/1.1 200"
        status, text = shown.ask("GET", "/api/stream", BEARER)
        assert (status, text) == (503, f"{MAX_STREAMS} browsers are already following this run; close one")
        assert shown.ask("GET", "/api/metrics", BEARER)[0] == 200
    client = socket.create_connection((host, int(port)), timeout=30)

    def admitted() -> bool:
        with contextlib.closing(socket.create_connection((host, int(port)), timeout=30)) as again:
            again.sendall(head)
            return again.recv(12) == b"HTTP/1.1 200"

    client.close()
    wait_for("room for another browser", admitted)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_curves_grow_while_a_run_trains(browser: Browser, tmp_path: Path) -> None:
    address, arguments = page_settings(tmp_path)
    small = (
        "run.steps=100000",
        "algorithm.tasks_per_step=16",
        "algorithm.group_size=4",
        "services.batch-store.memory=128MiB",
    )
    command = [sys.executable, "-m", "launch.cluster", str(QUICKSTART), "--run-dir", str(tmp_path / "run"), *arguments]
    command += [part for each in small for part in ("--set", each)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_for("the first steps", lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, 300)
        with visit(browser, f"http://{address}/#token={TOKEN}") as page:
            chart = page.locator(".chart").first
            expect(chart.locator("canvas").first).to_be_visible()
            first = str(chart.get_attribute("data-points"))
            expect(chart).not_to_have_attribute("data-points", first, timeout=120_000)
            page.get_by_role("button", name="Services").click()
            expect(page.locator("#processes")).to_contain_text("policy-trainer-worker/0")
            expect(page.locator("#pipeline")).to_contain_text("batch-store/0")
            page.get_by_role("button", name="Timeline").click()
            expect(page.locator("#lane-names")).to_contain_text("policy-trainer-worker/0")
            page.get_by_role("button", name="Log").click()
            expect(page.locator("#lines")).to_contain_text("scheduler/0")
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 1
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
