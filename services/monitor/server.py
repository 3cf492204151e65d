"""The monitor: receives telemetry, keeps the last values and publishes every change to its subscribers.

It does not block on subscribers, and training does not depend on it. A subscriber connects to `monitor-pub`, waits for
its first update (every new subscription causes one, which proves that it is active), requests the snapshot, and
continues after the snapshot's sequence number. After a gap in the sequence it requests a snapshot again. A full queue
loses the newest updates, so a subscriber also requests a snapshot when the stream falls silent. Updates consist of
[topic, envelope, body]; the topic frame serves subscribers that want a single prefix.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
import zmq

from proto import codec
from proto.envelope import FLAG_ONE_WAY
from proto.errors import WireError
from proto.messages import Ack, GetSnapshot, GetStatus, Snapshot, Status, Telemetry, TopicRow, Update
from services.monitor import cluster
from services.monitor.state import MonitorState
from shared.actor.service import Service
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call
from shared.rpc.transport import Pump, open_socket
from shared.rundir import RunDir
from shared.security.connections import Connections
from shared.security.curve import lock
from shared.security.roles import Role
from shared.security.zap import Gate

PUB = "monitor-pub"
POLL_S = 1.0
STATUS_DEADLINE_S = 2.0
SUBSCRIBER_MESSAGES = 4096
"""Maximum number of updates queued per subscriber. A slower one loses updates and sees the gap in the sequence.
libzmq keeps one copy of an update for all subscribers."""
SUBSCRIPTION_BYTES = 1024
"""Maximum bytes of a subscription, which is a topic prefix."""
_SUBSCRIBE, _UNSUBSCRIBE = 1, 0


class MonitorService(Service):
    """The monitor of a run."""

    NAME = "monitor"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        self._state = MonitorState()
        self._pump: Pump | None = None
        self._connections: Connections | None = None
        self._pub: zmq.Socket[bytes]
        self._stream = ""
        self._subscriptions = 0
        self.mailbox.handle(Telemetry, self._on_telemetry)
        self.mailbox.handle(GetSnapshot, self._on_snapshot)

    def bind(self) -> str:
        endpoint = super().bind()  # claims the mailbox; only its owner may take the stream's path
        socket = open_socket(self.context, zmq.XPUB)
        socket.setsockopt(zmq.SNDHWM, SUBSCRIBER_MESSAGES)
        socket.setsockopt(zmq.XPUB_VERBOSER, 1)  # report every subscription, not only the first of its prefix
        socket.bind(self.run.endpoint(PUB, self.instance))
        socket.setsockopt(zmq.MAXMSGSIZE, SUBSCRIPTION_BYTES)
        self._pub = socket
        self._pump = Pump(socket, self._on_subscription)
        return endpoint

    def open_door(self, gate: Gate) -> str:
        """Open the mailbox and the stream to other hosts. Both admit observers, which no other service does."""
        address = self.listen.rpartition(":")[0]
        lock(self._pub, gate.keys, Role.OBSERVER)
        self._connections = Connections(self._pub, f"{self.name} {PUB}")
        self._pub.bind(f"{address}:*")
        self._stream = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        return self.mailbox.bind(self.context, self.listen, gate=gate, admits=Role.OBSERVER)

    async def serve(self) -> None:
        while True:
            begun = self.loop.time()
            await self._poll_scheduler()
            await asyncio.sleep(max(0.0, begun + POLL_S - self.loop.time()))

    async def close(self) -> None:
        if self._connections is not None:
            self._connections.close()
        if self._pump is not None:
            self._pump.close()
            self.run.socket_file(PUB, self.instance).unlink(missing_ok=True)
        await super().close()

    async def _poll_scheduler(self) -> None:
        try:
            status = await self.scheduler.call(GetStatus(), Status, deadline_s=STATUS_DEADLINE_S)
        except RpcError:
            self._publish(self._state.put_changed(cluster.unreachable(time.time())))
            return
        for row in cluster.rows_of(status, time.time()):
            self._publish(self._state.put_changed(row))

    def _on_telemetry(self, message: Telemetry, call: Call) -> Ack:
        refused = self._state.refused
        self._publish(self._state.take(message))
        if self._state.refused == 1 and refused == 0:
            self.log.warning("too many topics, or too large ones: this one is discarded", topic=message.topic)
        return Ack()

    def _on_snapshot(self, _: GetSnapshot, call: Call) -> Snapshot:
        return msgspec.structs.replace(self._state.snapshot(), stream=self._stream)

    def _on_subscription(self, frames: list[bytes]) -> None:
        change = frames[0][:1]
        if change == bytes([_SUBSCRIBE]):
            self._subscriptions += 1
        elif change == bytes([_UNSUBSCRIBE]):
            self._subscriptions -= 1
        else:
            return
        values: dict[str, float | str] = {
            "subscriptions": self._subscriptions,
            "dropped": self._state.dropped,
            "refused": self._state.refused,
        }
        self._publish(
            self._state.put(
                TopicRow(
                    service=self.NAME,
                    instance=self.instance,
                    topic="monitor/subscriptions",
                    at=time.time(),
                    values=values,
                )
            )
        )

    def _publish(self, update: Update | None) -> None:
        if update is None or self._pump is None:
            return
        try:
            frames = codec.encode(update, request_id=0, incarnation=self.incarnation, flags=FLAG_ONE_WAY)
        except WireError as error:
            self.log.warning("update cannot be encoded", topic=update.row.topic, error=str(error))
            return
        self._pump.send([update.row.topic.encode(), *frames])
