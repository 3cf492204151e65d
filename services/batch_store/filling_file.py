"""Fills a file with a stream from another store, and serves the verified bytes of the file at the same time.

Before a chunk counts as available, it is compared with its digest, which the trainer's store computed. A chunk that
does not match is received again from the source of the next attempt.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Sequence

import xxhash

from proto import blockfile, bulk
from proto.errors import WireError
from shared.dataplane.mapping import lock_named

CHUNK_BYTES = bulk.MAX_RANGE_BYTES
ALLOCATE_BYTES = 16 << 20
"""Bytes allocated at a time, ahead of the data that arrives. Writing to a page that a full mount cannot provide raises
SIGBUS."""
DIGESTS_S = 20.0
"""Maximum time, in seconds, that received chunks wait for their digests."""


class FillingFile:
    """The target of one stream, and the source of others. Separate threads write, check and send."""

    covered = 1

    def __init__(self, path: str, nbytes: int, on_progress: Callable[[], None]) -> None:
        """`on_progress` is called on the checking thread when more bytes are available.

        Raises FileNotFoundError if the grant of the file was withdrawn.
        """
        descriptor = lock_named(path, os.O_RDWR)
        if descriptor is None:
            raise FileNotFoundError(path)
        self._descriptor = descriptor
        self._data = mmap.mmap(descriptor, nbytes)  # a duplicate of the descriptor keeps the lock
        self._view = memoryview(self._data)
        self._on_progress = on_progress
        self._allocated = 0
        self._digests: list[int] = []
        self._more = threading.Condition()
        self._given_up = False
        self.total_bytes = nbytes
        self.verified_bytes = 0
        self.received = 0
        self.head_bytes = 0
        """Length of the head in bytes, or 0 until the whole head is verified."""
        self.head_checksum = 0

    def close(self, *, complete: bool) -> None:
        """Stop writing. Unless `complete` is true, the streams that read the file then end. The mapping is kept as long
        as any stream reads from it.
        """
        self._given_up = not complete
        os.close(self._descriptor)
        with self._more:
            self._more.notify_all()
        self._on_progress()

    # ---- as a target

    def resume(self) -> None:
        """Continue after the last verified chunk. No thread may write or check in the meantime."""
        self.received = self.verified_bytes

    def adopt(self) -> None:
        """Verify the chunks that an earlier attempt received. Blocks until their digests are known."""
        with contextlib.suppress(WireError):
            self.check(self.total_bytes)

    def room(self, nbytes: int) -> memoryview:
        end = self.received + nbytes
        if end > self._allocated:
            size = min(max(ALLOCATE_BYTES, end - self._allocated), self.total_bytes - self._allocated)
            os.posix_fallocate(self._descriptor, self._allocated, size)
            self._allocated += size
        return self._view[self.received : end]

    def add_digests(self, digests: Sequence[int]) -> None:
        """Append the digests of the next chunks."""
        with self._more:
            self._digests.extend(digests)
            self._more.notify_all()

    @property
    def digests(self) -> int:
        """Number of known digests."""
        return len(self._digests)

    @property
    def chunks(self) -> int:
        return -(-self.total_bytes // CHUNK_BYTES)

    def check(self, upto: int) -> None:
        """Verify the chunks that end within the first `upto` bytes.

        Raises WireError for a damaged chunk, and TimeoutError if a digest does not arrive in time. The chunks before a
        damaged one remain available.
        """
        before = self.verified_bytes
        try:
            while self.verified_bytes < upto:
                at = self.verified_bytes
                end = min(at + CHUNK_BYTES, self.total_bytes)
                if end > upto:
                    break
                if xxhash.xxh3_64_intdigest(self._view[at:end]) != self._digest(at // CHUNK_BYTES):
                    raise WireError(f"bytes {at} to {end} do not match the digest from the trainer's store")
                self.verified_bytes = end
        finally:
            if self.verified_bytes > before:
                self._note_head()
                self._on_progress()

    def _digest(self, chunk: int) -> int:
        with self._more:
            if not self._more.wait_for(lambda: len(self._digests) > chunk or self._given_up, DIGESTS_S):
                raise TimeoutError(f"no digest of chunk {chunk} within {DIGESTS_S:g} s")
            if self._given_up:
                raise WireError("given up")
            return self._digests[chunk]

    def _note_head(self) -> None:
        if self.head_bytes or self.verified_bytes < min(blockfile.HEADER_BYTES, self.total_bytes):
            return
        try:
            table_bytes = blockfile.table_bytes(self._view[: blockfile.HEADER_BYTES], self.total_bytes)
        except WireError:  # not a block file, so no stream of it can be opened
            return
        size = blockfile.HEADER_BYTES + table_bytes
        if self.verified_bytes >= size:
            self.head_checksum = xxhash.xxh3_64_intdigest(self._view[:size])
            self.head_bytes = size

    # ---- as a source

    @property
    def available_bytes(self) -> int:
        return -1 if self._given_up else self.verified_bytes

    def pieces(self, at: int, nbytes: int) -> list[memoryview]:
        return [self._view[at : at + nbytes]]
