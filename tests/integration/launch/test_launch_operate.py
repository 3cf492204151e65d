"""Tests draining, scaling, rolling restarts and detached launchers with real processes that do no work (without
torch)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.tiny.harness import (
    QUICKSTART,
    ROOT,
    SERVICES,
    Launched,
    assert_nothing_left,
    ctl,
    environment,
    launched,
    processes_of,
    wait_for,
)


def rows(here: Launched) -> dict[str, dict[str, Any]]:
    return {f"{row['service']}/{row['instance']}": row for row in here.status().get("services", [])}


def state_of(here: Launched, name: str) -> str:
    return str(rows(here).get(name, {}).get("state", ""))


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "launch.cluster", *arguments]


def plan_of(topology: Path) -> list[str]:
    """Return the processes that a launcher of this topology would start."""
    done = subprocess.run(
        command(str(topology), "--dry-run"), capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=60
    )
    return [line.split()[0] for line in done.stdout.splitlines() if "services." in line]


def test_a_drained_instance_does_not_restart_and_the_others_continue(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "--set", "services.rollout.instances=2") as here:
        before = here.wait_ready(SERVICES + 1)
        assert ctl(here.path, "drain", "rollout/1").returncode == 0
        wait_for("rollout/1 to be drained", lambda: state_of(here, "rollout/1") == "DRAINED")
        os.kill(before["rollout/0"]["pid"], signal.SIGKILL)
        wait_for("rollout/0 to come back", lambda: here.wait_ready()["rollout/0"]["restarts"] == 1)
        assert state_of(here, "rollout/1") == "DRAINED"
        assert ctl(here.path, "restart", "rollout/1").returncode == 0
        after = here.wait_ready(SERVICES + 1)
        assert after["rollout/1"]["pid"] != before["rollout/1"]["pid"]
        here.process.send_signal(signal.SIGINT)
        status, _, errors = here.end()
    assert status == 1, errors


def test_scale_starts_or_drains_instances_and_records_their_number_in_the_topology(
    tmp_path: Path,
) -> None:
    with launched(tmp_path / "run") as here:
        before = here.wait_ready()
        assert ctl(here.path, "scale", "rollout", "3").returncode == 0
        up = here.wait_ready(SERVICES + 2)
        assert {"rollout/1", "rollout/2"} == set(up) - set(before)
        assert "rollout/2" in plan_of(here.run.topology)
        assert ctl(here.path, "scale", "rollout", "1").returncode == 0
        wait_for("both to be drained", lambda: {state_of(here, f"rollout/{i}") for i in (1, 2)} == {"DRAINED"})
        assert rows(here)["rollout/0"]["pid"] == before["rollout/0"]["pid"]
        assert "rollout/1" not in plan_of(here.run.topology)
        assert ctl(here.path, "scale", "rollout", "2").returncode == 0
        wait_for("rollout/1 to be back", lambda: state_of(here, "rollout/1") == "READY")
        os.kill(rows(here)["rollout/1"]["pid"], signal.SIGKILL)
        wait_for("the new instance to restart as the others do", lambda: rows(here)["rollout/1"]["restarts"] == 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["scale", "monitor", "2"], "monitor cannot be scaled: in this run only rollout, reference can"),
        (["scale", "rollout", "0"], "scale rollout to 0 refused: use 1 or more"),
        (["scale", "rollout", "100000"], "CPU threads on"),
        (["scale", "rollout/0", "2"], "give the name of a service"),
        (["drain", "batch-store"], "batch-store cannot be drained: it leases no tasks"),
        (["drain", "rollout/7"], "available: rollout/0"),
        (["restart", "rollout", "--all"], "name a service or give --all"),
    ],
)
def test_an_impossible_request_gives_a_one_line_error_and_exit_status_2(
    here: Launched, arguments: list[str], said: str
) -> None:
    before = here.run.topology.read_text()
    done = ctl(here.path, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert here.run.topology.read_text() == before


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with launched(tmp_path_factory.mktemp("refusals") / "run") as made:
        made.wait_ready()
        yield made


def test_restart_all_restarts_one_process_at_a_time(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as made:
        before = made.wait_ready()
        assert ctl(made.path, "restart", "all").returncode == 0
        wait_for("a restart of every process", lambda: all(row["restarts"] == 1 for row in made.wait_ready().values()))
        after = made.wait_ready()
        log = [json.loads(line) for line in made.run.log_file("supervisor", 0).read_text().splitlines()]
    assert all(after[name]["pid"] != row["pid"] for name, row in before.items())
    away = [(line["event"], line["name"]) for line in log if line["event"] in ("started", "exited")][len(before) :]
    names = [name for _, name in away[::2]]
    assert away[: 2 * len(before)] == [each for name in names for each in (("exited", name), ("started", name))]
    assert set(names) == set(before)


# -------------------------------------------------------------------------------------------------- detached


def test_detached_run_outlives_its_launcher_and_can_be_attached_and_stopped(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "--detach") as made:
        status, output, errors = made.end()
        assert status == 0, errors
        run = made.run
        assert f"attach     python -m launch.cluster --attach --run-dir {run.path}" in output
        assert all(row["state"] == "READY" for row in rows(made).values()), "the launcher returns once all are READY"

        second = subprocess.run(
            command(str(QUICKSTART), "--run-dir", str(run.path), "--resume"),
            capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=60,
        )  # fmt: skip
        assert second.returncode == 2
        assert "in use by another launcher" in second.stderr

        def attached() -> subprocess.Popen[str]:
            return subprocess.Popen(
                command("--attach", "--run-dir", str(run.path)),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment(),
            )  # fmt: skip

        watching = attached()
        assert watching.stdout is not None
        assert f"run {run.path}: 200 steps" in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        rest, _ = watching.communicate(timeout=30)
        assert watching.returncode == 0
        assert "the run continues" in rest
        assert len(rows(made)) == SERVICES

        watching = attached()
        assert watching.stdout is not None
        assert watching.stdout.readline()
        assert ctl(run.path, "stop").returncode == 0
        rest, _ = watching.communicate(timeout=60)
        assert watching.returncode == 1
        assert "the run was stopped" in rest
        assert_nothing_left(run)
        gone = subprocess.run(
            command("--attach", "--run-dir", str(run.path)),
            capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=60,
        )  # fmt: skip
    assert gone.returncode == 2
    assert gone.stderr == ctl(run.path, "status").stderr
    assert f"run {run.path} was stopped at " in gone.stderr
    assert len(gone.stderr.splitlines()) == 1


def test_detached_start_that_fails_reports_its_cause_and_exit_status(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "refuse-rollout").touch()
    with launched(tmp_path / "run", "--detach") as made:
        status, output, _ = made.end()
        assert_nothing_left(made.run)
    assert status == 1
    assert "the run failed: rollout/0: model of rollout: cannot be loaded" in output


def test_killed_detached_supervisor_leaves_nothing_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    with launched(tmp_path / "run", "--detach") as made:
        assert made.end()[0] == 0
        run = made.run
        [supervisor] = [pid for pid in processes_of(run.path) if "tests.integration.tiny.launcher" in _arguments(pid)]
        os.kill(supervisor, signal.SIGKILL)
        assert_nothing_left(run)
        gone = ctl(run.path, "status")
        assert gone.returncode == 1
        assert f"run {run.path} was killed before its first step: its supervisor recorded no end" in gone.stderr
        with launched(tmp_path / "run", "--resume") as again:
            wait_for("the second launcher's services", lambda: len(again.status().get("services", [])) == SERVICES)
            again.wait_ready()
            (again.path / "finish").touch()
            status, _, errors = again.end()
    assert status == 0, errors


def test_run_that_was_not_detached_cannot_be_attached(here: Launched) -> None:
    done = subprocess.run(
        command("--attach", "--run-dir", str(here.path)),
        capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "was not started with --detach" in done.stderr


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []
