"""Tests the monitor as a process: it sends subscribers its state and then every change, and a stopped subscriber does
not delay the others."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from proto.ids import new_incarnation
from proto.messages import GetSnapshot, Snapshot, Telemetry, TopicRow
from shared.actor.telemetry import TelemetrySender
from shared.rpc.client import Client
from shared.rundir import RunDir
from shared.stream import Stream
from tests.integration.tiny.harness import ROOT, environment, launched, wait_for

CALL_S = 10.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    run = RunDir.create(tmp_path / "run", shm_root=tmp_path / "shm")
    yield run
    run.remove_volatile()


class Monitor:
    """A process of `python -m services.monitor` that a test starts and kills."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.monitor", "--run", str(self.run.path)],
            cwd=ROOT,
            env=environment(),
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def monitor(run: RunDir) -> Iterator[Monitor]:
    here = Monitor(run)
    yield here
    here.kill()


class Sender:
    """Sends the telemetry of a service."""

    def __init__(self, run: RunDir, service: str = "rollout") -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        incarnation = new_incarnation()
        self._sender = TelemetrySender(service, 0, incarnation)
        self.client = Client(self._context, run.endpoint("monitor", 0), "monitor/0", incarnation)
        self._sender.connect(self.client)

    def emit(self, value: float, topic: str = "test") -> None:
        self._sender.emit(topic, {"value": value})
        self._sender.flush()

    def emit_large(self, number: int) -> None:
        self._sender.emit("test", {"value": float(number), "pad": "x" * 4000})
        self._sender.flush()

    async def snapshot(self) -> Snapshot:
        return await self.client.call(GetSnapshot(), Snapshot, deadline_s=CALL_S)

    async def close(self) -> None:
        self.client.close()
        await asyncio.get_running_loop().run_in_executor(None, self._context.term)


def subscriber(run: RunDir, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "launch.monitor", "--run", str(run.path), "--json", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
    )


async def take(rows: asyncio.Queue[TopicRow], last: float) -> list[float]:
    """Return the values of topic `test` up to `last`."""
    values: list[float] = []
    async with asyncio.timeout(CALL_S):
        while not values or values[-1] != last:
            row = await rows.get()
            if row.topic == "test":
                values.append(float(row.values["value"]))
    return values


async def pump(run: RunDir, queue: asyncio.Queue[TopicRow], streams: list[Stream]) -> None:
    async with Stream(run, ended=lambda: False) as stream:
        streams.append(stream)
        async for row in stream.rows():
            queue.put_nowait(row)


def test_late_subscriber_gets_the_state_then_every_change_in_order(run: RunDir, monitor: Monitor) -> None:
    async def scenario() -> list[float]:
        sender = Sender(run)
        for value in range(5):
            sender.emit(value)
        await sender.snapshot()  # The monitor handles this request after the earlier telemetry on the same connection.
        queue: asyncio.Queue[TopicRow] = asyncio.Queue()
        task = asyncio.create_task(pump(run, queue, []))
        first = await take(queue, 4)
        for value in range(5, 500):
            sender.emit(value)
        rest = await take(queue, 499)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await sender.close()
        return first + rest

    assert asyncio.run(scenario()) == [float(value) for value in range(4, 500)]


BURST = 250
"""Number of rows sent before the subscriber on the same event loop reads again. They fit into its bounded queues."""


def test_stopped_subscriber_does_not_delay_others_and_catches_up_with_a_snapshot(run: RunDir, monitor: Monitor) -> None:
    count = 20_000
    stopped = subscriber(run, "--topic", "test")

    async def scenario() -> tuple[list[float], float]:
        sender = Sender(run)
        sender.emit(-1)
        queue: asyncio.Queue[TopicRow] = asyncio.Queue()
        streams: list[Stream] = []
        task = asyncio.create_task(pump(run, queue, streams))
        await take(queue, -1)
        # The snapshot might arrive before the subscription is active.
        live = asyncio.create_task(take(queue, -2))
        while not live.done():
            sender.emit(-2)
            await asyncio.sleep(0.05)  # This paces the repetitions.
        await live
        assert stopped.stdout is not None
        await asyncio.get_running_loop().run_in_executor(None, stopped.stdout.readline)
        stopped.send_signal(signal.SIGSTOP)
        slowest = 0.0
        values: list[float] = []
        for begin in range(0, count, BURST):
            for number in range(begin, begin + BURST):
                sender.emit_large(number)
            begun = time.monotonic()
            values += await take(queue, begin + BURST - 1)
            slowest = max(slowest, time.monotonic() - begun)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await sender.close()
        return values, slowest

    try:
        values, slowest = asyncio.run(scenario())
        received = [value for value in values if value >= 0]
        assert received == [float(number) for number in range(count)], "the healthy subscriber lost updates"
        assert slowest < 5.0
        stopped.send_signal(signal.SIGCONT)
        assert stopped.stdout is not None
        seen: list[float] = []
        for line in stopped.stdout:
            seen.append(json.loads(line)["values"]["value"])
            if seen[-1] == count - 1:
                break
        assert seen == sorted(seen)
        assert len(seen) < count, "80 MB cannot have waited in bounded queues"
        stopped.terminate()
        told = stopped.communicate(timeout=CALL_S)[1].splitlines()
        lost = sum(int(re.fullmatch(r"launch\.monitor: (\d+) updates lost, .*", line)[1]) for line in told)  # type: ignore[index]
        assert lost >= count - len(seen)
    finally:
        stopped.kill()
        stopped.communicate()


