"""A Ray cluster of several raylets on this machine, and helpers that run the quickstart on it. The raylets share an
address and a file system."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest

from tests.integration.tiny.harness import QUICKSTART, ROOT, free_ports, wait_for

STORE_BYTES = 80 << 20
NOTICED = {"period_ms": "1000", "timeout_ms": "2000", "failure_threshold": "2"}
"""Settings with which Ray notices a dead node within two seconds."""
LIMIT_S = 120.0
RAY_START = [
    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
    *("--num-cpus", "1", "--object-store-memory", str(STORE_BYTES)),
]
"""The command that starts a node as a user would, without its address and labels."""


@dataclass
class RayCluster:
    """The cluster with its nodes by label. `home` is the head."""

    cluster: Any
    folder: str
    nodes: dict[str, Any] = field(default_factory=dict)
    prefix: Sequence[str] = ()

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, label: str, **resources: int) -> None:
        """Add a node. With an empty `label`, the node has no label."""
        labels = {"rlbus-host": label} if label else {}
        self.nodes[label] = self.cluster.add_node(
            num_cpus=1, object_store_memory=STORE_BYTES, labels=labels, **resources
        )

    def kill(self, label: str) -> None:
        """Kill the raylet of a node, as the loss of its host would."""
        self.cluster.remove_node(self.nodes.pop(label), allow_graceful=False)

    def actors(self) -> list[psutil.Process]:
        """Return the processes of the actors that keep agents."""
        raylets = [each for each in processes_of(Path(self.folder)) if each.name() == "raylet"]
        return [each for raylet in raylets for each in raylet.children() if "HostKeeper" in " ".join(each.cmdline())]


class Nodes(Protocol):
    """The nodes of a Ray cluster. Commands on its head begin with `prefix`."""

    @property
    def address(self) -> str: ...

    @property
    def prefix(self) -> Sequence[str]: ...


@contextlib.contextmanager
def ray_cluster(*labels: str) -> Iterator[RayCluster]:
    """Start a head node, and one more node for each label. Ray's files are in a separate folder with a short path."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="rl-ray-")
    before = dict(os.environ)
    settings = {f"health_check_{name}": value for name, value in NOTICED.items()} | {"worker_niceness": "0"}
    os.environ.update({f"RAY_{name}": value for name, value in settings.items()})
    # Ray writes the cluster's address into `ray` in its default folder, and expects both folders to exist.
    os.environ["RAY_TMPDIR"] = folder
    os.mkdir(os.path.join(folder, "ray"))
    try:
        head = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False, "temp_dir": folder}
        made = RayCluster(
            Cluster(initialize_head=True, head_node_args={**head, "labels": {"rlbus-host": "home"}}), folder
        )
        try:
            for label in labels:
                made.add(label)
            yield made
        finally:
            made.cluster.shutdown()
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def run_on(
    cluster: Nodes, path: Path, *settings: str, options: Sequence[str] = (), **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """Start the quickstart in `path` on the cluster. Any process that is left is killed at the end of the test."""
    ports = [f"{key}={port}" for key, port in free_ports().items()]
    given = [*ports, "services.batch-store.memory=256MiB", "data.eval={}", *settings]
    process = subprocess.Popen(
        [
            *(*cluster.prefix, sys.executable, "-m", "launch.cluster", str(QUICKSTART), "--run-dir", str(path)),
            *(word for each in given for word in ("--set", each)),
            *options,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": cluster.address, **environment},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
        for each in processes_of(path):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


class Told:
    """The lines that a launcher has printed so far."""

    def __init__(self, launcher: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        self._launcher = launcher
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._launcher.stdout is not None
        for line in self._launcher.stdout:
            self.lines.append(line.rstrip())

    def wait_for(self, pattern: str, after: int = 0, limit_s: float = 2 * LIMIT_S) -> int:
        """Wait for a line, from line `after` on, that matches the pattern. Return the number of the next line."""

        def found() -> int:
            for number, line in enumerate(self.lines[after:], after):
                if re.search(pattern, line):
                    return number + 1
            assert self._launcher.poll() is None, "\n".join(self.lines[-30:])
            return 0

        return int(wait_for(pattern, found, limit_s))

    def step(self) -> int:
        """Return the last committed step that was printed."""
        return max((int(each) for line in self.lines for each in re.findall(r"step (\d+)/", line)), default=0)


@contextlib.contextmanager
def started_node(*command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run `command`, which ends with `ray start … --block`, and yield once its node is part of the cluster."""
    node = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}
    )
    try:
        assert node.stdout is not None
        said = []
        for line in node.stdout:
            said.append(line)
            if "Ray runtime started" in line:
                break
        assert node.poll() is None, "".join(said)
        yield node
    finally:
        node.kill()
        node.communicate()


def processes_of(path: Path) -> list[psutil.Process]:
    """Return the processes whose command line names the run: launcher, keeper of its hosts, agents, services."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and any(str(path) in word for word in process.cmdline()):
                found.append(process)
    return found


def volatile_folders(path: Path) -> list[Path]:
    """Return the run's folders for sockets and shared memory on all of its hosts."""
    found = []
    for file in (path / "run.json", *path.glob("hosts/*/run.json")):
        data = json.loads(file.read_text())
        found += [Path(data["sockets"]), Path(data["shm"])]
    return found


def assert_nothing_left(path: Path, folders: list[Path], cluster: RayCluster | None = None) -> None:
    """Check that, within a moment, no process of the run, none of `folders` and no actor of the cluster is left."""
    wait_for("no process left", lambda: not processes_of(path), 40)
    if cluster is not None:
        wait_for("no actor left", lambda: not cluster.actors(), 20)
    wait_for("no sockets or shared memory left", lambda: not any(folder.exists() for folder in folders), 20)
