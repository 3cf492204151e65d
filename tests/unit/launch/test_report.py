"""Tests report.html: how long a run waits for it at the end, and what happens if it cannot be written."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from launch.viewers import report
from launch.viewers.report import REPORT, write_in_time, write_report
from shared.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(path=tmp_path / "run", sockets=tmp_path / "sockets", shm=tmp_path / "shm")
    (made.path / "logs").mkdir(parents=True)
    made.metrics.write_text('{"step": 1, "reward/mean": 0.5}\n')
    return made


def test_a_run_that_failed_before_its_first_step_has_a_report(run: RunDir) -> None:
    run.metrics.unlink()
    run.outcome.write_text('{"outcome": "failed", "cause": "rollout/0: exit status 1"}')
    assert "failed: rollout/0: exit status 1" in write_report(run).read_text()


def test_a_failure_to_write_the_report_is_reported_and_leaves_no_file_behind(run: RunDir) -> None:
    (run.path / REPORT).mkdir()
    assert write_in_time(run, 60).startswith("not written (IsADirectoryError: ")
    assert [each.name for each in run.path.iterdir() if "report" in each.name] == [REPORT]


def test_the_end_of_a_run_does_not_wait_for_a_slow_report(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(report, "page", lambda _: "late" if gate.wait(30) else "never")
    began = time.monotonic()
    told = write_in_time(run, 0.1)
    assert time.monotonic() - began < 10
    assert told == f"not ready after 0.1 s; python -m launch.ctl --run {run.path} report writes it"
    assert not (run.path / REPORT).exists()
    gate.set()


def test_a_new_report_replaces_the_previous_one(run: RunDir) -> None:
    assert write_in_time(run, 60) == str(run.path / REPORT)
    first = (run.path / REPORT).read_text()
    run.metrics.write_text(json.dumps({"step": 1, "reward/mean": 9.0}) + "\n")
    write_report(run)
    assert (run.path / REPORT).read_text() != first
    assert [each.name for each in run.path.iterdir() if "report" in each.name] == [REPORT]
