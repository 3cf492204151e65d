"""Observers subscribe to ever more topics of a real monitor. Its memory stays bounded and other subscribers keep their
stream."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import zmq

from proto.ids import new_incarnation
from proto.messages import GetSnapshot, Snapshot
from services.monitor.subscriptions import MOST_TOPICS, TOPIC_BYTES
from shared.rpc.client import Client
from shared.rundir import RunDir
from shared.security import keys
from shared.security.curve import unlock
from shared.security.roles import Role
from tests.integration.tiny.harness import ROOT, environment, wait_for

FLOOD_S = 4.0
GROWTH_BYTES = 96 << 20
ANSWER_S = 30.0


@dataclass
class Monitor:
    """A monitor that other hosts can reach."""

    process: subprocess.Popen[bytes]
    run: RunDir
    stream: str
    """Address of the stream for other hosts."""

    def rss_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def log(self) -> str:
        return self.run.log_file("monitor", 0).read_text()

    def snapshot(self) -> Snapshot:
        """Return the monitor's state. Fails if the monitor does not answer in time."""
        return asyncio.run(snapshot_of(self.run))

    @contextlib.contextmanager
    def peer(self, kind: int) -> Iterator[zmq.Socket[bytes]]:
        """Yield a socket with an observer's key that is connected to the stream."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(kind)
        if kind == zmq.XSUB:
            socket.setsockopt(zmq.SNDHWM, 64)
            socket.setsockopt(zmq.SNDTIMEO, 100)
        unlock(socket, keys.load(self.run.keys, Role.OBSERVER))
        socket.connect(self.stream)
        try:
            yield socket
        finally:
            context.destroy(0)


async def snapshot_of(run: RunDir) -> Snapshot:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = Client(context, run.endpoint("monitor", 0), "monitor/0", new_incarnation())
    try:
        return await client.call(GetSnapshot(), Snapshot, deadline_s=ANSWER_S)
    finally:
        client.close()
        context.destroy(0)


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[Monitor]:
    run = RunDir.create(tmp_path / "run", shm_root=tmp_path / "shm")
    keys.create(run.keys)
    process = subprocess.Popen(
        [sys.executable, "-m", "services.monitor", "--run", str(run.path), "--listen", "tcp://127.0.0.1:0"],
        cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield Monitor(process, run, asyncio.run(snapshot_of(run)).stream)
        assert process.poll() is None, "the monitor died"
    finally:
        process.kill()
        process.wait(10)
        run.remove_volatile()


def subscribed(socket: zmq.Socket[bytes], topic: bytes = b"") -> None:
    """Subscribe, and wait until the subscription is active."""
    socket.setsockopt(zmq.SUBSCRIBE, topic)
    assert socket.poll(int(ANSWER_S * 1000)), "the subscription is not confirmed"


def flood(socket: zmq.Socket[bytes], topic: Callable[[], bytes]) -> None:
    """Subscribe to different topics for FLOOD_S. libzmq reconnects whenever the monitor ends the connection."""
    until = time.monotonic() + FLOOD_S
    while time.monotonic() < until:
        with contextlib.suppress(zmq.Again):
            socket.send(b"\1" + topic())


@pytest.mark.parametrize("length", [8, 900])
def test_an_observer_that_subscribes_without_end_loses_its_connection_and_nobody_else_is_delayed(
    monitor: Monitor, length: int
) -> None:
    with monitor.peer(zmq.SUB) as honest, monitor.peer(zmq.XSUB) as hostile:
        subscribed(honest)
        before = monitor.rss_bytes()
        flood(hostile, lambda: os.urandom(length))
        began = time.monotonic()
        [row] = [row for row in monitor.snapshot().rows if row.topic == "monitor/subscriptions"]
        assert time.monotonic() - began < 5.0
        assert row.values["ended"] >= 1  # type: ignore[operator]
        assert monitor.rss_bytes() - before < GROWTH_BYTES
        while honest.poll(0):
            honest.recv_multipart()
        with monitor.peer(zmq.SUB) as newcomer:
            subscribed(newcomer, b"monitor/")
        assert honest.poll(int(ANSWER_S * 1000)), "the first subscriber has lost its stream"
    said = next(line for line in map(json.loads, monitor.log().splitlines()) if line["event"] == "connection ended")
    assert "topic" in said["why"]


def test_many_connections_with_few_topics_each_are_bounded_together(monitor: Monitor) -> None:
    before = monitor.rss_bytes()
    numbers = itertools.count()
    with monitor.peer(zmq.SUB) as honest, contextlib.ExitStack() as stack:
        subscribed(honest)
        for _ in range(60):
            hostile = stack.enter_context(monitor.peer(zmq.SUB))
            for _ in range(MOST_TOPICS):
                hostile.setsockopt(zmq.SUBSCRIBE, next(numbers).to_bytes(4, "big") * (TOPIC_BYTES // 4))
        wait_for("ended", lambda: "all connections together" in monitor.log(), ANSWER_S)
        assert monitor.rss_bytes() - before < GROWTH_BYTES
        with monitor.peer(zmq.SUB) as newcomer:
            subscribed(newcomer, b"monitor/")


def test_a_subscriber_at_the_limits_is_served_and_may_change_its_topics(monitor: Monitor) -> None:
    with monitor.peer(zmq.SUB) as socket:
        for number in range(3 * MOST_TOPICS):
            if number >= MOST_TOPICS - 1:
                socket.setsockopt(zmq.UNSUBSCRIBE, topic(number - MOST_TOPICS + 1))
            socket.setsockopt(zmq.SUBSCRIBE, topic(number))
        subscribed(socket, b"monitor/")
    assert "connection ended" not in monitor.log()


def topic(number: int) -> bytes:
    return b"%0*d" % (TOPIC_BYTES, number)
