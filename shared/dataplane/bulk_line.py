"""One end of a bulk connection: a non-blocking socket, and messages off it into the memory they belong to.

Plain TCP (or a Unix socket), because a message queue costs a copy of every byte at the reader and two more threads:
payloads come straight from the kernel into their place. It must never wait, and never take more of a payload than its
checked head announced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable

from proto import bulk
from proto.errors import WireError

_BACKLOG = 128
_LOW_BYTES = 256 << 10
"""So much of a payload is worth waking up for: a wake-up for each packet costs the sender a quarter of its time."""

Room = Callable[[bulk.Head], memoryview | None]
"""Where the payload of a message goes; None: into the line's own buffer. May raise WireError: not a message."""
OnMessage = Callable[[bulk.Head, bytes, memoryview], None]
"""A whole message: head, the bytes of the head, payload (valid during the call)."""


class BulkLine:
    """Takes messages off a connected, non-blocking socket. One thread only."""

    def __init__(self, line: socket.socket, buffer_bytes: int) -> None:
        self.socket = line
        self._scratch = memoryview(bytearray(buffer_bytes))
        self._packed = memoryview(bytearray(bulk.HEAD_BYTES))
        self._packed_have = 0
        self._head: bulk.Head | None = None
        self._head_bytes = b""
        self._body = self._scratch[:0]
        self._body_have = 0
        self._low = 1

    def receive(self, room: Room, on_message: OnMessage, at_most: int) -> int:
        """Take what is there, `at_most` bytes or a little more; returns how many, -1 when the peer has closed.

        Raises WireError (what follows cannot be understood) and OSError: the connection is of no more use.
        """
        taken = 0
        while taken < at_most:
            left = len(self._body) - self._body_have
            try:
                if left:  # the next head comes along
                    got = self.socket.recvmsg_into([self._body[self._body_have :], self._packed])[0]
                else:
                    got = self.socket.recv_into(self._packed[self._packed_have :])
            except BlockingIOError:
                break
            if not got:
                return -1
            taken += got
            self._body_have += min(got, left)
            self._packed_have += max(0, got - left)
            if got >= left and self._head is not None:
                self._deliver(on_message)
            if self._packed_have == bulk.HEAD_BYTES:
                self._begin(room)
                if self._head is not None and not self._head.nbytes:
                    self._deliver(on_message)
        self._sleep_until(min(len(self._body) - self._body_have, _LOW_BYTES) or 1)
        return taken

    def discard(self) -> None:
        """The payload under way is not wanted any more: leave its memory alone, now and for its rest."""
        self._body = self._scratch[: len(self._body)]

    def _sleep_until(self, nbytes: int) -> None:
        """The socket is readable from so many bytes on; never more than are sure to come."""
        if nbytes != self._low:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._low = nbytes

    def _begin(self, room: Room) -> None:
        self._head_bytes = bytes(self._packed)
        self._packed_have = self._body_have = 0
        head = bulk.unpack_head(self._head_bytes)
        if head.nbytes > len(self._scratch):
            raise WireError(f"bulk message of {head.nbytes} bytes: {len(self._scratch)} are the limit here")
        place = room(head)
        self._body = self._scratch[: head.nbytes] if place is None else place
        if len(self._body) != head.nbytes:
            raise WireError(f"chunk {head.chunk} of {head.nbytes} bytes: {len(self._body)} belong there")
        self._head = head

    def _deliver(self, on_message: OnMessage) -> None:
        head, body = self._head, self._body
        self._head, self._body, self._body_have = None, self._scratch[:0], 0
        if head is not None:
            on_message(head, self._head_bytes, body)


def listen(endpoint: str) -> tuple[socket.socket, str]:
    """A listening, non-blocking socket at `tcp://host:port` (`*`: any) or `ipc://path`, and where it is.

    Raises OSError, WireError (no such kind of endpoint).
    """
    address = _address(endpoint)
    listener = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if isinstance(address, str):
            if os.path.exists(address):
                os.unlink(address)  # of a former life
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    if isinstance(address, str):
        return listener, endpoint
    host, port = listener.getsockname()
    return listener, f"tcp://{host}:{port}"


def connect(endpoint: str) -> socket.socket:
    """A non-blocking socket that connects or has connected. Raises OSError, WireError (no such kind of endpoint)."""
    address = _address(endpoint)
    line = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET, socket.SOCK_STREAM)
    try:
        line.setblocking(False)
        quick(line)
        failed = line.connect_ex(address)
        if failed not in (0, errno.EINPROGRESS):
            raise OSError(failed, os.strerror(failed))
    except BaseException:
        line.close()
        raise
    return line


def quick(line: socket.socket) -> None:
    """Send small messages at once."""
    if line.family == socket.AF_INET:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def unpaced(line: socket.socket) -> None:
    """To a peer on this host, send as fast as it takes it.

    bbr, the default of some hosts, goes on at the pace of a reader that once computed: a tenth to a fifth of the rate
    on loopback, where there is no line to spare. On a real line the host's choice stands.
    """
    with contextlib.suppress(OSError):  # the peer has left, or a kernel without it
        if line.family == socket.AF_INET and line.getsockname()[0] == line.getpeername()[0]:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) < 1 << 16


def _address(endpoint: str) -> str | tuple[str, int]:
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest and "\0" not in rest:
        return rest
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or "\0" in host or not (port == "*" or _is_port(port)):
        raise WireError(f"bulk endpoint {endpoint[:200]!r}: tcp://host:port or ipc://path is expected")
    return "" if host == "*" else host, 0 if port == "*" else int(port)
