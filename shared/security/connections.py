"""Watches the TCP connections of one listening socket, and closes those that send endless messages or lose their place.

A newcomer that finds all places taken displaces a connection that has not sent a message yet, else one of an observer
or operator (a guest), and never one of a service (see `shared.places`).

libzmq delivers a message when its last frame has arrived, and bounds neither the number of frames nor their total size,
so a peer that never sends the last frame could fill memory unnoticed. The kernel's count of received bytes is therefore
compared with the messages that have been delivered. libzmq's descriptors are duplicated while they are valid, never
used directly.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket as sockets
import struct
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from shared.os_limits import raise_descriptor_limit
from shared.places import Place, Places
from shared.rpc.transport import Pump
from shared.security.roles import Role

MOST_CONNECTIONS = 1024
"""Maximum number of connections on one endpoint."""
LOGGED_ENDS = 20
"""Maximum number of closed connections that are logged individually. All are counted."""
DESCRIPTOR_SHARE = 8
"""Divisor of the descriptor limit that gives the maximum number of connections of an endpoint. Each connection has two
descriptors, libzmq's and a duplicate. A process has up to two endpoints. Connections that have not been examined yet
have descriptors, too."""
UNSEEN_BYTES = 64 << 20
"""Number of bytes, received without a complete message, after which a connection is closed."""
IDLE_BYTES_PER_S = 1024.0
"""Bytes per second allowed for the heartbeats of an idle connection."""
LOOK_S = 0.1
STALL_S = 0.5
_SERVICE = Role.SERVICE.label.encode()
_RECEIVED = struct.Struct("<Q")
_RECEIVED_OFFSET = 128
"""tcpi_bytes_received in the kernel's struct tcp_info."""
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@dataclass(slots=True)
class _TcpConnection:
    handle: sockets.socket
    place: Place | None
    base: float = 0.0
    """Number of bytes received when the last complete message was delivered."""
    heard: bool = False
    """Whether a complete message has been delivered since the last check."""


class Connections:
    """The connections of one socket. Create it before the bind. It belongs to the event loop on which it was
    created."""

    def __init__(
        self, socket: zmq.Socket[bytes], name: str, on_closed: Callable[[int], None] = lambda descriptor: None
    ) -> None:
        """`on_closed` is called with the descriptor of each connection that has ended. libzmq may then reuse it."""
        self._on_closed = on_closed
        self.ended = 0
        """Total number of connections closed by this watcher."""
        self.failed = 0
        """Total number of failed handshakes."""
        self._open: dict[int, _TcpConnection] = {}
        self._by_place: dict[Place, _TcpConnection] = {}
        self._log = structlog.get_logger("connections", endpoint_of=name)
        descriptors = raise_descriptor_limit()
        self._places = Places(most_connections(descriptors))
        if self._places.most < MOST_CONNECTIONS:
            self._log.warning(
                f"at most {self._places.most} connections from other hosts: the limit on open descriptors is "
                f"{descriptors}; raise it (ulimit -Hn {MOST_CONNECTIONS * DESCRIPTOR_SHARE})"
            )
        self._spare = _put_by()
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._pump = Pump(socket.get_monitor_socket(_EVENTS | _FAILED), self._on_event)
        self._looked = self._loop.time()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def __len__(self) -> int:
        return len(self._open)

    def heard(self, descriptor: int, user: bytes) -> None:
        """Record that a complete message was delivered from the connection with this descriptor (ZMQ_SRCFD). `user` is
        the label of the role that its peer has proved."""
        connection = self._open.get(descriptor)
        if connection is not None:
            connection.heard = True
            if connection.place is not None and not connection.place.proven:
                connection.place.proven, connection.place.in_use = True, user == _SERVICE

    def end(self, descriptor: int, why: str) -> None:
        """Close the connection with this descriptor (ZMQ_SRCFD). What it has sent so far may still be delivered."""
        connection = self._open.get(descriptor)
        if connection is not None:
            self._end(connection.handle, why)

    def close(self) -> None:
        """Stop watching. Call this before the socket is closed."""
        self._timer.cancel()
        self._pump.close()
        self._socket.disable_monitor()
        for connection in self._open.values():
            connection.handle.close()
        self._open.clear()
        self._by_place.clear()
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
            return  # any other error means that the connection is gone
        if not _is_tcp(handle):
            handle.close()
            return
        place, victim = self._places.take(_address(handle), self._loop.time())
        connection = self._open[descriptor] = _TcpConnection(handle, place)
        if place is not None:
            self._by_place[place] = connection
        if victim is not None:
            self._end(self._by_place.pop(victim).handle, f"it lost its place: {self._places.most} connections are open")
        elif place is None:
            self._end(handle, f"{self._places.most} services are connected")

    def _end_unwatched(self, descriptor: int) -> None:
        """Use the spare descriptor to close a connection for which no other descriptor is left."""
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
            if connection.place is not None:
                self._places.leave(connection.place)
                self._by_place.pop(connection.place, None)
            connection.handle.close()
            self._on_closed(descriptor)

    def _look(self) -> None:
        now = self._loop.time()
        since_s, self._looked = now - self._looked, now
        self._timer = self._loop.call_later(LOOK_S, self._look)
        if self._spare is None:
            self._spare = _put_by()
        if since_s > STALL_S:
            return  # the loop was blocked: messages that arrived in the meantime are delivered first
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
        if self.ended <= LOGGED_ENDS:
            self._log.warning("connection ended", why=why)
        try:
            handle.shutdown(sockets.SHUT_RDWR)
        except OSError:
            return  # it is already closed


def most_connections(descriptors: int) -> int:
    """Return the maximum number of connections to one endpoint if the limit on open descriptors is `descriptors`."""
    return min(MOST_CONNECTIONS, descriptors // DESCRIPTOR_SHARE)


def _duplicate(descriptor: int) -> sockets.socket:
    """Return a duplicate of `descriptor`. Raises OSError if it is not a socket, or if no descriptor is left."""
    copy = os.dup(descriptor)
    try:
        return sockets.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _is_tcp(handle: sockets.socket) -> bool:
    return handle.type == sockets.SOCK_STREAM and handle.family in (sockets.AF_INET, sockets.AF_INET6)


def _address(handle: sockets.socket) -> str:
    """Return the address of the host at the other end, or an empty string if the connection is gone."""
    try:
        return str(handle.getpeername()[0])
    except OSError:
        return ""


def _put_by() -> int | None:
    """Return a descriptor to be closed when another one is needed, or None if no descriptor is left."""
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
