"""Fetches versions of the weights from other stores, so that each host receives a version once and passes it on.

The stores on hosts other than the trainer's form a chain (`HeartbeatAck.upstream`). A store fetches a version from its
predecessor into a file (`FillingFile`), whose verified chunks it passes on before it has the whole version. Before a
chunk counts as available, it is compared with its digest, which is fetched directly from the trainer's store. A store
that fails, makes no progress or sends a damaged chunk is skipped: its predecessors are tried next, and the trainer's
store last. The finished file is sealed like any other put.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import structlog
import xxhash

from proto import blockfile, bulk
from proto.errors import WireError
from proto.messages import ErrorCode, Held, Hold, PutTask, WaitKind, WaitRow
from services.batch_store.stream_server import StreamedContent
from shared.dataplane.mapping import lock_named
from shared.dataplane.stream import StreamReader
from shared.dataplane.stream_line import StreamOutcome
from shared.rpc.client import Client
from shared.rpc.errors import AWAY, RpcError

PAGE_CHUNKS = 512
"""Number of digests per request."""
AT_ONCE_CHUNKS = 32
"""Number of digests computed at a time. They are kept even if the request ends before its page is complete."""
CALL_S, OPEN_S = 5.0, 5.0
TRIES = 2
"""Number of attempts after which a store is skipped. An attempt that delivers a verified chunk resets the count to 1. A
store that was itself waiting for its predecessor may thus deliver no chunk in one attempt and continue in the next."""
STALL_S = 60.0
"""If no store delivers a verified chunk for this many seconds, the fetch of a version is abandoned."""
PAUSE_S = 0.2
WHOLE_S = 1.0
"""Maximum time, in seconds, that an answer waits for the whole version."""
MOST_VERSIONS = 64
"""Maximum number of versions that are fetched at the same time."""
KEPT_VERSIONS = 16
"""Number of versions whose digests are kept."""
GIVE_UP = (ErrorCode.COLLECTED, ErrorCode.MISSING, ErrorCode.BAD_REQUEST)
"""Errors of the trainer's store after which the fetch of a version is abandoned at once."""
CHUNK_BYTES = bulk.MAX_RANGE_BYTES
ALLOCATE_BYTES = 16 << 20
"""Bytes allocated at a time, ahead of the data that arrives. Writing to a page that a full mount cannot provide raises
SIGBUS."""
DIGESTS_S = 20.0
"""Maximum time, in seconds, that received chunks wait for their digests."""


