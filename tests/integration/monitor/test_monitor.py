"""Tests the monitor as a process: subscribers receive its state, then every change, and the curves and spans of earlier
steps. A stopped subscriber does not delay the others.
"""

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
from proto.messages import GetSnapshot, History, Snapshot, Telemetry, TopicRow
from shared.actor.telemetry import TelemetrySender
from shared.rpc.client import Client
from shared.rundir import RunDir
from shared.stream import Stream
from tests.integration.monitor.played_run import PlayedRun, metrics_row, monitored
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


LIMIT_S = 40.0


def test_a_late_observer_gets_curves_and_spans_and_sees_a_rewind(tmp_path: Path) -> None:
    async def scenario(played: PlayedRun) -> list[History]:
        found = []
        async with asyncio.timeout(LIMIT_S), Stream(played.run, ended=lambda: False) as stream:
            played.write_steps(30)
            played.emit_all()
            await played.settle()
            found.append(await stream.history())
            rows = played.run.metrics.read_text().splitlines(keepends=True)[:10]
            again = [json.dumps(metrics_row(step, offset=0.2)) + "\n" for step in range(11, 41)]
            played.run.metrics.write_text("".join([*rows, *again]))
            found.append(await stream.history())
        await played.close()
        return found

    with monitored(tmp_path) as run:
        first, second = asyncio.run(scenario(PlayedRun(run)))
    assert first.steps["reward/mean"].tolist() == list(range(1, 31))
    assert first.values["eval/held-out/reward"].tolist() == [metrics_row(20)["eval/held-out/reward"]]
    assert first.newest["step"] == 30
    assert {(row.service, row.values["what"]) for row in first.spans} >= {("rollout", "generate"), ("rollout", "lease")}
    assert second.steps["reward/mean"].tolist() == list(range(1, 41))
    assert second.values["reward/mean"][9] == metrics_row(10)["reward/mean"]
    assert second.values["reward/mean"][10] == metrics_row(11, offset=0.2)["reward/mean"]


def test_the_history_of_a_very_long_run_fits_into_one_message(tmp_path: Path) -> None:
    count, names = 20_000, [f"reward/part/{index}" for index in range(200)]

    async def scenario(played: PlayedRun) -> History:
        with played.run.metrics.open("w") as file:
            for step in range(1, count + 1):
                wide = {name: 0.5 for name in names} if step % 5 == 0 else {}
                file.write(json.dumps({"step": step, "reward/mean": step, **wide}) + "\n")
        async with asyncio.timeout(LIMIT_S), Stream(played.run, ended=lambda: False) as stream:
            return await stream.history()

    with monitored(tmp_path) as run:
        found = asyncio.run(scenario(PlayedRun(run)))
    assert len(found.steps) == len(names) + 1
    steps = found.steps["reward/mean"]
    assert 500 < len(steps) < 4096
    assert steps[-1] == count
    assert (found.values["reward/mean"] == steps).all()


def test_the_subscriber_in_the_documentation_prints_state_and_changes(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "monitor.md").read_text()
    [program] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in program.splitlines() if line.strip()]) <= 20
    assert {"launch", "proto", "services", "shared"}.isdisjoint(re.findall(r"\w+", program.split("\n\n")[0]))
    script = tmp_path / "subscriber.py"
    script.write_text(program)

    async def play(played: PlayedRun, value: float) -> None:
        played.sender("rollout/3").emit("test", {"value": value})
        await played.settle()

    async def scenario(run_path: Path, lines: list[str], played: PlayedRun) -> None:
        await play(played, 1.0)
        process = subprocess.Popen(
            [sys.executable, "-I", str(script), str(run_path)], stdout=subprocess.PIPE, text=True, cwd=tmp_path
        )
        assert process.stdout is not None
        loop = asyncio.get_running_loop()
        try:
            for value in (1.0, 2.0, 3.0):
                if value > 1.0:
                    await play(played, value)
                while f"{{'value': {value}}}" not in (lines or [""])[-1]:
                    async with asyncio.timeout(LIMIT_S):
                        lines.append(await loop.run_in_executor(None, process.stdout.readline))
        finally:
            process.kill()
            process.communicate()
            await played.close()

    lines: list[str] = []
    with monitored(tmp_path) as run:
        asyncio.run(scenario(run.path, lines, PlayedRun(run)))
    rows = [line for line in lines if " test " in line]
    assert [re.sub(r"\d{5,}\.\d+", "T", row.strip()) for row in rows] == [
        f"rollout 3 test T {{'value': {value}}} lost=0" for value in (1.0, 2.0, 3.0)
    ]
