"""A store and a reader on two hosts: network namespaces of their own, the reader with a /dev/shm of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from proto.tensors import checksum
from shared.dataplane.client import TaskShards
from shared.rundir import RunDir
from shared.security import keys
from tests.integration.store_process import REPOSITORY, STORE, make_run, peer_of

MEMORY = 128 << 20
STORE_ADDRESS, READER_ADDRESS = "10.203.77.1", "10.203.77.2"
PORT = 17_301
KEYS = ["tokens", "logprobs"]


OWN_MEMORY = 'mount -t tmpfs none /dev/shm && exec "$@"'
"""`ip netns exec` gives a process mounts of its own; this makes its shared memory its own too."""


def inside(host: str) -> list[str]:
    return ["ip", "netns", "exec", host]


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=10)


@dataclass(frozen=True)
class Hosts:
    """Two namespaces, joined by one line."""

    store: str
    reader: str

    def firewall(self, action: str, *rule: str) -> None:
        """On both ends, for what comes in."""
        for host in (self.store, self.reader):
            command(*inside(host), "iptables", action, "INPUT", *rule)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    for tool in ("ip", "iptables"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (apt package {'iproute2' if tool == 'ip' else tool})")
    made = Hosts(f"rlbus-s{os.getpid()}", f"rlbus-r{os.getpid()}")
    try:
        try:
            for host in (made.store, made.reader):
                command("ip", "netns", "add", host)
            command("ip", "-n", made.store, "link", "add", "rlb0", "type", "veth", "peer", "name", "rlb1")
            command("ip", "-n", made.store, "link", "set", "rlb1", "netns", made.reader)
            for host, link, address in ((made.store, "rlb0", STORE_ADDRESS), (made.reader, "rlb1", READER_ADDRESS)):
                command("ip", "-n", host, "addr", "add", f"{address}/24", "dev", link)
                for each in (link, "lo"):
                    command("ip", "-n", host, "link", "set", each, "up")
            made.firewall("-A", "-i", "lo", "-j", "ACCEPT")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.cmd}: {error.stderr.decode().strip()}")
        yield made
    finally:
        for host in (made.store, made.reader):
            with contextlib.suppress(subprocess.CalledProcessError):
                command("ip", "netns", "del", host)


@pytest.fixture
def run(tmp_path: Path, hosts: Hosts) -> Iterator[RunDir]:
    """A run whose store serves on its namespace's address."""
    made = make_run(tmp_path, memory=MEMORY)
    keys.create(made.keys)
    listen = f"tcp://{STORE_ADDRESS}:{PORT}"
    store = subprocess.Popen(
        [
            *inside(hosts.store),
            sys.executable,
            "-m",
            "services.batch_store",
            "--run",
            str(made.path),
            "--listen",
            listen,
        ],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield made
    finally:
        store.terminate()
        try:
            store.wait(10)
        except subprocess.TimeoutExpired:
            store.kill()
            store.wait(10)
        made.remove_volatile()


def put(run: RunDir, tasks: list[TaskShards]) -> None:
    """As a producer on the store's host does."""

    async def main() -> None:
        async with peer_of(run) as peer:
            for begin in range(0, len(tasks), 16):
                await peer.data.put(tasks[begin : begin + 16], store=STORE, deadline_s=20)

    asyncio.run(main())


@contextlib.contextmanager
def reader(hosts: Hosts, run: RunDir, tasks: int) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "tests.integration.stream_reader", str(run.path), f"tcp://{STORE_ADDRESS}:{PORT}"]
    process = subprocess.Popen(
        [*inside(hosts.reader), "sh", "-c", OWN_MEMORY, "reader", *words, str(tasks), *KEYS],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


def made_tasks(count: int, size: int) -> list[TaskShards]:
    rng = np.random.default_rng(3)
    return [
        TaskShards(f"train/0/{i}", 1, {"tokens": rng.integers(0, 50_000, size, np.int32), "logprobs": rng.random(size)})
        for i in range(count)
    ]


def digests(tasks: list[TaskShards]) -> list[dict[str, int]]:
    return [{key: checksum(task.shards[key]) for key in KEYS} for task in tasks]


def test_shards_cross_a_line_that_loses_two_packets_in_a_hundred(hosts: Hosts, run: RunDir) -> None:
    tasks = made_tasks(64, 50_000)  # 38 MB
    put(run, tasks)
    hosts.firewall("-A", "-m", "statistic", "--mode", "random", "--probability", "0.02", "-j", "DROP")
    with reader(hosts, run, len(tasks)) as process:
        out, _ = process.communicate(timeout=100)
    result = json.loads(out.splitlines()[-1])
    assert result["digests"] == digests(tasks)
    # everything came over the line, sealed, once
    nbytes = sum(array.nbytes for task in tasks for array in task.shards.values())
    assert nbytes <= result["counts"]["received_bytes"] < 1.01 * nbytes
    assert result["counts"]["refused"] == 0
    print(f"{nbytes / 1e6 / result['seconds']:.1f} MB/s over a line that loses 2 %")


def test_line_that_goes_silent_for_seconds_delays_and_damages_nothing(hosts: Hosts, run: RunDir) -> None:
    if shutil.which("tc") is None:
        pytest.skip("tc is not installed (apt package iproute2)")
    tasks = made_tasks(64, 50_000)
    put(run, tasks)
    hosts.firewall("-A", "-m", "statistic", "--mode", "random", "--probability", "0.02", "-j", "DROP")
    # 10 MB/s: the transfer takes seconds, so that the silence falls into it
    shaped = "root tbf rate 80mbit burst 64kb latency 50ms"
    command(*inside(hosts.store), "tc", "qdisc", "add", "dev", "rlb0", *shaped.split())
    with reader(hosts, run, len(tasks)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        time.sleep(1.0)
        silent_s = 3.0
        hosts.firewall("-I", "-j", "DROP")
        time.sleep(silent_s)  # the length of the silence is what is tested
        hosts.firewall("-D", "-j", "DROP")
        out, _ = process.communicate(timeout=100)
    result = json.loads(out.splitlines()[-1])
    assert result["digests"] == digests(tasks)
    assert result["seconds"] > silent_s + 1.0
