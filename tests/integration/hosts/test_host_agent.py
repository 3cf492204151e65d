"""Tests an agent on another network that takes part in a run and reaches it only over TCP: over links that lose and
delay packets, after partitions, and after the loss of the agent's host.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.commands import access
from shared.rundir import RunDir
from shared.security.roles import Role
from tests.integration.hosts.odd_host import PROBLEMS, begins, odd_host
from tests.integration.hosts.ray_cluster import Told, assert_nothing_left, processes_of, volatile_folders
from tests.integration.netns import Host, two_hosts
from tests.integration.tiny.harness import QUICKSTART, ROOT, ctl, environment, wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

LIMIT_S = 240.0
HEARS_NOTHING = ("INPUT", "!", "-i", "lo", "-j", "DROP")
LOSES = ("INPUT", "!", "-i", "lo", "-m", "statistic", "--mode", "random", "--probability", "0.1", "-j", "DROP")
"""Firewall rule that drops one in ten of the packets that arrive over the link."""


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


def firewall(host: Host, action: str, rule: tuple[str, ...]) -> None:
    """Add (-I) or remove (-D) a rule for incoming packets."""
    subprocess.run(host.command("iptables", action, *rule), check=True, capture_output=True, timeout=10)


def dropped(host: Host) -> int:
    """Return the number of packets that the host's rules have dropped."""
    listed = subprocess.run(host.command("iptables", "-nvxL", "INPUT"), check=True, capture_output=True, text=True)
    return sum(int(count) for count in re.findall(r"^\s*(\d+)\s+\d+\s+DROP", listed.stdout, re.M))


@dataclass
class Run:
    """A run of the quickstart whose rollout is on the host `away`."""

    folder: Path
    home: Host
    away: Host
    launcher: subprocess.Popen[str]
    told: Told

    @property
    def path(self) -> Path:
        return self.folder / "run"

    @property
    def away_path(self) -> Path:
        return self.folder / "away"

    @contextlib.contextmanager
    def agent(self) -> Iterator[subprocess.Popen[str]]:
        given = ("--access", str(self.folder / "file"), "--name", "b", "--run-dir", str(self.away_path))
        with on(self.away, "launch.host", *given) as agent:
            yield agent

    def state_of(self, service: str, instance: int) -> str:
        """Return the state of a process, or an empty string if it is not part of the run."""
        rows = json.loads(ctl(self.path, "status", "--json").stdout)["services"]
        return next((row["state"] for row in rows if (row["service"], row["instance"]) == (service, instance)), "")

    def goes_on(self) -> None:
        """Wait for two more steps."""
        step = self.told.step()
        wait_for("two more steps", lambda: self.told.step() >= step + 2, LIMIT_S)

    def ends(self, agent: subprocess.Popen[str]) -> None:
        """Stop the run and check what it leaves behind."""
        folders = volatile_folders(self.path) + volatile_folders(self.away_path)
        assert ctl(self.path, "stop").returncode == 0
        self.launcher.wait(LIMIT_S)
        assert agent.wait(LIMIT_S) == 0
        assert_nothing_left(self.folder, folders)


@contextlib.contextmanager
def running(folder: Path, delay_s: float = 0.0, place: str = "{}") -> Iterator[Run]:
    """Start a run on one of two hosts, for an agent on the other one. `place` is its entry in `placement.hosts`."""
    sets = [
        f"placement.hosts={{b: {place}}}",
        "services.rollout.host=b",
        "services.batch-store.memory=256MiB",
        "run.steps=100000",
        "data.eval={}",
    ]
    with two_hosts(delay_s) as (home, away):
        words = [word for each in [*sets, f"transport.listen={home.address}"] for word in ("--set", each)]
        path = folder / "run"
        with on(home, "launch.cluster", str(QUICKSTART), "--run-dir", str(path), *words) as launcher:
            wait_for("the run directory", (path / "run.json").exists, LIMIT_S)
            access.export(RunDir.open(path), Role.SERVICE, folder / "file")
            yield Run(folder, home, away, launcher, Told(launcher))


@pytest.mark.parametrize("deaf", [("away",), ("home",), ("home", "away")])
def test_a_host_loses_leases_in_a_partition_and_joins_again_when_the_partition_heals(
    deaf: tuple[str, ...], tmp_path: Path
) -> None:
    with running(tmp_path) as run, run.agent() as agent:
        run.told.wait_for("host b has joined")
        run.goes_on()
        before = volatile_folders(run.away_path)
        for side in deaf:
            firewall(getattr(run, side), "-I", HEARS_NOTHING)
        lost = run.told.wait_for("host b is lost: its agent has been silent")
        for side in deaf:
            firewall(getattr(run, side), "-D", HEARS_NOTHING)
        run.told.wait_for("host b has joined", lost)
        run.goes_on()
        assert not any(folder.exists() for folder in before)
        run.ends(agent)


