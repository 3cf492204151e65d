"""Watches the TCP connections of one listening socket and ends those that send without end.

libzmq hands a message over when its last frame is there, and bounds neither their number nor their sum: a peer that
never sends the last one would fill the memory before anybody sees a byte. So the kernel's count of received bytes is
compared with what came out. Nothing here may touch a descriptor of libzmq's: each is duplicated while it is known.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket as sockets
import struct
from dataclasses import dataclass

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from shared.descriptors import raise_descriptor_limit
from shared.rpc.transport import Pump

MOST_CONNECTIONS = 1024
"""On one endpoint; more are ended at once."""
DESCRIPTOR_SHARE = 8
"""At most the limit on descriptors by this many, too: each has two, libzmq's and ours, a process up to two endpoints,
and what comes in before we look at it has some as well."""
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
        descriptors = raise_descriptor_limit()
        self._most = most_connections(descriptors)
        if self._most < MOST_CONNECTIONS:
            self._log.warning(
                f"at most {self._most} connections of other hosts: the limit on open descriptors is {descriptors}; "
                f"raise it (ulimit -Hn {MOST_CONNECTIONS * DESCRIPTOR_SHARE})"
            )
        self._spare = _put_by()
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
        self._use_spare()

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
            handle = _duplicate(descriptor)
        except OSError as error:
            if error.errno == errno.EMFILE:
                self._end_unwatched(descriptor)
            return  # else it is gone meanwhile
        if not _is_tcp(handle):
            handle.close()
            return
        self._open[descriptor] = _Connection(handle)
        if len(self._open) > self._most:
            self._end(handle, f"{self._most} connections are open")

    def _end_unwatched(self, descriptor: int) -> None:
        """The descriptor put by for this is the only one left to reach it with."""
        self._use_spare()
        try:
            with _duplicate(descriptor) as handle:
                if _is_tcp(handle):
                    self._end(handle, "no descriptor is left to watch it")
        except OSError as error:
            self._log.warning("connection not watched", why=str(error))
        self._spare = _put_by()

    def _use_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _forget(self, descriptor: int) -> None:
        connection = self._open.pop(descriptor, None)
        if connection is not None:
            connection.handle.close()

    def _look(self) -> None:
        now = self._loop.time()
        since_s, self._looked = now - self._looked, now
        self._timer = self._loop.call_later(LOOK_S, self._look)
        if self._spare is None:
            self._spare = _put_by()
        if since_s > STALL_S:
            return  # the loop stood still: what has come in meanwhile is handed over first
        allowed = IDLE_BYTES_PER_S * since_s
        for connection in list(self._open.values()):
            received = _received_bytes(connection.handle)
            connection.base = received if connection.heard else min(connection.base + allowed, received)
            connection.heard = False
            if received - connection.base > UNSEEN_BYTES:
                self._end(connection.handle, f"{received - connection.base:.0f} bytes without a whole message")
                connection.base = received

    def _end(self, handle: sockets.socket, why: str) -> None:
        self.ended += 1
        self._log.warning("connection ended", why=why)
        try:
            handle.shutdown(sockets.SHUT_RDWR)
        except OSError:
            return  # it ended by itself


def most_connections(descriptors: int) -> int:
    """How many one endpoint may have where that is the limit on open descriptors."""
    return min(MOST_CONNECTIONS, descriptors // DESCRIPTOR_SHARE)


def _duplicate(descriptor: int) -> sockets.socket:
    """Raises OSError: it is no socket (any more), or there are too many descriptors."""
    copy = os.dup(descriptor)
    try:
        return sockets.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _is_tcp(handle: sockets.socket) -> bool:
    return handle.type == sockets.SOCK_STREAM and handle.family in (sockets.AF_INET, sockets.AF_INET6)


def _put_by() -> int | None:
    """A descriptor to be given up for another one; None: there is none to be had."""
    try:
        return os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return None


def _received_bytes(handle: sockets.socket) -> float:
    try:
        info = handle.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _RECEIVED_OFFSET + _RECEIVED.size)
    except OSError:
        return 0.0
    return float(_RECEIVED.unpack_from(info, _RECEIVED_OFFSET)[0]) if len(info) > _RECEIVED_OFFSET else 0.0
