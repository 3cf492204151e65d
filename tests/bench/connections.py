"""Measures the cost of a message and of a connection to the scheduler: `python -m tests.bench.connections [N]`.

N clients connect to a real scheduler over TCP with CURVE, as services on other hosts do, and send each kind of request.
For each kind, the program prints a JSON object with the sizes of a request and its answer in bytes, and the CPU time
that the scheduler's process used for the request: transport, decoding, the state machine, the journal and the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import zmq

from proto import codec
from proto.ids import new_incarnation
from proto.messages import (
    Ack,
    CompleteAck,
    GetRunInfo,
    GetStatus,
    Heartbeat,
    HeartbeatAck,
    LeaseGrant,
    LeaseProgress,
    LeaseRequest,
    PublishWeights,
    Register,
    Registered,
    Resolve,
    Resolved,
    RunInfo,
    Status,
)
from proto.registry import Message, Request
from shared.rpc.client import Client
from shared.rundir import RunDir
from shared.security import keys
from shared.security.roles import Role
from tests.bench.scheduler_load import CANARY, lease_request, make_run, result_of
from tests.bench.turns import heading, versions
from tests.weights_refs import weights_ref

CLIENTS = 1000
ADDRESS = "tcp://127.0.0.1:17493"
IN_FLIGHT = 64
CALL_S = 60.0
BEATS = 5
IDLE_S = 4.0
TASKS = 12_500
BLOCK = 4
STORE = ("batch-store", 0)


class Crowd:
    """Clients of one scheduler, each with its own connection."""

    def __init__(self, run: RunDir, process: psutil.Process, count: int) -> None:
        self.process = process
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.context.set(zmq.MAX_SOCKETS, 2 * count + 100)
        self.lives = [new_incarnation() for _ in range(count)]
        self.clients: list[Client] = []
        self._ring = keys.load(run.keys, Role.SERVICE)

    def connect(self, count: int) -> None:
        """Connect clients until there are `count`."""
        lives = self.lives[len(self.clients) : count]
        self.clients += [Client(self.context, ADDRESS, "scheduler/0", life, keys=self._ring) for life in lives]

    async def close(self) -> None:
        for client in self.clients:
            client.close()
        await asyncio.to_thread(self.context.term)

    async def ask(self, requests: Sequence[Request], reply: type[Message]) -> list[Any]:
        """Send a request from each client, `IN_FLIGHT` at a time, and return the answers."""
        limit = asyncio.Semaphore(IN_FLIGHT)

        async def one(client: Client, request: Request) -> Message:
            async with limit:
                return await client.call(request, reply, deadline_s=CALL_S)

        return await asyncio.gather(*map(one, self.clients, requests))

    async def cost(self, requests: Sequence[Request], reply: type[Message], rounds: int = 1) -> list[Any]:
        """Call `ask` `rounds` times, and print the cost."""
        before = _cpu_s(self.process)
        for _ in range(rounds):
            answers = await self.ask(requests, reply)
        used_s = _cpu_s(self.process) - before
        count = rounds * len(requests)
        line = {
            "request": type(requests[0]).__name__,
            "count": count,
            "bytes": _bytes(requests[-1]),
            "answer_bytes": _bytes(answers[-1]),
            "cpu_us": round(used_s / count * 1e6, 1),
        }
        print(json.dumps(line), flush=True)
        return answers


def _bytes(message: Message) -> int:
    """Return the size of a message in bytes, without the overhead of ZMTP and CURVE."""
    return sum(map(len, codec.encode(message, request_id=1, incarnation=1, remaining_s=1.0)))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(run: RunDir, process: psutil.Process, count: int) -> None:
    """Print the cost of `count` connections and of each kind of request."""
    chance = np.random.default_rng(1)
    crowd = Crowd(run, process, count)
    try:
        crowd.connect(1)
        await crowd.ask([GetStatus()], Status)  # the process has started
        fds, rss, cpu_s = process.num_fds(), process.memory_info().rss, _cpu_s(process)
        first, [life, *_] = crowd.clients[0], crowd.lives
        registration = _register(*STORE, life, limit_bytes=1 << 50)
        await first.call(registration, Registered, deadline_s=CALL_S)
        await first.call(GetRunInfo(driver=life), RunInfo, deadline_s=CALL_S)
        await first.call(PublishWeights(driver=life, ref=weights_ref(0, 0, CANARY)), Ack, deadline_s=CALL_S)
        crowd.connect(count)
        await crowd.ask([Resolve(service="batch-store", instance=0)] * count, Resolved)
        more = count - 1
        line = {
            "connections": count,
            "descriptors_each": round((process.num_fds() - fds) / more, 2),
            "bytes_each": (process.memory_info().rss - rss) // more,
            "cpu_us_each": round((_cpu_s(process) - cpu_s) / more * 1e6, 1),
        }
        print(json.dumps(line), flush=True)
        cpu_s = _cpu_s(process)
        await asyncio.sleep(IDLE_S)  # the length of the measurement
        idle = (_cpu_s(process) - cpu_s) / IDLE_S
        print(json.dumps({"idle_connections": count, "cores": round(idle, 4)}), flush=True)
        await crowd.cost([_register("rollout", i, life) for i, life in enumerate(crowd.lives)], Registered)
        await crowd.cost([Resolve(service="batch-store", instance=0)] * count, Resolved, BEATS)
        asked = [_of(i, lease_request(life, BLOCK)) for i, life in enumerate(crowd.lives)]
        grants: list[LeaseGrant] = await crowd.cost(asked, LeaseGrant)
        beats = [_beat(i, life, grants[i].lease_id) for i, life in enumerate(crowd.lives)]
        await crowd.cost(beats, HeartbeatAck, BEATS)
        done = [result_of(grant, life, chance) for grant, life in zip(grants, crowd.lives, strict=True)]
        await crowd.cost(done, CompleteAck)
        await crowd.cost([GetStatus()] * BEATS, Status, BEATS)
    finally:
        await crowd.close()


def _register(service: str, instance: int, life: int, limit_bytes: int = 0) -> Register:
    return Register(
        service=service,
        instance=instance,
        incarnation=life,
        pid=1,
        host="host",
        endpoint="tcp://10.10.10.10:10000",
        limit_bytes=limit_bytes,
        host_id=f"{instance:032x}",
    )


def _of(instance: int, request: LeaseRequest) -> LeaseRequest:
    return msgspec.structs.replace(request, instance=instance)


def _beat(instance: int, life: int, lease: int) -> Heartbeat:
    return Heartbeat(
        service="rollout",
        instance=instance,
        incarnation=life,
        state="READY",
        rss_bytes=1 << 32,
        holds_step=0,
        leases=[LeaseProgress(lease, 1000)],
        progress=1000,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Costs of messages and connections of a scheduler.")
    parser.add_argument("clients", type=int, nargs="?", default=CLIENTS)
    count = parser.parse_args().clients
    print(heading(versions(("pyzmq", "msgspec", "numpy"))))
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), TASKS)
        keys.create(run.keys)
        command = [sys.executable, "-m", "services.scheduler", "--run", str(run.path), "--listen", ADDRESS]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            asyncio.run(measure(run, psutil.Process(child.pid), count))
        finally:
            child.terminate()
            child.wait(20)
            run.remove_volatile()


if __name__ == "__main__":
    main()
