"""Lines between a reader and a store that do what real ones do: slow down, break and lie. Real sockets everywhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import zmq

from shared.dataplane.client import DataClient
from shared.dataplane.reach import Reach
from tests.integration.store_process import REPOSITORY, Peer, StoreProcess


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class TcpStoreProcess(StoreProcess):
    """A store whose chunks leave at `port`, and which tells readers `advertised` (nothing: the truth)."""

    port: int = field(default_factory=free_port)
    advertised: str = ""
    plain: bool = False

    def start(self) -> None:
        endpoint = f"tcp://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "tests.integration.stream_store", str(self.run.path), endpoint]
        self.process = subprocess.Popen(
            [*command, self.advertised, *(["plain"] if self.plain else [])],
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )


def remote(
    peer: Peer, *, plain: bool = False, cache_bytes: int = 64 << 20, inflight_bytes: int = 8 << 20
) -> DataClient:
    """A data client that never maps."""
    return DataClient(
        lambda service, instance: peer.store,
        reach=Reach.STREAM,
        plain=plain,
        cache_bytes=cache_bytes,
        inflight_bytes=inflight_bytes,
    )


class TcpLine:
    """Forwards TCP from `port` to `target`, at most `bytes_per_s` (0: no bound); `cut` resets every connection."""

    def __init__(self, target: int, bytes_per_s: float = 0) -> None:
        self.port = free_port()
        self.target = target
        self.bytes_per_s = bytes_per_s
        self.forwarded = 0
        self.connections = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up, down = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self.connections += 1
        self._writers |= {writer, down}
        for source, sink, slow in ((reader, down, False), (up, writer, True)):
            task = asyncio.create_task(self._pass(source, sink, slow=slow))
            self._tasks.add(task)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if slow:
                    self.forwarded += len(data)
                    if self.bytes_per_s:
                        await asyncio.sleep(len(data) / self.bytes_per_s)
                sink.write(data)
                await sink.drain()
        sink.transport.abort()

    def cut(self) -> None:
        """Reset what is connected; new connections are taken."""
        for writer in self._writers:
            raw = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            writer.transport.abort()
        self._writers.clear()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TcpLine]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        try:
            yield self
        finally:
            server.close()
            self.cut()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


Message = list[bytes]


class Meddler:
    """A man in the middle who speaks ZeroMQ: `meddle` turns each message from the store into those that go on."""

    def __init__(self, target: str, meddle: Callable[[Message], list[Message]]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front, self._back = self._context.socket(zmq.ROUTER), self._context.socket(zmq.DEALER)
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._back.connect(target)
        self._meddle = meddle
        self._peer = b""
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        for each in (self._front, self._back, self._stop):
            poller.register(each, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop in ready:
                break
            if self._front in ready:
                self._peer, *message = self._front.recv_multipart()
                self._back.send_multipart(message)
            if self._back in ready:
                for message in self._meddle(self._back.recv_multipart()):
                    self._front.send_multipart([self._peer, *message])
        self._context.destroy(linger=0)

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
