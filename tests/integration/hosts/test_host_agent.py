"""An agent on another network: it runs its part of a run that it reaches over TCP only, and survives a partition."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import access
from shared.rundir import RunDir
from shared.security.roles import Role
from tests.integration.hosts.ray_cluster import Told, assert_nothing_left, volatile_folders
from tests.integration.netns import Host, two_hosts
from tests.integration.tiny.harness import QUICKSTART, ROOT, ctl, environment, wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

LIMIT_S = 240.0


@contextlib.contextmanager
def on(host: Host, module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        host.command(sys.executable, "-m", module, *arguments),
        cwd=ROOT,
        env=environment(""),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait(20)


def cut(host: Host, action: str) -> None:
    """Drop everything that comes in over the link (-I), or no longer (-D)."""
    rule = ["INPUT", "!", "-i", "lo", "-j", "DROP"]
    subprocess.run(host.command("iptables", action, *rule), check=True, capture_output=True, timeout=10)


def test_a_partition_costs_leases_and_the_host_joins_again_when_it_heals(tmp_path: Path) -> None:
    path, away_path = tmp_path / "run", tmp_path / "away"
    sets = [
        "placement.hosts={b: {}}",
        "services.rollout.host=b",
        "run.steps=100000",
        "data.eval={}",
        "run.spares=false",
    ]
    with two_hosts() as (home, away), contextlib.ExitStack() as stack:
        sets += [f"transport.listen={home.address}", "services.batch-store.memory=256MiB"]
        words = [word for each in sets for word in ("--set", each)]
        launcher = stack.enter_context(on(home, "launch.cluster", str(QUICKSTART), "--run-dir", str(path), *words))
        told = Told(launcher)
        wait_for("the run directory", lambda: (path / "run.json").exists(), LIMIT_S)
        access.export(RunDir.open(path), Role.SERVICE, tmp_path / "file")
        given = ("--access", str(tmp_path / "file"), "--name", "b", "--run-dir", str(away_path))
        agent = stack.enter_context(on(away, "launch.host", *given))
        told.wait_for("host b has joined")
        wait_for("training", lambda: told.step() >= 2, LIMIT_S)
        before = volatile_folders(away_path)
        cut(away, "-I")
        lost = told.wait_for("host b is lost: its agent is silent")
        cut(away, "-D")
        told.wait_for("host b has joined", lost)
        step = told.step()
        wait_for("two more steps", lambda: told.step() >= step + 2, LIMIT_S)
        assert not any(folder.exists() for folder in before)
        folders = volatile_folders(path) + volatile_folders(away_path)
        assert ctl(path, "stop").returncode == 0
        launcher.wait(LIMIT_S)
        assert agent.wait(LIMIT_S) == 0
        assert_nothing_left(tmp_path, folders)