def test_the_stream_continues_after_the_monitor_is_killed(run: RunDir, monitor: Monitor) -> None:
    async def scenario() -> None:
        sender = Sender(run)
        sender.emit(1)
        queue: asyncio.Queue[TopicRow] = asyncio.Queue()
        task = asyncio.create_task(pump(run, queue, []))
        await take(queue, 1)
        monitor.kill()
        monitor.start()
        await sender.snapshot()  # This waits for the restarted monitor.
        for value in range(2, 10):
            sender.emit(value)
        await take(queue, 9)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await sender.close()

    asyncio.run(scenario())


def test_drops_reported_by_senders_are_counted(run: RunDir, monitor: Monitor) -> None:
    async def scenario() -> int:
        sender = Sender(run)
        sender.client.tell(
            Telemetry(
                service="rollout", instance=0, incarnation=3, sequence=9, dropped=7, at=0.0, topic="test", values={}
            )
        )
        dropped = (await sender.snapshot()).dropped
        await sender.close()
        return dropped

    assert asyncio.run(scenario()) == 7


def test_the_command_filters_by_topic_and_exits_with_0_when_interrupted(run: RunDir, monitor: Monitor) -> None:
    async def send() -> None:
        sender = Sender(run)
        sender.emit(1, "wanted/a")
        sender.emit(2, "other")
        await sender.snapshot()
        await sender.close()

    asyncio.run(send())
    command = subscriber(run, "--topic", "wanted/", "--topic", "also/")
    assert command.stdout is not None
    line = json.loads(command.stdout.readline())
    command.send_signal(signal.SIGINT)
    output, errors = command.communicate(timeout=CALL_S)
    assert set(line) == {"service", "instance", "topic", "at", "values"}
    assert (line["service"], line["instance"], line["topic"], line["values"]) == (
        "rollout",
        0,
        "wanted/a",
        {"value": 1},
    )
    assert command.returncode == 0, errors
    assert output == ""


def test_the_command_shows_the_cluster_and_exits_when_the_run_ends(tmp_path: Path) -> None:
    with launched(tmp_path / "run") as here:
        here.wait_ready()
        command = subscriber(here.run, "--topic", "cluster/")
        lines: list[dict[str, object]] = []
        assert command.stdout is not None
        wait_for(
            "the cluster's status",
            lambda: (
                lines.append(json.loads(command.stdout.readline()))  # type: ignore[func-returns-value,union-attr]
                or {line["topic"] for line in lines} >= {"cluster/status", "cluster/services"}
            ),
        )
        (here.path / "finish").touch()
        assert here.end()[0] == 0
        command.communicate(timeout=CALL_S)
        assert command.returncode == 0
    status = next(line["values"] for line in lines if line["topic"] == "cluster/status")
    assert isinstance(status, dict)
    assert status["steps"] == 1
    assert status["tasks/PENDING"] == 3


def test_the_command_exits_quietly_when_its_reader_closes_the_pipe(run: RunDir, monitor: Monitor) -> None:
    command = subscriber(run)
    assert command.stdout is not None
    command.stdout.readline()
    command.stdout.close()

    async def send() -> None:
        sender = Sender(run)
        for value in range(100):
            sender.emit(value)
        await sender.snapshot()
        await sender.close()

    asyncio.run(send())
    assert command.stderr is not None
    assert command.wait(timeout=CALL_S) == 0
    assert command.stderr.read() == ""
    command.stderr.close()
