"""Seals and opens bulk messages with AES-128-GCM under the keys of one line. No nonce is used twice.

The key and the nonce salt for a direction are 16 + 4 bytes of HKDF-SHA256 over the line's secret, salted with the
line's id. The nonce is salt || counter u64. Both ends count the messages in a direction from 1, so if a message was
forged, lost, repeated or moved, the message that arrives in its place fails to open. A line ends before one key has
sealed more than `KEY_LIMIT_BYTES`.
"""

from __future__ import annotations

import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from proto.bulk import TAG_BYTES
from proto.errors import WireError
from proto.tensors import Buffer

SECRET_BYTES = 32
KEY_BYTES = 16
SALT_BYTES = 4
KEY_LIMIT_BYTES = 1 << 36
"""Maximum number of bytes sealed with one GCM key and counted nonces: 2^32 blocks (NIST SP 800-38D allows 2^32 - 2
blocks per message)."""
TO_READER, TO_STORE = b"reader", b"store"
_COUNTER = struct.Struct("<Q")


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
