"""Tests a second host with its own store and rollout that joins the quickstart by hand and does part of the work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from launch.commands import access
from proto.ids import new_incarnation
from proto.messages import GetStoreStats, StoreStats
from shared.rpc.client import Client
from shared.rpc.errors import DeadlineExceeded
from shared.rundir import RunDir
from shared.security.access import read
from shared.security.roles import Role
from tests.integration.netns import Host, two_hosts
from tests.integration.tiny.harness import QUICKSTART, ROOT, ctl, environment, wait_for

STEPS = 60
LIMIT_S = 240.0


@contextlib.contextmanager
def on(host: Host, output: Path, module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with output.open("wb") as stream:
        child = subprocess.Popen(
            host.command(sys.executable, "-m", module, *arguments),
            cwd=ROOT,
            env=environment(""),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(20)


def puts_at(run: RunDir) -> int:
    """Return the number of puts that the joined host's store has accepted."""

    async def ask() -> int:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        client = Client(context, run.endpoint("batch-store", 1), "batch-store/1", new_incarnation())
        try:
            return (await client.call(GetStoreStats(), StoreStats, deadline_s=2)).puts
        except DeadlineExceeded:
            return 0
        finally:
            client.close()
            await asyncio.to_thread(context.term)

    return asyncio.run(ask())


@pytest.mark.long
def test_a_run_trains_on_tasks_sampled_by_a_joined_host_and_completes(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with two_hosts() as (home, away), contextlib.ExitStack() as stack:
        sets = [f"transport.listen={home.address}", f"run.steps={STEPS}", "services.batch-store.memory=256MiB"]
        words = [word for each in sets for word in ("--set", each)]
        launcher = stack.enter_context(
            on(home, tmp_path / "out", "launch.cluster", str(QUICKSTART), "--run-dir", str(path), *words)
        )
        wait_for("keys of the run", lambda: (path / "topology.yaml").exists(), LIMIT_S)
        access.export(RunDir.open(path), Role.SERVICE, tmp_path / "file")
        joined = RunDir.join(tmp_path / "joined", read(tmp_path / "file"))
        stack.callback(joined.remove_volatile)
        own = ("--run", str(joined.path), "--instance", "1", "--listen", f"tcp://{away.address}:0")
        stack.enter_context(on(away, tmp_path / "rollout.out", "services.rollout", *own))
        stack.enter_context(on(away, tmp_path / "store.out", "services.batch_store", *own))
        wait_for("puts on the joined host", lambda: puts_at(joined), LIMIT_S)
        log = ctl(path, "logs", "rollout/1", "--json")
        assert log.returncode == 0, log.stderr
        own_log = joined.log_file("rollout", 1).read_text().splitlines()
        assert log.stdout.splitlines()
        assert set(log.stdout.splitlines()) <= set(own_log)
        rows = {
            (row["service"], row["instance"]): row
            for row in json.loads(ctl(path, "status", "--json").stdout)["services"]
        }
        assert rows["rollout", 1]["state"] == "READY"
        assert rows["rollout", 1]["heartbeat_age_s"] < 10
        wait_for("the end of the run", lambda: launcher.poll() is not None, LIMIT_S)
        assert launcher.returncode == 0, (tmp_path / "out").read_text()[-2000:]
    rows = (path / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == STEPS + 1
