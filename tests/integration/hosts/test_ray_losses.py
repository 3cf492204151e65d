"""Tests runs on a real Ray cluster whose nodes, actors, agents and launcher are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.integration.hosts.ray_cluster import (
    RayCluster,
    Told,
    assert_nothing_left,
    processes_of,
    ray_cluster,
    run_on,
    volatile_folders,
)
from tests.integration.tiny.harness import ctl, wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

LIMIT_S = 240.0
ENDLESS = "run.steps=100000"
PLACES = ("placement={engine: ray, hosts: {b: {}, c: {}, late: {}}}", "services.rollout={host: [b, c], instances: 2}")
"""No service needs the host `late`, which has no node at first."""


@contextlib.contextmanager
def three_nodes(path: Path) -> Iterator[tuple[RayCluster, subprocess.Popen[str], Told]]:
    """Run the quickstart with a rollout on each of two nodes, and yield once training has begun."""
    with ray_cluster("b", "c") as cluster, run_on(cluster, path, *PLACES, ENDLESS) as launcher:
        told = Told(launcher)
        wait_for("training", lambda: told.step() >= 2 or launcher.poll() is not None, LIMIT_S)
        assert launcher.poll() is None, "\n".join(told.lines[-30:])
        yield cluster, launcher, told


def goes_on(told: Told) -> None:
    """Wait for two more steps."""
    before = told.step()
    wait_for("two more steps", lambda: told.step() >= before + 2, LIMIT_S)


def ends(cluster: RayCluster, launcher: subprocess.Popen[str], path: Path, earlier: Sequence[Path] = ()) -> None:
    """Stop the run and check what it leaves behind. `earlier` are folders of hosts that were lost."""
    folders = volatile_folders(path)
    assert ctl(path, "stop").returncode == 0
    launcher.wait(LIMIT_S)
    assert_nothing_left(path, [*folders, *earlier], cluster)


def test_the_work_of_a_killed_node_moves_to_another_and_the_node_may_return(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with three_nodes(path) as (cluster, launcher, told):
        before = volatile_folders(path)
        begun = time.monotonic()
        cluster.kill("c")
        lost = told.wait_for("host c is lost: its (node is dead|agent ended)|host c is lost: the actor")
        print(f"noticed after {time.monotonic() - begun:.1f} s")
        told.wait_for(r"rollout/1: placed on host b instead of c", lost - 1)
        goes_on(told)
        assert not [each for each in processes_of(path / "hosts" / "c") if each.is_running()]
        cluster.add("c")
        told.wait_for("host c has joined", lost)
        cluster.add("late")
        told.wait_for("host late has joined", lost)
        goes_on(told)
        ends(cluster, launcher, path, before)


def agent_of(path: Path, host: str) -> psutil.Process:
    """Return the agent of a host."""
    [agent] = [each for each in processes_of(path / "hosts" / host) if "launch.host" in each.cmdline()]
    return agent


def test_a_killed_actor_or_agent_is_replaced_and_the_run_continues(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with three_nodes(path) as (cluster, launcher, told):
        before = volatile_folders(path)
        agent = agent_of(path, "b")
        actor = agent.parent()
        assert actor is not None
        os.kill(actor.pid, signal.SIGKILL)
        lost = told.wait_for("host b is lost: its agent('s actor)? ended")
        told.wait_for("host b has joined", lost)
        goes_on(told)
        os.kill(agent_of(path, "c").pid, signal.SIGKILL)
        lost = told.wait_for("host c is lost: its agent ended", lost)  # The actor reports that its agent was killed.
        told.wait_for("host c has joined", lost)
        goes_on(told)
        ends(cluster, launcher, path, before)


def test_a_killed_launcher_leaves_nothing_on_any_host_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with three_nodes(path) as (cluster, launcher, told):
        folders = volatile_folders(path)
        assert len(folders) == 6
        assert len(cluster.actors()) == 2
        os.kill(launcher.pid, signal.SIGKILL)
        assert_nothing_left(path, folders, cluster)
        steps = f"run.steps={told.step() + 3}"
        with run_on(cluster, path, *PLACES, steps, options=["--resume"]) as resumed:
            output, _ = resumed.communicate(timeout=LIMIT_S)
        assert resumed.returncode == 0, output
        assert_nothing_left(path, [], cluster)


def test_a_detached_run_goes_on_without_its_launcher_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "run"
    detached = (*PLACES, ENDLESS)
    with ray_cluster("b", "c") as cluster, run_on(cluster, path, *detached, options=["--detach"]) as launcher:
        output, _ = launcher.communicate(timeout=LIMIT_S)
        assert launcher.returncode == 0, output
        folders = volatile_folders(path)
        steps = path / "metrics.jsonl"
        wait_for("two steps", lambda: steps.exists() and len(steps.read_text().splitlines()) >= 2, LIMIT_S)
        assert [each for each in processes_of(path) if "launch.placement.ray_keeper" in each.cmdline()]
        assert ctl(path, "stop").returncode == 0
        assert_nothing_left(path, folders, cluster)


def test_a_spare_host_takes_over_the_reference_with_model_and_data_from_home(tmp_path: Path) -> None:
    path = tmp_path / "run"
    places = (
        "placement={engine: ray, hosts: {b: {}, c: {}, spare: {}}}",
        "services.rollout.host=b",
        "services.reference.host=c",
        "policy.distribute=true",
    )
    with ray_cluster("b", "c", "spare") as cluster, run_on(cluster, path, *places, ENDLESS) as launcher:
        told = Told(launcher)
        wait_for("training", lambda: told.step() >= 2 or launcher.poll() is not None, LIMIT_S)
        assert launcher.poll() is None, "\n".join(told.lines[-30:])
        for host in ("b", "c", "spare"):
            assert list((path / "hosts" / host / "files").rglob("*.safetensors"))
        before = volatile_folders(path)
        cluster.kill("c")
        told.wait_for("reference/0: placed on host spare instead of c")
        goes_on(told)
        ends(cluster, launcher, path, before)


def test_a_second_run_on_the_same_nodes_is_refused(tmp_path: Path) -> None:
    with three_nodes(tmp_path / "first") as (cluster, _launcher, told):
        with run_on(cluster, tmp_path / "second", *PLACES) as second:
            output, _ = second.communicate(timeout=LIMIT_S)
        assert second.returncode == 2
        assert "host b: its node is already a host of run 'first'; end that run first" in output
        goes_on(told)
