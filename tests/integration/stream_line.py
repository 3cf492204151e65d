"""Network links between a reader and a store. These links are slow, break, or change data. All sockets are real."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from proto import bulk
from shared.dataplane.client import DataClient
from shared.dataplane.reach import Reach
from shared.rundir import RunDir
from tests.integration.store_process import REPOSITORY, Peer, StoreProcess
from tests.integration.tiny.harness import free_port

IN_CLEAR = "transport: {listen: 127.0.0.1, encrypt_bulk: false}\n"
"""Lines that turn stream encryption off when they are appended to a topology."""


def in_clear(run: RunDir) -> None:
    """Turn stream encryption off in the topology of `run`, before its services start."""
    text = run.topology.read_text()
    if not text.endswith(IN_CLEAR):
        run.topology.write_text(f"{text}{IN_CLEAR}")


@dataclass
class TcpStoreProcess(StoreProcess):
    """A store that streams chunks from `port` and tells readers the address `advertised`, or its real address if that
    is empty.

    If `plain` is true, the run's topology turns encryption off. `defect` names a `module:class.method` that always
    raises KeyError.
    """

    port: int = field(default_factory=free_port)
    advertised: str = ""
    plain: bool = False
    defect: str = ""

    def start(self) -> None:
        endpoint = f"tcp://127.0.0.1:{self.port}"
        if self.plain:
            in_clear(self.run)
        command = [sys.executable, "-m", "tests.integration.stream_store", "--run", str(self.run.path), endpoint]
        self.process = subprocess.Popen(
            [*command, self.advertised, self.defect],
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )


def remote(peer: Peer, *, plain: bool = False, inflight_bytes: int = 8 << 20) -> DataClient:
    """Return a data client that always streams and never maps."""
    return DataClient(
        lambda service, instance: peer.store,
        reach=Reach.STREAM,
        plain=plain,
        inflight_bytes=inflight_bytes,
    )


class TcpLine:
    """A proxy that forwards TCP from `port` to `target` at up to `bytes_per_s` (0: no limit). `cut` resets every
    connection."""

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
        """Reset all connections. New connections are accepted."""
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
"""Head and payload of a message, which are concatenated even if they do not match."""


class Meddler:
    """A man in the middle of the bulk protocol: `meddle` maps each message from the store to the messages that are
    passed on.

    Each connection has one thread per direction. Broken framing makes the reader disconnect and connect again.
    """

    def __init__(self, target: str, meddle: Callable[[Message], list[Message]]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._target = target
        self._meddle = meddle
        self.tag_bytes = 0
        """Number of bytes of the tag after each message, or 0 on an unencrypted connection."""
        self._lines: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        host, _, port = self._target.removeprefix("tcp://").rpartition(":")
        while True:
            try:
                front, _ = self._listener.accept()
            except OSError:
                return
            back = socket.create_connection((host, int(port)))
            self._lines += [front, back]
            for work in (self._up, self._down):
                thread = threading.Thread(target=self._until_broken, args=(work, front, back))
                self._threads.append(thread)
                thread.start()

    def _until_broken(
        self, work: Callable[[socket.socket, socket.socket], None], front: socket.socket, back: socket.socket
    ) -> None:
        with contextlib.suppress(OSError):
            work(front, back)
        for line in (front, back):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def _up(self, front: socket.socket, back: socket.socket) -> None:
        """Pass on the reader's messages. The reader's hello is followed by a tag if the link is encrypted, else by a
        message.
        """
        began = b""
        hello_bytes = bulk.HEAD_BYTES + bulk.LINE_ID_BYTES
        while data := front.recv(1 << 16):
            if len(began) < hello_bytes + len(bulk.MAGIC):
                began += data
                if len(began) >= hello_bytes + len(bulk.MAGIC):
                    self.tag_bytes = 0 if began[hello_bytes:].startswith(bulk.MAGIC) else bulk.TAG_BYTES
            back.sendall(data)

    def _down(self, front: socket.socket, back: socket.socket) -> None:
        with back.makefile("rb") as source:
            while head := source.read(bulk.HEAD_BYTES):
                payload = source.read(bulk.unpack_head(head).nbytes + self.tag_bytes)
                for message in self._meddle([head, payload]):
                    front.sendall(b"".join(message))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for line in self._lines:
            line.close()


@contextlib.contextmanager
def meddled(store: TcpStoreProcess, meddle: Callable[[Message], list[Message]]) -> Iterator[None]:
    """Start `store` with a meddler in front of it and advertise the meddler's address to readers."""
    meddler = Meddler(f"tcp://127.0.0.1:{store.port}", meddle)
    store.advertised = meddler.endpoint
    store.start()
    try:
        yield
    finally:
        meddler.close()


class Tap(Meddler):
    """A meddler that changes nothing."""

    def __init__(self, target: str) -> None:
        self.sealed_bytes = 0
        """Payload bytes of encrypted messages."""
        self.clear_bytes = 0
        super().__init__(target, self._look)

    def _look(self, message: Message) -> list[Message]:
        nbytes = bulk.unpack_head(message[0]).nbytes
        if len(message[1]) > nbytes:
            self.sealed_bytes += nbytes
        else:
            self.clear_bytes += nbytes
        return [message]


@contextlib.contextmanager
def tapped() -> Iterator[tuple[Tap, Sequence[str]]]:
    """Yield a tap, and the program and arguments (after the run) of a store whose chunks pass through it."""
    target = f"tcp://127.0.0.1:{free_port()}"
    tap = Tap(target)
    try:
        yield tap, ("tests.integration.stream_store", target, tap.endpoint)
    finally:
        tap.close()
