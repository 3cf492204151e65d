"""A subscriber's side of the monitor: the present state first, then every change in sequence, across its restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import zmq

from launch.peer import Run
from proto import codec
from proto.errors import WireError
from proto.ids import new_incarnation
from proto.limits import CONTROL
from proto.messages import GetSnapshot, Snapshot, TopicRow, Update
from shared.rpc.client import Client
from shared.rpc.errors import RpcError
from shared.rpc.transport import Pump, open_socket
from shared.security.access import Access
from shared.security.curve import unlock

PUB = "monitor-pub"
QUEUED_UPDATES = 10_000
QUIET_S = 1.0
SNAPSHOT_DEADLINE_S = 2.0
_NONE = -1


class Stream:
    """Connects to the monitor of a run. Use as an async context manager, then iterate `rows()`."""

    def __init__(self, run: Run, *, ended: Callable[[], bool]) -> None:
        """`ended` is asked while nothing comes in; when true, the stream is over."""
        self._run = run
        self._ended = ended
        self._incoming: asyncio.Queue[tuple[int, Update]] = asyncio.Queue(QUEUED_UPDATES)
        self.gaps = 0
        """Times that updates were lost on the way to us, and the state was taken anew."""
        self.heard_at = 0.0
        """Loop time at which the monitor last said anything."""

    async def __aenter__(self) -> Stream:
        run, loop = self._run, asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = open_socket(self._context, zmq.SUB, CONTROL)
        # everything, and filtered here: a sequence with holes would not show a loss
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
        """On other machines the stream is where the snapshot says, and each life of the monitor takes a new port."""
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
        """Yield the last value of every topic, then each change; again after a loss or a restart of the monitor."""
        incarnation, sequence, checked = _NONE, 0, False
        if isinstance(self._run, Access):
            await self._take_snapshot()  # says where the stream is
        while True:
            update = await self._next()
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
            # a gap, another life of the monitor, or silence: a full queue loses the newest, which only this shows
            taken = await self._take_snapshot()
            if taken is None:
                incarnation, checked = _NONE, False
                continue
            known, (incarnation, snapshot), checked = (incarnation, sequence), taken, update is None
            sequence = snapshot.sequence
            if (incarnation, sequence) == known:
                continue
            self.gaps += known[0] == incarnation
            for row in snapshot.rows:
                yield row

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
            decoded = codec.decode(frames[1:], CONTROL)
        except WireError:
            return  # a later update shows the gap
        self.heard_at = asyncio.get_running_loop().time()
        if isinstance(decoded.body, Update) and not self._incoming.full():
            self._incoming.put_nowait((decoded.envelope.incarnation, decoded.body))
