"""Measures the monitor under load: `python -m tests.bench.monitor [--minutes 10] [--rate 10000] [--subscribers 50]`.

The first part measures how many metrics per second the monitor accepts and how much CPU time a metric costs it, with no
subscribers and with many, one of which is stopped. The second part sends `rate` metrics per second for `minutes` and
prints how the monitor's memory changes. A metric is one value.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import zmq

from proto import codec
from proto.messages import Snapshot, Update
from services.monitor.server import PUB
from shared.rundir import RunDir
from tests.bench.turns import TURNS, Spread
from tests.integration.monitor.played_run import PlayedRun, start_monitor

VALUES = 20
"""Number of values in one telemetry message, about as many as services send."""
BURST = 100
"""Number of messages between two snapshot requests, which keep the sender from overfilling its own queue."""
TOPICS = 50
QUIET_S = 0.8
"""Seconds of silence after which a subscriber that was told to stop has received everything. The monitor sends its own
topics every second.
"""
WARM_UP_S = 30.0
SAMPLE_S = 5.0


def emit(played: PlayedRun, number: int) -> None:
    """Send one message of `VALUES` values."""
    values: dict[str, float | str] = {f"some/metric/{index}": number + index / 7 for index in range(VALUES)}
    played.sender("rollout/0").emit(f"bench/{number % TOPICS}", values)


def subscribe(endpoint: str, count: int, pipe: Connection) -> None:
    """Receive with `count` subscribers until told to stop, and then report how many updates were received and lost."""
    context = zmq.Context()
    sockets = []
    for _ in range(count):
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, b"")  # a loss is visible only as a gap in the whole sequence
        socket.connect(endpoint)
        sockets.append(socket)
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    received, lost, last = [0] * count, [0] * count, [0] * count
    index = {socket: position for position, socket in enumerate(sockets)}
    for socket in sockets:
        socket.recv_multipart()  # The subscription is active.
    pipe.send("ready")
    quiet_at = time.monotonic() + QUIET_S
    while not pipe.poll() or time.monotonic() < quiet_at:
        for socket, _ in poller.poll(100):
            quiet_at = time.monotonic() + QUIET_S
            at = index[socket]
            while socket.poll(0):
                frames = socket.recv_multipart()
                received[at] += frames[0].startswith(b"bench/")
                # Only the first subscriber decodes updates. If all did, this process would be the bottleneck.
                if at == 0 or count == 1:
                    body = codec.decode(frames[1:]).body
                    assert isinstance(body, Update)
                    lost[at] += max(body.sequence - last[at] - 1, 0) if last[at] else 0
                    last[at] = body.sequence
    pipe.send((min(received), max(received), lost[0]))


class Subscribers:
    """Subscribers in a separate process."""

    def __init__(self, run: RunDir, count: int) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=subscribe, args=(run.endpoint(PUB, 0), count, theirs))
        self.process.start()
        self._pipe.recv()

    def end(self) -> tuple[int, int, int]:
        """Return the smallest and the largest number of updates that a subscriber received, and how many the first
        subscriber lost."""
        self._pipe.send("end")
        least, most, lost = self._pipe.recv()
        self.process.join()
        return least, most, lost


async def flood(played: PlayedRun, pid: int, messages: int) -> tuple[float, float]:
    """Send `messages` messages as fast as they are accepted. Return metrics/s, and the monitor's CPU µs per metric."""
    process = psutil.Process(pid)
    before, begun = process.cpu_times(), time.monotonic()
    for number in range(messages):
        emit(played, number)
        if number % BURST == BURST - 1:
            await played.settle()
    seconds, after = time.monotonic() - begun, process.cpu_times()
    used_s = after.user + after.system - before.user - before.system
    metrics = messages * VALUES
    return metrics / seconds, 1e6 * used_s / metrics


async def compare(run: RunDir, pid: int, subscribers: int, messages: int) -> None:
    """Measure the throughput alternately without and with subscribers."""
    played = PlayedRun(run)
    rates: dict[int, list[float]] = {0: [], subscribers: []}
    costs: dict[int, list[float]] = {0: [], subscribers: []}
    for turn in range(TURNS):
        for count in (0, subscribers) if turn % 2 == 0 else (subscribers, 0):
            others = Subscribers(run, count - 1) if count else None
            stopped = Subscribers(run, 1) if count else None
            if stopped is not None:
                os.kill(stopped.process.pid or 0, signal.SIGSTOP)
            rate, cost = await flood(played, pid, messages)
            rates[count].append(rate)
            costs[count].append(cost)
            if others is not None and stopped is not None:
                least, most, lost = others.end()
                os.kill(stopped.process.pid or 0, signal.SIGCONT)
                _, woken, missed = stopped.end()
                print(
                    f"  {count - 1} subscribers got {least:,} to {most:,} of {messages:,}, the first lost {lost:,}; ",
                    end="the ",
                )
                print(f"stopped one received {woken:,} afterwards and knows of {missed:,} lost", flush=True)
    await played.close()
    for count in rates:
        rate, cost = Spread(tuple(rates[count])), Spread(tuple(costs[count]))
        print(f"{count} subscribers: {rate.text(',.0f')} metrics/s, {cost.text('.2f')} µs of CPU per metric")


async def sustain(run: RunDir, pid: int, rate: int, minutes: float) -> None:
    """Send `rate` metrics per second, and print the monitor's CPU time and memory."""
    played, process = PlayedRun(run), psutil.Process(pid)
    first = (await _settled(played)).sequence
    begun, number, per_s = time.monotonic(), 0, rate / VALUES
    memory: list[tuple[float, float]] = []
    before, sampled = process.cpu_times(), begun
    while (now := time.monotonic()) < begun + minutes * 60:
        while number < (now - begun) * per_s:
            emit(played, number)
            number += 1
        if now - sampled >= SAMPLE_S:
            sampled = now
            if now - begun >= WARM_UP_S:
                memory.append((now - begun, process.memory_info().rss))
        await asyncio.sleep(0.01)  # This paces the sender.
    seconds = time.monotonic() - begun
    after = process.cpu_times()
    snapshot = await _settled(played)
    used_s = after.user + after.system - before.user - before.system
    taken = sum(row.topic.startswith("bench/") for row in snapshot.rows)
    print(f"{number * VALUES / seconds:,.0f} metrics/s for {seconds / 60:.1f} min: {used_s / seconds:.1%} of a core")
    print(f"{snapshot.sequence - first:,} updates of {number:,} messages, {snapshot.dropped:,} dropped, {taken} topics")
    slope = statistics.linear_regression(*zip(*memory, strict=True)).slope
    sizes = [size / (1 << 20) for _, size in memory]
    print(f"memory {sizes[0]:.2f} MiB to {sizes[-1]:.2f} MiB, slope {slope * 60 / 1024:+.1f} KiB/min")
    await played.close()


async def _settled(played: PlayedRun) -> Snapshot:
    emit(played, 0)
    return await played.settle()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=int, default=10_000, help="metrics per second")
    parser.add_argument("--subscribers", type=int, default=50)
    parser.add_argument("--messages", type=int, default=20_000, help="messages of each turn of the comparison")
    given = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir.create(Path(folder) / "run", shm_root=Path(folder) / "shm")
        monitor = start_monitor(run)
        try:
            asyncio.run(compare(run, monitor.pid, given.subscribers, given.messages))
            asyncio.run(sustain(run, monitor.pid, given.rate, given.minutes))
        finally:
            monitor.kill()
            monitor.wait()
            run.remove_volatile()


if __name__ == "__main__":
    main()
