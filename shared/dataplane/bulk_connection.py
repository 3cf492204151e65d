"""Bulk connections: their sockets, plain TCP or Unix sockets, and the seals of the messages on them.

A message queue would cost a copy of every byte at the reader and two more threads. Here the kernel writes payloads
directly to their destination.

Messages are sealed with AES-128-GCM under the keys of one line, and no nonce is used twice. The key and the nonce salt
for a direction are 16 + 4 bytes of HKDF-SHA256 over the line's secret, salted with the line's id. The nonce is
salt || counter u64. Both ends count the messages in a direction from 1, so if a message was forged, lost, repeated or
moved, the message that arrives in its place fails to open. A line ends before one key has sealed more than
`KEY_LIMIT_BYTES`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from proto.bulk import TAG_BYTES
from proto.errors import WireError
from proto.tensors import Buffer

CONNECT_S = 5.0
_BACKLOG = 128
SECRET_BYTES = 32
KEY_BYTES = 16
SALT_BYTES = 4
KEY_LIMIT_BYTES = 1 << 36
"""Maximum number of bytes sealed with one GCM key and counted nonces: 2^32 blocks (NIST SP 800-38D allows 2^32 - 2
blocks per message)."""
TO_READER, TO_STORE = b"reader", b"store"
_COUNTER = struct.Struct("<Q")


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


class Seal:
    """One end of one direction of a line. It either seals or opens messages, and is not thread-safe."""

    def __init__(self, secret: bytes, line_id: bytes, direction: bytes) -> None:
        made = HKDF(SHA256(), KEY_BYTES + SALT_BYTES, line_id, b"rlbus bulk " + direction).derive(secret)
        self._cipher, self._salt = AESGCM(made[:KEY_BYTES]), made[KEY_BYTES:]
        self._counter = 0
        self.nbytes = 0
        """Number of bytes sealed or opened so far."""

    def seal(self, associated: bytes, data: Buffer, into: memoryview) -> int:
        """Write the ciphertext and the tag to the start of `into` and return their total length."""
        self._cipher.encrypt_into(self._nonce(data), data, associated, into[: len(data) + TAG_BYTES])
        return len(data) + TAG_BYTES

    def tag(self, associated: bytes) -> bytes:
        """Return the tag of a message that has no data."""
        return self._cipher.encrypt(self._nonce(b""), b"", associated)

    def open(self, associated: bytes, sealed: Buffer, into: memoryview) -> None:
        """Check `sealed` and decrypt it to fill `into`. Raises WireError, after which `into` holds arbitrary bytes."""
        if len(sealed) != len(into) + TAG_BYTES:
            raise WireError(f"sealed message of {len(sealed)} bytes: {len(into) + TAG_BYTES} are expected")
        try:
            self._cipher.decrypt_into(self._nonce(into), sealed, associated, into)
        except InvalidTag:
            raise WireError("bulk message is not the next one in the sealed sequence: its tag does not match") from None

    def _nonce(self, data: Buffer) -> bytes:
        self._counter += 1
        self.nbytes += len(data)
        return self._salt + _COUNTER.pack(self._counter)