@dataclass(eq=False)
class _Filling:
    """A version that is being fetched."""

    task: PutTask
    origin: str
    file: FillingFile | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once `file` exists, or once it is known that `file` will never exist."""
    work: asyncio.Task[None] = field(init=False)
    damaging: set[str] = field(default_factory=set)
    """The stores that sent a chunk whose digest did not match."""
    source: str = ""
    """The store from which the version is currently received."""
    since: float = 0.0
    """Loop time at which receiving from `source` began."""


class Relay:
    """The versions that a store is fetching. Use it only on the store's event loop."""

    def __init__(
        self,
        name: str,
        client_of: Callable[[str], Client],
        streams: StreamReader,
        *,
        begin: Callable[[str, int, PutTask], Awaitable[str]],
        seal: Callable[[str], Awaitable[object]],
        abandon: Callable[[str], None],
        on_progress: Callable[[], None],
        continues: bool = False,
    ) -> None:
        """`begin(put_id, nbytes, task)` grants a file and returns its path, `seal` seals it, and `abandon` discards an
        unsealed file. `on_progress` may be called on any thread. `continues` means that files may begin with
        chunks that an earlier attempt received."""
        self._name = name
        self._client_of = client_of
        self._streams = streams
        self._begin, self._seal, self._abandon = begin, seal, abandon
        self._on_progress = on_progress
        self._continues = continues
        self._fillings: dict[tuple[str, int], _Filling] = {}
        self.upstream: list[str] = []
        """The stores before this one in the chain, nearest first."""
        self._log = structlog.get_logger("relay")

    async def hold(self, request: Hold) -> Held:
        """Begin to fetch a version, unless that is already in progress, and return its size and how many bytes of it
        have been verified. Raises RpcError if the fetch failed."""
        task = request.task
        if request.origin == self._name:
            raise RpcError(ErrorCode.MISSING, f"{self._name}: {task.task_id} is not here", names=[task.task_id])
        filling = self._fillings.get((task.task_id, task.fence))
        if filling is None:
            if len(self._fillings) >= MOST_VERSIONS:
                text = f"{self._name}: {MOST_VERSIONS} versions are being fetched; one of them must end first"
                raise RpcError(ErrorCode.BUSY, text, retry_after_s=PAUSE_S)
            filling = self._fillings[task.task_id, task.fence] = _Filling(task, request.origin)
            filling.work = asyncio.create_task(self._fill(filling))
            filling.work.add_done_callback(lambda work: self._end(filling, work))
        await filling.begun.wait()
        if request.whole:
            await asyncio.wait({filling.work}, timeout=WHOLE_S)
        if filling.work.done() and not filling.work.cancelled():
            filling.work.result()
        if filling.file is None or filling.work.cancelled():
            raise RpcError(ErrorCode.NOT_READY, f"{self._name}: the fetch of {task.task_id} was abandoned")
        return Held(total_bytes=filling.file.total_bytes, held_bytes=filling.file.verified_bytes)

    def waits(self, now: float) -> list[WaitRow]:
        """Return the versions that are being received at `now` (loop time)."""
        return [
            WaitRow(
                WaitKind.CALL,
                f"{filling.task.task_id}: {filling.file.verified_bytes} of {filling.file.total_bytes} bytes",
                now - filling.since,
                of=filling.source,
            )
            for filling in self._fillings.values()
            if filling.file is not None and filling.source
        ]

    def source(self, task: PutTask) -> FillingFile | None:
        """Return the file that is being filled with this version, or None if its head has not arrived yet."""
        filling = self._fillings.get((task.task_id, task.fence))
        return filling.file if filling is not None and filling.file is not None and filling.file.head_bytes else None

    def is_coming(self, task: PutTask) -> bool:
        """Return whether this version is being fetched."""
        return (task.task_id, task.fence) in self._fillings

    def drop(self, is_over: Callable[[PutTask], bool]) -> None:
        """Stop fetching the versions for which `is_over` returns True."""
        for filling in self._fillings.values():
            if is_over(filling.task):
                filling.work.cancel()

    async def close(self) -> None:
        """Stop fetching all versions."""
        works = [filling.work for filling in self._fillings.values()]
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        self._streams.close()

    # ---- one version

    async def _fill(self, filling: _Filling) -> None:
        """Fetch a version and seal it. Raises RpcError."""
        task, put_id = filling.task, secrets.token_hex(16)
        began = asyncio.get_running_loop().time()
        granted = sealed = False
        digests: asyncio.Task[None] | None = None
        try:
            reply = await self._from_origin(filling, 0)
            path = await self._begin(put_id, reply.total_bytes, task)
            granted = True
            file = filling.file = FillingFile(path, reply.total_bytes, self._on_progress)
            file.add_digests(reply.digests)
            filling.begun.set()
            digests = asyncio.create_task(self._fetch_digests(filling, file))
            if self._continues:
                await asyncio.to_thread(file.adopt)
            if file.verified_bytes < file.total_bytes:
                await self._receive(filling, file, digests)
            await self._seal(put_id)
            sealed = True
            seconds = asyncio.get_running_loop().time() - began
            self._log.info("version relayed", task=task.task_id, bytes=file.total_bytes, seconds=round(seconds, 3))
        except RpcError as error:
            self._log.warning("version given up", task=task.task_id, why=str(error))
            raise
        except OSError as error:
            self._log.warning("version given up", task=task.task_id, why=str(error))
            raise RpcError(ErrorCode.BUSY, f"{self._name}: {task.task_id}: {error}", retry_after_s=PAUSE_S) from None
        finally:
            if digests is not None:
                digests.cancel()
            if filling.file is not None:
                filling.file.close(complete=sealed)
            if granted and not sealed:
                self._abandon(put_id)

    def _end(self, filling: _Filling, work: asyncio.Task[None]) -> None:
        """Forget a version whose fetch has ended or was cancelled before it began. Waiting readers get the error."""
        del self._fillings[filling.task.task_id, filling.task.fence]
        filling.begun.set()
        if not work.cancelled() and work.exception() is not None and not isinstance(work.exception(), RpcError):
            self._log.error("relay failed", task=filling.task.task_id, exc_info=work.exception())

    async def _receive(self, filling: _Filling, file: FillingFile, digests: asyncio.Task[None]) -> None:
        """Receive the file from the nearest store that sends it. Raises RpcError if no store does."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        while True:
            for store in self._sources(filling):
                filling.source, filling.since = store, loop.time()
                tries = 0
                while tries < TRIES:
                    before = file.verified_bytes
                    outcome, why = await self._attempt(filling, file, store)
                    if outcome is StreamOutcome.COMPLETE:
                        return
                    self._log.warning("relay interrupted", task=filling.task.task_id, source=store, why=why)
                    if file.verified_bytes > before:
                        since, tries = loop.time(), 0
                    tries += 1
                    if outcome is StreamOutcome.CORRUPT:
                        filling.damaging.add(store)
                        break
                if digests.done():
                    digests.result()
            if filling.origin in filling.damaging:
                names = [f"{filling.task.task_id}#*"]
                raise RpcError(ErrorCode.MISSING, f"{filling.origin}: damaged shards: {why}", names=names)
            if loop.time() - since > STALL_S:
                raise RpcError(ErrorCode.NOT_READY, f"{self._name}: {filling.task.task_id} has not arrived: {why}")
            await asyncio.sleep(PAUSE_S)  # paces the retries

    def _sources(self, filling: _Filling) -> Iterator[str]:
        """Yield the stores to try, nearest first."""
        for store in [*self.upstream, filling.origin]:
            if store not in filling.damaging:
                yield store

    async def _attempt(self, filling: _Filling, file: FillingFile, store: str) -> tuple[StreamOutcome, str]:
        try:
            if store != filling.origin:
                hold = Hold(task=filling.task, origin=filling.origin)
                await self._client_of(store).call(hold, Held, deadline_s=CALL_S)
            file.resume()
            return await self._streams.receive_into(file, store, filling.task, OPEN_S)
        except (RpcError, WireError) as error:
            if store == filling.origin and isinstance(error, RpcError) and error.code in GIVE_UP:
                raise
            return StreamOutcome.LOST, str(error)

    async def _fetch_digests(self, filling: _Filling, file: FillingFile) -> None:
        """Fetch the digests of all chunks, ahead of the chunks."""
        while file.digests < file.chunks:
            held = await self._from_origin(filling, file.digests)
            if held.total_bytes != file.total_bytes:
                text = f"{filling.origin}: {filling.task.task_id} now has {held.total_bytes} bytes"
                raise RpcError(ErrorCode.CONFLICT, text)
            file.add_digests(held.digests)

    async def _from_origin(self, filling: _Filling, first: int) -> Held:
        """Return the size of a version and a page of its digests. Raises RpcError."""
        request = Hold(task=filling.task, origin=filling.origin, first=first)
        loop = asyncio.get_running_loop()
        until = loop.time() + STALL_S
        while True:
            try:
                held = await self._client_of(filling.origin).call(request, Held, deadline_s=CALL_S)
            except RpcError as error:
                if error.code in GIVE_UP or error.code not in AWAY or loop.time() > until:
                    raise
                await asyncio.sleep(max(PAUSE_S, error.retry_after_s))
                continue
            if not held.digests or held.total_bytes <= 0:
                raise RpcError(ErrorCode.INTERNAL, f"{filling.origin}: no digests of {filling.task.task_id}")
            return held


class ChunkDigests:
    """Chunk digests of recently requested versions, computed when they are first requested."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, list[int]] = OrderedDict()
        self._lock = asyncio.Lock()

    async def page(self, path: str, source: StreamedContent, first: int) -> list[int]:
        """Return up to `PAGE_CHUNKS` chunk digests of `source`, starting at chunk `first`. `path` identifies the
        content.

        Raises RpcError(bad_request).
        """
        chunks = -(-source.total_bytes // CHUNK_BYTES)
        if not 0 <= first < chunks:
            raise RpcError(ErrorCode.BAD_REQUEST, f"{path}: no chunk {first}: there are only {chunks}")
        async with self._lock:  # stores on several hosts ask at the same time
            digests = self._known.setdefault(path, [])
            while len(digests) < min(first + PAGE_CHUNKS, chunks):
                digests += await asyncio.to_thread(_digests, source, len(digests), len(digests) + AT_ONCE_CHUNKS)
            while len(self._known) > KEPT_VERSIONS:
                self._known.popitem(last=False)
        return digests[first : first + PAGE_CHUNKS]


def _digests(source: StreamedContent, first: int, end: int) -> list[int]:
    digests: list[int] = []
    for at in range(first * CHUNK_BYTES, min(end * CHUNK_BYTES, source.total_bytes), CHUNK_BYTES):
        digest = xxhash.xxh3_64()
        for piece in source.pieces(at, min(CHUNK_BYTES, source.total_bytes - at)):
            digest.update(piece)
        digests.append(digest.intdigest())
    return digests


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
