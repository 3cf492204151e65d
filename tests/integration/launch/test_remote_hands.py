"""Tests a run that is watched and controlled from another machine, through nothing but access files and TCP.

The scheduler, store, monitor and supervisor are real; tiny services stand in for those that need torch.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launch.processes.plan import SUPERVISOR
from launch.viewers.peer import with_client
from launch.viewers.terminal.app import MonitorApp
from launch.viewers.terminal.feed import Feed
from proto.messages import ErrorCode, GetLog, LogLines
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from shared.security import access, keys
from shared.security.access import Access
from shared.security.roles import Role
from tests.integration.tiny.harness import (
    LIMIT_S,
    SERVICES,
    TINY,
    Launched,
    ctl,
    environment,
    free_ports,
    launched,
    wait_for,
)

ADDRESS = "127.0.0.1"


@dataclass
class Away:
    """A simulated second machine: a working directory with access files and none of the run's files."""

    folder: Path
    here: Launched

    def run(self, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=environment(),
            timeout=LIMIT_S,
            check=False,
        )

    def ctl(self, role: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("launch.ctl", "--access", str(self.folder / role), *arguments)

    def rows(self, role: str = "operator") -> dict[str, dict[str, Any]]:
        """Return the services of `ctl status` by name/instance."""
        done = self.ctl(role, "status", "--json")
        assert done.returncode == 0, done.stderr
        return {f"{row['service']}/{row['instance']}": row for row in json.loads(done.stdout)["services"]}


@pytest.fixture(scope="module")
def away(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Away]:
    folder = tmp_path_factory.mktemp("away")
    sets = [f"transport.listen={ADDRESS}", *(f"{key}={port}" for key, port in free_ports().items())]
    overrides = [word for each in sets for word in ("--set", each)]
    with launched(tmp_path_factory.mktemp("home") / "run", *overrides, tiny=TINY) as here:
        here.wait_ready(SERVICES)
        for role in Role:
            done = ctl(here.path, "export-access", "--role", role.label, "--to", str(folder / role.label))
            assert done.returncode == 0, done.stderr
        keys.create(folder / "strange")
        mine = access.read(folder / "operator")
        strange = keys.load(folder / "strange", Role.OPERATOR)
        # Only the stranger's key pair is wrong; the stranger knows the run's server key and endpoints.
        known = {**mine.keys.known, Role.OPERATOR: strange.public}
        ring = keys.Keyring(Role.OPERATOR, strange.public, strange.secret, known)
        access.write(folder / "stranger", Access(mine.name, ring, mine.endpoints))
        shutil.rmtree(folder / "strange")
        yield Away(folder, here)


def test_a_terminal_elsewhere_shows_the_run_and_only_operators_can_use_its_control_keys(away: Away) -> None:
    away.here.run.metrics.write_text("".join(f'{{"step": {step}, "reward/mean": 0.5}}\n' for step in range(1, 8)))

    async def attach(role: str) -> tuple[set[str], str]:
        feed = Feed(access.read(away.folder / role))
        app = MonitorApp(feed)
        async with app.run_test(size=(100, 30), notifications=True) as pilot:
            async with asyncio.timeout(LIMIT_S):
                await feed.connected.wait()
                while "reward/mean" not in feed.view.curves.names:
                    await asyncio.sleep(0.05)
            assert [point[0] for point in feed.view.curves.points("reward/mean")] == list(range(1, 8))
            await pilot.press("2", "r")
            await pilot.pause()
            names = {each.name for each in feed.view.services(time.time())}
            return names, type(app.screen).__name__

    names, screen = asyncio.run(attach("observer"))
    assert {"rollout/0", "scheduler/0", "policy-trainer/0"} <= names
    assert screen == "Screen"
    assert asyncio.run(attach("operator"))[1] == "Confirm"


def strangers(away: Away, service: str) -> int:
    """Return how many strangers a service has refused, as soon as an observer on another machine learns of any."""
    with subprocess.Popen(
        [sys.executable, "-m", "launch.monitor", "--access", str(away.folder / "observer"), "--json"],
        cwd=away.folder,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                row = json.loads(line)
                if row["service"] == service and row["topic"] == "security" and row["values"]["strangers"]:
                    return int(row["values"]["strangers"])
        finally:
            process.kill()
    raise AssertionError(f"{service} sent no telemetry about refusals")


def test_an_operator_on_another_machine_sees_the_same_as_a_local_one(away: Away) -> None:
    home = {f"{row['service']}/{row['instance']}": row for row in away.here.status()["services"]}
    found = away.rows()
    assert {name: row["pid"] for name, row in found.items()} == {name: row["pid"] for name, row in home.items()}
    assert len(found) == SERVICES


def test_an_operator_on_another_machine_restarts_a_service(away: Away) -> None:
    before = away.rows()["rollout/0"]
    done = away.ctl("operator", "restart", "rollout/0")
    assert done.returncode == 0, done.stderr
    assert "rollout/0" in done.stdout
    after = wait_for(
        "rollout/0 to be READY again",
        lambda: (
            (row := away.rows()["rollout/0"])["restarts"] == before["restarts"] + 1 and row["state"] == "READY" and row
        ),
    )
    assert after["pid"] != before["pid"]


def test_an_operator_on_another_machine_reads_the_logs(away: Away) -> None:
    done = away.ctl("operator", "--json", "logs", "scheduler", "-n", "2")
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    log = away.here.run.log_file("scheduler", 0).read_text().splitlines()
    assert len(found) == 2
    assert set(found) <= set(log)


@pytest.mark.parametrize("name", ["../../../etc/passwd", "..", "", "scheduler-0.jsonl", "supervisor\0"])
def test_only_logs_of_this_run_can_be_read_by_name(away: Away, name: str) -> None:
    request = GetLog(service=name, instance=0, lines=1000)
    with pytest.raises(RpcError, match="no service") as refused:
        asyncio.run(with_client(access.read(away.folder / "operator"), SUPERVISOR, request, LogLines))
    assert refused.value.code == ErrorCode.BAD_REQUEST


def test_a_wrong_name_gives_a_one_line_error_on_another_machine(away: Away) -> None:
    done = away.ctl("operator", "restart", "rolout")
    assert done.returncode == 2
    assert done.stderr.strip() == "no service 'rolout'; did you mean 'rollout'?"


def test_an_observer_may_watch_but_not_control(away: Away) -> None:
    before = away.rows()
    for arguments in (("restart", "rollout/0"), ("stop",), ("logs", "rollout"), ("status",)):
        done = away.ctl("observer", *arguments)
        assert done.returncode == 2, done.stdout
        assert "refused this access: the role observer is not enough" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    after = away.rows()
    assert {name: row["pid"] for name, row in after.items()} == {name: row["pid"] for name, row in before.items()}


def test_a_stranger_is_refused_with_a_one_line_error_and_counted(away: Away) -> None:
    for module, arguments in (("launch.ctl", ("stop",)), ("launch.monitor", ("--json",))):
        done = away.run(module, "--access", str(away.folder / "stranger"), *arguments)
        assert done.returncode == 2, done.stdout
        assert "refused this access" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert strangers(away, "supervisor") >= 1
    assert strangers(away, "monitor") >= 1
    log = away.here.run.log_file("supervisor", 0).read_text()
    assert '"reason": "unknown_key"' in log


def test_the_stream_continues_after_a_restart_of_the_monitor(away: Away) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "launch.monitor", "--access", str(away.folder / "observer"), "--json"],
        cwd=away.folder,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout)
            assert json.loads(next(lines))["topic"]
            pid, begun = away.rows()["monitor/0"]["pid"], time.time()
            assert away.ctl("operator", "restart", "monitor").returncode == 0
            rows = (row for line in lines if (row := json.loads(line))["at"] > begun)
            # The restarted monitor announces its new port itself.
            assert any(row["service"] == "monitor" and row["values"].get("state") == "READY" for row in rows)
            assert away.rows()["monitor/0"]["pid"] != pid
        finally:
            process.kill()


