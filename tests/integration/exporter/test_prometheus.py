"""Tests a real run that is scraped by a real Prometheus: promtool's lint, the scrape, and every query of the
dashboard."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.exporter.test_exporter import scrape
from tests.integration.tiny.harness import QUICKSTART, ROOT, environment, free_port, wait_for
from tests.unit.exporter.test_families import expressions
from tests.unit.exporter.test_otlp import Collector, collector

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
RARE = ("rlbus_trouble", "rlbus_lost_samples", "rlbus_dropped_tasks", "rlbus_rollout_is_capped")
"""Metrics that a healthy run of the quickstart does not have."""
LIMIT_S = 600.0


@pytest.fixture
def tools() -> tuple[str, str]:
    """Return the commands `prometheus` and `promtool` (Debian package prometheus)."""
    found = shutil.which("prometheus"), shutil.which("promtool")
    if found[0] is None or found[1] is None:
        pytest.skip("prometheus and promtool are not installed")
    return found[0], found[1]


@contextlib.contextmanager
def prometheus(binary: str, target: int, folder: Path) -> Iterator[int]:
    """Run a Prometheus server that scrapes a port on this machine. Yield the server's own port."""
    port = free_port()
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 100ms}\nscrape_configs:\n"
        f"- {{job_name: rlbus, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}\n"
    )
    arguments = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    process = subprocess.Popen(
        [binary, *arguments, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL
    )
    try:
        yield port
    finally:
        process.kill()
        process.wait()


def query(port: int, expression: str) -> list[Any]:
    """Return the series that an instant query yields, or none while Prometheus is starting."""
    text = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{text}", timeout=30) as answer:
            found = json.loads(answer.read())
    except OSError:
        return []
    assert found["status"] == "success", found
    series: list[Any] = found["data"]["result"]
    return series


@contextlib.contextmanager
def real_run(folder: Path, port: int, otlp: int) -> Iterator[Path]:
    """Run the quickstart with an exporter."""
    path = folder / "run"
    settings = [f"monitor.prometheus.listen=127.0.0.1:{port}", "run.steps=120"]
    settings += [f"monitor.traces={{otlp: 'http://127.0.0.1:{otlp}', share: 0.2}}"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.cluster", str(QUICKSTART), "--run-dir", str(path), *arguments],
        cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield path
        assert process.wait(LIMIT_S) == 0
    finally:
        process.terminate()
        process.wait()


def test_prometheus_scrapes_a_run_that_is_also_traced_and_reported(tools: tuple[str, str], tmp_path: Path) -> None:
    binary, promtool = tools
    port = free_port()
    with collector() as (kept, otlp), prometheus(binary, port, tmp_path) as server:
        with real_run(tmp_path, port, otlp) as path:
            wait_for("a trained step", lambda: query(server, "rlbus_time_step_seconds"), LIMIT_S)
            lint = subprocess.run([promtool, "check", "metrics"], input=scrape(port)[1], capture_output=True, text=True)
            assert (lint.returncode, lint.stdout + lint.stderr) == (0, "")
        # The exporter has exited together with the run. A query over the past minutes still finds the scraped values.
        empty = [each for each in expressions() if not query(server, f"last_over_time(({each})[5m:100ms])")]
        assert [each for each in empty if not any(rare in each for rare in RARE)] == []
        _check_traces(kept, path)
    report = (path / "report.html").read_text()
    assert '"ended":"done"' in report
    assert len(report) < 2_000_000


def _check_traces(kept: Collector, path: Path) -> None:
    """Check that some trace has every kind of span of a task, and that some trace has every kind of span of a step."""
    traces: dict[bytes, set[str]] = {}
    for span in kept.spans:
        traces.setdefault(span.trace_id, set()).add(span.name)
    task = {
        "lease rollout",
        "generate",
        "reward",
        "put",
        "lease reference",
        "fetch",
        "score",
        "train",
        "collect",
        "task",
    }
    step = {"step", "batch", "ForwardBackward", "OptimStep", "commit", "Publish", "sync"}
    assert [names for names in traces.values() if {*task, "task"} <= names], sorted(map(sorted, traces.values()))
    assert [names for names in traces.values() if step <= names]
    events = json.loads((path / "traces" / "trace.json").read_text())
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"rollout/0", "reference/0", "policy-trainer/0", "policy-trainer-worker/0", "tasks"} <= processes
    work = {event["name"] for event in events if event["ph"] == "X"}
    assert {"generate", "score", "ForwardBackward", "OptimStep", "Publish", "sync", "commit", "step"} <= work
