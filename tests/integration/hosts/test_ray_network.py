"""Tests a Ray cluster of two hosts in separate networks, started with `ray start` and a token as docs/hosts.md says."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.hosts.ray_cluster import (
    NOTICED,
    RAY_START,
    Told,
    assert_nothing_left,
    processes_of,
    run_on,
    started_node,
    volatile_folders,
)
from tests.integration.hosts.test_host_agent import HEARS_NOTHING, firewall
from tests.integration.netns import Host, two_hosts
from tests.integration.tiny.harness import ctl, wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PORT = 6379
LIMIT_S = 240.0
PLACES = ("placement={engine: ray, hosts: {b: {}}}", "services.rollout.host=b")


@dataclass
class Network:
    """The cluster's two hosts and the environment that its users have."""

    home: Host
    away: Host
    environment: dict[str, str]

    @property
    def address(self) -> str:
        return f"{self.home.address}:{PORT}"

    @property
    def prefix(self) -> Sequence[str]:
        return self.home.command()

    @contextlib.contextmanager
    def node(self, host: Host, label: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Run a node. When the `ray start` that it yields is killed, so is everything that it has started."""
        command = host.command("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *RAY_START)
        own = ("--node-ip-address", host.address, "--labels", f"rlbus-host={label}")
        with started_node(*command, *own, *arguments, **self.environment) as node:
            yield node

    def away_node(self) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        return self.node(self.away, "b", "--address", self.address)


@pytest.fixture
def network() -> Iterator[Network]:
    pytest.importorskip("ray")
    with two_hosts() as (home, away), tempfile.TemporaryDirectory(prefix="rl-ray-") as folder:
        environment = {f"RAY_health_check_{name}": value for name, value in NOTICED.items()}
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TMPDIR": folder}
        made = Network(home, away, environment)
        head = ("--head", "--port", str(PORT), "--include-dashboard", "false")
        with made.node(home, "home", *head):
            yield made


def refused(network: Network, path: Path, *settings: str, **environment: str) -> str:
    """Start a run that must not begin, and return the only line that is not a warning."""
    with run_on(network, path, *PLACES, *settings, **(network.environment | environment)) as launcher:
        output, _ = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 2, output
    assert not path.exists()
    assert not processes_of(path)
    [said] = [line for line in output.splitlines() if not line.startswith(("warning: ", "  "))]
    return said


def test_a_wrong_token_and_a_closed_port_are_named(network: Network, tmp_path: Path) -> None:
    said = refused(network, tmp_path / "run", RAY_AUTH_TOKEN=secrets.token_hex(32))
    assert said.startswith(f"placement: cannot connect to a Ray cluster at '{network.address}' ("), said
    assert said.endswith("set RAY_AUTH_MODE and RAY_AUTH_TOKEN as for its `ray start`, and check `ray status`")
    with network.away_node():
        closed = ("INPUT", "-s", network.away.address, "-p", "tcp", "--dport", "7001", "-j", "REJECT")
        firewall(network.home, "-I", closed)
        said = refused(network, tmp_path / "run", "transport.scheduler_port=7001")
    where = f"{network.home.address}:7001"
    assert said.startswith(f"placement: host b: it cannot connect to this machine at {where} ("), said


def test_the_launcher_says_why_an_agent_cannot_join(network: Network, tmp_path: Path) -> None:
    path = tmp_path / "run"
    settings = (*PLACES, "transport.supervisor_port=7002", "run.steps=100000")
    closed = ("INPUT", "-s", network.away.address, "-p", "tcp", "--dport", "7002", "-j", "DROP")
    with network.away_node(), run_on(network, path, *settings, **network.environment) as launcher:
        told = Told(launcher)
        wait_for("the end of the check", lambda: path.exists(), LIMIT_S)
        firewall(network.home, "-I", closed)
        told.wait_for(r"host b is not part of the run: its agent ended: launch.host: .*:7002: no answer")
        firewall(network.home, "-D", closed)
        told.wait_for("host b has joined")
        assert ctl(path, "stop").returncode == 0
        launcher.wait(LIMIT_S)


def test_a_run_survives_a_partition_and_the_host_returns_with_a_new_node(network: Network, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(network.away_node())
        launcher = stack.enter_context(run_on(network, path, *PLACES, "run.steps=100000", **network.environment))
        told = Told(launcher)
        told.wait_for("host b has joined")
        assert not [line for line in told.lines if "neither a token" in line]
        wait_for("training", lambda: told.step() >= 2, LIMIT_S)
        before = volatile_folders(path)
        for side in (network.home, network.away):
            firewall(side, "-I", HEARS_NOTHING)
        lost = told.wait_for("host b is lost: its node is dead")
        for side in (network.home, network.away):
            firewall(side, "-D", HEARS_NOTHING)
        node.kill()  # Ray does not let a node return that it has declared dead.
        node.wait()
        stack.enter_context(network.away_node())
        told.wait_for("host b has joined", lost)
        step = told.step()
        wait_for("two more steps", lambda: told.step() >= step + 2, LIMIT_S)
        folders = volatile_folders(path)
        assert ctl(path, "stop").returncode == 0
        launcher.wait(LIMIT_S)
        assert_nothing_left(path, [*before, *folders])
