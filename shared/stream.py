"""The monitor's client: yields the current state, then every change in sequence, across restarts of the monitor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import zmq

from proto import codec
from proto.errors import WireError
from proto.ids import new_incarnation
from proto.messages import GetHistory, GetSnapshot, History, Snapshot, TopicRow, Update
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rpc.transport import Pump, open_socket
from shared.rundir import RunDir
from shared.security.access import Access
from shared.security.curve import unlock

PUB = "monitor-pub"
QUEUED_UPDATES = 10_000
QUIET_S = 1.0
SNAPSHOT_DEADLINE_S = 2.0
HISTORY_DEADLINE_S = 10.0
_NONE = -1


class Stream:
    """A connection to the monitor of a run. Use it as an async context manager, then iterate over `rows()`."""

    def __init__(self, run: RunDir | Access, *, ended: Callable[[], bool]) -> None:
        """Create a stream that ends once `ended` returns true. `ended` is called while nothing arrives."""
        self._run = run
        self._ended = ended
        self._incoming: asyncio.Queue[tuple[int, Update]] = asyncio.Queue(QUEUED_UPDATES)
        self.gaps = 0
        """Number of times that updates were lost in transit and the state was read again."""
        self.lost = 0
        """Number of updates lost in this way. They are counted when the next update arrives, or when no more arrive."""
        self._arrived = (_NONE, 0)
        """Incarnation of the monitor and sequence number of the last update that arrived."""
        self.heard_at = 0.0
        """Loop time of the last message from the monitor."""

    async def __aenter__(self) -> Stream:
        run, loop = self._run, asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = open_socket(self._context, zmq.SUB)
        # Subscribe to all topics and filter here, because a loss cannot be detected in a sequence with gaps.
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._address = ""
        if isinstance(run, Access):
            unlock(self._socket, run.keys)
            self._client = Client(
                self._context, run.endpoints["monitor"], "monitor/0", new_incarnation(), keys=run.keys
            )
        else:
            self._follow(run.endpoint(PUB, 0))
            self._client = Client(self._context, run.endpoint("monitor", 0), "monitor/0", new_incarnation())
        self._pump = Pump(self._socket, self._on_message)
        self.heard_at = loop.time()
        return self

    def _follow(self, address: str) -> None:
        """Connect to the address in the snapshot. For other hosts, each life of the monitor uses a new port."""
        if address and address != self._address:
            if self._address:
                self._socket.disconnect(self._address)
            self._socket.connect(address)
            self._address = address

    async def __aexit__(self, *_: object) -> None:
        self._pump.close()
        self._client.close()
        await asyncio.get_running_loop().run_in_executor(None, self._context.term)

    async def rows(self) -> AsyncIterator[TopicRow]:
        """Yield the last value of every topic, then each change. Start over after a loss or a restart."""
        incarnation, sequence, checked = _NONE, 0, False
        if isinstance(self._run, Access):
            await self._take_snapshot()  # The snapshot has the address of the stream.
        while True:
            update = await self._next()
            if update is not None:
                self._count_lost(update[0], update[1].sequence, arrived=1)
            if update is None:
                if self._ended():
                    return
                if checked:
                    continue
            elif update[0] == incarnation:
                checked = False
                number = update[1].sequence
                if number <= sequence:
                    continue
                if number == sequence + 1:
                    sequence = number
                    yield update[1].row
                    continue
            # This is a gap, another life of the monitor, or silence. A full queue drops the newest updates; this can be
            # detected only while no updates arrive.
            taken = await self._take_snapshot()
            if taken is None:
                incarnation, checked = _NONE, False
                continue
            known, (incarnation, snapshot), checked = (incarnation, sequence), taken, update is None
            sequence = snapshot.sequence
            if update is None:  # nothing is on its way: updates that only the snapshot includes will never arrive
                self._count_lost(incarnation, sequence, arrived=0)
            if (incarnation, sequence) == known:
                continue
            self.gaps += known[0] == incarnation
            for row in snapshot.rows:
                yield row

    async def history(self) -> History:
        """Return the curves and the spans that the monitor has kept. Raises RpcError."""
        return await self._client.call(GetHistory(), History, deadline_s=HISTORY_DEADLINE_S)

    def _count_lost(self, incarnation: int, number: int, *, arrived: int) -> None:
        """Count as lost the updates up to `number` that have not arrived. `arrived` is 1 if update `number` has
        arrived."""
        if self._arrived[0] == incarnation:
            self.lost += max(number - self._arrived[1] - arrived, 0)
        self._arrived = (incarnation, number)

    async def _next(self) -> tuple[int, Update] | None:
        try:
            async with asyncio.timeout(QUIET_S):
                return await self._incoming.get()
        except TimeoutError:
            return None

    async def _take_snapshot(self) -> tuple[int, Snapshot] | None:
        try:
            decoded = await self._client.exchange(GetSnapshot(), deadline_s=SNAPSHOT_DEADLINE_S)
        except RpcError:
            return None
        body = decoded.body
        self.heard_at = asyncio.get_running_loop().time()
        if isinstance(self._run, Access) and isinstance(body, Snapshot):
            self._follow(body.stream)
        return (decoded.envelope.incarnation, body) if isinstance(body, Snapshot) else None

    def _on_message(self, frames: list[bytes]) -> None:
        try:
            decoded = codec.decode(frames[1:])
        except WireError:
            return  # A later update shows the gap.
        self.heard_at = asyncio.get_running_loop().time()
        if isinstance(decoded.body, Update) and not self._incoming.full():
            self._incoming.put_nowait((decoded.envelope.incarnation, decoded.body))
