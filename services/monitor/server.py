"""The monitor: receives telemetry, keeps the last values and publishes every change to its subscribers.

The monitor does not block on subscribers, and training does not depend on the monitor. A subscriber connects to
`monitor-pub`, waits for its first update (every new subscription causes an update, which proves that the subscription
is active), requests the snapshot, and continues after the snapshot's sequence number. After a gap in the sequence, the
subscriber requests another snapshot. If a subscriber's queue is full, the newest updates are lost, so a subscriber also
requests a snapshot when the stream falls silent. Updates consist of [topic, envelope, body]; the topic frame lets a
subscriber select a single prefix.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import zmq

from proto import codec
from proto.envelope import FLAG_ONE_WAY
from proto.errors import WireError
from proto.messages import (
    Ack,
    GetHistory,
    GetSnapshot,
    GetStatus,
    GetSupervisorState,
    History,
    Snapshot,
    Status,
    SupervisorState,
    Telemetry,
    TopicRow,
    Update,
)
from services.monitor.state import MonitorState, row_bytes, rows_of, unreachable
from services.monitor.subscriptions import Subscriptions
from services.monitor.warnings.desk import WarningDesk
from shared.actor.service import Service
from shared.rpc.errors import RpcError
from shared.rpc.mailbox import Call
from shared.rpc.transport import Pump, open_socket
from shared.rundir import RunDir
from shared.runfiles.files import RunFiles
from shared.runfiles.last import as_lines
from shared.security.connections import Connections
from shared.security.curve import lock
from shared.security.roles import Role
from shared.security.zap import Gate
from shared.view.services import process_rows
from shared.view.timeline import MAX_HISTORY, SPAN

PUB, SUPERVISOR = "monitor-pub", "supervisor"
POLL_S = 1.0
STATUS_DEADLINE_S = 2.0
SUBSCRIBER_MESSAGES = 4096
"""Maximum number of updates queued per subscriber. A subscriber that falls further behind loses updates and sees the
gap in the sequence. libzmq keeps one copy of an update for all subscribers."""
FRAME_BYTES = 1024
"""Maximum size, in bytes, of what a subscriber sends: a topic, or a message of the handshake."""
UNREAD_SUBSCRIPTIONS = 8
"""Maximum number of subscriptions of a connection that wait to be read. libzmq applies all of them at once, before they
can be counted."""
RECEIVE_BYTES = 16 << 10
"""Size, in bytes, of the kernel's receive buffer of a connection. libzmq applies what is in it even after the
connection has been closed."""
CONFIRM_S = 0.02
"""Time, in seconds, after which new subscriptions are confirmed by an update. One update confirms all of them."""
MAX_SPAN_BYTES = 512
"""Maximum encoded size of a span that is kept, in bytes. The spans (`MAX_HISTORY`) and the curves must fit in one 8 MiB
message."""
MAX_POINTS = 3 << 17
"""Maximum total number of curve points in one answer. A point takes 16 bytes."""
_SUBSCRIBE, _UNSUBSCRIBE = 1, 0


class MonitorHistory:
    """The part of the metrics file that has been read, and the newest spans."""

    def __init__(self, run: Path) -> None:
        self._files = RunFiles(run)
        self._spans: deque[TopicRow] = deque(maxlen=MAX_HISTORY)

    def note(self, row: TopicRow) -> None:
        """Keep the row if it is a span."""
        if row.topic == SPAN and row_bytes(row) <= MAX_SPAN_BYTES:
            self._spans.append(row)

    def read(self) -> None:
        """Read the new rows of the metrics file. Call this method from one thread at a time."""
        while self._files.read():
            pass

    @property
    def spans(self) -> list[TopicRow]:
        """The newest spans, oldest first."""
        return list(self._spans)

    def answer(self) -> History:
        """Return the part of the history that has been read."""
        curves = self._files.view.curves
        columns = curves.columns(points=MAX_POINTS)
        return History(
            newest=curves.last,
            steps={name: np.asarray(steps) for name, (steps, _) in columns.items()},
            values={name: np.asarray(values) for name, (_, values) in columns.items()},
            spans=self.spans,
        )


class MonitorService(Service):
    """The monitor of a run."""

    NAME = "monitor"

    def __init__(self, run: RunDir, instance: int, supervisor: str = "") -> None:
        super().__init__(run, instance, supervisor)
        self._state = MonitorState()
        self._history = MonitorHistory(run.path)
        self._reading = asyncio.Lock()
        """Held while the metrics file is read."""
        self._connections: Connections | None = None
        self._stream = ""
        self._subscriptions = 0
        """Number of subscriptions, including those of peers on this host."""
        self._guests = Subscriptions()
        """Subscriptions of peers on other hosts."""
        self._source = -1
        """Descriptor of the connection from which the current message has arrived."""
        self._confirming: asyncio.TimerHandle | None = None
        self._warnings: WarningDesk | None = None
        self._pub = open_socket(self.context, zmq.XPUB)
        self._pub.setsockopt(zmq.SNDHWM, SUBSCRIBER_MESSAGES)
        self._pub.setsockopt(zmq.RCVHWM, UNREAD_SUBSCRIPTIONS)
        self._pub.setsockopt(zmq.RCVBUF, RECEIVE_BYTES)
        self._pub.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES)
        self._pub.setsockopt(zmq.XPUB_VERBOSER, 1)  # report every subscription, not only the first for each prefix
        self._pump = Pump(self._pub, self._on_subscription, on_source=self._on_source)
        self.closing.callback(self._pump.close)
        self.mailbox.handle(Telemetry, self._on_telemetry)
        self.mailbox.handle(GetSnapshot, self._on_snapshot)
        self.mailbox.handle(GetHistory, self._on_history)

    def bind(self) -> str:
        endpoint = super().bind()  # claims the mailbox; only its owner may take the stream's path
        self._pub.bind(self.run.endpoint(PUB, self.instance))
        self.closing.callback(self.run.socket_file(PUB, self.instance).unlink, missing_ok=True)
        return endpoint

    def open_door(self, gate: Gate) -> str:
        """Open the mailbox and the stream to other hosts. Both admit observers; mailboxes of other services do not."""
        address = self.listen.rpartition(":")[0]
        lock(self._pub, gate.keys, Role.OBSERVER)
        self._connections = Connections(self._pub, f"{self.name} {PUB}", self._guests.forget)
        self.closing.callback(self._connections.close)
        self._pub.bind(f"{address}:*")
        self._stream = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        return self.mailbox.bind(self.context, self.listen, gate=gate, admits=Role.OBSERVER)

    async def start(self) -> None:
        self._warnings = await self.loop.run_in_executor(None, WarningDesk.open, self.run, self.log)
        if self._warnings is not None:
            self.closing.callback(self._warnings.close)
            self._publish_all(self._warnings.newest())

    async def serve(self) -> None:
        if self.supervised:
            self.keep(self._poll_supervisor())
        while True:
            begun = self.loop.time()
            await self._poll_scheduler()
            await self._warn()
            await asyncio.sleep(max(0.0, begun + POLL_S - self.loop.time()))

    async def drain(self) -> None:
        await self._warn()  # the warnings about the last steps of the run
        await self._poll_scheduler()
        await asyncio.to_thread(self._write_last)

    async def close(self) -> None:
        if self._confirming is not None:
            self._confirming.cancel()
        await super().close()

    async def _poll_scheduler(self) -> None:
        try:
            status = await self.scheduler.call(GetStatus(), Status, deadline_s=STATUS_DEADLINE_S)
        except RpcError:
            self._publish(self._state.put_changed(unreachable(time.time())))
            return
        for row in rows_of(status, time.time()):
            self._publish(self._state.put_changed(row))
            self._watch(row)

    def _write_last(self) -> None:
        """Write the last value of every topic and the newest spans, for those who look at the run after its end."""
        partial = self.run.last.with_suffix(".partial")
        try:
            partial.write_bytes(as_lines([*self._state.snapshot().rows, *self._history.spans]))
            partial.replace(self.run.last)
        except OSError as error:
            self.log.warning("the last values cannot be written", error=str(error))

    async def _warn(self) -> None:
        """Publish the warnings that are due. Yields to the event loop between pages of a long metrics.jsonl."""
        more = True
        while more and self._warnings is not None:
            rows, more = self._warnings.read(time.time())
            self._publish_all(rows)
            await asyncio.sleep(0)

    def _watch(self, row: TopicRow) -> None:
        if self._warnings is not None:
            self._warnings.take(row)

    def _publish_all(self, rows: Iterable[TopicRow]) -> None:
        for row in rows:
            self._publish(self._state.put(row))

    async def _poll_supervisor(self) -> None:
        """Publish the run's processes as the supervisor sees them, until cancelled."""
        while True:
            try:
                supervisor = self.client(SUPERVISOR)
                state = await supervisor.call(GetSupervisorState(), SupervisorState, deadline_s=STATUS_DEADLINE_S)
            except RpcError:
                pass  # The supervisor has ended, and the run ends with it.
            else:
                for row in process_rows(state.processes, time.time()):
                    self._publish(self._state.put_changed(row))
            await asyncio.sleep(POLL_S)

    def _on_telemetry(self, message: Telemetry, call: Call) -> Ack:
        refused = self._state.refused
        update = self._state.take(message)
        if update is not None:
            self._history.note(update.row)
            self._watch(update.row)
        self._publish(update)
        if self._state.refused == 1 and refused == 0:
            self.log.warning(
                "too many topics or too many bytes: values of this topic are discarded", topic=message.topic
            )
        return Ack()

    def _on_snapshot(self, _: GetSnapshot, call: Call) -> Snapshot:
        return msgspec.structs.replace(self._state.snapshot(), stream=self._stream)

    async def _on_history(self, _: GetHistory, call: Call) -> History:
        async with self._reading:
            await asyncio.to_thread(self._history.read)
            return self._history.answer()

    def _on_source(self, descriptor: int, user: bytes) -> None:
        """Note the connection from which the next message has arrived."""
        self._source = descriptor
        if self._connections is not None:
            self._connections.heard(descriptor, user)

    def _on_subscription(self, frames: list[bytes]) -> None:
        """Count a subscription. `frames` are the name of the peer, empty on this host, its address and the change."""
        is_guest, change, topic = bool(frames[0]), frames[2][:1], frames[2][1:]
        if change == bytes([_SUBSCRIBE]):
            self._subscriptions += 1
            too_many = self._guests.add(self._source, topic) if is_guest else None
            if too_many is not None and self._connections is not None:
                self._connections.end(*too_many)
        elif change == bytes([_UNSUBSCRIBE]):
            self._subscriptions -= 1
            if is_guest:
                self._guests.remove(self._source, topic)
        else:
            return
        if self._confirming is None:
            self._confirming = self.loop.call_later(CONFIRM_S, self._confirm)

    def _confirm(self) -> None:
        """Publish an update, which proves to new subscribers that their subscriptions are active."""
        self._confirming = None
        values: dict[str, float | str] = {
            "subscriptions": self._subscriptions,
            "dropped": self._state.dropped,
            "refused": self._state.refused,
            "ended": self._connections.ended if self._connections is not None else 0,
        }
        row = TopicRow(
            service=self.NAME, instance=self.instance, topic="monitor/subscriptions", at=time.time(), values=values
        )
        self._publish(self._state.put(row))

    def _publish(self, update: Update | None) -> None:
        if update is None or not self._subscriptions:
            return
        try:
            frames = codec.encode(update, request_id=0, incarnation=self.incarnation, flags=FLAG_ONE_WAY)
        except WireError as error:
            self.log.warning("update cannot be encoded", topic=update.row.topic, error=str(error))
            return
        self._pump.send([update.row.topic.encode(), *frames])
