"""Tests what a launcher prints at the end of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from launch.commands.console import failure_lines
from launch.supervisor.events import RunEnded, RunOutcome
from shared.rundir import RunDir


def test_a_cause_that_explains_a_failure_is_printed_without_the_log(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", shm_root=tmp_path / "shm")
    trace = "Traceback (most recent call last):\nRpcError: no"
    run.log_file("rollout", 0).write_text(json.dumps({"event": "service failed", "exception": trace}) + "\n")
    ended = RunEnded(RunOutcome.FAILED, "rollout/0: no model", ("rollout", 0))
    first, *log = failure_lines(run, ended)
    assert first == "the run failed: rollout/0: no model"
    assert log[-1] == "    RpcError: no"
    assert failure_lines(run, replace(ended, explained=True)) == [first]
    run.remove_volatile()