def test_access_can_only_be_exported_on_the_runs_own_machine(away: Away) -> None:
    done = away.ctl("service", "export-access", "--role", "operator", "--to", str(away.folder / "more"))
    assert done.returncode == 2
    assert "use --run" in done.stderr
    assert not (away.folder / "more").exists()


def test_a_host_joins_with_an_access_file_and_a_service_started_there_by_hand_works(away: Away) -> None:
    folder = away.folder / "joined"
    done = away.run("launch.ctl", "join", str(away.folder / "service"), "--run-dir", str(folder))
    assert done.returncode == 0, done.stderr
    joined = RunDir.open(folder)
    words = ["-m", "services.batch_store", "--run", str(folder), "--instance", "1", "--listen", f"tcp://{ADDRESS}:0"]
    store = subprocess.Popen([sys.executable, *words], cwd=away.folder, env=environment(), stderr=subprocess.PIPE)
    try:
        wait_for("batch-store/1 of the other host", lambda: "batch-store/1" in away.rows())
        assert away.rows()["batch-store/1"]["pid"] == store.pid
        assert joined.host_id != away.here.run.host_id
    finally:
        store.terminate()
        _, errors = store.communicate(timeout=LIMIT_S)
        joined.remove_volatile()
    assert store.returncode == 0, errors


def test_an_operator_on_another_machine_stops_the_run(away: Away) -> None:
    """This test must be the last one, because it ends the run."""
    run = away.here.run
    done = away.ctl("operator", "stop")
    assert done.returncode == 0, done.stderr
    status, _, errors = away.here.end()
    assert status == 1
    assert "stopped by the operator" in errors
    wait_for("no sockets left", lambda: not run.sockets.exists())
    gone = away.ctl("operator", "status")
    assert gone.returncode == 1
    assert len(gone.stderr.splitlines()) == 1
