"""The socket to the service in a process that runs users' code. A `Link` passes messages to the loop, and sends
messages from any thread.

The process exits when the service is gone.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import deque
from collections.abc import Callable

import msgspec

from services.rollout.user_code.frames import LENGTH, TO_SERVICE_BYTES, Ask, Captured, ToProcess, ToService, frame
from shared.workflow import Sequence

READ_BYTES = 1 << 18


class Link:
    """A connection to the service. Messages are passed to `take` on `loop`."""

    def __init__(
        self, socket_: socket.socket, loop: asyncio.AbstractEventLoop, take: Callable[[ToProcess], None]
    ) -> None:
        """`take` is called on the loop with every message that is not an answer to `captured`."""
        self._socket = socket_
        self._on_message = take
        self._loop = loop
        self._decoder: msgspec.msgpack.Decoder[ToProcess] = msgspec.msgpack.Decoder(ToProcess)
        self._buffer = bytearray()
        self._inbox: deque[ToProcess] = deque()
        self._reading = threading.RLock()
        self._writing = threading.Lock()
        self._loop.add_reader(socket_.fileno(), self._readable)

    def send(self, message: ToService) -> None:
        """Send a message, from any thread. Raises the errors of `frame`."""
        data = frame(message, TO_SERVICE_BYTES)
        with self._writing:
            self._socket.sendall(data)

    def captured(self, slot: int) -> list[Sequence]:
        """Return everything sampled for `slot`. Any thread may call this; other messages wait in the meantime."""
        with self._reading:
            self.send(Ask(slot))
            while True:
                self._receive(0)
                answer: Captured | None = None
                for message in self._complete_messages():
                    if isinstance(message, Captured):
                        answer = message
                    else:
                        self._inbox.append(message)
                if answer is not None:
                    self._loop.call_soon_threadsafe(self._drain)
                    return answer.sequences

    def _readable(self) -> None:
        with self._reading:
            try:
                self._receive(socket.MSG_DONTWAIT)
            except BlockingIOError:  # `captured` has read the data
                return
            self._inbox.extend(self._complete_messages())
        self._drain()

    def _drain(self) -> None:
        while self._inbox:
            self._on_message(self._inbox.popleft())

    def _receive(self, flags: int) -> None:
        data = self._socket.recv(READ_BYTES, flags)
        if not data:
            os._exit(0)  # the service is gone; exit without running user code
        self._buffer += data

    def _complete_messages(self) -> list[ToProcess]:
        """Remove and return the complete messages in the buffer."""
        messages: list[ToProcess] = []
        at = 0
        while len(self._buffer) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer, at)
            if len(self._buffer) - at - LENGTH.size < length:
                break
            at += LENGTH.size
            messages.append(self._decoder.decode(memoryview(self._buffer)[at : at + length]))
            at += length
        del self._buffer[:at]
        return messages
