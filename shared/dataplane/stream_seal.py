"""Seals and opens bulk payloads with AES-128-GCM under keys of one stream. It must never use a nonce twice.

Key and nonce salt of (direction, epoch) are 16 + 4 bytes of HKDF-SHA256 over the stream's secret, salted with the
stream id; the nonce is salt || counter u64, and counters of one epoch only grow. A new epoch begins after
`REKEY_BYTES`. What is opened must come in the order in which it was sealed: anything else is a replay.
"""

from __future__ import annotations

import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from proto.bulk import TAG_BYTES, Head, pack_head
from proto.errors import WireError
from proto.tensors import Buffer

SECRET_BYTES = 32
KEY_BYTES = 16
SALT_BYTES = 4
REKEY_BYTES = 1 << 36
"""2^32 blocks, the bound of one GCM key with counting nonces (NIST SP 800-38D allows 2^32 - 2 blocks a message)."""
TO_READER, TO_STORE = b"chunks", b"credit"
_COUNTER = struct.Struct("<Q")
_EPOCH = struct.Struct("<I")


class _Keys:
    def __init__(self, secret: bytes, stream_id: bytes, direction: bytes) -> None:
        self._secret, self._stream_id, self._direction = secret, stream_id, direction

    def of(self, epoch: int) -> tuple[AESGCM, bytes]:
        info = b"rlbus bulk " + self._direction + b" " + _EPOCH.pack(epoch)
        made = HKDF(SHA256(), KEY_BYTES + SALT_BYTES, self._stream_id, info).derive(self._secret)
        return AESGCM(made[:KEY_BYTES]), made[KEY_BYTES:]


class Sealer:
    """The sending end of one direction of one stream. One thread only."""

    def __init__(self, secret: bytes, stream_id: bytes, direction: bytes, rekey_bytes: int = REKEY_BYTES) -> None:
        self._keys = _Keys(secret, stream_id, direction)
        self._stream_id = stream_id
        self._rekey_bytes = rekey_bytes
        self._sealed_bytes = self._counter = self.epoch = 0
        self._cipher, self._salt = self._keys.of(0)

    def seal(self, kind: int, flags: int, index: int, data: Buffer, into: memoryview) -> tuple[bytes, int]:
        """Write ciphertext and tag to the start of `into`; returns the head and their length."""
        if self._sealed_bytes and self._sealed_bytes + len(data) > self._rekey_bytes:
            self.epoch += 1
            self._sealed_bytes = self._counter = 0
            self._cipher, self._salt = self._keys.of(self.epoch)
        self._sealed_bytes += len(data)
        self._counter += 1
        nbytes = len(data) + TAG_BYTES
        head = pack_head(Head(kind, flags, self.epoch, index, self._counter, self._stream_id, nbytes))
        self._cipher.encrypt_into(self._salt + _COUNTER.pack(self._counter), data, head, into[:nbytes])
        return head, nbytes


class Opener:
    """The receiving end of one direction of one stream. One thread only."""

    def __init__(self, secret: bytes, stream_id: bytes, direction: bytes) -> None:
        self._keys = _Keys(secret, stream_id, direction)
        self._last = (0, 0)
        self.epoch = 0
        self._cipher, self._salt = self._keys.of(0)

    def open(self, packed: Buffer, head: Head, data: Buffer, into: memoryview) -> None:
        """Check and decrypt `data` to exactly `into`. Raises WireError: forged, damaged, replayed, out of order.

        After an error `into` holds rubbish. `packed`: the head as it came, which the tag covers.
        """
        if (head.epoch, head.counter) <= self._last:
            raise WireError(f"bulk frame {head.epoch}:{head.counter} after {self._last}: replayed or out of order")
        if len(data) != len(into) + TAG_BYTES:
            raise WireError(f"bulk frame of {len(data)} bytes: {len(into) + TAG_BYTES} belong here")
        cipher, salt = (self._cipher, self._salt) if head.epoch == self.epoch else self._keys.of(head.epoch)
        try:
            cipher.decrypt_into(salt + _COUNTER.pack(head.counter), data, packed, into)
        except InvalidTag:
            raise WireError("bulk frame is not what was sealed: its tag does not match") from None
        self._last, self.epoch, self._cipher, self._salt = (head.epoch, head.counter), head.epoch, cipher, salt
