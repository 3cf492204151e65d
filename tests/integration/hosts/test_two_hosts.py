"""Tests a store and a reader on two hosts. Each has its own network namespace, and the reader also has its own
/dev/shm."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from proto.tensors import checksum
from shared.dataplane.client import TaskShards
from shared.rundir import RunDir
from shared.security import keys
from tests.integration.store_process import REPOSITORY, STORE, make_run, peer_of
from tests.integration.two_hosts import STORE_ADDRESS, Hosts, command, inside, two_hosts, with_own_memory

MEMORY = 128 << 20
PORT = 17_301
LINE_BYTES_PER_S = 10_000_000
QUEUE_BYTES = 100_000
"""Number of bytes that the link carries in 10 ms. With longer queues, TCP would take longer than the test to share the
link fairly.
"""
KEYS = ["tokens", "logprobs"]


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with two_hosts(switched=getattr(request, "param", "") == "switched") as made:
        yield made


@pytest.fixture
def run(tmp_path: Path, hosts: Hosts) -> Iterator[RunDir]:
    """Create a run whose store listens on the address of its namespace."""
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
    """Put tasks, as a producer on the store's host would."""

    async def main() -> None:
        async with peer_of(run) as peer:
            for begin in range(0, len(tasks), 16):
                await peer.data.put(tasks[begin : begin + 16], store=STORE, deadline_s=20)

    asyncio.run(main())


@contextlib.contextmanager
def reader(hosts: Hosts, run: RunDir, tasks: int, *, told: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Start a reader. If `told` is true, it begins when it receives a line of input."""
    words = [
        sys.executable,
        "-m",
        "tests.integration.hosts.stream_reader",
        str(run.path),
        f"tcp://{STORE_ADDRESS}:{PORT}",
    ]
    process = subprocess.Popen(
        [*with_own_memory(hosts.reader), *words, str(tasks), *KEYS],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE if told else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def made_tasks(count: int, size: int) -> list[TaskShards]:
    rng = np.random.default_rng(3)
    return [
        TaskShards(f"train/0/{i}", 1, {"tokens": rng.integers(0, 50_000, size, np.int32), "logprobs": rng.random(size)})
        for i in range(count)
    ]


def digests(tasks: list[TaskShards]) -> list[dict[str, int]]:
    return [{key: checksum(task.shards[key]) for key in KEYS} for task in tasks]


def shape_line(hosts: Hosts) -> None:
    """Limit the rate at which the store's host sends to `LINE_BYTES_PER_S`."""
    shape = f"root tbf rate {LINE_BYTES_PER_S * 8} burst 64kb latency 50ms"
    command(*inside(hosts.store), "tc", "qdisc", "add", "dev", "rlb0", *shape.split())


def test_shards_cross_a_link_that_loses_two_percent_of_its_packets(hosts: Hosts, run: RunDir) -> None:
    tasks = made_tasks(64, 50_000)  # 38 MB
    put(run, tasks)
    hosts.lose_packets(0.02)
    with reader(hosts, run, len(tasks)) as process:
        out, _ = process.communicate(timeout=100)
    result = json.loads(out.splitlines()[-1])
    assert result["digests"] == digests(tasks)
    # everything was streamed encrypted, and only once
    nbytes = sum(array.nbytes for task in tasks for array in task.shards.values())
    assert nbytes <= result["counts"]["received_bytes"] < 1.01 * nbytes
    assert result["counts"]["refused"] == 0
    print(f"{nbytes / 1e6 / result['seconds']:.1f} MB/s over a line that loses 2 %")


def test_a_fetch_completes_undamaged_over_a_link_that_is_silent_for_seconds(hosts: Hosts, run: RunDir) -> None:
    tasks = made_tasks(64, 50_000)
    put(run, tasks)
    hosts.lose_packets(0.02)
    shape_line(hosts)  # the transfer takes seconds, so that the silence occurs during it
    with reader(hosts, run, len(tasks)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        time.sleep(1.0)
        silent_s = 3.0
        hosts.firewall("-I", "-j", "DROP")
        time.sleep(silent_s)  # the length of the silence is under test
        hosts.firewall("-D", "-j", "DROP")
        out, _ = process.communicate(timeout=100)
    result = json.loads(out.splitlines()[-1])
    assert result["digests"] == digests(tasks)
    assert result["seconds"] > silent_s + 1.0


@pytest.mark.long
@pytest.mark.parametrize("hosts", ["switched"], indirect=True)
def test_readers_share_the_link_fairly(hosts: Hosts, run: RunDir) -> None:
    """Three concurrent processes read the same shards at similar speeds, and each receives every shard only once.

    If they were served in turn, the last would take three times as long as the first.
    """
    tasks = made_tasks(128, 50_000)  # 77 MB: long enough for TCP to share the link
    nbytes = sum(array.nbytes for task in tasks for array in task.shards.values())
    put(run, tasks)
    hosts.use_cubic()
    hosts.queue_in_the_switch(LINE_BYTES_PER_S, QUEUE_BYTES)
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(reader(hosts, run, len(tasks), told=True)) for _ in range(3)]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "begins\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        results = [json.loads(process.communicate(timeout=100)[0].splitlines()[-1]) for process in processes]
    assert all(result["digests"] == digests(tasks) for result in results)
    assert all(nbytes <= result["counts"]["received_bytes"] < 1.01 * nbytes for result in results)
    seconds = [result["seconds"] for result in results]
    assert max(seconds) < 1.5 * min(seconds), seconds
    assert max(seconds) > 0.9 * 3 * nbytes / LINE_BYTES_PER_S, seconds  # the link is the bottleneck
    print(f"{[round(each, 1) for each in seconds]} s for {nbytes / 1e6:.0f} MB each at {LINE_BYTES_PER_S / 1e6:g} MB/s")
