"""Tests that a launcher reports each problem of a real Ray cluster in one line, before anything starts."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.hosts.odd_host import PROBLEMS, begins, odd_host
from tests.integration.hosts.ray_cluster import (
    RAY_START,
    RayCluster,
    processes_of,
    ray_cluster,
    run_on,
    started_node,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

LIMIT_S = 240.0
PLACES = ("placement={engine: ray, hosts: {b: {}, c: {}}}", "services.rollout={host: [b, c], instances: 2}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster("b", "c") as made:
        yield made


def refused(cluster: RayCluster, path: Path, *settings: str, **environment: str) -> list[str]:
    """Start a run that must not begin, and return the lines that are not warnings."""
    with run_on(cluster, path, *settings, **environment) as launcher:
        output, _ = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 2, output
    assert not path.exists()
    assert not processes_of(path)
    assert not cluster.actors()
    return [line for line in output.splitlines() if not line.startswith(("warning: ", "  "))]


@pytest.mark.parametrize(
    ("settings", "address", "line"),
    [
        (
            ("placement.hosts.nobody={}", "services.rollout.host=nobody", "services.rollout.instances=1"),
            "",
            "placement: host nobody: no node has the label rlbus-host=nobody, and no other node is free (nodes: b, c, ",
        ),
        (("placement.hosts.b={gpus: 2}",), "", "placement: host b: its node has 0 GPUs, but placement.hosts.b.gpus"),
        ((), "127.0.0.1:9", "placement: no Ray cluster at '127.0.0.1:9' (Connection refused); start one with `ray "),
    ],
)
def test_a_cluster_that_cannot_place_the_run_is_refused_with_a_one_line_error(
    settings: tuple[str, ...], address: str, line: str, cluster: RayCluster, tmp_path: Path
) -> None:
    environment = {"RAY_ADDRESS": address} if address else {}
    [said] = refused(cluster, tmp_path / "run", *PLACES, *settings, **environment)
    assert said.startswith(line)


def test_a_port_in_use_on_the_home_host_is_named(cluster: RayCluster, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        [said] = refused(cluster, tmp_path / "run", *PLACES, f"transport.scheduler_port={port}")
    assert said.endswith(f"transport.scheduler_port: {port} cannot be used (Address already in use); choose another")


@contextlib.contextmanager
def another_node(cluster: RayCluster, label: str, folder: Path) -> Iterator[None]:
    """Start a node as a user would, on a host that differs from home in several ways."""
    command, environment = odd_host(folder / "other")
    labels = ("--address", cluster.address, "--labels", f"rlbus-host={label}")
    with started_node(*command, *RAY_START, *labels, **environment):
        yield


def test_a_node_with_another_release_and_no_model_is_refused_with_one_line_for_each_problem(
    cluster: RayCluster, tmp_path: Path
) -> None:
    with another_node(cluster, "odd", tmp_path):
        places = ("placement={engine: ray, hosts: {odd: {}}}", "services.rollout.host=odd")
        said = refused(cluster, tmp_path / "run", *places)
    assert begins(said, "host odd: ") == PROBLEMS


def test_a_dry_run_says_where_everything_would_run_and_starts_nothing(cluster: RayCluster, tmp_path: Path) -> None:
    with run_on(cluster, tmp_path / "run", *PLACES, options=["--dry-run"]) as launcher:
        output, _ = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 0, output
    rows = {line.split()[0]: line for line in output.splitlines() if line.startswith(("rollout/", "scheduler/"))}
    assert " b " in rows["rollout/0"]
    assert " c " in rows["rollout/1"]
    assert " this machine " in rows["scheduler/0"]
    assert f"hosts          b: {socket.gethostname()}, c: {socket.gethostname()}" in output.splitlines()
    assert not (tmp_path / "run").exists()


def test_nodes_without_labels_are_used_if_they_have_enough_gpus(cluster: RayCluster, tmp_path: Path) -> None:
    cluster.add("", num_gpus=2)
    places = ("services.rollout.host=g",)
    with run_on(
        cluster, tmp_path / "run", "placement={engine: ray, hosts: {g: {gpus: 2}}}", *places, options=["--dry-run"]
    ) as launcher:
        output, _ = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 0, output
    assert f"hosts          g: {socket.gethostname()}" in output.splitlines()
    [said] = refused(cluster, tmp_path / "run", "placement={engine: ray, hosts: {g: {gpus: 3}}}", *places)
    assert said.startswith("placement: host g: no node has the label rlbus-host=g, and no other node with 3 GPUs is ")
