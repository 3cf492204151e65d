"""Watches the TCP connections of one listening socket and ends those that send without end.

libzmq hands a message over when its last frame is there, and bounds neither their number nor their sum: a peer that
never sends the last one would fill the memory before anybody sees a byte. So the kernel's count of received bytes is
compared with what came out. Nothing here may touch a descriptor of libzmq's: each is duplicated while it is known.
"""

from __future__ import annotations

import asyncio
import os
import socket as sockets
import struct
from dataclasses import dataclass

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from shared.rpc.transport import Pump

MOST_CONNECTIONS = 1024
"""On one endpoint; more are ended at once."""
UNSEEN_BYTES = 64 << 20
"""A connection that sent so much, and not one whole message in it, is ended."""
IDLE_BYTES_PER_S = 1024.0
"""What a quiet connection's heartbeats are allowed."""
LOOK_S = 0.1
STALL_S = 0.5
_RECEIVED = struct.Struct("<Q")
_RECEIVED_OFFSET = 128
"""tcpi_bytes_received in the kernel's struct tcp_info."""
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@dataclass(slots=True)
class _Connection:
    handle: sockets.socket
    base: float = 0.0
    """Bytes received when the last whole message came out."""
    heard: bool = False
    """A whole message came out since the last look."""


class Connections:
    """Of one socket; made before its bind. Belongs to the event loop it was made on."""

    def __init__(self, socket: zmq.Socket[bytes], name: str) -> None:
        self.ended = 0
        """Connections ended here, in all."""
        self.failed = 0
        """Handshakes that did not succeed, in all."""
        self._open: dict[int, _Connection] = {}
        self._log = structlog.get_logger("connections").bind(endpoint_of=name)
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._pump = Pump(socket.get_monitor_socket(_EVENTS | _FAILED), self._on_event)
        self._looked = self._loop.time()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def __len__(self) -> int:
        return len(self._open)

    def heard(self, descriptor: int) -> None:
        """A whole message came out of the connection with this descriptor (ZMQ_SRCFD)."""
        connection = self._open.get(descriptor)
        if connection is not None:
            connection.heard = True

    def close(self) -> None:
        """Before the socket is closed."""
        self._timer.cancel()
        self._pump.close()
        self._socket.disable_monitor()
        for connection in self._open.values():
            connection.handle.close()
        self._open.clear()

    def _on_event(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)
        kind, descriptor = event["event"], int(event["value"])
        if kind & _FAILED:
            self.failed += 1
        elif kind == zmq.EVENT_ACCEPTED:
            self._accepted(descriptor)
        else:
            self._forget(descriptor)

    def _accepted(self, descriptor: int) -> None:
        self._forget(descriptor)
        try:
            handle = sockets.socket(fileno=os.dup(descriptor))
        except OSError:
            return  # gone meanwhile
        if handle.type != sockets.SOCK_STREAM or handle.family not in (sockets.AF_INET, sockets.AF_INET6):
            handle.close()
            return
        self._open[descriptor] = _Connection(handle)
        if len(self._open) > MOST_CONNECTIONS:
            self._end(self._open[descriptor], f"{MOST_CONNECTIONS} connections are open")

    def _forget(self, descriptor: int) -> None:
        connection = self._open.pop(descriptor, None)
        if connection is not None:
            connection.handle.close()

    def _look(self) -> None:
        now = self._loop.time()
        since_s, self._looked = now - self._looked, now
        self._timer = self._loop.call_later(LOOK_S, self._look)
        if since_s > STALL_S:
            return  # the loop stood still: what has come in meanwhile is handed over first
        allowed = IDLE_BYTES_PER_S * since_s
        for connection in list(self._open.values()):
            received = _received_bytes(connection.handle)
            connection.base = received if connection.heard else min(connection.base + allowed, received)
            connection.heard = False
            if received - connection.base > UNSEEN_BYTES:
                self._end(connection, f"{received - connection.base:.0f} bytes without a whole message")
                connection.base = received

    def _end(self, connection: _Connection, why: str) -> None:
        self.ended += 1
        self._log.warning("connection ended", why=why)
        try:
            connection.handle.shutdown(sockets.SHUT_RDWR)
        except OSError:
            return  # it ended by itself


def _received_bytes(handle: sockets.socket) -> float:
    try:
        info = handle.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _RECEIVED_OFFSET + _RECEIVED.size)
    except OSError:
        return 0.0
    return float(_RECEIVED.unpack_from(info, _RECEIVED_OFFSET)[0]) if len(info) > _RECEIVED_OFFSET else 0.0
