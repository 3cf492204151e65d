"""Tests ranks of one model, and engines to which weights are sent, on two hosts that reach each other only over TCP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launch.commands import access
from shared.rundir import RunDir
from shared.security.roles import Role
from tests.integration import parity_run as parity
from tests.integration.hosts.ray_cluster import Told
from tests.integration.hosts.test_host_agent import HEARS_NOTHING, firewall
from tests.integration.netns import Host, two_hosts
from tests.integration.reference.test_reference_group import assert_scored_as_one_rank_scores, scored_tasks
from tests.integration.tiny.harness import QUICKSTART, ROOT, environment, processes_of, wait_for
from tests.integration.two_hosts import OWN_MEMORY, command

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

LIMIT_S = 400.0
PLAIN = (
    "data.eval={}",
    "algorithm.tasks_per_step=16",
    "services.batch-store.memory=256MiB",
    "checkpoint.every=100",
)
RANKS = ("services.policy-trainer.workers=2",)


@contextlib.contextmanager
def on(host: Host, module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a module on a host, with its own shared memory."""
    child = subprocess.Popen(
        host.command("sh", "-c", OWN_MEMORY, "host", sys.executable, "-m", module, *arguments),
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


@dataclass
class Run:
    """A run whose home is one host, with agents on the other."""

    path: Path
    told: Told
    launcher: subprocess.Popen[str]
    home: Host
    away: Host
    agents: dict[str, subprocess.Popen[str]]

    def rows(self) -> list[dict[str, Any]]:
        file = self.path / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for_step(self, step: int) -> None:
        def committed() -> bool:
            assert self.launcher.poll() is None, "\n".join(self.told.lines[-30:])
            return any(row["step"] >= step for row in self.rows())

        wait_for(f"step {step}", committed, LIMIT_S)

    def log(self, host: str, service: str, instance: int = 0) -> list[dict[str, Any]]:
        folder = self.path / "hosts" / host if host else self.path
        return [json.loads(line) for line in RunDir.open(folder).log_file(service, instance).read_text().splitlines()]

    def kill_rank(self, host: str) -> None:
        """Kill the trainer's rank on a host."""
        [pid] = [
            pid
            for pid in processes_of(self.path / "hosts" / host)
            if b"services.policy_trainer.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(pid, signal.SIGKILL)

    @property
    def shm(self) -> Path:
        """Path by which this process reaches the shared memory of the home host's stores, which is mounted only on that
        host."""
        return Path(f"/proc/{self.launcher.pid}/root{RunDir.open(self.path).shm}")

    def done(self) -> None:
        assert self.launcher.wait(LIMIT_S) == 0, "\n".join(self.told.lines[-30:])


@contextlib.contextmanager
def started(path: Path, hosts: str, *settings: str, small: tuple[str, ...] = parity.SMALL) -> Iterator[Run]:
    """Start a run on the home host, and an agent for each letter of `hosts` on the other machine."""
    with two_hosts() as (home, away), contextlib.ExitStack() as stack:
        places = ", ".join(f"{name}: {{}}" for name in ("a", *hosts))
        given = [*small, *settings, f"placement.hosts={{{places}}}", f"transport.listen={home.address}"]
        words = [word for each in given for word in ("--set", each)]
        launcher = stack.enter_context(on(home, "launch.cluster", str(QUICKSTART), "--run-dir", str(path), *words))
        made = Run(path, Told(launcher), launcher, home, away, {})

        def begun() -> bool:
            assert launcher.poll() is None, "\n".join(made.told.lines)
            return (path / "run.json").exists()

        wait_for("the run directory", begun, LIMIT_S)
        file = path.with_name("access")
        access.export(RunDir.open(path), Role.SERVICE, file)
        for name in hosts:
            where = ("--name", name, "--run-dir", str(path / "hosts" / name))
            made.agents[name] = stack.enter_context(on(away, "launch.host", "--access", str(file), *where))
        yield made


def listening(host: Host) -> set[str]:
    """Return the addresses at which processes on a host accept connections."""
    return {line.split()[3].rpartition(":")[0] for line in command(*host.command("ss", "-Hltn")).splitlines()}


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with parity.start(tmp_path_factory.mktemp("one"), *RANKS) as run:
        assert run.end() == 0, run.output()
        return run.path


def test_ranks_on_two_hosts_give_the_same_bits_as_on_one_host_even_after_a_kill(
    on_one_host: Path, tmp_path: Path
) -> None:
    with started(tmp_path / "run", "b", *RANKS, "services.policy-trainer.host=[a, b]") as run:
        run.wait_for_step(4)
        for host in (run.home, run.away):
            assert listening(host) <= {"127.0.0.1", host.address}
        run.kill_rank("b")
        run.done()
        loaded = [line for line in run.log("", "policy-trainer") if line["event"] == "workers loaded"][-1]
        assert loaded["source"] == "snapshot"
    assert parity.differences(on_one_host, run.path) == []


def test_a_spare_host_takes_the_rank_of_a_lost_one_and_the_run_returns_to_its_checkpoint(
    on_one_host: Path, tmp_path: Path
) -> None:
    with started(tmp_path / "run", "bc", *RANKS, "services.policy-trainer.host=[a, b]") as run:
        run.wait_for_step(4)
        run.agents["b"].kill()
        run.told.wait_for("policy-trainer-worker/1: placed on host c instead of b")
        run.done()
        loaded = [line for line in run.log("", "policy-trainer") if line["event"] == "workers loaded"][-1]
        assert loaded["source"] == "checkpoint"
        assert loaded["step"] in (3, 6, 9)
    assert parity.differences(on_one_host, run.path) == []


def test_ranks_separated_by_a_partition_form_a_new_group_when_the_partition_heals(
    on_one_host: Path, tmp_path: Path
) -> None:
    with started(tmp_path / "run", "b", *RANKS, "services.policy-trainer.host=[a, b]") as run:
        run.wait_for_step(4)
        firewall(run.away, "-I", HEARS_NOTHING)
        lost = run.told.wait_for("host b is lost: its agent has been silent")
        firewall(run.away, "-D", HEARS_NOTHING)
        run.told.wait_for("host b has joined", lost)
        run.done()
    assert parity.differences(on_one_host, run.path) == []


def test_weights_sent_to_another_host_over_gloo_give_the_same_bits_as_on_one_host(
    on_one_host: Path, tmp_path: Path
) -> None:
    away = ("services.policy-trainer.host=a", "services.rollout={host: b, weights: gloo, block_tasks: 4}")
    with started(tmp_path / "run", "b", *RANKS, *away) as run:
        run.done()
        assert {row["sync/sent"] for row in run.rows() if row["step"]} == {1.0}
        loaded = [line for line in run.log("b", "rollout") if line["event"] == "transfer failed, the shards are used"]
        assert loaded == []
    assert parity.differences(on_one_host, run.path) == []


def test_a_two_stage_megatron_trainer_on_two_hosts_continues_after_a_kill(tmp_path: Path) -> None:
    stages = "services.policy-trainer={host: [a, b], backend: megatron, parallel: {pp: 2}}"
    with started(tmp_path / "run", "b", stages, *PLAIN, "run.steps=6", "staleness=0", small=()) as run:
        run.wait_for_step(2)
        run.kill_rank("b")
        run.done()
    assert [row["step"] for row in run.rows()] == list(range(1, 7))
    assert max(row["rollout/logprob_mismatch"] for row in run.rows()) <= 1e-4


def test_a_two_stage_reference_on_two_hosts_scores_like_one_rank_and_survives_the_loss_of_a_host(
    tmp_path: Path,
) -> None:
    places = (
        "services.policy-trainer.host=a",
        "services.reference={host: [a, b], backend: megatron, parallel: {pp: 2}}",
    )
    with started(tmp_path / "run", "bc", *places, *PLAIN, "run.steps=30", small=()) as run:
        run.wait_for_step(1)
        shards = scored_tasks(run.shm)
        run.agents["b"].kill()
        run.told.wait_for("reference/1: placed on host c instead of b")
        run.done()
        assert run.log("c", "reference", 1)
    assert_scored_as_one_rank_scores(shards)
    assert [row["step"] for row in run.rows()] == list(range(1, 31))
