"""Sockets of bulk connections: plain TCP or Unix sockets.

A message queue would cost a copy of every byte at the reader and two more threads. Here the kernel writes payloads
directly to their destination.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

from proto.errors import WireError

CONNECT_S = 5.0
_BACKLOG = 128


def listen(endpoint: str) -> tuple[socket.socket, str]:
    """Return a listening, non-blocking socket at `tcp://host:port` (`*`: any) or `ipc://path`, and its endpoint.

    Raises OSError, and WireError for any other kind of endpoint.
    """
    address = _address(endpoint)
    listener = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if isinstance(address, str):
            if os.path.exists(address):
                os.unlink(address)  # left by an earlier life
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


def connect(endpoint: str, timeout_s: float) -> socket.socket:
    """Return a blocking socket connected to `endpoint`. Sending on it raises BlockingIOError after `timeout_s`.

    Raises OSError, and WireError for any other kind of endpoint.
    """
    address = _address(endpoint)
    line = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET, socket.SOCK_STREAM)
    try:
        line.settimeout(CONNECT_S)
        line.connect(address)
        line.settimeout(None)
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        quick(line)
    except BaseException:
        line.close()
        raise
    return line


def quick(line: socket.socket) -> None:
    """Send small messages without delay (TCP_NODELAY)."""
    if line.family == socket.AF_INET:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def unpaced(line: socket.socket) -> None:
    """Send to a peer on this host as fast as it reads.

    Once a reader on loopback has read slowly because it was computing, bbr (the default on some hosts) keeps sending at
    that slow pace: a tenth to a fifth of the possible rate. Connections to other hosts keep the host's congestion
    control.
    """
    with contextlib.suppress(OSError):  # the peer is gone, or the kernel has no cubic
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