@pytest.mark.parametrize("side", ["home", "away"])
def test_packet_loss_in_one_direction_does_not_cause_the_loss_of_a_host(side: str, tmp_path: Path) -> None:
    with running(tmp_path) as run, run.agent() as agent:
        run.told.wait_for("host b has joined")
        firewall(getattr(run, side), "-I", LOSES)
        run.goes_on()
        run.goes_on()
        assert dropped(getattr(run, side)) > 10
        assert not [line for line in run.told.lines if "is lost" in line]
        run.ends(agent)


def test_a_delay_of_a_tenth_of_a_second_does_not_cause_the_loss_of_a_host(tmp_path: Path) -> None:
    with running(tmp_path, delay_s=0.1) as run, run.agent() as agent:
        run.told.wait_for("host b has joined")
        run.goes_on()
        run.goes_on()
        assert not [line for line in run.told.lines if "is lost" in line]
        run.ends(agent)


def test_a_host_without_power_counts_as_lost_and_joins_again_with_a_new_agent(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        with run.agent():
            run.told.wait_for("host b has joined")
            run.goes_on()
            firewall(run.away, "-I", HEARS_NOTHING)  # the home host does not learn of the deaths, as in a power cut
            firewall(run.home, "-I", HEARS_NOTHING)
            for process in processes_of(run.away_path):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        before = volatile_folders(run.away_path)
        lost = run.told.wait_for("host b is lost: its agent has been silent")
        firewall(run.away, "-D", HEARS_NOTHING)
        firewall(run.home, "-D", HEARS_NOTHING)
        with run.agent() as agent:
            run.told.wait_for("host b has joined", lost)
            run.goes_on()
            assert not any(folder.exists() for folder in before)
            run.ends(agent)


def test_an_agent_listens_at_the_address_that_the_topology_gives_it(tmp_path: Path) -> None:
    with running(tmp_path, place="{address: 10.99.0.7}") as run:
        for host, command in (
            (run.away, "addr add 10.99.0.7/32 dev lo"),
            (run.home, f"route add 10.99.0.7/32 via {run.away.address}"),
        ):
            subprocess.run(host.command("ip", *command.split()), check=True, timeout=20)
        with run.agent() as agent:
            run.told.wait_for("host b has joined")
            run.goes_on()
            listening = subprocess.run(run.away.command("ss", "-ltnH"), check=True, capture_output=True, text=True)
            assert {line.split()[3].rpartition(":")[0] for line in listening.stdout.splitlines()} == {"10.99.0.7"}
            run.ends(agent)


def test_an_agent_on_a_host_that_differs_from_home_is_refused_on_both_sides_with_the_reasons(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        command, other = odd_host(tmp_path / "other")
        agent = subprocess.run(
            run.away.command(
                *(*command, sys.executable, "-m", "launch.host", "--access", str(tmp_path / "file"), "--name", "b"),
                *("--run-dir", str(run.away_path)),
            ),
            cwd=ROOT,
            env={**environment(""), **other},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert agent.returncode == 2
        assert begins(agent.stderr.splitlines(), "launch.host: ") == PROBLEMS
        run.told.wait_for("host b is refused: policy.model: no folder")
        assert begins([line for line in run.told.lines if " is refused: " in line], "host b is refused: ") == PROBLEMS
        assert not processes_of(run.away_path)
        assert not run.away_path.exists()


def test_an_operator_at_home_scales_drains_and_reads_what_runs_on_another_host(tmp_path: Path) -> None:
    with running(tmp_path) as run, run.agent() as agent:
        run.told.wait_for("host b has joined")
        run.goes_on()
        assert ctl(run.path, "scale", "rollout", "2").returncode == 0
        wait_for("a second rollout there", lambda: run.state_of("rollout", 1) == "READY", LIMIT_S)
        assert (run.away_path / "logs" / "rollout-1.jsonl").exists()
        assert "READY" in ctl(run.path, "logs", "rollout/1").stdout
        assert ctl(run.path, "drain", "rollout/0").returncode == 0
        wait_for("the drained rollout", lambda: run.state_of("rollout", 0) == "DRAINED", LIMIT_S)
        run.goes_on()
        assert ctl(run.path, "scale", "rollout", "1").returncode == 0
        wait_for("the first rollout again", lambda: run.state_of("rollout", 0) == "READY", LIMIT_S)
        wait_for("the second one to be drained", lambda: run.state_of("rollout", 1) == "DRAINED", LIMIT_S)
        run.goes_on()
        assert ctl(run.away_path, "status").returncode == 0  # the health check of the agent's container
        run.ends(agent)
