"""Tests the exporter as a process beside a monitor, with real scrapes and a real collector. The exporter must never
delay the monitor."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from proto.ids import new_incarnation
from proto.messages import GetSnapshot, Snapshot
from services.exporter.spans import trace_id
from shared.actor.telemetry import TelemetrySender
from shared.rpc.client import Client
from shared.rundir import RunDir
from shared.topology import load
from tests.integration.tiny.harness import QUICKSTART, ROOT, environment, free_port, wait_for
from tests.unit.exporter.test_otlp import collector

CALL_S = 30.0


@contextlib.contextmanager
def process(run: RunDir, service: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a service of `run` for the duration of the block."""
    started = subprocess.Popen(
        [sys.executable, "-m", f"services.{service}", "--run", str(run.path)],
        cwd=ROOT, env=environment(), stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


@contextlib.contextmanager
def a_run(folder: Path, *settings: str) -> Iterator[RunDir]:
    made = RunDir.create(folder / "run", topology=load(QUICKSTART, settings), shm_root=folder / "shm")
    try:
        yield made
    finally:
        made.remove_volatile()


def scrape(port: int, token: str = "", path: str = "/metrics", method: str = "GET") -> tuple[int, str]:
    """Return the status and the body of a response, or (0, "") if nothing is listening."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CALL_S)
    try:
        connection.request(method, path, headers={"authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except ConnectionRefusedError:
        return 0, ""
    finally:
        connection.close()


def values(text: str) -> dict[str, float]:
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def tell(run: RunDir, *messages: tuple[str, dict[str, float | str]], service: str = "rollout") -> Snapshot:
    """Send telemetry, and return the monitor's state afterwards."""

    async def told() -> Snapshot:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        incarnation = new_incarnation()
        sender = TelemetrySender(service, 0, incarnation)
        client = Client(context, run.endpoint("monitor", 0), "monitor/0", incarnation)
        sender.connect(client)
        try:
            await client.call(GetSnapshot(), Snapshot, deadline_s=CALL_S)  # From here on, the sender is connected.
            for topic, given in messages:
                sender.emit(topic, given)
            sender.flush()
            return await client.call(GetSnapshot(), Snapshot, deadline_s=CALL_S)
        finally:
            client.close()
            await asyncio.get_running_loop().run_in_executor(None, context.term)

    return asyncio.run(told())


def test_a_scraper_reads_the_monitors_values_and_learns_when_the_monitor_is_gone(tmp_path: Path) -> None:
    port = free_port()
    with a_run(tmp_path, f"monitor.prometheus.listen=127.0.0.1:{port}") as run, process(run, "exporter"):
        with process(run, "monitor"):
            tell(run, ("engine", {"generated_tokens": 41.0}))
            wait_for("a scrape", lambda: values(scrape(port)[1]).get("rlbus_engine_generated_tokens_total") == 41.0)
            assert values(scrape(port)[1])["rlbus_monitor_up"] == 1.0
            wait_for("the scheduler's absence", lambda: values(scrape(port)[1]).get("rlbus_scheduler_up") == 0.0)
            assert scrape(port, path="/")[0] == 404
            assert scrape(port, method="POST")[0] == 405
            _keep_scrapers_waiting(run, port)
        wait_for("the end of the monitor", lambda: values(scrape(port)[1]).get("rlbus_monitor_up") == 0.0)


def _keep_scrapers_waiting(run: RunDir, port: int) -> None:
    """Check that scrapers that never finish do not delay the monitor or a scraper that comes after them."""
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            line = stack.enter_context(socket.create_connection(("127.0.0.1", port), CALL_S))
            line.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n")  # The request is never completed.
        state = tell(run, *(("engine", {"generated_tokens": 42.0}) for _ in range(100)))
        assert any(row.values.get("generated_tokens") == 42.0 for row in state.rows)
        wait_for("another scraper", lambda: values(scrape(port)[1])["rlbus_engine_generated_tokens_total"] == 42.0)


def test_a_scraper_without_the_token_is_refused(tmp_path: Path) -> None:
    port, token, file = free_port(), "0123456789abcdef", tmp_path / "token"
    file.touch(0o600)
    file.write_text(token + "\n")
    with (
        a_run(tmp_path, f"monitor.prometheus={{listen: '127.0.0.1:{port}', token: {file}}}") as run,
        process(run, "exporter"),
    ):
        wait_for("the port", lambda: scrape(port)[0])
        assert [scrape(port, given)[0] for given in ("", "0123456789abcdeF", token)] == [401, 401, 200]


def test_spans_reach_the_file_and_a_collector_that_is_absent_at_first(tmp_path: Path) -> None:
    with collector() as (_, port):
        pass
    span = {"what": "generate", "seconds": 1.5, "tasks": "train/0/3", "lease": 2.0, "stage": "rollout"}
    settings = f"monitor.traces={{otlp: 'http://127.0.0.1:{port}', file_limit: 64KiB, share: 1.0}}"
    with a_run(tmp_path, settings) as run, process(run, "monitor"), process(run, "exporter") as exporter:
        file = run.path / "traces" / "trace.json"
        wait_for("the file", file.exists)

        def written() -> list[str]:
            tell(run, ("span", {**span}), ("span", {"what": "idle", "seconds": 0.1}), ("spanning", {"seconds": 1.0}))
            return [event["name"] for event in json.loads(file.read_text()) if event["ph"] == "X"]

        assert set(wait_for("spans in the file", written)) == {"generate", "idle"}
        log = run.log_file("exporter", 0)
        told = "traces are not arriving; spans are being dropped, but the run goes on"
        wait_for("the warning", lambda: told in log.read_text())
        with collector(port) as (kept, _):
            kept.wait(1)
            assert {each.trace_id for each in kept.spans} == {trace_id("run", "train/0/3")}
            tell(
                run, ("span/part", {"what": "lease", "seconds": 2.0, "tasks": "train/0/3", "lease": 2.0, "stage": "r"})
            )
            count = len(kept.spans)
            wait_for("the lease", lambda: any(each.name == "lease r" for each in kept.spans[count - 1 :]))
            exporter.terminate()
            assert exporter.wait(CALL_S) == 0
    assert log.read_text().count(told) == 1


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("monitor.prometheus.listen=127.0.0.1:{port}", "127.0.0.1:{port} cannot be used (Address already in use)"),
        ("monitor.prometheus.token=/no/token", "/no/token: No such file or directory; write a token into a file"),
    ],
)
def test_an_exporter_that_cannot_serve_says_why_in_one_line(tmp_path: Path, key: str, line: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with a_run(tmp_path, key.format(port=port)) as run, process(run, "exporter") as exporter:
            errors = exporter.communicate(timeout=CALL_S)[1].decode()
    assert exporter.returncode
    last = errors.splitlines()[-1]  # The log of a service that is started by hand precedes this line.
    assert last.startswith("exporter/0: monitor.prometheus.")
    assert line.format(port=port) in last
