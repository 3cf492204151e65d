"""Tests that every command says the same of a run that has ended."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch import cluster, ctl, monitor
from launch.processes.plan import SUPERVISOR
from launch.supervisor.events import RunOutcome
from shared.rundir import RunDir
from shared.topology import load

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "launch" / "topologies" / "quickstart.yaml"
AT = 1_700_000_000.0
COMMANDS = (
    ["status"],
    ["doctor"],
    ["stop"],
    ["scale", "rollout", "2"],
    ["restart", "rollout/0"],
    ["drain", "rollout"],
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run whose launcher has ended, which removed its sockets."""
    path = tmp_path / "run"
    (path / "logs").mkdir(parents=True)
    names = {"run": "run", "sockets": str(tmp_path / "sockets"), "shm": str(tmp_path / "shm")}
    (path / "run.json").write_text(json.dumps(names))
    (path / "launcher.lock").touch()
    load(QUICKSTART).dump_resolved(path / "topology.yaml")
    return RunDir.open(path)


def stamp(path: Path) -> None:
    os.utime(path, (AT, AT))


def trained(run: RunDir, step: int) -> None:
    run.log_file(SUPERVISOR, 0).write_text("{}\n")
    run.metrics.write_text(json.dumps({"step": step}) + "\n")
    for file in (run.log_file(SUPERVISOR, 0), run.metrics):
        stamp(file)


def record(run: RunDir, outcome: str, cause: str = "") -> None:
    run.outcome.write_text(json.dumps({"outcome": outcome, "cause": cause}))
    stamp(run.outcome)


def told(run: RunDir) -> str:
    """Return the line that all commands print about the run, with exit status 1."""
    lines = set()
    for command in COMMANDS:
        done = CliRunner().invoke(ctl.app, ["--run", str(run.path), *command])
        assert done.exit_code == 1, done.output
        lines.add(done.stderr)
    attached = CliRunner().invoke(cluster.app, ["--attach", "--run-dir", str(run.path)])
    assert attached.exit_code == 2
    watched = CliRunner().invoke(monitor.app, ["--run", str(run.path), "--plain"])
    assert watched.exit_code == 0
    [line] = {*lines, attached.stderr, watched.stderr}
    return line.removeprefix(f"run {run.path} ").removesuffix("\n")


def continued(run: RunDir) -> str:
    return f"; continue it with `python -m launch.cluster {run.topology} --run-dir {run.path} --resume`"


def test_a_run_that_is_done(run: RunDir) -> None:
    trained(run, 200)
    record(run, "done")
    run.export.mkdir()
    assert told(run) == f"was done at 2023-11-14 22:13:20 UTC at step 200 of 200; its model is in {run.export}"


@pytest.mark.parametrize(("outcome", "how"), [("stopped", "was stopped"), ("failed", "failed")])
def test_a_run_that_was_stopped_or_failed(run: RunDir, outcome: str, how: str) -> None:
    trained(run, 7)
    record(run, outcome, "rollout/0: no model")
    line = f"{how} at 2023-11-14 22:13:20 UTC at step 7 of 200: rollout/0: no model"
    assert told(run) == line + continued(run)


def test_a_run_whose_supervisor_was_killed(run: RunDir) -> None:
    trained(run, 7)
    run.sockets.mkdir()
    (run.sockets / "supervisor-0").touch()  # a guard that was killed as well leaves the sockets behind
    line = "was killed at step 7 of 200: its supervisor recorded no end, and its last sign of life was at 2023-11-14 "
    assert told(run) == line + "22:13:20 UTC" + continued(run)


def test_a_run_that_never_started(run: RunDir) -> None:
    assert told(run) == "has not started: its launcher ended before it started a process" + continued(run)


@pytest.fixture
def launcher(run: RunDir) -> Iterator[None]:
    """A launcher that holds the run, which is ending."""
    run.sockets.mkdir()
    with (run.path / "launcher.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.usefixtures("launcher")
def test_a_run_that_is_ending_has_not_ended(run: RunDir) -> None:
    trained(run, 7)
    record(run, "stopped", "interrupted")
    done = CliRunner().invoke(ctl.app, ["--run", str(run.path), "status"])
    assert done.stderr == f"run {run.path}: neither scheduler nor supervisor answers; see {run.logs}\n"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for command in COMMANDS:
        done = CliRunner().invoke(ctl.app, ["--run", str(tmp_path), *command])
        assert (done.exit_code, done.stderr.startswith(f"run directory {tmp_path}: not a run")) == (2, True)


def test_a_demo_that_is_stopped_on_purpose_is_no_error_of_make() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\ndemo:")[2].splitlines()[1]
    assert recipe.endswith(" -m launch.cluster launch/topologies/quickstart.yaml --stopped-ok")


@pytest.mark.parametrize(
    ("outcome", "strict", "lenient"), [(RunOutcome.DONE, 0, 0), (RunOutcome.STOPPED, 1, 0), (RunOutcome.FAILED, 1, 1)]
)
def test_only_a_stop_on_purpose_can_count_as_a_success(outcome: RunOutcome, strict: int, lenient: int) -> None:
    assert cluster.exit_status(outcome, stopped_ok=False) == strict
    assert cluster.exit_status(outcome, stopped_ok=True) == lenient
