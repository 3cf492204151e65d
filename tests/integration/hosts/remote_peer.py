"""A process on another host in the security tests: `python -m tests.integration.hosts.remote_peer WHAT ...`.

Prints one JSON object. The process must never see the home host's sockets.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import zmq

from proto import codec
from proto.ids import new_incarnation
from proto.messages import (
    GetInventory,
    GetSnapshot,
    GetStatus,
    GetStoreStats,
    Inventory,
    Ping,
    Pong,
    Snapshot,
    Status,
    StoreStats,
)
from shared.actor.service import Service
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rpc.transport import open_socket
from shared.rundir import RunDir
from shared.security.curve import unlock
from shared.security.keys import Keyring, load
from shared.security.roles import Role

CALL_S = 20.0
REFUSED_S = 2.0
STREAM_MS = 20_000
TOPIC = "remote/hello"


class Visitor(Service):
    """Sends a request to each service, publishes telemetry, and exits."""

    NAME = "visitor"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        self.found: dict[str, Any] = {}

    async def serve(self) -> None:
        store, monitor = self.client("batch-store", 0), self.client("monitor")
        stats = await store.call(GetStoreStats(), StoreStats, deadline_s=CALL_S)
        await monitor.call(Ping(), Pong, deadline_s=CALL_S)
        self.telemetry.emit(TOPIC, {"x": 1.0})
        while TOPIC not in (topics := await self._topics(monitor)):  # The subscriber is in another process.
            await asyncio.sleep(0.05)
        status = await self.scheduler.call(GetStatus(), Status, deadline_s=CALL_S)
        while not any(row.service == self.NAME for row in status.services):
            status = await self.scheduler.call(GetStatus(), Status, deadline_s=CALL_S)
        self.found = {
            "scheduler": self.scheduler.endpoint,
            "store": store.endpoint,
            "monitor": monitor.endpoint,
            "bytes": stats.bytes,
            "registered": True,
            "topic_seen": TOPIC in topics,
        }

    @staticmethod
    async def _topics(monitor: Client) -> set[str]:
        snapshot = await monitor.call(GetSnapshot(), Snapshot, deadline_s=CALL_S)
        return {row.topic for row in snapshot.rows}


async def visit(path: str) -> dict[str, Any]:
    service = Visitor(RunDir.open(Path(path)), 0)
    async with asyncio.timeout(2 * CALL_S):
        await service.run_until_stopped()
    return {"state": service.state, "cause": service.cause, **service.found}


async def knock(endpoint: str, folder: str, role: str, home: str, *, clear_text: bool) -> dict[str, Any]:
    """Send a Ping with the keys of `folder` and the server's real key; return whether it is answered."""
    own = load(Path(folder), Role.of_label(role))
    known = load(Path(home), Role.SERVICE).known
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    if not clear_text:
        unlock(socket, Keyring(own.role, own.public, own.secret, known))
    socket.connect(endpoint)
    ping = codec.encode(Ping(), request_id=1, incarnation=new_incarnation(), remaining_s=CALL_S)
    socket.send_multipart(ping, zmq.DONTWAIT)  # Without DONTWAIT, a refused connection would block forever.
    wait_s = CALL_S if own.role == Role.OPERATOR else REFUSED_S
    answered = bool(await asyncio.to_thread(socket.poll, int(wait_s * 1000)))
    context.destroy(0)
    return {"answered": answered}


async def watch(endpoint: str, folder: str) -> dict[str, Any]:
    ring = load(Path(folder), Role.OBSERVER)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = Client(context, endpoint, "monitor/0", new_incarnation(), keys=ring)
    snapshot = await client.call(GetSnapshot(), Snapshot, deadline_s=CALL_S)
    socket = open_socket(context, zmq.SUB)
    unlock(socket, ring)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(snapshot.stream)
    ready = await asyncio.to_thread(socket.poll, STREAM_MS)
    updates = [type(codec.decode(socket.recv_multipart()[1:]).body).__name__] if ready else []
    try:
        await client.call(GetInventory(), Inventory, deadline_s=CALL_S)
        told = "answered"
    except RpcError as error:
        told = str(error)
    client.close()
    context.destroy(0)
    return {"rows": len(snapshot.rows), "stream": snapshot.stream, "updates": updates, "telemetry": told}


async def main(what: str, *arguments: str) -> dict[str, Any]:
    if what == "service":
        return await visit(*arguments)
    if what == "watch":
        return await watch(*arguments)
    return await knock(*arguments, clear_text=what == "clear")


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
